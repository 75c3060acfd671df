"""Counts the items that stages skip, sums the counts over all processes, and logs those that are lost."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data.graph import DataPipe
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.consumers import traverse
from torchdata_wds.handlers import SkipCounts
from torchdata_wds.pipes.chain_text import stage_text
from torchdata_wds.pipes.resume_facts import ItemsSkipped, merge_skips
from torchdata_wds.pipes.seeds import above_filters
from torchdata_wds.workers.shared_copies import SharedByCopies

logger = logging.getLogger(__name__)
_LONGEST_EXAMPLE = 500
_MOST_SHOWN = 5


class SkipWatch:
    """Watches what the stages of a graph skip in this process."""

    def __init__(self, datapipe: DataPipe) -> None:
        pipes = get_all_graph_pipes(traverse(datapipe))
        agreed = above_filters(pipes)
        self._watched: list[tuple[Any, SkipCounts, bool]] = [
            (pipe, counts, id(pipe) in agreed)
            for pipe in pipes
            if isinstance(counts := vars(pipe).get("skipped"), SkipCounts)
        ]
        self._seen: list[dict[str, int]] = [dict(counts) for _, counts, _ in self._watched]

    def news(self, *, is_first: bool = True) -> Iterator[ItemsSkipped]:
        """Yields what was skipped since the last call; what all consumers skip alike is reported by the first alone."""
        for number, (pipe, counts, is_agreed) in enumerate(self._watched):
            seen = self._seen[number]
            if dict.__eq__(counts, seen):  # Counter's own comparison is slow
                continue
            now = self._seen[number] = dict(counts)
            if is_agreed and not is_first:
                continue
            stage = stage_text(pipe, without=("handler",))
            for reason, times in now.items():
                if times != seen.get(reason, 0):
                    example = counts.examples.pop(reason, "")[:_LONGEST_EXAMPLE]
                    yield ItemsSkipped(stage, reason, times - seen.get(reason, 0), reason in counts.losses, example)


class _Report(SharedByCopies):
    """What the user asks: the user calls the original of a service, and a copy of it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Callable[[], EpochSkips | None] = lambda: None  # must not keep the workers alive
        self.last: list[ItemsSkipped] = []


class EpochSkips:
    """What all stages of one loader skip in an epoch, in the workers and in the main process."""

    def __init__(self, report: _Report | None = None) -> None:
        self._report = report or _Report()
        self._graph: Any = None
        self._main_skips: list[ItemsSkipped] = []
        self._lock = threading.Lock()  # figures may be sent from another thread
        self._is_running = False

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochSkips, (self._report,)

    def begin(self, graph: Any) -> None:
        """Starts counting an epoch of a `RunningGraph`."""
        self._graph = graph
        self._report.latest = weakref.ref(self)
        if graph.watch is not None:
            list(graph.watch.news())  # drops those of an epoch that was left early
        self._main_skips.clear()
        self._is_running = True

    def stop(self) -> None:
        """Keeps the counts of an epoch that will not continue."""
        if self._is_running:
            self._report.last = self._collect()
            self._is_running = False

    def end(self, epoch: int) -> None:
        """Ends an epoch, counted from 1, and logs what was lost in it."""
        self.stop()
        log_skips(self._report.last, epoch)

    def counts(self, *, by_rule: bool) -> dict[str, dict[str, int]]:
        """Returns the counts of the running or last epoch by stage and reason; `by_rule` adds what rules left out."""
        latest = self._report.latest()
        found: dict[str, dict[str, int]] = {}
        for skipped in latest._collect() if latest is not None and latest._is_running else self._report.last:
            if skipped.is_loss or by_rule:
                found.setdefault(skipped.stage, {})[skipped.reason] = skipped.times
        return found

    def _collect(self) -> list[ItemsSkipped]:
        graph = self._graph
        if graph.watch is not None:
            with self._lock:
                self._main_skips.extend(graph.watch.news())
        else:
            for run in graph.runs:  # in this process, so this does not wait
                run.wait_for_facts()
        told = [skipped for run in graph.runs for facts in run.streams.facts for skipped in facts.skips]
        return merge_skips([*self._main_skips, *told])


def log_skips(skips: Iterable[ItemsSkipped], epoch: int) -> None:
    """Logs one line about an epoch, counted from 1, in which something was lost."""
    lost = sorted((skipped for skipped in merge_skips(skips) if skipped.is_loss), key=lambda skipped: -skipped.times)
    if not lost:
        return
    shown = [f"{skipped.times:,} by {skipped.stage} ({skipped.reason})" for skipped in lost[:_MOST_SHOWN]]
    shown += [f"{len(lost) - _MOST_SHOWN} more kinds"] if len(lost) > _MOST_SHOWN else []
    example = next((skipped.example for skipped in lost if skipped.example), "")
    logger.warning(
        "epoch %d skipped %s items: %s%s",
        epoch,
        f"{sum(skipped.times for skipped in lost):,}",
        ", ".join(shown),
        f". One of them: {example}" if example else "",
    )
