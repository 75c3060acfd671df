"""Streams that a thread reads ahead: the same bytes and failures, a bounded lead, nothing left open."""

import gzip
import io
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.kits.processes import children, in_child
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.decompression import Decompression
from torchdata_wds.storage.read_ahead import ReadAhead, close_all

SECONDS = 20


class Tape(io.RawIOBase):
    """A stream of pieces that can be made to wait, to fail at its end, and that knows how far it was read."""

    def __init__(self, size: int, *, failure: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.size = size
        self.position = 0
        self.failure = failure
        self.gate = gate

    def read(self, size: int = -1, /) -> bytes:
        if self.gate is not None:
            assert self.gate.wait(SECONDS)
        count = min(size, self.size - self.position)
        if not count and self.failure is not None:
            raise self.failure
        data = bytes(number % 251 for number in range(self.position, self.position + count))
        self.position += count
        return data


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shard read-ahead"]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread outlives its stream."""
    yield
    assert not reader_threads()


def ahead_of(tape: Any, **options: Any) -> ReadAhead[str]:
    return ReadAhead(lambda: (tape, "found"), **options)


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(SECONDS * 100):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came to be")


@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
@pytest.mark.parametrize("step", [1 << 20, 100_000, 511])
def test_ahead_gives_the_bytes_of_the_stream(size: int, step: int) -> None:
    """In reads of any size, and what the opening found out besides."""
    tape = Tape(size)
    stream, found = ahead_of(tape).opened()
    with stream:
        pieces = list(iter(lambda: stream.read(step), b""))
        assert stream.read(1) == b""
    assert found == "found"
    assert b"".join(pieces) == bytes(number % 251 for number in range(size))
    assert tape.closed


def test_ahead_raises_what_the_opening_raised() -> None:
    """Where the stream is asked for, not before."""

    def opening() -> Any:
        raise ShardOpenError("no such shard")

    ahead = ReadAhead(opening)
    wait_until(lambda: not reader_threads())
    with pytest.raises(ShardOpenError, match="no such shard"):
        ahead.opened()


def test_ahead_raises_behind_the_bytes_before_a_failure() -> None:
    """Each byte that was read comes out first, and each later read fails again."""
    stream, _ = ahead_of(Tape(700, failure=ShardOpenError("broke off"))).opened()
    with stream:
        assert len(stream.read(700)) == 700
        for _ in range(2):
            with pytest.raises(ShardOpenError, match="broke off"):
                stream.read(1)


def test_ahead_opens_and_reads_before_it_is_asked() -> None:
    """The thread is at work from the beginning."""
    tape = Tape(5000)
    ahead = ahead_of(tape)
    wait_until(lambda: tape.position == 5000)
    ahead.close()
    assert tape.closed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
}


@pytest.mark.parametrize("kind", PACKERS)
def test_ahead_decompresses_in_its_thread(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader only copies: all decompression has happened, in the other thread, before the reader asks."""
    data = random.Random(2).randbytes(300_000) + bytes(3_000_000)
    path = tmp_path / "x.tar"
    path.write_bytes(PACKERS[kind](data))
    threads, fill = set(), Decompression.fill

    def noted(self: Decompression, view: memoryview) -> int:
        threads.add(threading.current_thread().name)
        return fill(self, view)

    monkeypatch.setattr(Decompression, "fill", noted)
    ahead = ReadAhead(lambda: (open_shard(path), None))
    wait_until(lambda: not reader_threads())
    stream, _ = ahead.opened()
    with stream:
        assert stream.read() == data
    assert threads == {"shard read-ahead"}


@pytest.mark.parametrize("kind", PACKERS)
def test_ahead_raises_behind_the_bytes_before_damage(kind: str, tmp_path: Path) -> None:
    """A wrong checksum is found by the thread, and raised where the reader comes to it."""
    data = random.Random(2).randbytes(300_000)
    packed = bytearray(PACKERS[kind](data))
    packed[-8 if kind == "gzip" else -1] ^= 1
    path = tmp_path / "x.tar"
    path.write_bytes(packed)
    stream, _ = ReadAhead(lambda: (open_shard(path), None)).opened()
    with stream:
        assert stream.read(len(data)) == data
        for _ in range(2):
            with pytest.raises(ShardFormatError, match="is damaged"):
                stream.read(1)


@pytest.mark.parametrize("kind", PACKERS)
def test_ahead_closes_when_a_compressed_shard_is_not_wanted(kind: str, tmp_path: Path) -> None:
    """Closed in the middle of a shard that would decompress to a gigabyte, it ends with little of it in memory."""
    path = tmp_path / "x.tar"
    path.write_bytes(PACKERS[kind](bytes(20_000_000)) * 50)
    ahead = ReadAhead(lambda: (open_shard(path), None), lead=1 << 20)
    stream, _ = ahead.opened()
    assert len(stream.read(3 << 20)) == 3 << 20
    assert ahead._held <= (1 << 20) + (1 << 18)
    stream.close()


def test_ahead_holds_no_more_than_its_lead() -> None:
    """It waits until bytes are taken; one piece may be on its way."""
    piece = 1 << 18
    tape = Tape(40 * piece)
    stream, _ = ahead_of(tape, lead=4 * piece).opened()
    with stream:
        wait_until(lambda: tape.position >= 4 * piece)
        threading.Event().wait(0.05)
        assert tape.position == 4 * piece
        stream.read(2 * piece)
        wait_until(lambda: tape.position >= 6 * piece)
    assert tape.position < 40 * piece


def test_ahead_closes_when_it_is_not_wanted() -> None:
    """Closed in the middle, before it was opened, or twice, it ends its thread and closes its stream."""
    tape = Tape(100 << 20)
    ahead = ahead_of(tape)
    stream, _ = ahead.opened()
    stream.read(10)
    stream.close()
    ahead.close()
    assert tape.closed
    gate = threading.Event()
    slow = Tape(100, gate=gate)
    waiting = ahead_of(slow)
    threading.Timer(0.05, gate.set).start()
    waiting.close()
    assert slow.closed


def test_ahead_leaves_a_stalled_source_to_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for ever; when the source answers, it is closed."""
    monkeypatch.setattr("torchdata_wds.storage.read_ahead._PATIENCE", 0.05)
    gate = threading.Event()
    tape = Tape(100, gate=gate)
    ahead = ahead_of(tape)
    ahead.close()
    assert not tape.closed
    assert reader_threads()
    gate.set()
    wait_until(lambda: tape.closed and not reader_threads())


def test_many_stalled_streams_are_closed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the time that closing one may take."""
    asked: list[float] = []
    monkeypatch.setattr("torchdata_wds.storage.read_ahead._PATIENCE", 0.1)
    monkeypatch.setattr(ReadAhead, "close", lambda self, patience=0: asked.append(patience) or join(self, patience))
    gate = threading.Event()
    streams = [ahead_of(Tape(100, gate=gate)) for _ in range(4)]
    close_all(streams)
    assert asked[0] > 0
    assert asked[1:] == [0, 0, 0]
    gate.set()
    wait_until(lambda: not reader_threads())


def join(ahead: ReadAhead[str], patience: float) -> None:
    ahead._thread.join(patience)


def test_ahead_ends_a_command_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for it, for its source can be interrupted."""
    monkeypatch.setattr("torchdata_wds.storage.read_ahead._PATIENCE", SECONDS)
    stream, _ = ReadAhead(lambda: (open_shard("pipe:sleep 1000"), None)).opened()
    before = children()
    assert before
    stream.close()
    assert not reader_threads()
    assert not children()


def test_ahead_is_closed_at_once_when_a_fork_closes_its_copy() -> None:
    """The fork has no thread to wait for, and a lock that the thread held is held there for ever."""
    ahead = ahead_of(Tape(100))
    stream, _ = ahead.opened()
    is_held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ahead._changed:
            is_held.set()
            release.wait(SECONDS)

    def close() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        stream.close()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(SECONDS)
    try:
        assert in_child(close) == 0
    finally:
        release.set()
        holder.join()
    with stream:
        assert len(stream.read()) == 100


def test_ahead_may_be_closed_in_its_own_thread() -> None:
    """A garbage collection there may close a reader that nobody uses any more."""
    is_made, closed = threading.Event(), threading.Event()

    def opening() -> tuple[Any, None]:
        assert is_made.wait(SECONDS)
        close_all([ahead])
        closed.set()
        return io.BufferedReader(io.BytesIO(b"x")), None  # type: ignore[arg-type]

    ahead = ReadAhead(opening)
    is_made.set()
    assert closed.wait(SECONDS)
    ahead._thread.join(SECONDS)
