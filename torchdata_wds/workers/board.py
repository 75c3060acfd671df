"""The board on which the main process tells its workers what holds."""

from __future__ import annotations

import ctypes
from multiprocessing.context import BaseContext

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """What the main process tells its workers while they work, in shared memory.

    Args:
        context: The multiprocessing context of the workers.
    """

    def __init__(self, context: BaseContext) -> None:
        self._slots = context.RawArray(ctypes.c_uint64, 2)

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
