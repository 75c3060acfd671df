"""Reading from a web server that another thread interrupts: it ends soon, and never as if the shard had ended."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.kits.fault_server import Fault, Site, serve_site
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage import retrying as patience
from torchdata_wds.storage.byte_streams import ByteStream, interrupt

DATA = os.urandom(200_000)
OPTIONS = {"http": {"read_timeout": 60}}


@contextmanager
def reading(stream: ByteStream, done: list[object]) -> Iterator[threading.Thread]:
    """A thread that reads all; `done` gets the bytes or the error."""

    def read() -> None:
        try:
            done.append(stream.read())
        except ShardOpenError as error:
            done.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    yield thread
    thread.join(5)
    assert not thread.is_alive()


def check_interrupted(url: str, waiting: Callable[[], object]) -> None:
    """Interrupts the reading of a URL once it waits; it must end at once, by an error."""
    done: list[object] = []
    with open_shard(url, storage_options=OPTIONS) as stream:
        with reading(stream, done):
            while not waiting():
                time.sleep(0.001)
            interrupt(stream)
        with pytest.raises(ShardOpenError, match="interrupted"):
            stream.read(1)
    (error,) = done
    assert isinstance(error, ShardOpenError)
    assert "reading was interrupted" in str(error)


def test_reading_ends_when_it_is_interrupted_in_a_stall() -> None:
    """No second request follows, and nobody waits for the time-out."""
    site = Site({"/a.tar": DATA}, plans={"/a.tar": iter([Fault("stall", until=70_000)])})
    with serve_site(site) as address:
        check_interrupted(f"{address}/a.tar", lambda: site.stalled)
    assert len(site.requests) == 1


def test_reading_ends_when_it_is_interrupted_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server asked for is not waited out."""
    paused = threading.Event()
    monkeypatch.setattr(patience, "seconds_to_wait", lambda *_: paused.set() or 300.0)
    site = Site({"/a.tar": DATA}, plans={"/a.tar": iter([Fault("drop", until=70_000)])})
    with serve_site(site) as address:
        check_interrupted(f"{address}/a.tar", paused.is_set)
    assert len(site.requests) == 1


def test_reading_never_ends_as_if_the_shard_did_when_it_is_interrupted() -> None:
    """A body without a length ends where its connection does: an interrupt must not pass for that end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sent = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + DATA[:70_000])
                sent.set()
                with contextlib.suppress(ConnectionError):
                    connection.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        check_interrupted(f"http://127.0.0.1:{listener.getsockname()[1]}/a.tar", sent.is_set)
        thread.join(5)


def test_interrupting_is_harmless_when_nothing_is_read() -> None:
    """Before the first read, at the end, and behind the closing."""
    with serve_site(Site({"/a.tar": DATA})) as address:
        for size in (0, len(DATA) + 1):
            with open_shard(f"{address}/a.tar") as stream:
                assert stream.read(size) == DATA[:size]
                raw = getattr(stream, "raw")  # noqa: B009
                interrupt(stream)
            raw.interrupt()
        # The connection that was kept serves the next shard.
        with open_shard(f"{address}/a.tar") as stream:
            assert stream.read() == DATA
