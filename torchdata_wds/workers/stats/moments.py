"""Figures as the difference between two moments of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torchdata_wds.storage import meters
from torchdata_wds.workers.stats.figures import At, Figures, SourceFigures, StageFigures, WorkerFigures
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot, Stage
from torchdata_wds.workers.stats.wait_clock import WaitMark

Skipped = Mapping[str, Mapping[str, int]]  # how many items by stage and reason
_Pair = tuple[Snapshot, Snapshot]  # a later and an earlier one of one worker
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Messages(NamedTuple):
    """The messages of one worker."""

    asked: int = 0  # how often the main process asked for one
    found_ready: int = 0  # how often one was there
    awaited: float = 0.0  # seconds


class Moment(NamedTuple):
    """What is known about a loader at one moment; `main` is the main process, which has stages too."""

    waits: WaitMark
    main: Snapshot
    workers: Mapping[tuple[int, str], Snapshot] = _NOTHING  # by number and run, those that were replaced too
    messages: Mapping[int, Messages] = _NOTHING  # by number; empty if there are no workers

    def pairs(self, before: Moment) -> list[_Pair]:
        """Returns what each worker has done, now and at an earlier moment."""
        return [(later, before.workers.get(key, Snapshot(""))) for key, later in self.workers.items()]

    def figures_since(self, before: Moment, skipped: Skipped) -> Figures:
        """Returns the figures between an earlier moment and this one."""
        main = [(self.main, before.main)]
        has_workers = bool(self.messages)
        pairs = self.pairs(before) if has_workers else main
        others = main if has_workers else []
        sources = meters.total(
            meters.difference(later.sources, earlier.sources) for later, earlier in (*pairs, *others)
        )
        asked, found_ready = self._messages_since(before)
        waits = self.waits.since(before.waits)
        return Figures(
            seconds=waits.waited + waits.elsewhere,
            items=waits.count,
            samples=sum(later.samples - earlier.samples for later, earlier in pairs),
            bytes=sum(tally.bytes for tally in sources.values()),
            waits=waits,
            asked=asked,
            found_ready=found_ready,
            workers=self._workers_since(before) if has_workers else (_worker(0, main, 0.0),),
            stages=(*_stages(pairs, skipped, in_main=False), *_stages(others, skipped, in_main=True)),
            sources=tuple(_source(name, tally) for name, tally in sources.items()),
        )

    def _messages_since(self, before: Moment) -> tuple[int, int]:
        earlier = [before.messages.get(number, Messages()) for number in self.messages]
        asked = sum(now.asked for now in self.messages.values()) - sum(then.asked for then in earlier)
        ready = sum(now.found_ready for now in self.messages.values()) - sum(then.found_ready for then in earlier)
        return asked, ready

    def _workers_since(self, before: Moment) -> tuple[WorkerFigures, ...]:
        found = []
        for number, messages in self.messages.items():
            runs = [key for key in self.workers if key[0] == number]
            pairs = [(self.workers[key], before.workers.get(key, Snapshot(""))) for key in runs]
            awaited = messages.awaited - before.messages.get(number, Messages()).awaited
            found.append(_worker(number, pairs, awaited))
        return tuple(found)


def _worker(number: int, pairs: Sequence[_Pair], awaited: float) -> WorkerFigures:
    def total(name: str) -> Any:
        return sum(getattr(later, name) - getattr(earlier, name) for later, earlier in pairs)

    blocked, reading, sending = total("blocked"), total("reading"), total("sending")
    at = pairs[-1][0].at if pairs else None
    return WorkerFigures(
        number,
        busy=max(total("active") - blocked - reading - sending, 0.0),
        blocked=blocked,
        reading=reading,
        cpu=total("cpu"),
        items=total("items"),
        at=None if at is None else At(*at),
        sending=sending,
        awaited=awaited,
    )


def _stages(pairs: Sequence[_Pair], skipped: Skipped, *, in_main: bool) -> Iterator[StageFigures]:
    """Adds up each stage over the workers, whose graphs are the same."""
    longest = max((later.stages for later, _ in pairs), key=len, default=())
    for number, stage in enumerate(longest):
        nothing = Stage(stage.text, 0, 0, 0.0)
        found = [
            (later.stages[number], earlier.stages[number] if number < len(earlier.stages) else nothing)
            for later, earlier in pairs
            if number < len(later.stages)
        ]
        yield StageFigures(
            stage.text,
            in_main,
            items_in=_count([(now.items_in, then.items_in) for now, then in found]),
            items_out=_count([(now.items_out, then.items_out) for now, then in found]),
            seconds=sum(max(now.seconds - then.seconds, 0.0) for now, then in found),
            skipped=skipped.get(stage.text, {}),
        )


def _count(pairs: Sequence[tuple[int, int]]) -> int | None:
    if any(now < 0 for now, _ in pairs):
        return None
    return sum(now - max(then, 0) for now, then in pairs)


def _source(name: str, tally: meters.SourceTally) -> SourceFigures:
    return SourceFigures(
        name,
        shards=tally.shards,
        bytes=tally.bytes,
        seconds=tally.seconds,
        waited=tally.waited,
        first_byte=tally.first_seconds / tally.first_bytes if tally.first_bytes else 0.0,
        retries=tally.retries,
        hits=tally.hits,
        misses=tally.misses,
        slowest=tally.slowest,
        slowest_seconds=tally.slowest_seconds,
    )
