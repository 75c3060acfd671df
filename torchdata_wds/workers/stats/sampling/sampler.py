"""One thread of a process, which looks at what its streams are doing: 20 times a second at first, less often later."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Protocol

from torchdata_wds.pipes.running import frames_of_threads

logger = logging.getLogger(__name__)

#: Seconds between two of the first looks. Each takes some 200 us, with all that waking the thread costs, and the
#: threads that run must let go of the interpreter for it.
INTERVAL = 0.05

#: The thread asks for the interpreter, and gets it when the one that holds it waits for something, or after this many
#: seconds. By default that would be 0.005: time of a stage that computes would be charged to the next one that waits.
SWITCHES = 0.0005

Frames = Mapping[int, FrameType]  # the innermost frame of each thread, by its identifier


class Watched(Protocol):
    """What the thread tells of each look."""

    @property
    def interval(self) -> float:
        """The number of seconds between two looks that it needs."""

    def tick(self, frames: Frames, seconds: float) -> None:
        """Notes what is to be seen, quickly; `seconds` is the time since the last look."""

    def follow(self) -> None:
        """Does what follows from that, and may take longer."""


class _Sampler:
    def __init__(self) -> None:
        self.watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()
        self.interval = 0.0  # the switch interval before

    def start(self) -> None:
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self.interval, SWITCHES))
        self.thread = threading.Thread(target=self.run, name="wds-stats", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # too many threads run, or the interpreter ends
            self.end()
            logger.warning("the times of stages are not known: %s", error)

    def end(self) -> None:
        self.thread = None
        if sys.getswitchinterval() == SWITCHES:
            sys.setswitchinterval(self.interval)

    def listed(self) -> list[Watched]:
        while True:
            try:
                return list(self.watched)
            except RuntimeError:  # one has left meanwhile
                continue

    def run(self) -> None:
        last = time.perf_counter()
        pause = min((found.interval for found in self.listed()), default=INTERVAL)
        while True:
            time.sleep(pause)
            now = time.perf_counter()
            with self.lock:
                watched = self.listed()
                if not watched:
                    self.end()
                    return
                pause = min(found.interval for found in watched)
            with frames_of_threads() as frames:
                for found in watched:
                    self.safely(found, partial(found.tick, frames, now - last))
                del frames
            for found in watched:
                self.safely(found, found.follow)
            last = now
            del watched
            found = None  # type: ignore[assignment]  # nothing is kept alive during the sleep

    def safely(self, watched: Watched, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            self.watched.discard(watched)
            logger.exception("the figures of a loader stop here")


_sampler = _Sampler()


def watch(watched: Watched) -> None:
    """Starts to tell an object of each look, until `leave`, or until nothing else refers to it."""
    sampler = _sampler
    with sampler.lock:
        sampler.watched.add(watched)
        if sampler.thread is None:
            sampler.start()


def leave(watched: Watched) -> None:
    """Stops telling an object."""
    # Without the lock: a finalizer may call this, in the thread that holds it.
    _sampler.watched.discard(watched)


def _start_anew() -> None:
    global _sampler
    before, _sampler = _sampler, _Sampler()
    if before.thread is not None:
        before.end()  # its thread does not run here


os.register_at_fork(after_in_child=_start_anew)
