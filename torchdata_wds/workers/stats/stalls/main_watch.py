"""Notices that the stages in the main process make no item, from another thread."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from torchdata_wds.pipes.running import pipes_on
from torchdata_wds.process_place import Place
from torchdata_wds.workers.stats.figures import At
from torchdata_wds.workers.stats.sampling import sampler
from torchdata_wds.workers.stats.sampling.sampler import Frames
from torchdata_wds.workers.stats.stalls.alarm import Alarm, is_waited_for
from torchdata_wds.workers.stats.stalls.stack_file import own_stacks
from torchdata_wds.workers.stats.stalls.watch import SLICE
from torchdata_wds.workers.stats.stalls.worker_states import WorkerState, describe_main


class MainWatch:
    """Warns when the training loop has waited for `stall_after` seconds for stages in this process.

    `find` returns what these stages are at, as far as that is known.
    """

    def __init__(self, rank: Place, stall_after: float, find: Callable[[], At | None]) -> None:
        self._alarm = Alarm(rank, stall_after)
        self.interval = min(SLICE, self._alarm.after)  # the seconds between two looks
        self._find = find
        self._graph: Callable[[], Any] = lambda: None
        self._made = -1
        self._passed = self._waited = 0.0
        self._is_stalled = False

    def begin(self, graph: Any) -> None:
        """Begins an epoch of a `RunningGraph`."""
        self._graph = weakref.ref(graph)
        self._made, self._passed, self._waited = -1, 0.0, 0.0
        has_stages = not graph.workers or not any(graph.end is run for run in graph.runs)
        if has_stages and self._alarm.after < float("inf"):
            sampler.watch(self)

    def stop(self) -> None:
        """Ends the epoch."""
        sampler.leave(self)

    def tick(self, frames: Frames, seconds: float) -> None:
        """Looks now and then whether the training loop still waits for the same item."""
        self._passed += seconds
        graph = self._graph()
        if graph is None or self._passed < self.interval:
            return
        passed, self._passed = self._passed, 0.0
        made = graph.end._number_of_samples_yielded
        is_same, self._made = made == self._made, made
        self._waited = self._waited + passed if is_same and is_waited_for(frames.values()) else 0.0
        if self._alarm.is_due(self._waited) and not _reports_itself(graph, self._alarm.after):
            self._is_stalled = any(pipe is graph.end for frame in frames.values() for pipe in pipes_on(frame))
            if not self._is_stalled:
                self._waited = 0.0  # the training loop waits for another loader

    def follow(self) -> None:
        """Warns if the look found that the training loop has waited too long."""
        if not self._is_stalled:
            return
        self._is_stalled = False
        state = WorkerState(os.getpid(), dump=own_stacks(), at=self._find())
        self._alarm.warn(self._waited, "stages in the main process. What it is at", describe_main(state))


def _reports_itself(graph: Any, after: float) -> bool:
    """Returns whether a pool waits for a worker, and will say so."""
    return bool(graph.workers) and any(run.waited >= after / 2 for run in graph.runs)
