"""What pipes tell about the way of their stream, and how each answers for itself when it is to go on from its middle.

A worker is far ahead of the items that the main process has delivered, so no pipe can say where it will have to go on.
Pipes tell facts instead that stay true: which item of its source a loader had come to, after how many samples; when a
pass began, and how long it was. From these and the number of delivered items the rest is computed.

A pipe says in its own class, by these attributes, what resuming may rely on:

- ``one_to_one = True``: it gives one item for each that it takes, and counts in ``skipped`` those that it leaves out;
- ``repeats_shards = True``: before the loader, it gives the same shards again at no cost;
- the methods of `Step`: it takes several items for one, or reorders them, in a way that can be computed;
- ``makes_samples = True``: items are counted from here on.

A pipe that says nothing is replayed: its items are made once more and dropped. What a class says does not count for
the subclasses that users derive from it, which may do anything: they say it themselves. Native pipes, which cannot say
anything, have a table in `torchdata_wds.workers.resume.planner`.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index.slices import ChangedShardError
from torchdata_wds.handlers import warn_once
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.urls import mask_url

_RESUME = "Resume with the shards of that run, or begin a new epoch"
_MOST_VERSIONS = 1000  # of how many shards versions are kept: as many as a worker may open ahead of what is delivered


class ShardBegun(NamedTuple):
    """A loader took an item of its source."""

    passing: int  # the pass in which it did
    samples: int  # how many samples of the pass came before
    ordinal: int  # the number of the item in the pass
    digest: int  # a CRC-32 over the items of the pass up to and with this one
    places: tuple[tuple[int, int], ...] = ()  # if several are read in turn: their numbers, and samples each had given


class PassEnded(NamedTuple):
    """The samples of a pass came to their end, after `samples` of them."""

    passing: int
    samples: int


class PassBegun(NamedTuple):
    """Pass number `passing` began at item `item` of the epoch; a negative number is that of one before the epoch."""

    passing: int
    item: int


class EpochEnded(NamedTuple):
    """An epoch came to its end, after `taken` items of its last pass."""

    passing: int
    taken: int


class SkipNotice(NamedTuple):
    """A stage that gives an item for each has left some out: items can no longer be counted through it."""

    stage: str


class ShardOpened(NamedTuple):
    """A loader opened an item of its source, of which its store tells a version."""

    passing: int
    ordinal: int
    version: StoredVersion


class Reached(NamedTuple):
    """Item number `ordinal` of a pass had been read at least until the pass had given `samples` samples."""

    passing: int
    ordinal: int
    samples: int


class ItemsSkipped(NamedTuple):
    """A stage has skipped items."""

    stage: str  # as it was written
    reason: str  # the type of the exceptions, or the rule
    times: int
    is_loss: bool  # whether they are lost, and not left out by a rule
    example: str = ""  # the message for one of them


def merge_skips(skips: Iterable[ItemsSkipped]) -> list[ItemsSkipped]:
    """Adds up what was told of the same stage and reason; the first example stays."""
    merged: dict[tuple[str, str, bool], ItemsSkipped] = {}
    for skipped in skips:
        place = skipped.stage, skipped.reason, skipped.is_loss
        if (before := merged.get(place)) is not None:
            skipped = before._replace(times=before.times + skipped.times, example=before.example or skipped.example)
        merged[place] = skipped
    return list(merged.values())


Fact = ShardBegun | PassEnded | PassBegun | EpochEnded | SkipNotice | ItemsSkipped | ShardOpened


class Watch:
    """Takes down what the pipes of one stream tell, in the process that runs it."""

    def __init__(self) -> None:
        self.facts: deque[Fact] = deque()  # another thread may take some out while pipes tell more
        self.passing = 0  # the pass that runs
        self.samples = 0  # how many samples of the pass there were
        self.agreed_seed: int | None = None  # the seed that all consumers of the stream share
        self.epoch: int | None = None  # its number from 0, on which all consumers agree; None where nobody said it
        self.places: Sequence[tuple[int, int]] = ()  # what a loader has open, as `ShardBegun` tells it
        # What was known when the stream was stopped, by pass and ordinal.
        self.known: dict[tuple[int, int], ShardBegun] = {}
        self.known_versions: dict[tuple[int, int], StoredVersion] = {}
        self.reached: Reached | None = None  # where the stream had come at least; None where that is not known
        self.counts = False  # whether samples can be counted: no handler may have skipped some then that come now
        self.reading = ""  # the item that a loader reads, for messages
        # Called before each item with the pass and its number in it; None where no stage draws from global generators.
        self.reseed: Callable[[int, int], object] | None = None

    def begin_pass(self, number: int, item: int) -> None:
        """Tells that a pass begins, at an item of the epoch."""
        self.passing = number
        self.facts.append(PassBegun(number, item))

    def begin_shard(self, ordinal: int, digest: int) -> None:
        """Tells which item of its source a loader has come to; `digest` is a CRC-32 over all up to it."""
        known = self.known.get((self.passing, ordinal))
        if known is not None and known.digest != digest:
            raise other_shards(ordinal)
        if known is not None and known.samples != self.samples:
            error = self._other_samples(known.samples)
            if self.counts:
                raise error
            warn_once("other samples", f"{error}. Or a handler has skipped other samples then than now")
        self._check_reached(ordinal)
        self.facts.append(ShardBegun(self.passing, self.samples, ordinal, digest, tuple(self.places)))

    def open_shard(self, ordinal: int, version: StoredVersion) -> None:
        """Tells the version of an item that a loader has opened; warns of another tag, refuses another size."""
        then = self.known_versions.get((self.passing, ordinal), version)
        if then.size != version.size:
            raise ChangedShardError(
                f"shard {mask_url(self.reading)} has {version.size:,} bytes, and had {then.size:,} when the state was "
                f"made that is resumed here: it holds other samples now. {_RESUME}",
                shard=mask_url(self.reading),
            )
        if then.tag and version.tag and then.tag != version.tag:
            # No error: servers that mirror one another may give the same object tags of their own.
            warn_once(
                "other tag",
                f"shard {mask_url(self.reading)} has the ETag {version.tag}, and had {then.tag} when the state was "
                "made that is resumed here: if it was written anew, samples may come twice or be left out in this "
                f"epoch. {_RESUME}",
            )
        self.facts.append(ShardOpened(self.passing, ordinal, version))

    def end_samples(self) -> None:
        """Tells that the samples of the pass have ended."""
        self._check_reached(None)
        self.facts.append(PassEnded(self.passing, self.samples))

    def _check_reached(self, ordinal: int | None) -> None:
        """Checks that no shard ended before the sample that had been taken of it."""
        reached = self.reached
        if reached is None or not self.counts or self.passing != reached.passing:
            return
        if (ordinal is None or ordinal > reached.ordinal) and self.samples < reached.samples:
            raise self._other_samples(reached.samples, " or more")

    def _other_samples(self, then: int, more: str = "") -> ShardListError:
        what = f"shard {mask_url(self.reading)} has" if self.reading else "shards before this one have"
        return ShardListError(
            f"{what} another number of samples than when the state was made that is resumed here: up to its end the "
            f"pass had {then:,}{more} samples then, and has {self.samples:,} now. {_RESUME}"
        )

    def take(self) -> list[Fact]:
        """Gives the facts that have not been passed on."""
        return [self.facts.popleft() for _ in range(len(self.facts))]

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()  # pipes hold it: a copy of a pipe belongs to no stream yet


def other_shards(ordinal: int) -> ShardListError:
    """Makes the error for shards that are not those of the stream that is to go on."""
    return ShardListError(
        "the shards are not those of the run that is to be resumed, or not in the same order: they differ among the "
        f"first {ordinal + 1:,} that come here. Resume with the same shards, or begin a new epoch"
    )


class Wanted(NamedTuple):
    """Which items of a stream are still to come."""

    early: Sequence[int]  # the numbers of those before `first`, ascending
    first: int  # from here on all

    @property
    def least(self) -> int:
        """The number of the first item of all."""
        return self.early[0] if self.early else self.first


class Facts:
    """What is known of one stream."""

    def __init__(self, passes: Iterable[PassBegun] = ()) -> None:
        self.passes = list(passes)  # where passes began, in this epoch; at least the one that it began in
        self.shards: list[ShardBegun] = []  # in their order
        self.lengths: dict[int, int] = {}  # how many samples passes had that have ended
        self.versions: dict[tuple[int, int], StoredVersion] = {}  # of shards opened lately, by pass and ordinal
        self.ended: EpochEnded | None = None
        self.skipping: set[str] = set()  # the stages that have left items out
        self.skips: list[ItemsSkipped] = []  # in the epoch
        self.shards_cut = False  # whether shards that began after the last of `shards` have been left out
        self.passes_cut = False  # the same of passes

    def add(self, facts: Sequence[Fact]) -> None:
        """Adds what a worker has told; what is known already it tells again when it goes on from a state."""
        for fact in facts:
            if isinstance(fact, ShardBegun):
                last = (self.shards[-1].passing, self.shards[-1].ordinal) if self.shards else (-1, -1)
                place = fact.passing, fact.ordinal
                if place > last:
                    self.shards.append(fact)
                if place >= last:
                    self.shards_cut = False
            elif isinstance(fact, PassBegun):
                if fact.item <= 0:  # the epoch begins
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
        """Finds the pass that items of the epoch are from, up to the first behind which all are wanted."""
        # None where they are from several passes, or that is unknown, or not how long a pass was that has ended.
        number = max(0, bisect_right(self.passes, wanted.least, key=lambda begun: begun.item) - 1)
        found = self.passes[number]
        if number + 1 == len(self.passes):
            return None if self.passes_cut else found
        following = self.passes[number + 1]
        if following.passing > found.passing + 1 or following.item < wanted.first or found.passing not in self.lengths:
            return None
        return found

    def shard_of(self, passing: int, sample: int) -> tuple[ShardBegun | None, bool]:
        """Finds the last known beginning of a shard before a sample, and whether no other lies between them."""
        number = bisect_right(self.shards, (passing, sample), key=lambda begun: begun[:2]) - 1
        if number < 0 or self.shards[number].passing != passing:
            return None, False
        found = self.shards[number]
        if number + 1 == len(self.shards):
            return found, not self.shards_cut
        following = self.shards[number + 1]
        return found, (following.passing, following.ordinal) == (passing, found.ordinal + 1)


class Way(NamedTuple):
    """What is known of a stream that goes on."""

    facts: Facts  # what its pipes have told
    passing: int  # the pass that it goes on with
    share: int  # how many items ``wds_epoch`` gives in the epoch; 0 without one
    length: int | None = None  # how many items the step's source gives in the pass; None where it has not ended


class Step:
    """A stage between the grouping and the end of a stream that does not simply give one item for one."""

    ratio = 1  # how many items it takes for one
    reorders = False  # whether it gives items in another order
    cuts_epochs = False  # whether the stream goes on through it from epoch to epoch

    def obstacle(self) -> str | None:
        """Says why items cannot be skipped through it; None where they can."""
        return None

    def resume(self, wanted: Wanted, way: Way) -> tuple[Wanted, Way] | None:
        """Lets the next iteration give only `wanted` items; returns those it takes and the way before, if known."""
        raise NotImplementedError

    def undo(self) -> None:
        """Takes back a `resume`: the next iteration begins at the beginning."""

    def taken(self, item: int, way: Way) -> tuple[int, Way] | None:
        """Returns how many items it had taken, at least, when it had given `item`, and the way before it."""
        return item, way

    def length_of(self, source: int) -> int:
        """Returns how many items it gives of `source` items."""
        return source


def said_by(pipe: Any, name: str) -> Any:
    """Returns what a pipe's class says about itself under a name; None where it says nothing."""
    kind = type(pipe)
    module = sys.modules.get(kind.__module__) if kind.__module__.startswith("torchdata_wds.") else None
    is_own = getattr(module, kind.__qualname__, None) is kind
    return getattr(kind, name, None) if is_own or name in vars(kind) else None
