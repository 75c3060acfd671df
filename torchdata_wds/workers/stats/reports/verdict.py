"""Decides from a loader's figures what holds the training back, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal

from torchdata_wds.workers.stats.figures import Figures, WorkerFigures
from torchdata_wds.workers.stats.reports.cases import Case, load_of, slowest_of
from torchdata_wds.workers.stats.reports.hints import Hint, enough_workers, source_hints, stage_hints, transport_hints

Kind = Literal[
    "unknown",  # there are too few figures
    "trainer",  # the training step is the limit
    "stage",  # one in the workers
    "main",  # a stage in the main process, although there are workers
    "latency",  # of a source
    "bandwidth",  # of a source
    "worker",  # one is slower than the others
    "bursts",  # workers are ahead at times, and late at others
    "transport",  # sending items from the workers to the main process
    "processors",  # too few for these workers
    "uneven",  # workers ran out of items before the others
]

#: The share of its time that a training loop may wait before it counts as held back.
LEAST_SHARE = 0.05
_LEAST_SECONDS = 0.5
_LEAST_ITEMS = 3


@dataclass(frozen=True)
class Verdict:
    """What holds the training back.

    Attributes:
        kind: What it is; "trainer" if the loader does not.
        subject: The stage, source or shard in question; "" if there is not one.
        share: The share of its time, from 0 to 1, that the training loop waits, without the wait for the first item.
        part: The subject's part of the workers' work, from 0 to 1; for "main" that of the loop's waits, for "bursts"
            the share of their time in which workers are blocked, for "transport" that of packing items, if it is slow.
        worker: The number of the worker in question, if there is one.
        hints: What to try.
        enough: How many workers to try, if "workers" is among the hints.
    """

    kind: Kind
    subject: str = ""
    share: float = 0.0
    part: float = 0.0
    worker: int | None = None
    hints: tuple[Hint, ...] = ()
    enough: int = 0


def judge(figures: Figures, options: Mapping[str, int], epoch: int = 0) -> Verdict:
    """Decides what holds the training back in a stretch of an epoch; `options` are those of `LoaderStats`."""
    case = Case(figures, options, epoch)
    found = (find(case) for find in _RULES)
    return next((verdict for verdict in found if verdict is not None), Verdict("unknown", share=case.share))


def is_too_little(case: Case) -> bool:
    """Returns whether there are too few items, or too little time after the first one, to decide anything."""
    waits = case.waits
    seconds = min(waits.waited + waits.elsewhere - waits.first, case.seconds)
    return waits.count < _LEAST_ITEMS or seconds < _LEAST_SECONDS


def _too_little(case: Case) -> Verdict | None:
    return Verdict("unknown", share=case.share) if is_too_little(case) else None


def _trainer(case: Case) -> Verdict | None:
    return Verdict("trainer", share=case.share) if case.share < LEAST_SHARE else None


def _main_stage(case: Case) -> Verdict | None:
    """Finds that the training loop waits mostly for stages that follow ``.join_workers()``."""
    stages = [stage for stage in case.figures.stages if stage.in_main] if case.count else []
    slowest, waited = slowest_of(stages), case.waits.waited
    if slowest is None or sum(stage.seconds for stage in stages) < waited / 2:
        return None
    return Verdict("main", slowest.stage, case.share, min(slowest.seconds / waited, 1.0), hints=("move_stage",))


def _bad_worker(case: Case) -> Verdict | None:
    """Finds one worker that works all the time while the others are blocked: items are taken from all in turn."""
    if len(case.workers) < 2:
        return None
    slow = max(case.workers, key=load_of)
    others = [worker for worker in case.workers if worker is not slow]
    is_slow = load_of(slow) >= max(1.7 * median(map(load_of, others)), 0.5 * case.seconds)
    awaited = sum(worker.awaited for worker in case.workers)
    is_awaited = slow.awaited >= 0.6 * awaited  # also if that was not measured
    if not (is_slow and is_awaited) or mean(worker.blocked for worker in others) < 0.25 * case.seconds:
        return None
    part = max(slow.reading, slow.busy) / load_of(slow)
    return Verdict("worker", _subject_of(slow, case), case.share, part, slow.number)


def _subject_of(slow: WorkerFigures, case: Case) -> str:
    """Returns the shard or the stage that makes a worker slow: it has the greatest part in what all workers did."""
    at, stage = slow.at, case.slowest_stage
    if slow.reading > slow.busy:
        return case.slowest_source.slowest or (at.shard if at is not None else "")
    return stage.stage if stage is not None else (at.stage if at is not None else "")


def _transport(case: Case) -> Verdict | None:
    """Finds that taking items from messages that are ready, or packing them in the workers, is what takes the time."""
    figures, waits = case.figures, case.waits
    is_ready = figures.asked >= 10 and figures.found_ready >= 0.7 * figures.asked and case.blocked >= 0.2
    # A late worker makes a few waits long; items that are slow to take make all waits alike.
    is_taking = is_ready and (waits.p50 * waits.count >= waits.waited / 2 or waits.p99 < 0.02)
    if not case.count or not (is_taking or case.sending > case.work / 2):
        return None
    part = 0.0 if is_taking else case.part(case.sending)
    return Verdict("transport", "", case.share, part, hints=transport_hints(case))


def _uneven(case: Case) -> Verdict | None:
    """Finds that workers have nothing left to do while others work: their streams ended, or had no shard."""
    counts = [worker.items for worker in case.workers]
    if len(counts) < 2 or min(counts) * 2 > max(counts):
        return None
    idle = [worker for worker in case.workers if load_of(worker) + worker.blocked < 0.5 * case.seconds]
    longest = max(case.workers, key=load_of)
    if longest in idle or len(idle) * 3 < len(counts):
        return None
    part = len(idle) / len(counts)
    return Verdict("uneven", share=case.share, part=part, worker=longest.number, hints=("even_shards",))


def _bursts(case: Case) -> Verdict | None:
    """Finds that workers wait for the training loop at times, and it for them at others: their queue is too short."""
    # Workers that were never blocked would be faster by 1 / (1 - blocked), a loop that never waited by 1 / (1 - share).
    if not case.count or case.blocked < 0.2 or 1 - case.share < 0.5 * (1 - case.blocked):
        return None
    stage, reads = case.slowest_stage, case.reading > case.work / 2
    subject = case.slowest_source.source if reads else stage.stage if stage is not None else ""
    return Verdict("bursts", subject, case.share, case.blocked, hints=("prefetch_factor",))


def _source(case: Case) -> Verdict | None:
    if not case.reading or case.reading < case.work / 2:
        return None
    source = case.slowest_source
    is_late = source.shards * source.first_byte >= 0.5 * source.seconds > 0
    hints = source_hints(case, source, is_late=is_late)
    found = Verdict("latency" if is_late else "bandwidth", source.source, case.share, case.part(case.reading))
    return _advised(found, [*hints, "workers"], case)  # waiting takes no processor


def _processors(case: Case) -> Verdict | None:
    """Finds that more workers want a processor than there are, so that they compute less than they are busy."""
    stage = case.slowest_stage
    if stage is None or not case.count or case.is_pool or len(case.workers) <= case.cpus:
        return None
    # A stage that only sleeps, or waits for a server of its own, uses no processors.
    is_full = case.used_cpus >= 0.5 * case.cpus or (case.is_loaded and case.computing >= 0.05)
    if not is_full or case.wanted_cpus <= 1.1 * case.cpus or case.computing > 0.8:
        return None
    found = Verdict("processors", stage.stage, case.share, case.part(stage.seconds))
    return _advised(found, [*stage_hints(case, stage), "fewer_workers"], case)


def _stage(case: Case) -> Verdict | None:
    stage = case.slowest_stage
    if stage is None:
        return None
    found = Verdict("stage", stage.stage, case.share, case.part(stage.seconds))
    return _advised(found, [*stage_hints(case, stage), "workers"], case)


def _advised(found: Verdict, hints: Iterable[Hint], case: Case) -> Verdict:
    """Adds hints to a verdict, that for more workers only if there is room for them."""
    enough = enough_workers(case) if "workers" in (hints := tuple(hints)) else 0
    kept = tuple(hint for hint in hints if hint != "workers" or enough)
    return Verdict(found.kind, found.subject, found.share, found.part, found.worker, kept, enough)


_RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    _too_little,
    _trainer,
    _main_stage,
    _bad_worker,
    _transport,
    _uneven,
    _bursts,
    _source,
    _processors,
    _stage,
)
