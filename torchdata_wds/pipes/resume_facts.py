"""The facts that pipes report about their stream, and how each pipe describes what resuming may rely on.

A worker is far ahead of the items that the main process has delivered, so no pipe knows where it will have to resume.
Instead, pipes report facts that stay true: that a loader took an item of its source, after how many samples; when a
pass began, and how long it was. The rest is computed from these and the number of delivered items.

A pipe's class declares what resuming may rely on:

- ``one_to_one = True``: it yields one item for each that it takes, and counts in ``skipped`` those that it drops;
- ``repeats_shards = True``: before the loader, it yields the same shards again at no cost;
- the methods of `Step`: it takes several items for one, or reorders them, in a way that can be computed;
- ``makes_samples = True``: items are counted from here on.

A pipe that declares nothing is replayed: its items are made again and dropped. A user's subclass does not inherit the
declarations, since it may do anything; it can repeat them. Native pipes, which cannot declare anything, have a table in
`torchdata_wds.workers.resume.planner`.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torchdata_wds.errors import ChangedShardError, ShardListError
from torchdata_wds.handlers import warn_once
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.urls import mask_url

_RESUME = "Resume with the shards of that run, or begin a new epoch"
_MOST_VERSIONS = 1000  # how many shards' versions are kept: a worker may open that many ahead of delivery


class ShardBegun(NamedTuple):
    """A loader took an item of its source."""

    passing: int  # the number of the pass
    samples: int  # how many samples of the pass came before it
    ordinal: int  # the number of the item in the pass
    digest: int  # a CRC-32 over the items of the pass up to and including this one
    places: tuple[tuple[int, int], ...] = ()  # if several are read in turn: (number, samples yielded) of each


class PassEnded(NamedTuple):
    """A pass ended, after `samples` samples."""

    passing: int
    samples: int


class PassBegun(NamedTuple):
    """Pass number `passing` began at item `item` of the epoch; a negative `item` lies before the epoch."""

    passing: int
    item: int


class EpochEnded(NamedTuple):
    """An epoch ended, after `taken` items of its last pass."""

    passing: int
    taken: int


class SkipNotice(NamedTuple):
    """A one-to-one stage has dropped items, so they can no longer be counted through it."""

    stage: str


class ShardOpened(NamedTuple):
    """A loader opened an item of its source, whose store reports a version."""

    passing: int
    ordinal: int
    version: StoredVersion


class Reached(NamedTuple):
    """Item number `ordinal` of a pass was read at least until the pass had yielded `samples` samples."""

    passing: int
    ordinal: int
    samples: int


class ItemsSkipped(NamedTuple):
    """A stage has skipped items."""

    stage: str  # as written in the chain
    reason: str  # the type of the exceptions, or the rule
    times: int
    is_loss: bool  # whether they are lost, rather than left out by a rule
    example: str = ""  # the message for one of them


def merge_skips(skips: Iterable[ItemsSkipped]) -> list[ItemsSkipped]:
    """Adds up the counts of the same stage and reason; keeps the first example."""
    merged: dict[tuple[str, str, bool], ItemsSkipped] = {}
    for skipped in skips:
        place = skipped.stage, skipped.reason, skipped.is_loss
        if (before := merged.get(place)) is not None:
            skipped = before._replace(times=before.times + skipped.times, example=before.example or skipped.example)
        merged[place] = skipped
    return list(merged.values())


Fact = ShardBegun | PassEnded | PassBegun | EpochEnded | SkipNotice | ItemsSkipped | ShardOpened


class Watch:
    """Records what the pipes of one stream report, in the process that runs it."""

    def __init__(self) -> None:
        self.facts: deque[Fact] = deque()  # another thread may take some while pipes report more
        self.passing = 0  # the current pass
        self.samples = 0  # how many samples the pass has yielded
        self.agreed_seed: int | None = None  # the seed that all consumers of the stream share
        self.epoch: int | None = None  # its number from 0, the same in all consumers; None if unknown
        self.places: Sequence[tuple[int, int]] = ()  # the items that a loader has open, as in `ShardBegun`
        # What was known when the stream was stopped, by pass and ordinal.
        self.known: dict[tuple[int, int], ShardBegun] = {}
        self.known_versions: dict[tuple[int, int], StoredVersion] = {}
        self.reached: Reached | None = None  # how far the stream had read, at least; None if unknown
        self.counts = False  # whether samples can be counted: no handler can skip different ones now
        self.reading = ""  # the item that a loader is reading, for messages
        # Called before each item with the pass and the item's number; None if no stage draws from global generators.
        self.reseed: Callable[[int, int], object] | None = None

    def begin_pass(self, number: int, item: int) -> None:
        """Reports that a pass begins, at an item of the epoch."""
        self.passing = number
        self.facts.append(PassBegun(number, item))

    def begin_shard(self, ordinal: int, digest: int) -> None:
        """Reports that a loader takes an item of its source; `digest` is a CRC-32 over all items up to it."""
        known = self.known.get((self.passing, ordinal))
        if known is not None and known.digest != digest:
            raise other_shards(ordinal)
        if known is not None and known.samples != self.samples:
            error = self._other_samples(known.samples)
            if self.counts:
                raise error
            warn_once("other samples", f"{error}. Or a handler skipped different samples then")
        self._check_reached(ordinal)
        self.facts.append(ShardBegun(self.passing, self.samples, ordinal, digest, tuple(self.places)))

    def open_shard(self, ordinal: int, version: StoredVersion) -> None:
        """Reports the version of an item that a loader opened; warns of another tag, and raises for another size."""
        then = self.known_versions.get((self.passing, ordinal), version)
        if then.size != version.size:
            raise ChangedShardError(
                f"shard {mask_url(self.reading)} has {version.size:,} bytes, and had {then.size:,} when the state was "
                f"made: it holds other samples now. {_RESUME}",
                shard=mask_url(self.reading),
            )
        if then.tag and version.tag and then.tag != version.tag:
            # Not an error: mirror servers may each give the same object a tag of their own.
            warn_once(
                "other tag",
                f"shard {mask_url(self.reading)} has the ETag {version.tag}, and had {then.tag} when the state was "
                f"made: if it was rewritten, samples may come twice or be left out in this epoch. {_RESUME}",
            )
        self.facts.append(ShardOpened(self.passing, ordinal, version))

    def end_samples(self) -> None:
        """Reports that the samples of the pass have ended."""
        self._check_reached(None)
        self.facts.append(PassEnded(self.passing, self.samples))

    def _check_reached(self, ordinal: int | None) -> None:
        """Raises if a shard ended before a sample that was already taken from it."""
        reached = self.reached
        if reached is None or not self.counts or self.passing != reached.passing:
            return
        if (ordinal is None or ordinal > reached.ordinal) and self.samples < reached.samples:
            raise self._other_samples(reached.samples, " or more")

    def _other_samples(self, then: int, more: str = "") -> ShardListError:
        what = f"shard {mask_url(self.reading)} has" if self.reading else "shards before this one have"
        return ShardListError(
            f"{what} another number of samples than when the state was made: up to its end the pass had "
            f"{then:,}{more} samples then, and has {self.samples:,} now. {_RESUME}"
        )

    def take(self) -> list[Fact]:
        """Returns the facts reported since the last call."""
        return [self.facts.popleft() for _ in range(len(self.facts))]

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()  # pipes hold it, and a copy of a pipe belongs to no stream yet


def other_shards(ordinal: int) -> ShardListError:
    """Makes the error for shards that differ from those of the resumed stream."""
    return ShardListError(
        "the shards differ from those of the resumed run, or come in another order: they differ among the first "
        f"{ordinal + 1:,} that come here. Resume with the same shards, or begin a new epoch"
    )


class Wanted(NamedTuple):
    """The items of a stream that are still needed."""

    early: Sequence[int]  # the numbers of those before `first`, ascending
    first: int  # the item from which all are needed

    @property
    def least(self) -> int:
        """The number of the first item needed."""
        return self.early[0] if self.early else self.first


class Facts:
    """What is known about one stream."""

    def __init__(self, passes: Iterable[PassBegun] = ()) -> None:
        self.passes = list(passes)  # where passes began in this epoch; the first is the one in which it began
        self.shards: list[ShardBegun] = []  # in order
        self.lengths: dict[int, int] = {}  # the numbers of samples of ended passes
        self.versions: dict[tuple[int, int], StoredVersion] = {}  # of recently opened shards, by pass and ordinal
        self.ended: EpochEnded | None = None
        self.skipping: set[str] = set()  # the stages that have dropped items
        self.skips: list[ItemsSkipped] = []  # in this epoch
        self.shards_cut = False  # whether shards after the last of `shards` were left out of a state
        self.passes_cut = False  # the same for passes

    def add(self, facts: Sequence[Fact]) -> None:
        """Adds what a worker has reported."""
        # A resumed worker reports again what the state has. If the state ends with shard 7, then of the shards 5, 6, 7,
        # 8, ... reported now only 8 and later are new. From 7 on none is missing, even if the state left some out.
        for fact in facts:
            if isinstance(fact, ShardBegun):
                last = (self.shards[-1].passing, self.shards[-1].ordinal) if self.shards else (-1, -1)
                place = fact.passing, fact.ordinal
                if place > last:
                    self.shards.append(fact)
                if place >= last:
                    self.shards_cut = False
            elif isinstance(fact, PassBegun):
                if fact.item <= 0:  # a new epoch begins
                    self.passes, self.passes_cut, self.ended = [], False, None
                elif self.passes and fact.passing >= self.passes[-1].passing:
                    self.passes_cut = False
                if not self.passes or fact.passing > self.passes[-1].passing:
                    self.passes.append(fact)
            elif isinstance(fact, EpochEnded):
                self.ended = fact
            elif isinstance(fact, PassEnded):
                self.lengths[fact.passing] = fact.samples
            elif isinstance(fact, ShardOpened):
                self.versions[fact.passing, fact.ordinal] = fact.version
                if len(self.versions) > _MOST_VERSIONS:
                    del self.versions[next(iter(self.versions))]
            elif isinstance(fact, ItemsSkipped):
                self.skips = merge_skips([*self.skips, fact])
            else:
                self.skipping.add(fact.stage)

    def pass_of(self, wanted: Wanted) -> PassBegun | None:
        """Finds the pass that holds the `early` items and the `first`; None if they span several, or it is unknown."""
        # None too if that pass has ended but its length is unknown.
        number = max(0, bisect_right(self.passes, wanted.least, key=lambda begun: begun.item) - 1)
        found = self.passes[number]
        if number + 1 == len(self.passes):
            return None if self.passes_cut else found
        following = self.passes[number + 1]
        if following.passing > found.passing + 1 or following.item < wanted.first or found.passing not in self.lengths:
            return None
        return found

    def shard_of(self, passing: int, sample: int) -> tuple[ShardBegun | None, bool]:
        """Finds the last known start of a shard at or before a sample, and whether no other start lies between them."""
        number = bisect_right(self.shards, (passing, sample), key=lambda begun: begun[:2]) - 1
        if number < 0 or self.shards[number].passing != passing:
            return None, False
        found = self.shards[number]
        if number + 1 == len(self.shards):
            return found, not self.shards_cut
        following = self.shards[number + 1]
        return found, (following.passing, following.ordinal) == (passing, found.ordinal + 1)


class Way(NamedTuple):
    """What is known about a resumed stream."""

    facts: Facts  # what its pipes have reported
    passing: int  # the pass in which it resumes
    share: int  # how many items ``wds_epoch`` yields in the epoch; 0 without one
    length: int | None = None  # how many items the step's source yields in the pass; None if it has not ended


class Step:
    """A stage between the grouping and the end of a stream that does not yield exactly one item for each."""

    ratio = 1  # how many items it takes for each that it yields
    reorders = False  # whether it yields items in another order
    cuts_epochs = False  # whether it cuts the stream into epochs

    def obstacle(self) -> str | None:
        """Returns why items cannot be skipped through it; None if they can."""
        return None

    def resume(self, wanted: Wanted, way: Way) -> tuple[Wanted, Way] | None:
        """Makes the next iteration yield only `wanted` items; returns those it takes and the way before, if known."""
        raise NotImplementedError

    def undo(self) -> None:
        """Reverts a `resume`: the next iteration starts from the beginning."""

    def taken(self, item: int, way: Way) -> tuple[int, Way] | None:
        """Returns how many items it had taken, at least, once it had yielded `item`, and the way before it."""
        return item, way

    def length_of(self, source: int) -> int:
        """Returns how many items it yields from `source` items."""
        return source


def said_by(pipe: Any, name: str) -> Any:
    """Returns what a pipe's own class declares under a name; None if it declares nothing."""
    kind = type(pipe)
    module = sys.modules.get(kind.__module__) if kind.__module__.startswith("torchdata_wds.") else None
    is_own = getattr(module, kind.__qualname__, None) is kind
    return getattr(kind, name, None) if is_own or name in vars(kind) else None
