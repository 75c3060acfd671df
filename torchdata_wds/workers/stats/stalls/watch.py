"""Waits for the messages of workers, and notices when none comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

from torchdata_wds.pipes.running import frames_of_threads
from torchdata_wds.process_place import Place
from torchdata_wds.workers.stats.stalls.alarm import Alarm, is_waited_for
from torchdata_wds.workers.stats.stalls.worker_states import States, describe

T = TypeVar("T")

# Waits are cut into slices, between which signals are handled. A signal interrupts a wait; but one that comes just
# before would only be handled after it, so that Ctrl-C did nothing until an item comes.
SLICE = 0.5


class StallWatch:
    """Waits for the messages of `workers` workers: warns after `stall_after` seconds, and raises after `timeout`.

    `states` returns what is known about each worker. 0 turns each of the two off.
    """

    def __init__(self, rank: Place, workers: int, *, timeout: float, stall_after: float, states: States) -> None:
        self._workers = workers
        self.timeout = timeout
        self.waited = 0.0  # the seconds of the wait that goes on, once it is long
        self._states = states
        self._alarm = Alarm(rank, stall_after)
        self._slice = min(SLICE, timeout or inf, self._alarm.after)

    def wait(self, number: int, receive: Callable[[float], T | None]) -> T:
        """Returns the next message of a worker; `receive` takes the seconds that it may wait, and may return None.

        Raises:
            RuntimeError: if none has come within `timeout` seconds.
        """
        message = receive(self._slice)
        if message is not None:
            return message
        try:
            return self._wait_longer(number, receive)
        finally:
            self.waited = 0.0

    def _wait_longer(self, number: int, receive: Callable[[float], T | None]) -> T:
        begun = time.monotonic() - self._slice
        self.waited, busy = self._slice, 0.0  # how long until now, and until the training loop began to wait too
        while True:
            if self.timeout and self.waited >= self.timeout:
                raise RuntimeError(self.late(number))
            if not _loop_waits():
                busy = self.waited
            if self._alarm.is_due(seconds := self.waited - busy):
                what = f"worker {number} of {self._workers}. What the workers are at"
                self._alarm.warn(seconds, what, describe(self._states(), number, seconds))
            rest = self.timeout - self.waited if self.timeout else inf
            if (message := receive(min(self._slice, rest))) is not None:
                return message
            self.waited = time.monotonic() - begun

    def late(self, number: int) -> str:
        """Returns the text of the error for a worker that sent nothing within `timeout` seconds."""
        return (
            f"{self._alarm.rank}worker {number} of {self._workers} did not send its next item within "
            f"timeout={self.timeout} s: it or its source is slow or stuck. "
            "A larger timeout waits longer, timeout=0 forever. "
            f"What the workers are at:\n{describe(self._states(), number, self.timeout)}"
        )


def _loop_waits() -> bool:
    """Returns whether the training loop waits for an item, if this thread makes items for it."""
    # A thread that works ahead (prefetch, pinned memory) waits while the training loop is busy, too.
    if threading.current_thread() is threading.main_thread():
        return True
    with frames_of_threads() as frames:
        return is_waited_for(frames.values())
