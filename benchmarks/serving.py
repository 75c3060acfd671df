"""A web server for benchmarks, as fast as the kernel sends files: it runs in a process of its own.

    python benchmarks/serving.py FOLDER [--latency SECONDS] [--bare]

serves the files of a folder on the loopback address and prints its address. A request may ask for one range of bytes,
by its first and last; with --bare it gets the whole file.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["serve"]

_RANGE = re.compile(rb"range: *bytes=(\d+)-(\d*)\s*", re.IGNORECASE)


@contextmanager
def serve(folder: Path, *, latency: float = 0.0, bare: bool = False) -> Iterator[str]:
    """Serves a folder from another process; gives the address, such as http://127.0.0.1:1234.

    Args:
        folder: The folder.
        latency: Seconds from each request to the first byte of the answer.
        bare: Whether neither tags nor dates nor the ability to send parts are told.
    """
    command = [sys.executable, __file__, str(folder), "--latency", str(latency), *(["--bare"] if bare else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _answer_all(connection: socket.socket, folder: Path, latency: float, *, bare: bool) -> None:
    """Answers the requests of one connection."""
    with connection, connection.makefile("rb") as requests:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while line := requests.readline():
            asked = None
            while (header := requests.readline()).strip():
                asked = asked or _RANGE.fullmatch(header)
            time.sleep(latency)
            path = folder / line.split()[1].decode().lstrip("/")
            try:
                _send(connection, path, None if bare else asked, bare=bare, body=not line.startswith(b"HEAD"))
            except (BrokenPipeError, ConnectionResetError):
                return


def _send(connection: socket.socket, path: Path, asked: re.Match[bytes] | None, *, bare: bool, body: bool) -> None:
    if not path.is_file():
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        begin, end, answer = 0, status.st_size, "200 OK"
        told = "" if bare else f'Accept-Ranges: bytes\r\nETag: "{status.st_mtime_ns:x}-{end:x}"\r\n'
        if asked is not None:
            begin = min(int(asked[1]), end)
            end = min(int(asked[2]) + 1, end) if asked[2] else end
            answer = "206 Partial Content"
            told += f"Content-Range: bytes {begin}-{end - 1}/{status.st_size}\r\n"
        connection.sendall(f"HTTP/1.1 {answer}\r\n{told}Content-Length: {end - begin}\r\n\r\n".encode())
        while body and begin < end:
            begin += os.sendfile(connection.fileno(), file.fileno(), begin, end - begin)


def main() -> None:
    """Serves until it is terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--bare", action="store_true")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        print(f"http://127.0.0.1:{server.getsockname()[1]}", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(
                target=_answer_all,
                args=(connection, arguments.folder, arguments.latency),
                kwargs={"bare": arguments.bare},
                daemon=True,
            ).start()


if __name__ == "__main__":
    main()
