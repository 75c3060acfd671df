"""A web server that fails by plan: each request for a path meets the next fault of that path's plan."""

import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from tests.kits.servers import QuietServer, serving

OLD = "Sat, 01 Jan 2022 10:00:00 GMT"
NEW = "Sun, 02 Jan 2022 10:00:00 GMT"


class Fault(NamedTuple):
    """What goes wrong with one request.

    Attributes:
        kind: "drop" (the connection ends), "reset", "stall", "status", "overstate" or "understate" (the length),
            "whole" (Range is ignored), "change" (the object is another from now on), "redirect", "silent" (no answer),
            "garbage" (no HTTP), "elsewhere" (another part than asked for), "less" (a shorter part than asked for),
            "more" (bytes after the part that was asked for), "late" (the answer comes late), "slow" (the body comes in
            pieces, each late).
        until: "drop", "reset", "stall": the byte of the object where it happens.
        after: The same, counted from the beginning of the answer, where `until` is not given.
        status: The status.
        wait: Its Retry-After.
        size: "overstate", "understate", "more": by how many bytes; "slow": of a piece.
        seconds: "late", "slow": how late.
        to: "redirect": the address of another server.
    """

    kind: str
    until: int | None = None
    after: int = 0
    status: int = 503
    wait: str | None = None
    size: int = 1000
    to: str = ""
    seconds: float = 0.0


Plan = Iterator[Fault | None]


@dataclass
class Site:
    """What a server has, and how.

    Attributes:
        objects: Path -> content.
        replacements: Path -> content after a "change".
        plans: Path -> the faults of its requests, in their order; nothing goes wrong after the last.
        ranges: Whether it gives parts.
        tells_ranges: Whether it says that it does; None for the truth.
        validators: "etag", "weak", "date", "fresh" (a date that is as new as the answer), "stuck" (a
            tag that never changes), or "none".
        heeds_condition: Whether it looks at If-Range.
        chunked: Whether whole objects come in chunks, without a length.
        repeats: Whether an answer with a part has the validators, too.
        requests: Path, headers of all requests.
        connections: How many there were.
        stalled: How many of them have come to a "stall".
    """

    objects: dict[str, bytes]
    replacements: dict[str, bytes] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    ranges: bool = True
    tells_ranges: bool | None = None
    validators: str = "etag"
    heeds_condition: bool = True
    chunked: bool = False
    repeats: bool = True
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    connections: int = 0
    stalled: int = 0
    changed: set[str] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)

    def fault(self, path: str) -> Fault | None:
        """The next fault of a path."""
        return next(self.plans.get(path, iter(())), None)

    def validators_of(self, path: str, data: bytes) -> dict[str, str]:
        """The headers that tell versions apart."""
        tag = hashlib.sha256(data).hexdigest()[:16]
        date = NEW if path in self.changed else OLD
        if self.validators in ("etag", "weak"):
            return {"ETag": f'{"W/" if self.validators == "weak" else ""}"{tag}"', "Last-Modified": date}
        told: dict[str, dict[str, str]] = {
            "none": {},
            "date": {"Last-Modified": date},
            "fresh": {"Last-Modified": date, "Date": date},
            "stuck": {"ETag": '"tag"'},
        }
        return told[self.validators]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body behind its headers would wait for the client's acknowledgement
    timeout = 20
    site: Site

    def setup(self) -> None:
        super().setup()
        self.site.connections += 1

    def log_message(self, *_: Any) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return OLD if self.site.validators == "fresh" else super().date_time_string(timestamp)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.site.requests.append((self.path, {name.title(): value for name, value in self.headers.items()}))
        fault = self.site.fault(path)
        if fault is not None and fault.kind == "change" and path in self.site.replacements:
            self.site.changed.add(path)
            self.site.objects[path] = self.site.replacements.pop(path)
        early: Callable[[Fault], None] | None = getattr(self, f"do_{fault.kind}", None) if fault else None
        if fault is not None and early is not None:
            early(fault)
        elif path not in self.site.objects:
            self.answer(404, b"there is no such shard")
        else:
            self.serve(path, self.site.objects[path], fault)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_status(self, fault: Fault) -> None:
        self.answer(fault.status, b"not now", **({"Retry_After": fault.wait} if fault.wait else {}))

    def do_redirect(self, fault: Fault) -> None:
        self.answer(302, b"elsewhere", Location=fault.to + self.path)

    def do_silent(self, fault: Fault) -> None:
        self.close_connection = True

    def do_garbage(self, fault: Fault) -> None:
        self.wfile.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        self.close_connection = True

    def serve(self, path: str, data: bytes, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        if fault and kind == "late":
            self.site.closing.wait(fault.seconds)
        validators = self.site.validators_of(path, data)
        first, end = self.part(data, validators, whole=kind == "whole")
        if first is None:
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        partial = end is not None
        end = len(data) if end is None else end
        if partial and kind == "less":
            end = max(first + 1, (first + end) // 2)
        told = end + (fault.size if fault else 0) * {"overstate": 1, "understate": -1}.get(kind, 0)
        headers = validators if self.site.repeats or not partial else {}
        if self.site.ranges if self.site.tells_ranges is None else self.site.tells_ranges:
            headers = {**headers, "Accept-Ranges": "bytes"}
        if partial:
            begin = first + 7 if kind == "elsewhere" else first
            total = len(data) + told - end
            headers = {**headers, "Content-Range": f"bytes {begin}-{max(told, first + 1) - 1}/{total}"}
        chunked = self.site.chunked and not partial
        rest = bytes(fault.size if fault and kind == "more" else 0)
        size = max(told - first, 0) + len(rest)
        length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(size)}
        self.send_response(206 if partial else 200)
        for name, value in {**headers, **length}.items():
            if name != "Date":
                self.send_header(name, value)
        self.end_headers()
        self.send_body(data[first:end] + rest, first, fault, chunked=chunked)

    def part(self, data: bytes, validators: dict[str, str], *, whole: bool) -> tuple[int | None, int | None]:
        """First byte, None if the object ends before; the byte behind the last, None for the whole object."""
        asked, condition = self.headers.get("Range"), self.headers.get("If-Range")
        holds = condition is None or condition in validators.values() or not self.site.heeds_condition
        if asked is None or not self.site.ranges or whole or not holds:
            return 0, None
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= len(data):
            return None, None
        return int(first), min(int(last) + 1 if last else len(data), len(data))

    def send_body(self, body: bytes, first: int, fault: Fault | None, *, chunked: bool) -> None:
        cut = len(body)
        if fault is not None and fault.kind in ("drop", "reset", "stall"):
            cut = min(cut, max(0, fault.after if fault.until is None else fault.until - first))
        slow = fault if fault is not None and fault.kind == "slow" else None
        step = slow.size if slow is not None else 10_000 if chunked else 1 << 20
        for start in range(0, cut, step):
            if slow is not None:
                self.site.closing.wait(slow.seconds)
            piece = body[start : min(start + step, cut)]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if fault is not None and fault.kind in ("drop", "reset", "stall"):
            self.break_off(fault)
        elif chunked:
            self.wfile.write(b"0\r\n\r\n")
        if fault is not None:
            self.close_connection = True

    def break_off(self, fault: Fault) -> None:
        self.wfile.flush()
        if fault.kind == "stall":
            self.site.stalled += 1
            self.site.closing.wait(10)
        if fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


@contextmanager
def serve_site(site: Site, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves a site; gives its address, such as http://127.0.0.1:1234."""
    handler = type("Handler", (_Handler,), {"site": site})
    with serving(QuietServer(("127.0.0.1", 0), handler)) as address:
        try:
            yield address.replace("127.0.0.1", host)
        finally:
            site.closing.set()
