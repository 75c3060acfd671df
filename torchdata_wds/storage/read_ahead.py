"""Opens a shard in a thread, which reads ahead of the shard's reader."""

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torchdata_wds.storage.byte_streams import BUFFER_SIZE, ByteStream, Source, StoredVersion, interrupt, stored_version
from torchdata_wds.storage.meters import GIVEN_STREAMS, Meter, reads_ahead

#: The default limit for reading ahead, in bytes per shard.
LARGEST_LEAD = 16 << 20
_PIECE = 1 << 18

#: Seconds that `close` waits for a thread whose source does not respond; the thread then closes it later.
_PATIENCE = 5.0
T = TypeVar("T")


class ReadAhead(Source, Generic[T]):
    """Calls `opening` in a thread, at once, and reads the stream that it returns about `lead` bytes ahead.

    `meter` counts how long the reader waits for the thread; what the thread reads is counted where it is read.
    """

    def __init__(
        self, opening: Callable[[], tuple[ByteStream, T]], *, lead: int = LARGEST_LEAD, meter: Meter | None = None
    ) -> None:
        self._opening = opening
        self._lead = lead
        self._meter = meter or Meter("", GIVEN_STREAMS)
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._rest = memoryview(b"")  # the part of the current piece that is not delivered yet
        self._stream: ByteStream | None = None
        self._found: list[T] = []
        self._failure: Exception | None = None
        self._is_over = False  # the thread adds no more
        self._is_stopped = False
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shard read-ahead", daemon=True)
        self._thread.start()

    def opened(self) -> tuple[ByteStream, T]:
        """Waits until the stream is open; returns a stream of the same bytes, and the other value of `opening`.

        Closing the stream closes everything. If opening failed, closes everything and raises the error.
        """
        with self._changed:
            with self._meter.waiting():
                self._changed.wait_for(lambda: self._found or self._is_over)
            if self._found:
                return io.BufferedReader(self, BUFFER_SIZE), self._found[0]
        failure = self._failure
        self.close()
        raise failure or RuntimeError("a shard that was opened ahead is already closed")

    def stored_version(self) -> StoredVersion | None:
        """Returns the version that the stream reports."""
        return None if self._stream is None else stored_version(self._stream)

    def fill(self, view: memoryview) -> int:
        """Takes the next bytes, none at the end of the stream; if reading has failed, every call raises the error."""
        if not self._rest:
            with self._changed:
                with self._meter.waiting():
                    self._changed.wait_for(lambda: self._pieces or self._is_over)
                if self._pieces:
                    self._rest = memoryview(self._pieces.popleft())
                    self._held -= len(self._rest)
                    self._changed.notify_all()
                elif self._failure is not None:
                    raise self._failure
        count = min(len(view), len(self._rest))
        view[:count], self._rest = self._rest[:count], self._rest[count:]
        self._meter.byte += count
        return count

    def stop(self) -> None:
        """Makes the thread end soon; does not wait for it."""
        if not self._is_here:
            return
        with self._changed:
            self._is_stopped = True
            self._pieces.clear()
            stream = None if self._is_over else self._stream
            self._changed.notify_all()
        # The thread waits either for room, which the notification ends, or inside the source, which only this ends.
        # Outside the lock, which the thread may need in order to end.
        if stream is not None:
            interrupt(stream)

    def close(self, patience: float | None = None) -> None:
        """Stops the thread and waits `patience` seconds at most; a thread that ends later closes the source then."""
        self.stop()
        if self._is_here and threading.current_thread() is not self._thread:  # as in a garbage collection there
            self._thread.join(_PATIENCE if patience is None else patience)
        self._failure = None  # it refers to the frames that raised it
        super().close()

    @property
    def _is_here(self) -> bool:
        """Whether the thread runs in this process: a forked copy has none, and may have a lock that the thread held."""
        return self._owner == os.getpid()

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            with reads_ahead():
                self._read_all()
        except Exception as error:  # noqa: BLE001 - raised to the reader
            failure = error
        with self._changed:
            self._is_over = True
            # After `stop` the error is that of the interrupted read, which no reader waits for.
            self._failure = None if self._is_stopped else failure
            self._changed.notify_all()

    def _read_all(self) -> None:
        stream, found = self._opening()
        with stream:
            with self._changed:
                self._stream = stream
                self._found.append(found)
                self._changed.notify_all()
            read = getattr(stream, "read1", stream.read)
            # The thread reads while it holds less than `lead` bytes, so it may exceed that by a piece: for 16 MiB, it
            # holds at most 16.25 MiB. read1 does not wait for a whole piece, so that slow bytes arrive at once.
            while not self._is_stopped and (piece := read(_PIECE)):
                with self._changed:
                    self._pieces.append(piece)
                    self._held += len(piece)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._held < self._lead or self._is_stopped)


def close_all(streams: Iterable[ReadAhead[Any]]) -> None:
    """Closes streams that are no longer needed; waits no longer for all of them than for one."""
    streams = list(streams)
    for ahead in streams:
        ahead.stop()
    end = time.monotonic() + _PATIENCE
    for ahead in streams:
        ahead.close(max(0.0, end - time.monotonic()))
