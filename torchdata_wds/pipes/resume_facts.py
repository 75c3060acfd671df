"""What the pipes of a stream tell about their way, and how they are told to begin in the middle of it.

A worker is far ahead of the items that the main process has delivered, so no pipe can say where it will have to go on.
Pipes tell facts instead that stay true: which item of its source a loader had come to, after how many samples; when a
pass began, and how long it was. From these and the number of delivered items the rest is computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index.slices import ChangedShardError
from torchdata_wds.handlers import warn_once
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.urls import mask_url

#: Of how many shards versions are kept: as many as a worker may open ahead of what is delivered.
_MOST_VERSIONS = 1000


class ShardBegun(NamedTuple):
    """A loader took an item of its source.

    Attributes:
        passing: The pass in which it did.
        samples: How many samples of the pass came before.
        ordinal: The number of the item in the pass.
        digest: A CRC-32 over the items of the pass up to and with this one.
        places: Where several items are read in turn: the numbers of all, and how many samples each had given.
    """

    passing: int
    samples: int
    ordinal: int
    digest: int
    places: tuple[tuple[int, int], ...] = ()


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
    """A stage has skipped items.

    Attributes:
        stage: The stage, as it was written.
        reason: The type of the exceptions, or the rule.
        times: How many.
        is_loss: Whether they are lost, and not left out by a rule.
        example: The message for one of them, or "".
    """

    stage: str
    reason: str
    times: int
    is_loss: bool
    example: str = ""


def merge_skips(skips: Iterable[ItemsSkipped]) -> list[ItemsSkipped]:
    """Adds up what was told of the same stage and reason; the first example stays."""
    merged: dict[tuple[str, str, bool], ItemsSkipped] = {}
    for skipped in skips:
        place = skipped.stage, skipped.reason, skipped.is_loss
        before = merged.get(place)
        if before is not None:
            skipped = before._replace(times=before.times + skipped.times, example=before.example or skipped.example)
        merged[place] = skipped
    return list(merged.values())


Fact = ShardBegun | PassEnded | PassBegun | EpochEnded | SkipNotice | ItemsSkipped | ShardOpened


class Watch:
    """Takes down what the pipes of one stream tell, in the process that runs it.

    Attributes:
        facts: What has not been passed on yet. Another thread may take facts out while pipes tell more.
        passing: The pass that runs.
        samples: How many samples of the pass there were.
        agreed_seed: The seed that all consumers of the stream share.
        epoch: The number of the epoch, counted from 0, on which all consumers agree; None where nobody said it.
        places: What a loader that reads several items in turn has open, as `ShardBegun` tells it.
        known: The beginnings of shards that were known when the stream was stopped, by pass and ordinal.
        known_versions: The versions that shards had then, where they were told, by pass and ordinal.
        reached: Where the stream had come at least; None where that is not known.
        reading: The item that a loader reads, for messages.
        counts: Whether samples can be counted: no handler may have skipped some then that come now.
        reseed: Called by a stream of passes before each item, with the pass and the item's number in it; None where no
            stage draws from the global generators.
    """

    def __init__(self) -> None:
        self.facts: deque[Fact] = deque()
        self.passing = 0
        self.samples = 0
        self.agreed_seed: int | None = None
        self.epoch: int | None = None
        self.places: Sequence[tuple[int, int]] = ()
        self.known: dict[tuple[int, int], ShardBegun] = {}
        self.known_versions: dict[tuple[int, int], StoredVersion] = {}
        self.reached: Reached | None = None
        self.counts = False
        self.reading = ""
        self.reseed: Callable[[int, int], object] | None = None

    def begin_pass(self, number: int, item: int) -> None:
        """Tells that a pass begins, at an item of the epoch."""
        self.passing = number
        self.facts.append(PassBegun(number, item))

    def end_epoch(self, passing: int, taken: int) -> None:
        """Tells that the epoch ends, after `taken` items of a pass."""
        self.facts.append(EpochEnded(passing, taken))

    def begin_shard(self, ordinal: int, digest: int) -> None:
        """Tells which item of its source a loader has come to; `digest` is a CRC-32 over the items up to and with it.

        Raises:
            ShardListError: if it came to another one when the stream was first run, or after another number of samples.
        """
        known = self.known.get((self.passing, ordinal))
        if known is not None and known.digest != digest:
            raise other_shards(ordinal)
        if known is not None and known.samples != self.samples:
            error = _other_samples(self.reading, known.samples, self.samples)
            if self.counts:
                raise error
            warn_once("other samples", f"{error}. Or a handler has skipped other samples then than now")
        self._check_reached(ordinal)
        self.facts.append(ShardBegun(self.passing, self.samples, ordinal, digest, tuple(self.places)))

    def open_shard(self, ordinal: int, version: StoredVersion) -> None:
        """Tells the version of an item of a loader's source that it has opened; warns if it had another tag.

        Raises:
            ChangedShardError: if it was of another size when the stream was first run.
        """
        then = self.known_versions.get((self.passing, ordinal), version)
        if then.size != version.size:
            raise ChangedShardError(
                f"shard {mask_url(self.reading)} has {version.size:,} bytes, and had {then.size:,} when the state was "
                "made that is resumed here: it holds other samples now. Resume with the shards of that run, or "
                "begin a new epoch",
                shard=mask_url(self.reading),
            )
        if then.tag and version.tag and then.tag != version.tag:
            # No error: servers that mirror one another may give the same object tags of their own.
            warn_once(
                "other tag",
                f"shard {mask_url(self.reading)} has the ETag {version.tag}, and had {then.tag} when the state was "
                "made that is resumed here: if it was written anew, samples may come twice or be left out in this "
                "epoch. Resume with the shards of that run, or begin a new epoch",
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
            raise _other_samples(self.reading, reached.samples, self.samples, " or more")

    def take(self) -> list[Fact]:
        """Gives the facts that have not been passed on."""
        facts = []
        while self.facts:
            facts.append(self.facts.popleft())
        return facts

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()  # pipes hold it: a copy of a pipe belongs to no stream yet


def other_shards(ordinal: int) -> ShardListError:
    """Makes the error for shards that are not those of the stream that is to go on."""
    return ShardListError(
        "the shards are not those of the run that is to be resumed, or not in the same order: they differ among the "
        f"first {ordinal + 1:,} that come here. Resume with the same shards, or begin a new epoch"
    )


class Wanted(NamedTuple):
    """Which items of a stream are still to come.

    Attributes:
        early: The numbers of those before `first`, ascending.
        first: From here on all.
    """

    early: Sequence[int]
    first: int

    @property
    def least(self) -> int:
        """The number of the first item of all."""
        return self.early[0] if self.early else self.first


class Facts:
    """What is known of one stream.

    Attributes:
        passes: Where passes began, in this epoch; at least the one that it began in.
        shards: Where shards began, in their order.
        lengths: How many samples passes had that have ended.
        versions: Those of shards that were opened lately, by pass and ordinal, where their stores have told them.
        ended: Where the epoch came to its end.
        skipping: The stages that have left items out.
        skips: What was skipped in the epoch.
        shards_cut: Whether shards that began after the last of `shards` have been left out.
        passes_cut: Whether passes that began after the last of `passes` have been left out.
    """

    def __init__(self) -> None:
        self.passes: list[PassBegun] = []
        self.shards: list[ShardBegun] = []
        self.lengths: dict[int, int] = {}
        self.versions: dict[tuple[int, int], StoredVersion] = {}
        self.ended: EpochEnded | None = None
        self.skipping: set[str] = set()
        self.skips: list[ItemsSkipped] = []
        self.shards_cut = False
        self.passes_cut = False

    def add(self, facts: Sequence[Fact]) -> None:
        """Adds what a worker has told; what is known already it tells again when it goes on from a state."""
        for fact in facts:
            if isinstance(fact, ShardBegun):
                last = self.shards[-1] if self.shards else None
                place = fact.passing, fact.ordinal
                if last is None or place > (last.passing, last.ordinal):
                    self.shards.append(fact)
                if last is None or place >= (last.passing, last.ordinal):
                    self.shards_cut = False
            elif isinstance(fact, PassBegun):
                if fact.item <= 0:  # the epoch begins
                    self.passes = []
                    self.passes_cut = False
                    self.ended = None
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
        """Finds the pass that items of the epoch are from, up to the first behind which all are wanted.

        Returns:
            None where they are from several passes, or that is not known, or not how long the pass was if it has ended.
        """
        number = max(0, bisect_right(self.passes, wanted.least, key=lambda begun: begun.item) - 1)
        found = self.passes[number]
        if number + 1 == len(self.passes):
            return None if self.passes_cut else found
        following = self.passes[number + 1]
        if following.passing > found.passing + 1 or following.item < wanted.first or found.passing not in self.lengths:
            return None
        return found

    def shard_of(self, passing: int, sample: int) -> tuple[ShardBegun | None, bool]:
        """Finds the last known beginning of a shard before a sample of a pass.

        Returns:
            That, or None where no beginning is known; and whether no other shard lies between it and the sample.
        """
        number = bisect_right(self.shards, (passing, sample), key=lambda begun: begun[:2]) - 1
        if number < 0 or self.shards[number].passing != passing:
            return None, False
        found = self.shards[number]
        if number + 1 == len(self.shards):
            return found, not self.shards_cut
        following = self.shards[number + 1]
        return found, (following.passing, following.ordinal) == (passing, found.ordinal + 1)


def _other_samples(shard: str, then: int, now: int, more: str = "") -> ShardListError:
    what = f"shard {mask_url(shard)} has" if shard else "shards before this one have"
    return ShardListError(
        f"{what} another number of samples than when the state was made that is resumed here: up to its end the pass "
        f"had {then:,}{more} samples then, and has {now:,} now. Resume with the shards of that run, or begin a new "
        "epoch"
    )
