"""Collects the figures of one loader, from its workers and from the main process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torchdata_wds.workers.shared_copies import SharedByCopies
from torchdata_wds.workers.stats.figures import At, Figures
from torchdata_wds.workers.stats.graph_facts import machine_load
from torchdata_wds.workers.stats.loader_stats import LoaderStats, log_epoch, logs_epochs
from torchdata_wds.workers.stats.moments import Messages, Moment, Skipped
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot
from torchdata_wds.workers.stats.sampling.tally import Tally
from torchdata_wds.workers.stats.sinks import StatsSinks
from torchdata_wds.workers.stats.skips import EpochSkips
from torchdata_wds.workers.stats.tracing.epoch_trace import EpochTrace
from torchdata_wds.workers.stats.wait_clock import AllWaits, WaitClock, WaitMark


class _Asked(SharedByCopies):
    """What the user asks: the user calls the original of a service, and a copy of it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Callable[[], Collector | None] = lambda: None  # must not keep the workers alive
        self.last: Callable[[], LoaderStats] | None = None  # makes the figures of the last epoch
        self.sinks = StatsSinks()


class Collector:
    """Collects the figures of a loader, epoch after epoch."""

    def __init__(self, skips: EpochSkips, asked: _Asked | None = None, trace: EpochTrace | None = None) -> None:
        self._waits = AllWaits()
        self._asked = asked or _Asked()
        self._skips = skips
        self._trace = trace
        self._graph: Any = None
        self._main = Tally()  # of the stages in the main process
        self._facts: Mapping[str, int] = {}
        self._epoch = self._rank = 0
        self._is_running = False
        self._begun = self._asked_last = Moment(WaitMark(), Snapshot(""))
        self._seen: dict[tuple[int, str], Snapshot] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Collector, (self._skips, self._asked, self._trace)

    def follow(self, earlier: Collector) -> None:
        """Answers for an earlier collector of the same loader, and sends figures where that one did."""
        self._asked = earlier._asked

    def open(self, graph: Any, rank: int, facts: Mapping[str, int]) -> None:
        """Notes a `RunningGraph`, and what the advice of a report depends on."""
        self._graph, self._rank, self._facts = graph, rank, facts
        # With workers, what the main process waits for is no work of its stages.
        self._main = Tally(divides=False) if graph.workers else Tally(active=self._waits.seconds)

    @property
    def clock(self) -> WaitClock:
        """What measures the waits of the running or last epoch."""
        return self._waits.clock

    def begin(self, epoch: int) -> None:
        """Begins an epoch, before its streams are ordered."""
        self.stop()
        traced = None if self._trace is None else self._trace.begin(epoch)
        clock, self._main.track = traced or (None, None)
        self._waits.begin(clock)
        self._epoch = epoch
        graph = weakref.ref(self._graph)
        self._main.begin(lambda: getattr(graph(), "end", None), without=list(map(id, self._graph.runs)))
        self._begun = self._asked_last = self.moment()
        self._is_running = True
        self._asked.running = weakref.ref(self)

    def begun(self) -> None:
        """Sends figures from now on, in a thread: all workers have been forked."""
        self._asked.sinks.begin(self)

    def end(self) -> None:
        """Ends an epoch whose items were all taken, and logs it."""
        was_running = self._is_running
        self.stop()
        if was_running and self._asked.last is not None and logs_epochs():
            log_epoch(self._asked.last())

    def stop(self) -> None:
        """Keeps the figures of an epoch that will not go on."""
        if self._is_running:
            self.clock.stop()
            self._main.end()
            if self._trace is not None:
                self._trace.end()
            self._asked.sinks.end()
            self._asked.last = self._making(self._asked_last, self.moment())
            self._is_running = False

    def main_at(self) -> At | None:
        """Returns what the stages in the main process are at."""
        at = self._main.snapshot().at
        return None if at is None else At(*at)

    def send(self, function: Callable[[LoaderStats], object], every: float) -> None:
        """Sends figures to a function from now on."""
        self._asked.sinks.add(function, every)

    def stats(self) -> LoaderStats:
        """Returns the figures of the running or last epoch, and those since the last call."""
        running = self._asked.running()
        if running is not None and running._is_running:
            now = running.moment()
            found = running.between(running._asked_last, now)
            running._asked_last = now
            return found
        last = self._asked.last
        return LoaderStats(0, self._rank, Figures(), Figures(), self._facts) if last is None else last()

    def between(self, since: Moment, now: Moment) -> LoaderStats:
        """Returns the figures of this epoch up to a moment, and those since another one."""
        return self._making(since, now)()

    def _making(self, since: Moment, now: Moment) -> Callable[[], LoaderStats]:
        """Returns what makes the figures, which takes longer than a short epoch and may never be asked for."""
        options = {**self._facts, "ahead": self._ahead(now), "load": machine_load()}
        skipped = self._skips.counts(by_rule=True)
        return partial(_stats, self._epoch, self._rank, (self._begun, since, now), skipped, options)

    def moment(self) -> Moment:
        """Returns what is known now."""
        graph = self._graph
        links = [link for run in graph.runs for link in run.links] if graph.workers else []
        for number, link in enumerate(links):
            if (snapshot := link.snapshot()) is not None:
                self._seen[number, snapshot.run] = snapshot
        messages = {n: Messages(link.asked, link.found_ready, link.awaited) for n, link in enumerate(links)}
        waits = self.clock.mark(graph.end._number_of_samples_yielded)
        return Moment(waits, self._main.snapshot(), dict(self._seen), messages)

    def _ahead(self, now: Moment) -> int:
        """Returns how many items the workers have made that were not taken yet, as far as they have told."""
        made = sum(later.items - earlier.items for later, earlier in now.pairs(self._begun))
        return max(made - sum(run.streams.taken for run in self._graph.runs), 0) if self._graph.workers else 0


def _stats(
    epoch: int, rank: int, moments: tuple[Moment, Moment, Moment], skipped: Skipped, options: Mapping[str, int]
) -> LoaderStats:
    begun, since, now = moments
    return LoaderStats(epoch, rank, now.figures_since(begun, skipped), now.figures_since(since, skipped), options)
