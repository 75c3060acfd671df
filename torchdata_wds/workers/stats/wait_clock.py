"""Measures how long the training loop waits for its items, at next to no cost."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

from torchdata_wds.workers.stats.figures import Waits

#: If an item takes fewer seconds than this, with the training step, only one of several is measured: measuring takes 4
#: to 12 microseconds. A loop that takes less than `_QUICK` an item does nothing with most items, and may know less.
_WORTH, _WORTH_OF_QUICK = 0.001, 0.004
_QUICK = 0.0001
_MOST_RECENT = 1000
_MOST_LEFT_OUT = 1000
_NEVER = 1 << 62
_STEPS = 8  # how many classes of waits there are between one length and its double
_random = random.Random(0).random  # its own: the global one belongs to the program


class WaitMark(NamedTuple):
    """The figures of an epoch at one moment."""

    taken: int = 0
    waited: float = 0.0  # seconds
    seconds: float = 0.0  # since the first item was asked for
    first: float = 0.0  # the wait for that item
    by_class: Counter[int] = Counter()  # noqa: RUF012  (never changed)

    def since(self, before: WaitMark) -> Waits:
        """Returns the waits between two moments."""
        waited, seconds = max(self.waited - before.waited, 0.0), max(self.seconds - before.seconds, 0.0)
        classes = self.by_class - before.by_class
        return Waits(
            self.taken - before.taken,
            waited,
            max(seconds - waited, 0.0),
            _quantile(classes, 0.5),
            _quantile(classes, 0.99),
            self.first if not before.taken else 0.0,
        )


class WaitClock:
    """The waits of one epoch.

    A front measures an item if `due` items or more were taken before it: it sets `began` to the time, takes the item,
    and calls `note`. Which items are measured is drawn at random, so that none of the steps of a rhythm, such as that
    of messages with many items, is left out always.
    """

    def __init__(self) -> None:
        self.due = 0
        self.began = 0.0  # when the last measured wait began
        self._first = 0.0
        self._ended = 0.0  # when it ended
        self._counted = 0  # the items up to there
        self._left_out = 0  # how many are left out now, on average, between two that are measured
        self._waited = self._first_wait = 0.0
        self._recent: deque[tuple[float, int]] = deque()  # waits not yet counted, and the items they stand for
        self._by_class: Counter[int] = Counter()
        self._counting = threading.Lock()

    def note(self, taken: int) -> None:
        """Notes the end of a measured wait, with which `taken` items were taken in this epoch."""
        began, now = self.began, perf_counter()
        weight = max(taken - self._counted, 1)
        if not self._first:
            self._first, self._first_wait = began, now - began
        self._waited += weight * (now - began)
        # Each line here costs several times what it would in a loop, as the processor's caches hold other code.
        self._recent.append((now - began, weight))
        if self._ended:
            each = (now - self._ended) / weight + 1e-9
            self._left_out = left_out = min(int((_WORTH if each > _QUICK else _WORTH_OF_QUICK) / each), _MOST_LEFT_OUT)
            self.due = taken + int(_random() * (2 * left_out + 1))
        self._ended, self._counted = now, taken
        if len(self._recent) > _MOST_RECENT:
            self._count()

    def _count(self) -> Counter[int]:
        """Counts the recent waits, and returns the counts of all."""
        with self._counting:  # a thread may ask for figures
            while self._recent:
                wait, weight = self._recent.popleft()
                self._by_class[round(math.log2(max(wait, 1e-9)) * _STEPS)] += weight
            return self._by_class.copy()

    def stop(self) -> None:
        """Notes that there are no more items, or that the epoch was left."""
        self.due = _NEVER
        if self.began > self._ended:  # the wait for the end
            self._waited += perf_counter() - self.began
            self._first, self._ended = self._first or self.began, perf_counter()

    def waited(self) -> float:
        """Returns how many seconds the training loop has waited up to now, about."""
        return min(self._waited + self._waits_now(), self.seconds())

    def seconds(self) -> float:
        """Returns how many seconds have passed since the first item was asked for."""
        first = self._first or self.began
        if not first:
            return 0.0
        return (self._ended if self.due == _NEVER else perf_counter()) - first

    def _waits_now(self) -> float:
        return perf_counter() - self.began if self.began > self._ended and self.due != _NEVER else 0.0

    def mark(self, yielded: int) -> WaitMark:
        """Returns the figures up to now; the graph has `yielded` items, some perhaps to a thread that runs ahead."""
        taken = max(yielded, self._counted) if self._left_out else self._counted
        return WaitMark(taken, self.waited(), self.seconds(), self._first_wait, self._count())


class AllWaits:
    """The waits of all epochs of a loader."""

    def __init__(self) -> None:
        self._before = 0.0
        self.clock = WaitClock()  # of the running or last epoch

    def begin(self, clock: WaitClock | None = None) -> None:
        """Begins an epoch, which a clock of its own may measure."""
        self._before = self.seconds()
        self.clock = clock or WaitClock()

    def seconds(self) -> float:
        """Returns for how many seconds the training loop has waited."""
        return self._before + self.clock.waited()


class MeasuredItems(Iterator[Any]):
    """Takes items from an iterator, and measures how long that takes."""

    def __init__(self, items: Iterator[Any], clock: WaitClock) -> None:
        self._items, self._clock = items, clock
        self._taken = 0

    def __next__(self) -> Any:
        clock = self._clock
        is_measured = self._taken >= clock.due
        if is_measured:
            clock.began = perf_counter()
        try:
            item = next(self._items)
        except BaseException:  # DataLoader2 ends the epoch
            clock.stop()
            raise
        self._taken += 1
        if is_measured:
            clock.note(self._taken)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


def _quantile(classes: Counter[int], share: float) -> float:
    wanted = share * sum(classes.values())
    for number in sorted(classes):
        wanted -= classes[number]
        if wanted <= 0:
            return float(2.0 ** (number / _STEPS))
    return 0.0
