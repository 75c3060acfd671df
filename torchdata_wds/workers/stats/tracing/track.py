"""What a process notes on its track of a trace while it makes items."""

from __future__ import annotations

import os
from pathlib import Path

from torchdata_wds.storage import meters
from torchdata_wds.workers.stats.tracing.spans import SpanFile, SpanLog

#: Seconds between two looks at a process that is traced.
INTERVAL = 0.01

SOURCE = "waiting for the source"

_MOST_EVENTS = 200_000  # of all tracks together


def most_events(workers: int) -> int:
    """Returns how many events each track may have: the training loop, the main process, and the workers."""
    return _MOST_EVENTS // (workers + 2)


class Track:
    """The track of one process; a worker's goes to a file in `folder`, from which the main process reads it."""

    def __init__(self, most: int, folder: str | None = None, number: int = 0, *, notes_openings: bool = True) -> None:
        self.log = SpanLog(most)
        self._file = None if folder is None else SpanFile(Path(folder), number, os.getpid())
        self.is_running = self._file is None or self._file.append([])
        if self.is_running and notes_openings:
            meters.tell_openings(self._opened)

    def _opened(self, shard: str) -> None:
        self.log.instant("opened a shard", "shard", shard)

    def look(self, stage: str, start: float, end: float, *, reads: bool) -> None:
        """Notes what was seen at `end`, and is taken for what went on since `start`."""
        if not reads:
            self.log.add(stage, "stage", start, end)
        else:
            shard, byte = meters.reading() or ("", 0)
            detail = f"{stage}: {shard}, byte {byte:,}" if shard else stage
            self.log.add(SOURCE, "source", start, end, detail, subject=shard)

    def flush(self, *, is_end: bool = False) -> None:
        """Hands a worker's spans to the main process; the track ends when that needs them no longer."""
        if self._file is not None and self.is_running:
            self.is_running = self._file.append(self.log.take(is_end=is_end))
            if not self.is_running:
                self.end()

    def end(self) -> None:
        """Ends the track."""
        self.is_running = False
        meters.tell_openings(self._opened, stop=True)
