"""Takes items from a loader for a while, and counts those of the time in which it ran evenly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

_EARLY = 0.25  # of the time: how long further items may be left out


class Taken(NamedTuple):
    """What was counted."""

    items: int
    seconds: float
    first: float  # seconds to the first item, with the start of the workers


class EmptyEpochError(ValueError):
    """Raised if a graph yields nothing, so that there is nothing to measure."""


class Taking:
    """Takes items from a loader for about `seconds` after the first one.

    It leaves out the first item, and `early` ones at most, since workers start one after another and shuffle buffers
    fill. An epoch that ends before is repeated, and then whole epochs are counted, without the first. `restart` is
    called when the counted time begins, maybe more than once, and `ended` at the end of each epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seconds: float,
        early: int,
        restart: Callable[[], object],
        ended: Callable[[], object],
    ) -> None:
        self._loader = loader
        self._seconds, self._early = seconds, max(early, 1)
        self._restart, self._ended = restart, ended
        self._first = 0.0

    def run(self) -> Taken:
        """Takes the items; raises an `EmptyEpochError` if there are none."""
        begin = time.perf_counter()
        part, is_whole = self._first_epoch(begin)
        begin += part.first
        if not is_whole:
            return part
        # The loader needs no more start, so these epochs take what an epoch takes.
        items, seconds, start = 0, 0.0, time.perf_counter()
        self._restart()
        for epoch in count(1):
            taken, is_whole = self._epoch(begin + 2 * self._seconds)
            now = time.perf_counter()
            if not taken or (not is_whole and epoch > 1):
                break
            items, seconds = items + taken, now - start
            if not is_whole or now + seconds / epoch > begin + self._seconds:
                break
        return Taken(items, seconds, self._first) if items else part

    def _first_epoch(self, begin: float) -> tuple[Taken, bool]:
        """Returns what was counted, and whether the epoch has ended."""
        items, skipped, since = 0, 0, begin
        for items, now in self._items():
            self._first = self._first or now - begin
            passed = now - begin - self._first
            if not skipped and (items >= self._early or passed >= _EARLY * self._seconds):
                skipped, since = items, now
                self._restart()
            elif passed >= self._seconds:
                return Taken(items - skipped, now - since, self._first), False
        if not items:
            raise EmptyEpochError("the graph yields no items, so there is nothing to measure")
        self._ended()
        return Taken(items, time.perf_counter() - begin, self._first), True

    def _epoch(self, end: float) -> tuple[int, bool]:
        items = 0
        for items, now in self._items():
            if now >= end:
                return items, False
        self._ended()
        return items, True

    def _items(self) -> Iterator[tuple[int, float]]:
        clock = time.perf_counter
        for number, _ in enumerate(self._loader, 1):
            yield number, clock()
