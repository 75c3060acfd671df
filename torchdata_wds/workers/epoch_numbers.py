"""The number of an epoch, agreed among workers that end with it and know nothing of those before them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchdata_wds.pipes.place import mix
from torchdata_wds.workers.options import checked_int

__all__ = ["EpochNumbers", "iteration_key"]

#: Places in the memory: the number that was set, how often one was set, the last epoch, and recent iterations.
_SET, _TIMES, _LAST, _RECENT = range(4)
_RECENT_COUNT = 16

_EPOCH_LIMIT = 2**31
_TIMES_BITS = 22


class EpochNumbers:
    """Counts the epochs of a dataset over all processes that have been forked or spawned with it.

    The first worker of an iteration that asks takes the next number, and notes it by the iteration's key; the others
    find it there. No lock is needed: two that ask at once read the same last epoch, and write the same. That holds
    because each entry is one int64, and an iteration is noted before the last epoch is.
    """

    def __init__(self) -> None:
        size = _RECENT + _RECENT_COUNT
        self._memory: torch.Tensor = torch.zeros(size, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"_memory": self._memory}
        copy = EpochNumbers()  # which has counted nothing yet
        copy._memory[:_LAST] = self._memory[:_LAST]
        return vars(copy)

    def set(self, epoch: int) -> None:
        """Sets the number of the coming epoch."""
        self._memory[_SET] = checked_int("epoch", epoch, 0, _EPOCH_LIMIT)
        self._memory[_TIMES] += 1

    @property
    def times(self) -> int:
        """How often a number was set."""
        return int(self._memory[_TIMES])

    @property
    def given(self) -> int:
        """The number that was set last."""
        return int(self._memory[_SET])

    def begin(self, key: int) -> int:
        """Returns the epoch's number for a worker of an iteration that has begun just now."""
        last = int(self._memory[_LAST])  # first: what another worker of the iteration changes it to is not for this one
        recent = int(self._memory[_RECENT + key % _RECENT_COUNT])
        if recent >> 32 == key:
            return recent % 2**32
        times = self.times % 2**_TIMES_BITS
        epoch = self.given if times != last >> 40 else last % 2**40
        self.note(key, epoch)
        return epoch

    def note(self, key: int, epoch: int) -> None:
        """Notes the number of an iteration's epoch: the next iteration has the one after it, unless one is set."""
        self._memory[_RECENT + key % _RECENT_COUNT] = key << 32 | epoch
        self._memory[_LAST] = self.times % 2**_TIMES_BITS << 40 | epoch + 1


def iteration_key() -> int:
    """Returns a number from 1 that all workers of an iteration of torch's DataLoader share, and no others.

    They have one base seed, which a program may set to the same each epoch, and one pipe to the main process.
    """
    worker = get_worker_info()
    assert worker is not None
    pipe = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":
            with suppress(AttributeError, OSError):  # no such pipe in this version of torch
                pipe = os.fstat(getattr(frame.f_locals.get("data_queue"), "_writer").fileno()).st_ino  # noqa: B009
        frame = frame.f_back
    return mix(worker.seed - worker.id, pipe) % (2**31 - 1) + 1
