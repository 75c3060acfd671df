"""Many numbers in a few: the smallest, median, largest, and a histogram."""

from typing import NamedTuple

import numpy as np

from torchdata_wds.cli.stats.tallies import Integers, Numbers

_MOST_BINS = 30
_STEEP = 100  # times the smallest number: from there on, bins grow with the numbers


class Histogram(NamedTuple):
    """How many numbers lie from each edge to the one before the next."""

    edges: list[int]  # one more than bins
    counts: list[int]
    is_log: bool = False  # whether the edges grow by a factor


class NumberFigures(NamedTuple):
    """A summary of whole numbers; each of its numbers except the total is one of them."""

    minimum: int
    median: int
    p95: int
    maximum: int
    total: int
    histogram: Histogram


def summarize_numbers(numbers: Numbers) -> NumberFigures | None:
    """Summarizes numbers; None if there are none."""
    values = numbers.values()
    count = len(values)
    if not count:
        return None
    # nearest rank: of 10 numbers, the median is the 5th and the 95th percentile the 10th
    ranks = [0, (count + 1) // 2 - 1, -(-95 * count // 100) - 1, count - 1]
    low, median, p95, high = (int(value) for value in np.partition(values, ranks)[ranks])
    total = int(values.sum(dtype=np.uint64))
    return NumberFigures(low, median, p95, high, total, make_histogram(values, low, high))


def make_histogram(values: Integers, low: int, high: int) -> Histogram:
    """Counts whole numbers from `low` to `high` in at most about 30 bins with plain edges."""
    is_log = high - low >= _MOST_BINS and high >= _STEEP * max(low, 1)
    edges = _growing_edges(low, high) if is_log else _even_edges(low, high)
    counts, _ = np.histogram(values, np.array([*edges[:-1], edges[-1] - 0.5]))  # the last bin would include its end
    return Histogram(edges, counts.tolist(), is_log)


def _even_edges(low: int, high: int) -> list[int]:
    """Returns multiples of 1, 2, 5, 10, 20, ...: for 64 to 160 those of 5, which are 60, 65, ..., 165."""
    steps = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    step = next(step for step in steps if high // step - low // step < _MOST_BINS)
    return list(range(low // step * step, (high // step + 2) * step, step))


def _growing_edges(low: int, high: int) -> list[int]:
    """Returns edges such as 10, 20, 50, 100, with more between them where the numbers span only a few decades."""
    decades = len(str(high)) - len(str(max(low, 1))) + 1
    factors = (1, 2, 5) if decades > 6 else (1, 1.5, 2, 3, 5, 7)
    edges = [int(factor * 10**power) for power in range(20) for factor in factors]
    edges = sorted(set(edges))
    first = max((edge for edge in edges if edge <= low), default=0)
    last = min(edge for edge in edges if edge > high)
    return [edge for edge in ([0, *edges] if low == 0 else edges) if first <= edge <= last]
