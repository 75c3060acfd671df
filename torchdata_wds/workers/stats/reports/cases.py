"""One stretch of an epoch as the rules of the verdict look at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from torchdata_wds.workers.stats.figures import Figures, SourceFigures, StageFigures, WorkerFigures


class Case:
    """The figures in question; `options` are those of `LoaderStats`, `epoch` the number of the epoch."""

    def __init__(self, figures: Figures, options: Mapping[str, int], epoch: int) -> None:
        self.figures, self.options, self.epoch = figures, options, epoch
        self.waits, self.workers, self.seconds = figures.waits, figures.workers, figures.seconds
        self.share = figures.waits.running_share
        self.count = options.get("num_workers", len(figures.workers))  # of workers; 0 for the main process
        self.is_pool = bool(options.get("pool"))  # the workers' processors are not those of this machine
        self.cpus = max(options.get("cpus", 1), 1)
        self.is_loaded = options.get("load", 0) >= 100  # no processor of the machine is free

    @cached_property
    def work(self) -> float:
        """Seconds in which the workers made items, packed them or waited for sources, all together."""
        return sum(map(load_of, self.workers))

    @cached_property
    def busy(self) -> float:
        """Seconds in which the workers made items, all together."""
        return sum(worker.busy for worker in self.workers)

    @cached_property
    def reading(self) -> float:
        """Seconds in which the workers waited for sources, all together."""
        return sum(worker.reading for worker in self.workers)

    @cached_property
    def sending(self) -> float:
        """Seconds in which the workers packed items for the main process, all together."""
        return sum(worker.sending for worker in self.workers)

    @cached_property
    def used_cpus(self) -> float:
        """How many processors the workers keep busy."""
        return self._per_second(worker.cpu for worker in self.workers)

    @cached_property
    def wanted_cpus(self) -> float:
        """How many processors they would keep busy if there were enough, and no stage slept."""
        return self._per_second([self.busy, self.sending])

    @cached_property
    def blocked(self) -> float:
        """The share of their time in which workers wait until their items are taken, on average."""
        return self._per_second(worker.blocked for worker in self.workers) / max(len(self.workers), 1)

    @cached_property
    def computing(self) -> float:
        """The share of their work, from 0 to 1, in which the workers use a processor."""
        used = sum(worker.cpu for worker in self.workers)
        if not self.count:  # that of the training step is in it
            used = min(used, self.busy)
        return min(used / self.work, 1.0) if self.work else 0.0

    @cached_property
    def slowest_stage(self) -> StageFigures | None:
        """The stage in the workers that takes most time."""
        return slowest_of(stage for stage in self.figures.stages if not stage.in_main)

    @cached_property
    def slowest_source(self) -> SourceFigures:
        """The source that stages wait for most; one without a name if none is known."""
        sources = self.figures.sources
        return max(sources, key=lambda source: (source.waited, source.seconds), default=SourceFigures(""))

    @cached_property
    def reads_gzip(self) -> bool:
        """Whether a shard that was looked at is compressed with gzip."""
        shards = [source.slowest for source in self.figures.sources]
        shards += [worker.at.shard for worker in self.workers if worker.at is not None]
        return any(shard.lower().endswith((".gz", ".tgz")) for shard in shards)

    def part(self, seconds: float) -> float:
        """Returns the part of the workers' work that some seconds are."""
        return min(seconds / self.work, 1.0) if self.work else 0.0

    def _per_second(self, amounts: Iterable[float]) -> float:
        return sum(amounts) / self.seconds if self.seconds else 0.0


def load_of(worker: WorkerFigures) -> float:
    """Returns the seconds that a worker spent on items, waiting for sources included."""
    return worker.busy + worker.reading + worker.sending


def slowest_of(stages: Iterable[StageFigures]) -> StageFigures | None:
    """Returns the stage that takes most time; None if none takes any."""
    slowest = max(stages, key=lambda stage: stage.seconds, default=None)
    return slowest if slowest is not None and slowest.seconds > 0 else None
