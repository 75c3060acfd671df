"""Calls a function at regular times, in the middle of whatever Python code runs then."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Receives how many ticks were due, more than 1 after a long call into C, and the innermost frame of the main thread if
#: it was interrupted for this; otherwise None.
OnTick = Callable[[int, FrameType | None], object]

INTERVAL = 0.001  # seconds
# How soon running threads must let another one look at them. By default they may keep the interpreter for 5 ms, or
# until they wait for something: then most looks would find them where they read. A signal needs nothing of the kind.
_SWITCH = 20e-6


@contextmanager
def ticking(on_tick: OnTick) -> Iterator[None]:
    """Calls a function every millisecond inside the context: by a signal if possible, otherwise from a thread."""
    # A thread must wait until the others let go of the interpreter, so what it sees leans towards the places where they
    # do. A signal interrupts the main thread wherever it is.
    with _by_signal(on_tick) if _may_use_signal() else _by_thread(on_tick):
        yield


def _may_use_signal() -> bool:
    # an alarm that someone has set is kept if Python code receives it
    is_set, handler = any(signal.getitimer(signal.ITIMER_REAL)), signal.getsignal(signal.SIGALRM)
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and handler is not None and (callable(handler) or not is_set)


class _Grid:
    """Counts the ticks that are due. Their times do not depend on when the earlier ones were noticed."""

    # A call into C that takes 5 ms delays a tick, which then stands for the five that would have found that call. If
    # the clock started anew after each tick, it would count half a tick more than the call takes.
    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._counted = 0

    def due(self) -> int:
        now = int((time.perf_counter() - self._begin) / INTERVAL)
        count, self._counted = now - self._counted, now
        return count


@contextmanager
def _by_signal(on_tick: OnTick) -> Iterator[None]:
    grid = _Grid()
    alarm = _Alarm()
    is_busy = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_busy
        if is_busy:  # the next signal has come while this one is handled; its tick is counted with the one after it
            return
        is_busy = True
        try:
            if count := grid.due():
                on_tick(count, frame)
        finally:
            is_busy = False
        alarm.ring_if_due(number, frame)

    signal.signal(signal.SIGALRM, handle)
    signal.siginterrupt(signal.SIGALRM, False)  # so that reads of other libraries go on
    signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
    try:
        yield
    finally:
        alarm.put_back()


class _Alarm:
    """An alarm that the program has set for itself, with the one timer that there is; it rings at its time."""

    def __init__(self) -> None:
        self._handler: Any = signal.getsignal(signal.SIGALRM)
        seconds, self._interval = signal.getitimer(signal.ITIMER_REAL)
        self._time = time.monotonic() + seconds if seconds else math.inf

    def ring_if_due(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._time:
            self._time = time.monotonic() + self._interval if self._interval else math.inf
            self._handler(number, frame)

    def put_back(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        if self._time < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(self._time - time.monotonic(), 1e-6), self._interval)


@contextmanager
def _by_thread(on_tick: OnTick) -> Iterator[None]:
    is_over = threading.Event()

    def run() -> None:
        grid = _Grid()
        while not is_over.wait(INTERVAL):
            if count := grid.due():
                on_tick(count, None)

    thread = threading.Thread(target=run, name="wds-profile", daemon=True)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(switch)
