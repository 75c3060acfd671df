"""Finds how the time of a graph in this process divides among its stages, from many looks at the stacks of threads.

A clock around each stage would cost as much as a fast stage itself, and would keep stages apart that run as one loop. A
look at the stacks costs the stages nothing between two looks, and takes the same share of all of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.chain_text import known_name, sources_of, stage_text, written
from torchdata_wds.pipes.resume_facts import said_by
from torchdata_wds.pipes.running import frames_of_threads
from torchdata_wds.workers.stats.sampling.stage_finder import StageFinder, stages_in_order

_WAITING_MODULES = frozenset({"threading", "queue", "concurrent.futures._base", "concurrent.futures.thread"})
_WAITING_STAGES = ("Prefetcher", "PinMemory", "FullSync")  # torchdata's, which sleep until their thread has an item


class StageTimes(NamedTuple):
    """What one stage, or several that run as one loop, did; seconds without those of the stages before it."""

    text: str  # as it is written in a chain
    items: int  # that it yielded
    makes_samples: bool
    seconds: float  # that it worked, read, or waited for threads of its own
    reading: float  # those of them in which it waited for a source, or read it
    so_far: float  # how long this stage and all before it took; what runs in other threads meanwhile does not add to it
    in_thread: bool  # whether it ran in another thread than the last stage


class StageClock:
    """Looks at the stacks of all threads at each tick, and charges the time to the stages that they are in."""

    def __init__(self, end: IterDataPipe[Any], without: Iterable[int] = ()) -> None:
        self.stages = stages_in_order(end, without)
        self._finder = StageFinder(self.stages)
        self._waiting = {n for n, stage in enumerate(self.stages) if known_name(stage) in _WAITING_STAGES}
        self._caller = threading.get_ident()
        self._items = [_ItemCount() for _ in self.stages]
        self.restart()

    def restart(self) -> None:
        """Forgets what happened until now."""
        self._looks: Counter[_Spot] = Counter()
        self._since = time.perf_counter()
        self.total = 0.0
        for stage, items in zip(self.stages, self._items, strict=True):
            items.note(stage)
            items.count = 0

    def stop(self) -> None:
        """Ends the measured time; what follows is not counted."""
        self.total = time.perf_counter() - self._since
        self.note_items()

    def note_items(self) -> None:
        """Adds up the items of all stages; must be called when an epoch ends, since torch counts anew in the next."""
        for stage, items in zip(self.stages, self._items, strict=True):
            items.note(stage)

    def tick(self, count: int, frame: FrameType | None) -> None:
        """Charges `count` ticks to the stages in which threads are now."""
        if self.total:  # after `stop`
            return
        main, own = threading.main_thread().ident, threading.get_ident()
        with frames_of_threads() as frames:
            for thread, current in frames.items():
                innermost = frame if thread == main and frame is not None else current
                # the thread that looks, unless it was interrupted for that
                if (thread != own or innermost is frame) and (spot := self._spot(thread, innermost)) is not None:
                    self._looks[spot] += count
        self.note_items()

    def _spot(self, thread: int, frame: FrameType) -> _Spot | None:
        found = self._finder.spot(frame)
        if found is None or found.stage < 0:
            return _Spot(thread, -1, "") if thread == self._caller else None
        is_waiting = found.stage in self._waiting or frame.f_globals.get("__name__") in _WAITING_MODULES
        return _Spot(thread, found.stage, "reading" if found.reads else "waiting" if is_waiting else "")

    def outside(self) -> float:
        """Returns the seconds that the calling thread was in no stage: those of the loader itself."""
        return self._scaled().get(_Spot(self._caller, -1, ""), 0.0)

    def figures(self) -> list[StageTimes]:
        """Returns the figures of each stage, sources first."""
        seconds = self._scaled()
        sources = _sources(self.stages)
        # A stage that waits, for others that another thread runs, does no work of its own.
        threads = [{spot.thread for spot in seconds if spot.stage == number} for number in range(len(self.stages))]
        for spot in [spot for spot in seconds if spot.kind == "waiting"]:
            before = set().union(*(threads[number] for number in sources[spot.stage] - {spot.stage}))
            if spot.stage in self._waiting or before - {spot.thread}:
                del seconds[spot]
        inside = self._inside()
        return [
            self._figure(number, [*inside.get(number, ()), number], sources[number], seconds)
            for number in range(len(self.stages))
            if not any(number in loop for loop in inside.values())
        ]

    def _figure(self, number: int, loop: Sequence[int], sources: set[int], seconds: dict[_Spot, float]) -> StageTimes:
        own = {spot: value for spot, value in seconds.items() if spot.stage in loop}
        by_thread: Counter[int] = Counter()
        for spot, value in seconds.items():
            by_thread[spot.thread] += value if spot.stage in sources else 0.0  # type: ignore[assignment]
        return StageTimes(
            ".".join(stage_text(self.stages[one], without=("handler",)) for one in loop),
            self._items[number].count,
            bool(said_by(self.stages[number], "makes_samples")),
            math.fsum(own.values()),
            math.fsum(value for spot, value in own.items() if spot.kind == "reading"),
            max(by_thread.values(), default=0.0),
            bool(own) and self._caller not in {spot.thread for spot in own},
        )

    def _inside(self) -> dict[int, list[int]]:
        """Returns the stages that run as one loop with the stage after them, by that stage's number."""
        found: dict[int, list[int]] = {}
        for number, stage in enumerate(self.stages):
            before = [
                place
                for place, other in enumerate(self.stages)
                if any(other is one for one in written(sources_of(stage)))
            ]
            if len(before) == 1 and self._items[number].ever and not self._items[before[0]].ever:
                found[number] = [*found.pop(before[0], ()), before[0]]
        return found

    def _scaled(self) -> dict[_Spot, float]:
        """Returns the time by spot, without that of the looks themselves."""
        mine = sum(count for spot, count in self._looks.items() if spot.thread == self._caller)
        return {spot: count * self.total / mine for spot, count in self._looks.items()} if mine else {}


class _Spot(NamedTuple):
    """Where a thread was."""

    thread: int
    stage: int  # -1 outside of all
    kind: str  # "reading", "waiting" or ""


class _ItemCount:
    """Counts the items of a stage over several passes, in each of which torch counts from 0."""

    def __init__(self) -> None:
        self.count = self.ever = 0
        self._iterator: Any = None
        self._last = 0

    def note(self, stage: Any) -> None:
        iterator, now = stage._valid_iterator_id, stage._number_of_samples_yielded
        is_same = iterator == self._iterator and now >= self._last
        more = now - self._last if is_same else now
        self.count, self.ever = self.count + more, self.ever + more
        self._iterator, self._last = iterator, now


def _sources(stages: Sequence[IterDataPipe[Any]]) -> list[set[int]]:
    """Returns the numbers of each stage and of all before it."""
    numbers = {id(stage): number for number, stage in enumerate(stages)}
    found: list[set[int]] = []
    for number, stage in enumerate(stages):
        before = [found[numbers[id(one)]] for one in written(sources_of(stage)) if id(one) in numbers]
        found.append({number}.union(*before))
    return found
