"""Shards from web servers: ``http:`` and ``https:``, by urllib3."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin
from urllib.request import getproxies, proxy_bypass

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage.compression import HEAD_SIZE, is_compressed
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.streams import ShardSource, Source, wrap_source
from torchdata_wds.storage.urls import mask_text, mask_url, masked_cause

if TYPE_CHECKING:
    import urllib3

__all__ = ["open_http"]

_CONNECT_SECONDS = 30
_READ_SECONDS = 60
_REDIRECTS = 8
# Seconds to wait after each attempt that got no response: a kept connection may have been closed meanwhile.
_PAUSES = (0.0, 0.2, 0.0)
_PIECE = 256 * 1024
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+|\*)")
_OWN_DECODERS = ("gzip", "x-gzip", "zstd")


class HttpSource(Source):
    """The body of a response; urllib3 raises where it is shorter than its Content-Length or its chunks say."""

    def __init__(self, response: urllib3.BaseHTTPResponse, shard: str) -> None:
        self._response = response
        self._shard = shard
        self._received = 0

    def take(self, size: int) -> bytes:
        import urllib3

        try:
            # read() would drop what it has already received when the connection breaks.
            data = self._response.read1(min(size, _PIECE), decode_content=False) or b""
        except urllib3.exceptions.HTTPError as error:
            raise ShardOpenError(
                f"shard {self._shard} broke off after {self._received:,}{self._expected()} bytes: "
                f"{mask_text(str(error))}. Try again, or skip failing shards with handler=warn_and_continue.",
                shard=self._shard,
            ) from masked_cause(error)
        self._received += len(data)
        return data

    def _expected(self) -> str:
        length = self._response.headers.get("Content-Length", "")
        return f" of {int(length):,}" if length.isdecimal() else ""

    def _close(self) -> None:
        self._response.close()


@dataclass(frozen=True)
class _Request:
    """How to ask for one shard."""

    url: str
    shard: str
    headers: dict[str, str]

    def get(self, part: str | None = None) -> urllib3.BaseHTTPResponse:
        """Sends the request and gives the response, whatever its status.

        Raises:
            ShardOpenError: if no server answers.
        """
        import urllib3

        headers = {"Accept-Encoding": "identity", **self.headers}
        if part is not None:
            headers["Range"] = f"bytes={part}"
        for pause in _PAUSES:
            try:
                return self._send(headers)
            except (urllib3.exceptions.HTTPError, ValueError) as error:
                failure = error
            time.sleep(pause)
        raise ShardOpenError(f"cannot open shard {self.shard}: {_reason(failure)}", shard=self.shard) from masked_cause(
            failure
        )

    def _send(self, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        return _pool(_proxy(self.url), os.getpid()).request(
            "GET", self.url, headers=headers, preload_content=False, retries=_redirects()
        )

    def open(self, offset: int) -> io.BufferedReader:
        """Opens the whole shard and reads past the offset."""
        response = self.get()
        if response.status != 200:
            raise self.refusal(response)
        return wrap_source(self.decoded(response), self.shard, skip=offset)

    def open_part(self, offset: int) -> io.BufferedReader:
        """Opens the shard, known to be uncompressed, at the offset."""
        response = self.get(f"{offset}-")
        if response.status == 200:
            return wrap_source(HttpSource(response, self.shard), self.shard, skip=offset, plain=True)
        first, last, total = _content_range(response)
        if response.status == 206 and first == offset and (total is None or last == total - 1):
            return wrap_source(HttpSource(response, self.shard), self.shard, plain=True)
        if response.status == 416 and total is not None:
            response.close()
            return self.nothing_behind(offset, total)
        raise self.refusal(response)

    def nothing_behind(self, offset: int, total: int) -> io.BufferedReader:
        """The empty rest of a shard that ends at the offset."""
        if offset == total:
            return wrap_source(io.FileIO(os.devnull), self.shard, plain=True)
        raise ShardFormatError(
            f"shard {self.shard} ends at byte {total:,}, before the offset {offset:,} that was asked for; "
            "is its index older than the shard?",
            shard=self.shard,
        )

    def decoded(self, response: urllib3.BaseHTTPResponse) -> Source:
        """The body without a Content-Encoding that nobody asked for."""
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        source = HttpSource(response, self.shard)
        if encoding in ("identity", ""):
            return source
        if encoding in _OWN_DECODERS:
            return ShardSource(source, self.shard)
        source.close()
        raise ShardOpenError(
            f"cannot open shard {self.shard}: the server sent Content-Encoding {encoding!r}, expected identity",
            shard=self.shard,
        )

    def refusal(self, response: urllib3.BaseHTTPResponse) -> ShardOpenError:
        """The error for a response that is not what was asked for."""
        response.close()
        final = mask_url(_final_url(self.url, response))
        via = "" if final == self.shard else f" (redirected to {final})"
        status = f"{response.status} {response.reason or ''}".strip()
        return ShardOpenError(f"cannot open shard {self.shard}: the server answered {status}{via}", shard=self.shard)


def open_http(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:
    """Opens a shard on a web server.

    Args:
        url: Its URL; a user name and password in it are sent as basic authentication.
        offset: Decompressed bytes to leave out: by a range request where the server and the shard allow it.
        options: ``{"https": {"headers": {...}}}``, and the same for ``http``.

    Raises:
        ShardOpenError: if no server answers, or with anything but the shard.
    """
    request = _Request(url, mask_url(url), _headers(url, options))
    if offset and _is_plain(request):
        return request.open_part(offset)
    return request.open(offset)


def _is_plain(request: _Request) -> bool:
    """Tells whether the server gives parts, and the shard is not compressed: the offset counts decompressed bytes."""
    response = request.get(f"0-{HEAD_SIZE - 1}")
    with HttpSource(response, request.shard) as source:
        if response.status != 206 or response.headers.get("Content-Encoding"):
            return False
        head = b""
        while piece := source.take(HEAD_SIZE):
            head += piece
    return len(head) == HEAD_SIZE and not is_compressed(head)


def _final_url(url: str, response: urllib3.BaseHTTPResponse) -> str:
    for step in response.retries.history if response.retries else ():
        url = urljoin(url, step.redirect_location or "")
    return url


def _content_range(response: urllib3.BaseHTTPResponse) -> tuple[int | None, int | None, int | None]:
    found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if found is None:
        return None, None, None
    first, last, total = (int(number) if number and number != "*" else None for number in found.groups())
    return first, last, total


def _headers(url: str, options: StorageOptions) -> dict[str, str]:
    import urllib3

    scheme = url.partition(":")[0].lower()
    chosen = dict(options.get(scheme, {}))
    # Tokens that were read from a file end in a newline.
    headers = {str(name): str(value).strip() for name, value in dict(chosen.pop("headers", None) or {}).items()}
    for name, value in headers.items():
        if not name or not (name + value).isprintable():
            raise ValueError(f"storage_options for {scheme!r}: header {name!r} or its value holds control characters")
    if chosen:
        raise TypeError(f"storage_options for {scheme!r} takes only 'headers', found {', '.join(map(repr, chosen))}")
    try:
        auth = urllib3.util.parse_url(url).auth
    except urllib3.exceptions.HTTPError as error:
        shard = mask_url(url)
        raise ShardOpenError(
            f"cannot open shard {shard}: its address is malformed: {_reason(error)}", shard=shard
        ) from masked_cause(error)
    return {**(urllib3.make_headers(basic_auth=unquote(auth)) if auth else {}), **headers}


def _redirects() -> urllib3.Retry:
    import urllib3

    # Redirects only: where urllib3 tries again by itself, it logs the URL with all its secrets.
    return urllib3.Retry(total=None, connect=0, read=0, other=0, redirect=_REDIRECTS, status=0)


def _proxy(url: str) -> str | None:
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return None if proxy_bypass(host) else getproxies().get(scheme.lower())


@lru_cache(maxsize=8)
def _pool(proxy: str | None, process: int) -> urllib3.PoolManager:  # noqa: ARG001 - one pool per process, for fork
    import urllib3

    timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS)
    return urllib3.ProxyManager(proxy, timeout=timeout) if proxy else urllib3.PoolManager(timeout=timeout)


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    # urllib3 puts the connection object before the text: "<...HTTPConnection object at 0x...>: Failed to ..."
    return mask_text(re.sub(r"<?[\w.]*HTTPS?Connection(Pool)?\b[^:>]*?(object at 0x\w+)?>?: ", "", str(cause)))
