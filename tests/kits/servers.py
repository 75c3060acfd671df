"""HTTP servers for tests, on the loopback address only."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from typing import Any


@contextmanager
def serving(server: BaseServer) -> Iterator[str]:
    """Runs a server in a thread of this process; gives its address."""
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that go away early, which is what is tested."""

    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *_: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        try:
            super().copyfile(source, outputfile)
        except (BrokenPipeError, ConnectionResetError):  # the client left early
            self.close_connection = True


@contextmanager
def serve_folder(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """Serves the files of a folder; gives the server's URL."""
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))) as address:
        yield address
