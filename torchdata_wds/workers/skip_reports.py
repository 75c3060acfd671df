"""What an epoch skipped, summed up over all processes, and the line that is logged about losses."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.resume_facts import ItemsSkipped, merge_skips
from torchdata_wds.workers.skips import SkipWatch, logger

if TYPE_CHECKING:
    from torchdata_wds.workers.resume.checkpoints import Run

_MOST_SHOWN = 5


class _Report:
    """The counts of the running or the last epoch of a loader.

    DataLoader2 runs a copy of its reading service. Copies of a report within one process are the same object, so that
    the user's service answers for the one that runs. `running` returns the counts of the running epoch, or None.
    """

    def __init__(self) -> None:
        self._key = f"{os.getpid()}-{uuid.uuid4().hex}"
        self.running: Callable[[], list[ItemsSkipped] | None] = lambda: None
        self.last: list[ItemsSkipped] = []
        _reports[self._key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _report_of, (self._key,)


_reports: WeakValueDictionary[str, _Report] = WeakValueDictionary()


def _report_of(key: str) -> _Report:
    return _reports.get(key) or _Report()


class EpochSkips:
    """What all stages of a loader skip in an epoch, in the workers and in the main process."""

    def __init__(self) -> None:
        self._report = _Report()
        self._runs: Sequence[Run] = ()
        self._main: SkipWatch | None = None
        self._main_skips: list[ItemsSkipped] = []
        self._is_running = False

    def watch(self, runs: Sequence[Run], end: DataPipe | None) -> None:
        """Sets what runs the parts of the graph, and the last pipe of any other stages in the main process."""
        self._runs = runs
        self._main = None if end is None else SkipWatch(end)
        reference = weakref.ref(self)  # the user's copy of the service must not keep the workers alive

        def running() -> list[ItemsSkipped] | None:
            found = reference()
            return found._collect() if found is not None and found._is_running else None

        self._report.running = running

    def begin(self) -> None:
        """Begins to count an epoch."""
        if self._main is not None:
            list(self._main.news())  # of an epoch that was left early
        self._main_skips.clear()
        self._is_running = True

    def end(self, epoch: int) -> None:
        """Ends an epoch, counted from 1, and logs what was lost in it."""
        self.stop()
        log_skips(self._report.last, epoch)

    def stop(self) -> None:
        """Keeps the counts of an epoch that does not go on."""
        if self._is_running:
            self._report.last = self._collect()
            self._is_running = False

    def counts(self, *, by_rule: bool) -> dict[str, dict[str, int]]:
        """Returns the counts of the running or last epoch, by stage and reason; `by_rule` adds what rules left out."""
        running = self._report.running()
        found: dict[str, dict[str, int]] = {}
        for skipped in self._report.last if running is None else running:
            if skipped.is_loss or by_rule:
                found.setdefault(skipped.stage, {})[skipped.reason] = skipped.times
        return found

    def _collect(self) -> list[ItemsSkipped]:
        if self._main is not None:
            self._main_skips.extend(self._main.news())
        else:
            for run in self._runs:  # in this process, where that does not wait
                run.wait_for_facts()
        facts = [facts for run in self._runs for facts in run.streams.facts]
        return merge_skips([*self._main_skips, *(skipped for one in facts for skipped in one.skips)])


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
