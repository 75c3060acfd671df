"""A web server for tests of caches: it counts requests and can be told to stop half-way."""

import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CacheServer(ThreadingHTTPServer):
    """Serves `objects`, by path; `requests` counts what was asked for.

    Attributes:
        gate: While it is closed, all answers stop after half of their bytes.
        cut: Paths whose answers end there.
        tags: Whether answers have an ETag, which follows from the content.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.cut: set[str] = set()
        self.tags = False
        self._counting = threading.Lock()

    def put(self, name: str, data: bytes) -> str:
        """Has an object from now on; gives its URL."""
        self.objects[f"/{name}"] = data
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def count(self, path: str) -> None:
        """Counts a request."""
        with self._counting:
            self.requests[path] += 1

    def handle_error(self, *_: Any) -> None:
        """Says nothing: clients leave early and are killed."""


class _Answers(BaseHTTPRequestHandler):
    server: CacheServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.count(self.path)
        data = self.server.objects.get(self.path)
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        if self.server.tags:
            self.send_header("ETag", f'"{zlib.crc32(data):08x}"')
        self.end_headers()
        half = len(data) // 2
        self.wfile.write(data[:half])
        self.wfile.flush()
        if self.path not in self.server.cut:
            self.server.gate.wait(30)
            self.wfile.write(data[half:])


@contextmanager
def cache_server() -> Iterator[CacheServer]:
    """Runs a server."""
    server = CacheServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
