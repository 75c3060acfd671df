"""The global order of a mixture by weights, also as a pure function: position -> source and number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from torchdata_wds.checks import check_flags, checked_int, checked_weights
from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.order.permutation import MOST_SAMPLES, Order, mix, scrambled

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CIRCLE = 2**64
#: The step on the circle: the golden section of it, which spreads any number of points most evenly.
_GOLDEN = 0x9E3779B97F4A7C15
#: Positions that are shuffled among each other.
_WINDOW = 8
#: Up to this many positions for each source are counted one by one from where the last call ended. From there on exact
#: sums, one for each source, cost less.
_NEAR = 500


class MixedOrder:
    """The order of one epoch of a mixture: position -> source, and number of the sample in it.

    All epochs are one stream: an epoch is its next `length` positions. A source gives each of its samples once before
    it starts its next pass, which has an order of its own. After any number of positions, a source has been chosen as
    often as its weight says, within a few samples.

    Args:
        totals: How many samples each source has.
        weights: One finite number above 0 per source: how often it is chosen, relative to the others.
        length: Positions of an epoch; None for the sum of `totals`.
        run, shuffle, seed: As in `Order`; each source has runs of its own.
        epoch: The number of the epoch.

    Raises:
        ShardListError: if a source has no samples.
        ValueError: if there is no source, or a number is out of range.

    Example:
        >>> mixed = MixedOrder([1000, 10], [3, 1])
        >>> sources, numbers = mixed.numbers(0, 400)
        >>> np.bincount(sources).tolist()
        [300, 100]
    """

    def __init__(
        self,
        totals: Sequence[int],
        weights: Sequence[float],
        *,
        length: int | None = None,
        run: int = 16,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        self.totals = [checked_int(f"total {place}", total, 0, MOST_SAMPLES) for place, total in enumerate(totals)]
        if not self.totals:
            raise ValueError("a mixture needs at least one source")
        if 0 in self.totals:
            raise ShardListError(
                f"source {self.totals.index(0)} of the mixture, counted from 0, has no samples. Check its shards, or "
                "leave it out"
            )
        self.weights = checked_weights(weights, len(self.totals))
        self.length = checked_int("length", sum(self.totals) if length is None else length, 0, MOST_SAMPLES)
        self.run = checked_int("run", run, 1, MOST_SAMPLES)
        check_flags(shuffle=shuffle)
        self.shuffle, self.seed = shuffle, seed
        self.epoch = checked_int("epoch", epoch, 0, MOST_SAMPLES // max(self.length, 1) - 1)
        # Weights 3 and 1 end at 3/4 of the circle and at its end. Exact fractions make this the same everywhere.
        sums = list(accumulate(map(Fraction, self.weights)))
        self._ends = [int(_CIRCLE * end / sums[-1]) for end in sums]
        self._inner_ends = np.array(self._ends[:-1], dtype=np.uint64)
        self._phase, self._key = mix("phase", seed), mix("windows", seed)
        # A position of the stream, and how often each source was chosen before it.
        self._known: tuple[int, NDArray[np.int64]] = (0, np.zeros(len(self.totals), dtype=np.int64))
        self._passes: dict[int, tuple[int, Order]] = {}

    def numbers(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the sources at positions `first` to `stop` (exclusive), and the samples' numbers, as int64."""
        if not 0 <= first <= stop <= self.length:
            raise ValueError(f"positions {first} to {stop} are not within 0 to {self.length}")
        begin, end = self.epoch * self.length + first, self.epoch * self.length + stop
        start, last = begin - begin % _WINDOW, end - end % _WINDOW
        sources = self._sources(start, last + _WINDOW)
        before = self._counts(start)
        if last > start:
            self._known = last, before + self._count(sources[: last - start])
        places = (before + self._count(sources[: begin - start])).tolist()
        sources = sources[begin - start : end - start]
        numbers = np.empty(len(sources), dtype=np.int64)
        for source in np.flatnonzero(self._count(sources)).tolist():
            chosen = np.flatnonzero(sources == source)
            numbers[chosen] = self._numbers_of(source, places[source], places[source] + len(chosen))
        return sources, numbers

    def _points(self, start: int, stop: int) -> NDArray[np.uint64]:
        return np.arange(start, stop, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(self._phase)

    def _sources_of(self, points: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.searchsorted(self._inner_ends, points, side="right").astype(np.int64)

    def _sources(self, start: int, stop: int) -> NDArray[np.int64]:
        # 34 golden steps end close to where they began, as any Fibonacci number of them. With 34 consumers that take
        # samples in turn from two equal sources, batches of 32 had 0 to 32 of the first. So positions are shuffled in
        # windows, which makes that 6 to 25, and counts at the windows' borders remain exact.
        keys = scrambled(np.arange(start, stop, dtype=np.uint64), self._key)
        order = np.argsort(keys.reshape(-1, _WINDOW), axis=1, kind="stable")
        points = np.take_along_axis(self._points(start, stop).reshape(-1, _WINDOW), order, axis=1)
        return self._sources_of(points.ravel())

    def _counts(self, stop: int) -> NDArray[np.int64]:
        """Returns how often each source is chosen before a window's start, counted from the stream's beginning."""
        start, counts = self._known
        if 0 <= stop - start <= _NEAR * len(self.totals):
            return counts + self._count(self._sources_of(self._points(start, stop)))
        # The points phase + i * golden below an end are those for which dividing by the circle, with and without
        # that end subtracted, differs by one. The circle is added so that nothing is negative.
        phase = self._phase + _CIRCLE
        rounds = _floor_sum(stop, _CIRCLE, _GOLDEN, phase)
        below = [rounds - _floor_sum(stop, _CIRCLE, _GOLDEN, phase - end) for end in self._ends]
        return np.array([end - first for first, end in pairwise([0, *below])], dtype=np.int64)

    def _count(self, sources: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(sources, minlength=len(self.totals))

    def _numbers_of(self, source: int, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the numbers at places of a source, counted over all its passes."""
        total = self.totals[source]
        parts = []
        while first < stop:
            number, place = divmod(first, total)
            length = min(stop - first, total - place)
            parts.append(self._pass(source, number).numbers(place, place + length))
            first += length
        return np.concatenate(parts)

    def _pass(self, source: int, number: int) -> Order:
        known = self._passes.get(source)
        if known is None or known[0] != number:
            seed = mix("source", self.seed, source)
            order = Order(self.totals[source], run=self.run, shuffle=self.shuffle, seed=seed, epoch=number)
            known = self._passes[source] = number, order
        return known[1]


def _floor_sum(count: int, divisor: int, factor: int, start: int) -> int:
    """Returns the sum of (i * factor + start) // divisor for i = 0..count-1, in as many steps as the gcd takes."""
    # Whole multiples of the divisor are summed directly. The rest counts lattice points below a line, row by row
    # instead of column by column: the same sum again with factor and divisor exchanged.
    total = 0
    while True:
        total += (count - 1) * count // 2 * (factor // divisor) + count * (start // divisor)
        factor, start = factor % divisor, start % divisor
        top = count * factor + start
        if top < divisor:
            return total
        count, start = divmod(top, divisor)
        divisor, factor = factor, divisor
