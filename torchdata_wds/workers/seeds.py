"""Seeds as pure functions, and the board on which the main process tells them to its workers."""

from __future__ import annotations

import ctypes
import hashlib
from multiprocessing.context import BaseContext

__all__ = ["NoticeBoard", "mix"]


def mix(*parts: int | str) -> int:
    """Returns a uint64 that depends on every part, the same on all machines and Python versions."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class NoticeBoard:
    """What the main process tells its workers, in shared memory: the seeds of the epoch, and that it is closing.

    Args:
        context: The multiprocessing context of the workers.
    """

    def __init__(self, context: BaseContext) -> None:
        self._slots = context.RawArray(ctypes.c_uint64, 3)

    @property
    def seeds(self) -> tuple[int, int]:
        """The seed that all workers share, and the one that this set of workers derives its own from."""
        return self._slots[0], self._slots[1]

    @seeds.setter
    def seeds(self, seeds: tuple[int, int]) -> None:
        self._slots[0], self._slots[1] = seeds

    @property
    def closing(self) -> bool:
        """Whether the main process has begun to shut its workers down."""
        return bool(self._slots[2])

    def close(self) -> None:
        """Says that the workers' work is over."""
        self._slots[2] = 1
