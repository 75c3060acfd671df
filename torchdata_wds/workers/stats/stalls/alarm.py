"""Decides when a warning about a stall is due, and whether the training loop waits at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from math import inf
from types import FrameType

from torchdata_wds.process_place import Place

logger = logging.getLogger(__name__)
_MOST_PAUSE = 64  # times `stall_after`: the longest pause between two warnings
_LOOPS = ("torchdata_wds.workers.running_epoch", "torchdata.dataloader2.dataloader2")


class Alarm:
    """Logs a warning after `stall_after` seconds without an item, 0 for never, and then more and more rarely."""

    def __init__(self, rank: Place, stall_after: float) -> None:
        self.rank = f"rank {rank.number} of {rank.consumers}: " if rank.consumers > 1 else ""
        self.after = stall_after or inf
        self._pause = self.after
        self._earliest = 0.0  # when the next warning may be logged

    def is_due(self, seconds: float) -> bool:
        """Returns whether a warning is to be logged after some seconds without an item."""
        return seconds >= self.after and time.monotonic() >= self._earliest

    def warn(self, seconds: float, waits_for: str, report: str) -> None:
        """Logs the warning."""
        logger.warning(
            "%sno item has come for %d s: the training loop waits for %s (stall_after=0 turns this warning off):\n%s",
            *(self.rank, seconds, waits_for, report),
        )
        # Twice, four times ... as late in the same wait. If all items are that slow, the warnings become rare too.
        self._earliest = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _MOST_PAUSE * self.after)


def is_waited_for(frames: Iterable[FrameType]) -> bool:
    """Returns whether a training loop waits for an item of a loader in one of some threads, by their frames."""
    return any(_is_loop(outer) for frame in frames for outer in _outward(frame))


def _is_loop(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__next__" and frame.f_globals.get("__name__") in _LOOPS


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
