"""The board on which the main process and its workers tell one another what holds."""

from __future__ import annotations

import ctypes
from multiprocessing.context import BaseContext

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """What the main process and its workers tell one another while they work, in shared memory.

    Args:
        context: The multiprocessing context of the workers.
        workers: How many there are.
    """

    def __init__(self, context: BaseContext, workers: int) -> None:
        self._slots = context.RawArray(ctypes.c_uint64, 2 + workers)

    @property
    def turn(self) -> int:
        """The number of the order that holds: work on any other is in vain."""
        return self._slots[0]

    @turn.setter
    def turn(self, turn: int) -> None:
        self._slots[0] = turn

    @property
    def closing(self) -> bool:
        """Whether the main process has begun to shut its workers down."""
        return bool(self._slots[1])

    def close(self) -> None:
        """Says that the workers' work is over."""
        self._slots[1] = 1

    def answered(self, worker: int) -> int:
        """The number of the last order that a worker has taken up; 0 if it has not taken up any."""
        return self._slots[2 + worker]

    def answer(self, worker: int, turn: int) -> None:
        """Notes that a worker has taken up an order; 0 stands for a worker that begins."""
        self._slots[2 + worker] = turn
