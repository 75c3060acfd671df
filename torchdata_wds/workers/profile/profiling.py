"""Runs a graph in several ways for a short time each, and measures it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe

from torchdata_wds.checks import checked_context, checked_int, is_number
from torchdata_wds.consumers import upstream
from torchdata_wds.pipes.shards.save_shards import ShardSaverIterDataPipe
from torchdata_wds.workers import graphs
from torchdata_wds.workers.loader import WdsLoader
from torchdata_wds.workers.profile.pipe_profile import PipeProfile, StageProfile, WorkersProfile
from torchdata_wds.workers.profile.process_use import ProcessUse
from torchdata_wds.workers.profile.repeated_batches import repeat_batches
from torchdata_wds.workers.profile.stage_times import StageClock, StageTimes
from torchdata_wds.workers.profile.taking import Taking
from torchdata_wds.workers.profile.ticks import ticking

logger = logging.getLogger(__name__)
_SEED = 0  # the same order of shards and samples in all runs
_BATCHES = 10  # for the training step
_WARM_UP = 0.5  # of the time of a part


def profile_pipe(
    pipe: IterDataPipe[Any],
    seconds: float = 10,
    workers: Iterable[int] = (0, 1, 2, 4),
    *,
    step: Callable[[Any], object] | None = None,
    prefetch_factor: int = 2,
    multiprocessing_context: str | None = None,
) -> PipeProfile:
    """Measures how fast a graph is on this machine: by stage, by number of workers, and against a training step.

    It runs copies of the graph by `WdsLoader`, all with the same seed: a short one to warm up, one in this process in
    which a timer looks every millisecond which stage is running, and one for each number of workers. Each part takes an
    equal part of the time. What comes before a loader runs evenly is left out: the start of workers, the filling of
    shuffle buffers, the first item. A graph that ends earlier is repeated. All runs read the same shards, so later ones
    may find them in the system's page cache; shards that are read from a slow disk only once are slower in training.

    Call it in the main thread, and in a script under ``if __name__ == "__main__":``.

    Args:
        pipe: The last pipe of the graph, as for `WdsLoader`. It is not changed.
        seconds: How long to measure in all. The start of workers and what precedes the first item come on top.
        workers: The numbers of workers to measure; none measures only the stages.
        step: A function that takes an item, such as a training step. It is called with ten items in turn, to find how
            many it takes in a second.
        prefetch_factor: As for `WdsLoader`.
        multiprocessing_context: As for `WdsLoader`.

    Returns:
        Figures, a table by `report()` and plain values by `to_plain()`.

    Raises:
        TypeError: if an argument has the wrong type, or the graph cannot be copied.
        ValueError: if a number is out of range, the graph yields nothing, or it writes shards.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> from torchdata_wds import profile_pipe
        >>> profile = profile_pipe(IterableWrapper(range(1000)).batch(10), 0.1, workers=[0])
        >>> [stage.stage for stage in profile.stages], [run.workers for run in profile.runs]
        (['IterableWrapper(range(0, 1000))', 'batch(10)'], [0])
    """
    profiler = Profiler(
        pipe,
        seconds,
        workers,
        step=step,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=multiprocessing_context,
    )
    return profiler.run()


class Profiler:
    """Measures a graph in parts, with equal shares of the time; the arguments are those of `profile_pipe`."""

    def __init__(
        self,
        pipe: IterDataPipe[Any],
        seconds: float,
        workers: Iterable[int],
        *,
        step: Callable[[Any], object] | None = None,
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
    ) -> None:
        self._counts = _checked_workers(workers)
        self.parts = len(self._counts) + 2 + (step is not None)
        self._seconds = _checked_seconds(seconds) / (self.parts - 1 + _WARM_UP)  # for each part
        if step is not None and not callable(step):
            raise TypeError(f"step must be a function that takes an item, not {step!r}")
        self._step = step
        self._prefetch_factor = checked_int("prefetch_factor", prefetch_factor, 1)
        self._context = checked_context(multiprocessing_context)
        _check_graph(pipe)
        self._pipe = pipe

    def run(self, done: Callable[[], object] = lambda: None) -> PipeProfile:
        """Measures all parts; calls `done` after each."""
        begin = time.perf_counter()
        self._warm_up()
        done()
        stages = self._measure_stages()
        done()
        runs = []
        for count in self._counts:
            runs.append(self._measure_workers(count))
            done()
        rate = None
        if self._step is not None:
            rate = self._measure_step(self._step)
            done()
        seconds = time.perf_counter() - begin
        return PipeProfile(_processors(), seconds, stages.samples, stages.figures, stages.outside, tuple(runs), rate)

    def _loader(self, workers: int) -> WdsLoader[Any]:
        return WdsLoader(
            self._pipe,
            workers,
            seed=_SEED,
            ranks=(0, 1),
            prefetch_factor=self._prefetch_factor,
            multiprocessing_context=self._context,
        )

    def _warm_up(self) -> None:
        logger.info("profile: warming up")
        with self._loader(0) as loader:
            Taking(loader, _WARM_UP * self._seconds, 1, _nothing, _nothing).run()

    def _measure_stages(self) -> _Stages:
        logger.info("profile: the stages, for %.1f s", self._seconds)
        with self._loader(0) as loader:
            iterator = iter(loader)
            graph = loader._engine.graph
            clock = StageClock(graph.end, without=map(id, graph.runs))
            with ticking(clock.tick):
                Taking(_Resumed(loader, iterator), self._seconds, 1, clock.restart, clock.note_items).run()
                clock.stop()
        return _stages_of(clock)

    def _measure_workers(self, workers: int) -> WorkersProfile:
        logger.info("profile: %d workers, for %.1f s", workers, self._seconds)
        early = 2 * workers * self._prefetch_factor
        with ExitStack() as stack:
            use = stack.enter_context(ProcessUse())
            loader = stack.enter_context(self._loader(workers))
            taken = Taking(loader, self._seconds, early, use.restart, _nothing).run()
            return WorkersProfile(
                workers, taken.items, taken.seconds, taken.items / taken.seconds, taken.first, *use.use()
            )

    def _measure_step(self, step: Callable[[Any], object]) -> float:
        logger.info("profile: the training step, for %.1f s", self._seconds)
        with self._loader(0) as loader:
            batches = repeat_batches(loader, _BATCHES)
        for batch in batches.batches[:2]:
            step(batch)
        _wait_for_device()
        begin = time.perf_counter()
        for count, batch in enumerate(batches, 1):  # noqa: B007
            step(batch)
            if time.perf_counter() - begin >= self._seconds:
                break
        _wait_for_device()
        return count / (time.perf_counter() - begin)


class _Resumed:
    """A loader of which the first epoch has begun."""

    def __init__(self, loader: WdsLoader[Any], iterator: Any) -> None:
        self._loader, self._iterator = loader, iterator

    def __iter__(self) -> Iterator[Any]:
        iterator, self._iterator = self._iterator, None
        return iter(self._loader) if iterator is None else iterator


class _Stages(NamedTuple):
    figures: tuple[StageProfile, ...]
    outside: float
    samples: float | None  # per item


def _stages_of(clock: StageClock) -> _Stages:
    stages = clock.figures()
    total = sum(stage.seconds for stage in stages) + clock.outside()
    samples = sum(stage.items for stage in stages if stage.makes_samples)
    items = stages[-1].items
    figures = tuple(_stage_profile(stage, total) for stage in stages)
    return _Stages(figures, clock.outside() / total if total else 0.0, samples / items if samples and items else None)


def _stage_profile(stage: StageTimes, total: float) -> StageProfile:
    return StageProfile(
        stage.text,
        stage.items,
        stage.seconds,
        stage.reading,
        stage.seconds / total if total else 0.0,
        stage.seconds / stage.items if stage.items else None,
        stage.items / stage.so_far if stage.items and stage.so_far else None,
        stage.in_thread,
    )


def _checked_workers(workers: Iterable[int]) -> list[int]:
    if not isinstance(workers, Iterable) or isinstance(workers, (str, bytes)):
        raise TypeError(f"workers must be numbers of workers, such as (0, 1, 2, 4), not {workers!r}")
    return sorted({checked_int("a number of workers", count, 0) for count in workers})


def _checked_seconds(seconds: Any) -> float:
    if not is_number(seconds):
        raise TypeError(f"seconds must be a number, not {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be above 0, not {seconds!r}")
    return float(seconds)


def _check_graph(pipe: Any) -> None:
    if not isinstance(pipe, IterDataPipe):
        raise TypeError(f"profile_pipe takes the last pipe of a graph, an IterDataPipe, not {pipe!r:.60}")
    if any(type(stage) is ShardSaverIterDataPipe for stage in upstream(pipe)):
        raise ValueError(
            "profile_pipe runs the graph several times, and save_wds_shards would write each time: leave it out"
        )
    try:
        graphs.copied(pipe)
    except Exception as error:
        raise TypeError(f"profile_pipe runs copies of the graph, and this one cannot be copied: {error}") from error


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _nothing() -> None:
    """Does nothing."""
