"""What one process does, as spans of time on one track, which never overlap."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

#: A shorter wait for room is not worth a span of its own.
_SHORTEST_WAIT = 0.001

#: Looks come a little late, each by another time, and what they see has no gaps.
_GAP = 0.001

_ROUNDING = 1e-7

#: What was seen last is taken to go on until a wait for room, if that begins within so many seconds.
_UNSEEN = 0.05

#: A span that goes on is handed over in pieces of so many seconds: the epoch may be left in it.
_LONGEST_OPEN = 0.3


class Span(NamedTuple):
    """Something that a process did; an instant if it took no time.

    The clock is `time.perf_counter`, which all processes of a machine share.
    """

    name: str
    kind: str  # "stage", "source", "blocked", "wait", "step", "shard" or "note"
    start: float
    seconds: float = 0.0
    detail: str = ""

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.seconds


class SpanLog:
    """Collects the spans of one track, at most `most`; a span that continues the last one extends it.

    Threads may share a log. The spans are kept until `take`.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.RLock()  # a garbage collection in here may end the trace, and take the spans
        self._done: list[Span] = []
        self._open: Span | None = None
        self._end = 0.0  # of the last span
        self._subject = ("", "", "")
        self._detail = ""

    def add(self, name: str, kind: str, start: float, end: float, detail: str = "", *, subject: str = "") -> None:
        """Adds a span, which begins at the end of the last one if that is later, or hardly earlier.

        It extends the last one if name, kind and `subject` are the same.
        """
        with self._lock:
            start = self._end if start < self._end + _GAP else start
            if end <= start:
                return
            last, before, self._subject = self._open, self._subject, (name, kind, subject)
            goes_on = before == self._subject and start <= self._end
            if last is not None and goes_on:
                self._open = last._replace(seconds=end - last.start)
            else:
                self._close()
                self._detail = self._detail if goes_on else detail
                self._open = Span(name, kind, start, end - start, self._detail)
            self._end = end

    def block(self, start: float, end: float) -> None:
        """Adds a wait for room, up to which the last stage has run."""
        if end - start < _SHORTEST_WAIT:
            return
        with self._lock:
            last = self._open
            if last is not None and last.kind != "blocked" and last.end < start < last.end + _UNSEEN:
                self._open, self._end = last._replace(seconds=start - last.start), start
        self.add("blocked", "blocked", start, end)

    def instant(self, name: str, kind: str, detail: str = "") -> None:
        """Adds something that happens now."""
        with self._lock:
            self._append(Span(name, kind, perf_counter(), 0.0, detail))

    def take(self, *, is_end: bool = True) -> list[Span]:
        """Returns what was added since the last call, and forgets it; before the end, without a span that may go on."""
        with self._lock:
            if is_end or (self._open is not None and self._open.seconds > _LONGEST_OPEN):
                self._close()
            done, self._done = self._done, []
            return done

    def _close(self) -> None:
        last, self._open = self._open, None
        if last is not None:
            self._append(last)

    def _append(self, span: Span) -> None:
        if self._left > 0:
            self._done.append(span)
        elif self._left == 0:
            self._done.append(Span("the trace of this track stops here: it has too many events", "note", span.start))
        self._left -= 1


class SpanFile:
    """A file of spans in the folder of a trace, which is there as long as the trace goes on."""

    def __init__(self, folder: Path, worker: int, process: int) -> None:
        self._path = folder / f"{worker}-{process}.jsonl"

    def append(self, spans: Iterable[Span]) -> bool:
        """Adds spans; returns whether the trace still goes on."""
        try:
            if not self._path.parent.is_dir():
                return False
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(span)}\n" for span in spans)
        except OSError:
            return False
        return True


def joined(spans: Iterable[Span]) -> list[Span]:
    """Joins the pieces of spans that were handed over one by one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        is_piece = last is not None and (*last[:2], last.detail) == (*span[:2], span.detail)
        if last is not None and is_piece and span.seconds and abs(span.start - last.end) < _ROUNDING:
            found[-1] = last._replace(seconds=span.end - last.start)
        else:
            found.append(span)
    return found


def read_spans(folder: Path) -> Iterator[tuple[int, Span]]:
    """Yields the spans in the folder of a trace, each with the number of its worker."""
    for path in sorted(folder.glob("*-*.jsonl")):
        worker = int(path.stem.partition("-")[0])
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # a worker that was killed may have written half a line
                yield worker, Span(*json.loads(line))
