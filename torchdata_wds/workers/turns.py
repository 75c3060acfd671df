"""Which worker's turn it is, and how many items each has given: reckoned from how many were taken in all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Turns"]


class Turns:
    """The turns of workers that are asked one after the other until each has ended.

    Stages behind them may be ahead of what is delivered, so that the question is how things stood some items ago.

    Args:
        counts: How many items each worker had given before.
        order: Whose turns come, in their order; workers that have ended are not among them.

    Example:
        >>> turns = Turns([0, 0], [0, 1])
        >>> turns.note_end(taken=3, worker=1)
        >>> turns.at(2), turns.at(5)
        (([1, 1], [0, 1]), ([4, 1], [0]))
    """

    def __init__(self, counts: Sequence[int], order: Sequence[int]) -> None:
        self.counts = list(counts)
        self.order = list(order)
        self._ends: list[tuple[int, int]] = []

    def note_end(self, taken: int, worker: int) -> None:
        """Notes that a worker had no item when it was asked, after so many had been taken of all."""
        self._ends.append((taken, worker))

    def at(self, taken: int) -> tuple[list[int], list[int]]:
        """Tells how many items each worker had given when so many had been taken of all, and whose turns came then."""
        counts, order = list(self.counts), deque(self.order)
        done = 0
        for ended, worker in list(self._ends):
            if ended > taken:
                break
            _take(counts, order, ended - done)
            done = ended
            order.remove(worker)
        _take(counts, order, taken - done)
        return counts, list(order)


def _take(counts: list[int], order: deque[int], number: int) -> None:
    if not order:
        return
    rounds, rest = divmod(number, len(order))
    for place, worker in enumerate(order):
        counts[worker] += rounds + (place < rest)
    order.rotate(-rest)
