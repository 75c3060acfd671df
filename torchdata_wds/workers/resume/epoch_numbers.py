"""Numbers the epochs of a dataset across the worker processes of torch's loaders, which remember no earlier epoch."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchdata_wds.checks import checked_int
from torchdata_wds.pipes.order.permutation import mix

#: Places in that memory: the epoch number set last, how often one was set, the next epoch, and recent iterations.
_SET, _TIMES, _LAST, _RECENT = range(4)
_RECENT_COUNT = 16
_EPOCH_LIMIT = 2**31
_TIMES_BITS = 22


class EpochNumbers:
    """Counts the epochs of a dataset across all processes forked or spawned with it."""

    # The first worker of an iteration takes the next number and notes it under the iteration's key, where the others
    # find it. Two that begin at once need no lock: both read the same next epoch, say 7, and write the same (this key
    # has 7, next is 8). That works because each entry is one int64, and the iteration is noted before the next epoch.
    # Entries pack two numbers: an iteration is key << 32 | epoch, the next epoch is times set << 40 | epoch.

    def __init__(self) -> None:
        size = _RECENT + _RECENT_COUNT
        self._memory: torch.Tensor = torch.zeros(size, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"_memory": self._memory}
        copy = EpochNumbers()  # an independent one, which has counted nothing yet
        copy._memory[:_LAST] = self._memory[:_LAST]
        return vars(copy)

    def set(self, epoch: int) -> None:
        """Sets the number of the coming epoch."""
        self._memory[_SET] = checked_int("epoch", epoch, 0, _EPOCH_LIMIT - 1)
        self._memory[_TIMES] += 1

    @property
    def given(self) -> tuple[int, int]:
        """The number set last, and how often one was set."""
        return int(self._memory[_SET]), int(self._memory[_TIMES])

    def begin(self, key: int) -> int:
        """Returns the epoch's number to a worker of an iteration that has just begun."""
        last = int(self._memory[_LAST])  # read first: another worker of this iteration may advance it
        recent = int(self._memory[_RECENT + key % _RECENT_COUNT])
        if recent >> 32 == key:
            return recent % 2**32
        given, times = self.given
        epoch = given if times % 2**_TIMES_BITS != last >> 40 else last % 2**40
        self.note(key, epoch)
        return epoch

    def note(self, key: int, epoch: int) -> None:
        """Notes the epoch number of an iteration; the next iteration gets the following one, unless another is set."""
        self._memory[_RECENT + key % _RECENT_COUNT] = key << 32 | epoch
        self._memory[_LAST] = self.given[1] % 2**_TIMES_BITS << 40 | epoch + 1


def iteration_key() -> int:
    """Returns a positive number shared by exactly the workers of one iteration of torch's DataLoader."""
    # They share a base seed, which a program may reset to the same value each epoch, and a pipe to the main process.
    worker = get_worker_info()
    assert worker is not None
    pipe = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":
            with suppress(AttributeError, OSError):  # another version of torch may have no such pipe
                pipe = os.fstat(getattr(frame.f_locals.get("data_queue"), "_writer").fileno()).st_ino  # noqa: B009
        frame = frame.f_back
    return mix(worker.seed - worker.id, pipe) % (2**31 - 1) + 1
