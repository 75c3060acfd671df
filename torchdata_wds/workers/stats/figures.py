"""The figures that a loader gives about itself, as plain values.

Seconds are those of a clock on the wall. Workers run side by side: of two workers, a stage may take two seconds in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part > 0 else 0.0


@dataclass(frozen=True)
class Waits:
    """How the training loop and the loader waited for each other."""

    count: int = 0  # how many items were taken
    waited: float = 0.0  # seconds in ``next(loader)``
    elsewhere: float = 0.0  # seconds between two of these calls: the training step
    p50: float = 0.0  # of the waits, in seconds
    p99: float = 0.0
    first: float = 0.0  # the wait for the first item of the epoch, a part of `waited`; 0 in a later stretch

    @property
    def share(self) -> float:
        """The share of the time, from 0 to 1, in which the training loop waited."""
        return _share(self.waited, self.elsewhere)

    @property
    def running_share(self) -> float:
        """The same without the wait for the first item, in which workers start and shuffles fill."""
        return _share(self.waited - self.first, self.elsewhere)


@dataclass(frozen=True)
class StageFigures:
    """One stage of the graph, in all workers together or in the main process."""

    stage: str  # as it is written in the chain, without secrets
    in_main: bool  # whether it runs in the main process although there are workers
    items_in: int | None  # what it took from the stages before it; None if the two run as one loop, and nothing counts
    items_out: int | None
    seconds: float  # in its own code, without the stages before it and without waiting for a source
    skipped: Mapping[str, int] = field(default_factory=dict)  # items by the type of the exception, or by the rule


@dataclass(frozen=True)
class At:
    """What a worker is doing."""

    stage: str  # "" between two epochs
    shard: str  # the one read last, without secrets; "" if none was
    byte: int  # how far it was read
    seconds: float  # for how long it has been making the same item


@dataclass(frozen=True)
class WorkerFigures:
    """One worker, or the main process where there are none; what no figure names is idle time."""

    number: int
    busy: float  # seconds in which it made items
    blocked: float  # seconds in which it waited because the items made ahead were not taken yet
    reading: float  # seconds in which it waited for a source
    cpu: float  # seconds of processor time of its process
    items: int
    at: At | None = None
    sending: float = 0.0  # seconds in which it packed items for the main process; not in `busy`
    awaited: float = 0.0  # seconds in which the main process waited for this worker


@dataclass(frozen=True)
class SourceFigures:
    """The shards of one server, bucket or kind of source."""

    source: str  # such as "https://data.example.org", "s3://bucket", "local files", "commands"; without secrets
    shards: int = 0  # how many were opened
    bytes: int = 0  # as stored, that is compressed
    seconds: float = 0.0  # waited for it, by stages or by threads that read ahead
    waited: float = 0.0  # waited for it by stages: what reading ahead hides is not in here
    first_byte: float = 0.0  # seconds to the first byte, on average over the openings
    retries: int = 0  # connections and requests that were tried again
    hits: int = 0  # shards that a cache had
    misses: int = 0
    slowest: str = ""  # the shard that was waited for longest, without secrets
    slowest_seconds: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What happened in one stretch of an epoch."""

    seconds: float = 0.0
    items: int = 0  # taken by the training loop
    samples: int = 0  # read by the workers, including those ahead of the training loop
    bytes: int = 0  # read from all sources, as stored
    waits: Waits = field(default_factory=Waits)
    asked: int = 0  # how often the main process asked a worker for a message of items
    found_ready: int = 0  # how often one was ready
    workers: tuple[WorkerFigures, ...] = ()
    stages: tuple[StageFigures, ...] = ()  # in the order of the graph, sources first
    sources: tuple[SourceFigures, ...] = ()
