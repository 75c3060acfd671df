"""Threads that fetch pieces of shards, and end soon when nobody needs the pieces any more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

from torchdata_wds.format.index.samples import Piece, SampleReader
from torchdata_wds.storage.meters import reads_ahead
from torchdata_wds.storage.places import meter_for
from torchdata_wds.storage.running_reads import interrupt_reads

#: Seconds that leaving waits for threads whose stores do not respond; such a thread ends later.
_PATIENCE = 5.0
_INTERVAL = 0.05
_SLICE = 0.5


def result_of(future: Future[bytes | Exception], reader: SampleReader, piece: Piece) -> bytes | Exception:
    """Waits for a piece in slices, between which signals are handled."""
    # A signal interrupts a wait. But one that comes just before, or to another thread, is only handled after it: Ctrl-C
    # would do nothing until the server responds.
    if not future.done():
        meter = meter_for(reader.index.shards[piece.shard].url, reader.ranges.storage_options)
        meter.byte = piece.starts[0]
        with meter.waiting():
            while not future.done():
                wait([future], _SLICE)
    return future.result()


class FetchThreads:
    """A pool of threads that fetch pieces, as a context.

    Its end interrupts the reads that are under way: each may wait for a server for a minute, and try again eight times.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="wds-pieces")
        self._busy: set[int] = set()  # the threads that fetch a piece
        self._futures: set[Future[bytes | Exception]] = set()

    def fetch(self, reader: SampleReader, piece: Piece) -> Future[bytes | Exception]:
        """Fetches a piece in a thread."""
        future = self._pool.submit(self._fetch, reader, piece)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _fetch(self, reader: SampleReader, piece: Piece) -> bytes | Exception:
        thread = threading.get_ident()
        self._busy.add(thread)
        try:
            with reads_ahead():
                return reader.fetch(piece)
        finally:
            self._busy.discard(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + _PATIENCE
        # Again and again, since a thread may be about to begin a read, or the next one of its piece. Ctrl-C may have
        # come before a future was noted, whose thread then still is.
        while (running := [future for future in list(self._futures) if not future.done()]) or self._busy:
            if time.monotonic() > end:
                return
            interrupt_reads(list(self._busy))
            wait(running, _INTERVAL)
            if not running:
                time.sleep(_INTERVAL)
        self._pool.shutdown()
