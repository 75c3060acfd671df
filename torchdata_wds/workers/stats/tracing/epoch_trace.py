"""Traces the first epoch of a loader, and writes it to a file when the epoch ends or is left."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from time import perf_counter
from typing import Any

from torchdata_wds.errors import WdsError
from torchdata_wds.storage import mask_url, open_target
from torchdata_wds.storage.urls import is_local, local_path, url_text
from torchdata_wds.workers.stats.tracing.clock import TracedClock
from torchdata_wds.workers.stats.tracing.events import trace_json
from torchdata_wds.workers.stats.tracing.spans import Span, joined, read_spans
from torchdata_wds.workers.stats.tracing.track import Track, most_events

logger = logging.getLogger(__name__)

_ABOUT = (
    "Spans of stages and sources come from looks at the stack, about 100 a second. Spans of the training loop and of "
    "blocked workers are measured."
)


class EpochTrace:
    """The trace of one epoch: made when the loader is, begun with its first epoch, and written once.

    A trace whose loader is dropped in the middle of the epoch is written then, or when the program ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise TypeError(f"trace must be the path of a file for a trace (str or Path), or None, not {path!r}")
        self._path = url_text(path)
        if is_local(self._path) and not (folder := Path(local_path(self._path)).parent).is_dir():
            raise ValueError(f"trace={self._path!r}: there is no folder {str(folder.absolute())!r}; create it first")
        self._written: _Written | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str] | None) -> EpochTrace | None:
        """Returns the trace for ``trace=``; raises a TypeError or ValueError if it cannot be a file."""
        return None if path is None else cls(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochTrace, (self._path,)

    def open(self, workers: int, rank: int = 0, ranks: int = 1) -> None:
        """Prepares the folder through which workers hand over their spans, before they start."""
        if self._written is None:
            path = _with_rank(self._path, rank) if ranks > 1 else self._path
            self._written = _Written(path, workers, f"rank {rank} of {ranks}" if ranks > 1 else "")
            weakref.finalize(self, self._written.end)

    @property
    def folder(self) -> str | None:
        """The folder for the spans of workers; None if the trace has ended."""
        return None if self._written is None or self._written.is_over else str(self._written.folder)

    def begin(self, epoch: int) -> tuple[TracedClock, Track] | None:
        """Begins the trace with the first epoch; returns the clock of the training loop, and the track of the stages.

        Returns None for a later epoch.
        """
        written = self._written
        if written is None or written.is_over or written.loop is not None:
            return None
        written.begin(epoch)
        assert written.loop is not None
        assert written.stages is not None
        return TracedClock(written.loop), written.stages

    def end(self) -> None:
        """Writes the trace, if it has begun and not ended."""
        if self._written is not None and self._written.loop is not None:
            self._written.end()


class _Written:
    """What is written, without a reference to what decides when."""

    def __init__(self, path: str, workers: int, rank: str) -> None:
        self._path, self._workers, self._rank = path, workers, rank
        self._most = most_events(workers)
        self._owner = os.getpid()
        self._start = 0.0
        self._epoch = 0
        self.folder = Path(tempfile.mkdtemp(prefix="wds-trace-"))
        self.loop: Track | None = None
        self.stages: Track | None = None
        self.is_over = False

    def begin(self, epoch: int) -> None:
        self._epoch, self._start = epoch, perf_counter()
        self.loop, self.stages = Track(self._most, notes_openings=False), Track(self._most)

    def end(self) -> None:
        if self.is_over or self._owner != os.getpid():
            return
        self.is_over = True
        # Under another name, no worker can add to it, and sees that the trace has ended.
        folder = self.folder.with_name(self.folder.name + "-read")
        try:
            self.folder.rename(folder)
            if self.loop is not None:
                self._write(folder)
        except (OSError, ValueError, WdsError) as error:
            logger.warning("the trace of epoch %d is not written to %s: %s", self._epoch, mask_url(self._path), error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        assert self.loop is not None
        assert self.stages is not None
        for track in (self.loop, self.stages):
            track.end()
        tracks = {0: ("training loop", self.loop.log.take())}
        found: dict[int, list[Span]] = {number + 1: [] for number in range(self._workers)}
        for number, span in read_spans(folder):
            found.setdefault(number + 1, []).append(span)
        tracks |= {number: (f"worker {number - 1}", joined(spans)) for number, spans in sorted(found.items())}
        if stages := self.stages.log.take():
            tracks[len(tracks)] = ("stages in the main process", stages)
        title = " ".join(filter(None, ("torchdata_wds", self._rank)))
        about = {"about": _ABOUT, "epoch": str(self._epoch)}
        data = trace_json(os.getpid(), title, tracks, self._start, about)
        target = open_target(self._path, overwrite=True)
        target.write(data)
        target.commit()
        logger.info("the trace of epoch %d is in %s", self._epoch, mask_url(self._path))


def _with_rank(path: str, rank: int) -> str:
    """Returns the path of one rank's trace: ``epoch-rank1.json`` for ``epoch.json``."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return f"{folder}{slash}{stem}-rank{rank}.{suffix}" if dot else f"{path}-rank{rank}"
