"""Notices that no item comes while the training loop waits, and says what each worker is at."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from types import FrameType
from typing import NamedTuple, TypeVar

from torchdata_wds.consumers import Place
from torchdata_wds.workers.stats.figures import At
from torchdata_wds.workers.stats.stalls.stack_text import place_in, shortened, stacks_in, working

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Waits are cut into slices, between which signals are handled. A signal interrupts a wait; but one that comes just
# before would only be handled after it, so that Ctrl-C did nothing until an item comes.
_SLICE = 0.5
_MOST_PAUSE = 64  # times `stall_after`: the longest pause between two warnings
_MOST_GROUPS = 8
_LOOPS = ("torchdata_wds.workers.running_epoch", "torchdata.dataloader2.dataloader2")


class WorkerState(NamedTuple):
    """What is known about a worker while the training loop waits."""

    process: int | None
    note: str = ""  # why there is no stack
    dump: str = ""  # as ``faulthandler`` has written it
    at: At | None = None
    place: str = ""  # where it runs, if elsewhere


States = Callable[[], list[WorkerState]]


class StallWatch:
    """Waits for the messages of `workers` workers: warns after `stall_after` seconds, and raises after `timeout`.

    `states` returns what is known about each worker. 0 turns each of the two off.
    """

    def __init__(self, rank: Place, workers: int, *, timeout: float, stall_after: float, states: States) -> None:
        self._rank = f"rank {rank.number} of {rank.consumers}: " if rank.consumers > 1 else ""
        self._workers = workers
        self.timeout = timeout
        self._stall_after = stall_after or inf
        self._states = states
        self._slice = min(_SLICE, timeout or inf, self._stall_after)
        self._pause = self._stall_after
        self._earliest = 0.0  # when the next warning may be logged

    def wait(self, number: int, receive: Callable[[float], T | None]) -> T:
        """Returns the next message of a worker; `receive` takes the seconds that it may wait, and may return None.

        Raises:
            RuntimeError: if none has come within `timeout` seconds.
        """
        message = receive(self._slice)
        return self._wait_longer(number, receive) if message is None else message

    def _wait_longer(self, number: int, receive: Callable[[float], T | None]) -> T:
        begun = time.monotonic() - self._slice
        waited, busy = self._slice, 0.0  # the seconds until now, and until the training loop began to wait too
        while True:
            if self.timeout and waited >= self.timeout:
                raise RuntimeError(self.late(number))
            if not _loop_waits():
                busy = waited
            if waited - busy >= self._stall_after and begun + waited >= self._earliest:
                self._warn(number, waited - busy)
            rest = self.timeout - waited if self.timeout else inf
            if (message := receive(min(self._slice, rest))) is not None:
                return message
            waited = time.monotonic() - begun

    def _warn(self, number: int, seconds: float) -> None:
        report = describe(self._states(), number)
        logger.warning(
            "%sno item has come for %d s: the training loop waits for worker %d of %d. What the workers are at "
            "(stall_after=0 turns this warning off):\n%s",
            *(self._rank, seconds, number, self._workers, report),
        )
        # Twice, four times ... as late in the same wait. If all items are that slow, the warnings become rare too.
        self._earliest = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _MOST_PAUSE * self._stall_after)

    def late(self, number: int) -> str:
        """Returns the text of the error for a worker that sent nothing within `timeout` seconds."""
        return (
            f"{self._rank}worker {number} of {self._workers} did not send its next item within "
            f"timeout={self.timeout} s: its source is slow or stuck. A larger timeout waits longer, timeout=0 forever. "
            f"What the workers are at:\n{describe(self._states(), number)}"
        )


def _loop_waits() -> bool:
    """Returns whether the training loop waits for an item, if this thread makes items for it."""
    # A thread that works ahead (prefetch, pinned memory) waits while the training loop is busy, too.
    if threading.current_thread() is threading.main_thread():
        return True
    return any(map(_is_loop, sys._current_frames().values()))


def _is_loop(frame: FrameType) -> bool:
    return any(
        outer.f_code.co_name == "__next__" and outer.f_globals.get("__name__") in _LOOPS for outer in _outward(frame)
    )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe(states: list[WorkerState], first: int) -> str:
    """Returns what each worker is at, number `first` first; workers that are at the same place share their stack."""
    groups: dict[tuple[str, ...], list[str]] = {}
    order = sorted(range(len(states)), key=lambda number: number != first)
    for number in order:
        heading, stacks = _described(number, states[number])
        groups.setdefault(tuple(stacks), []).append(heading)
    lines = [line for stacks, headings in [*groups.items()][:_MOST_GROUPS] for line in (*headings, *stacks)]
    others = sum(map(len, [*groups.values()][_MOST_GROUPS:]))
    return "\n".join([*lines, *([f"and {others} other workers"] if others else [])])


def _described(number: int, state: WorkerState) -> tuple[str, list[str]]:
    """Returns the heading and the stacks of a worker."""
    name = f"worker {number} (pid {state.process}{state.place})" if state.process else f"worker {number}"
    if state.dump:
        logger.debug("all stacks of %s:\n%s", name, state.dump)
    stacks = working(stacks_in(state.dump))
    text = "; ".join(filter(None, [_progress(state.at), state.note or place_in(stacks)]))
    lines = [line for n, stack in enumerate(stacks) for line in (["  another thread:"] * bool(n)) + shortened(stack)]
    return f"{name}: {text}", [f"  {line}" for line in lines]


def _progress(at: At | None) -> str:
    if at is None or not at.stage:
        return ""
    shard = f", {at.shard} at byte {at.byte:,}" if at.shard else ""
    return f"{at.stage}{shard}, for {at.seconds:.0f} s"
