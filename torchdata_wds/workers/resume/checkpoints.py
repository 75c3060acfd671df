"""Packs the positions of a loader's streams in the middle of an epoch into a small state, and unpacks them again.

The next turn, and the number of items that each worker has yielded, follow from the total taken: with 3 workers, after
7 items, worker 0 has yielded 3 and the others 2 each, and it is worker 1's turn.
"""

from __future__ import annotations

import logging
import pickle
import struct
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher
from torch.utils.data.graph import DataPipe, traverse_dps

from torchdata_wds.consumers import upstream
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.resume_facts import Facts, PassBegun, ShardBegun
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.workers.resume.planner import find_chain, has_functions, is_one_to_one, is_torchdata
from torchdata_wds.workers.resume.signatures import Signature
from torchdata_wds.workers.resume.stream import Point, Seeds

logger = logging.getLogger(__name__)

_MOST_BYTES = 6000  # about how many bytes the facts about all workers take in a state, before compression

#: How many shards' versions (size and ETag) a state keeps over all workers, at least one each.
_MOST_VERSIONS = 64
_SHARD = struct.Struct("<IQQI")
_PLACE = struct.Struct("<QQ")


class Turns:
    """The turns of workers that yield one item each in rotation, until all have ended."""

    # Later stages may have taken more items than were delivered, so `at` answers for an earlier moment.
    def __init__(self, counts: Sequence[int], order: Sequence[int]) -> None:
        self.counts = list(counts)  # how many items each worker had yielded before
        self.order = list(order)  # the workers that have not ended, next one first
        self._ends: list[tuple[int, int]] = []

    def note_end(self, taken: int, worker: int) -> None:
        """Notes that a worker had no item left at its turn, after `taken` items in total."""
        self._ends.append((taken, worker))

    def at(self, taken: int) -> tuple[list[int], list[int]]:
        """Returns each worker's count of items after `taken` in total, and the order of turns from there."""
        counts, order, done = list(self.counts), deque(self.order), 0
        ends = [(ended, worker) for ended, worker in self._ends if ended <= taken]
        # The rotation is even between two ends: 7 items of 3 workers are 2 rounds and one more turn, of the first.
        for ended, worker in [*ends, (taken, None)]:
            rounds, rest = divmod(ended - done, len(order) or 1)
            for place, other in enumerate(order):
                counts[other] += rounds + (place < rest)
            order.rotate(-rest)
            done = ended
            if worker is not None:
                order.remove(worker)
        return counts, list(order)


class Streams:
    """The streams of a set of workers in one epoch, as the main process knows them."""

    #: If set, the streams resume where `turns` and `facts` say: the seeds of the epoch in which they began, and whether
    #: the items before are skipped without making them.
    restart: tuple[Seeds, bool] | None = None
    epoch = 0  # its number, from 0

    def __init__(self, workers: int, facts: list[Facts] | None = None, *, continues: bool = False) -> None:
        self.turns = Turns([0] * workers, range(workers))  # whose turn it is, and what each had yielded before
        self.facts = [Facts([PassBegun(0, 0)]) for _ in range(workers)] if facts is None else facts
        self.taken = 0  # items taken from all workers since the epoch began or was resumed
        self.continues = continues  # whether streams run across epochs, cut by ``wds_epoch``

    def points(self) -> list[Point | None]:
        """Returns where each worker's stream resumes; None for one that begins."""
        if self.restart is None:
            return [None] * len(self.facts)
        seeds, skips = self.restart
        return [Point(count, seeds, facts, skips) for count, facts in zip(self.turns.counts, self.facts, strict=True)]

    def next_epoch(self) -> Streams:
        """Returns where the next epoch begins; after an early break only the workers know, and will report it."""
        if not self.continues:
            return Streams(len(self.facts))
        for facts in self.facts:
            ended, facts.ended = facts.ended, None
            facts.passes = [] if ended is None else [PassBegun(ended.passing, -ended.taken)]
            facts.passes_cut, facts.skips = False, []
        return Streams(len(self.facts), list(self.facts), continues=True)


def pack_facts(facts: Facts, item: int, ratio: int, workers: int) -> tuple[Any, ...]:
    """Packs the facts about a stream that resumes at `item`, of `ratio` samples each; thins out those far from it."""
    # Resuming needs the last shard that began before the position, and the two after it to know that none lies between.
    # Earlier ones only serve samples in a shuffle buffer: where one is left out, reading starts at a shard before it.
    # So each of 4 workers keeps at most about 62 shards of 24 bytes, even after reading 100,000.
    width = max((len(shard.places) for shard in facts.shards), default=0)
    room = max(4, _MOST_BYTES // workers // (_SHARD.size + width * _PLACE.size))
    place = bisect_right(facts.passes, item, key=lambda begun: begun.item)
    passes = _thinned(facts.passes[: place + 2], place, max(2, room // 4))
    known = {begun.passing for begun in passes}
    begun = facts.passes[max(0, place - 1)]
    shards = [shard for shard in facts.shards if shard.passing in known]
    place = bisect_right(shards, (begun.passing, (item - begun.item) * ratio), key=lambda shard: shard[:2])
    kept = _thinned(shards[: place + 2], place, room)
    # The stream may resume in any of the last ones before the position.
    resumable = [(shard.passing, shard.ordinal) for shard in shards[:place][-max(1, _MOST_VERSIONS // workers) :]]
    return (
        [tuple(begun) for begun in passes],
        b"".join(_SHARD.pack(*shard[:4]) for shard in kept),
        {number: length for number, length in facts.lengths.items() if number in known},
        sorted(facts.skipping),
        facts.shards_cut or len(shards) > place + 2,
        facts.passes_cut or passes[-1] != facts.passes[-1],
        [b"".join(_PLACE.pack(*place) for place in shard.places) for shard in kept] if width else [],
        {key: tuple(facts.versions[key]) for key in resumable if key in facts.versions},
    )


def _thinned(items: Sequence[Any], here: int, most: int) -> list[Any]:
    """Keeps the first item, those right before a position and all after it, and ever fewer of the earlier ones."""
    # With room for 16 and none after the position: the last 12 before it, then those 14, 18, 26 and 42 before it. At
    # worst, resuming starts a little too early and passes over a few shards.
    place = max(0, here - max(1, most * 3 // 4))
    kept = list(items[place:])
    gap = 2
    while place > 0 and len(kept) < most:
        place = max(0, place - gap)
        kept.insert(0, items[place])
        gap *= 2
    return kept if place == 0 else [items[0], *kept]


def unpack_facts(packed: Sequence[Any]) -> Facts:
    """Reverses `pack_facts`."""
    passes, shards, lengths, skipping, shards_cut, passes_cut, places, *more = packed
    facts = Facts(PassBegun(*begun) for begun in passes)
    facts.shards = [ShardBegun(*shard) for shard in _SHARD.iter_unpack(shards)]
    if places:
        found = [tuple(_PLACE.iter_unpack(packed)) for packed in places]
        facts.shards = [shard._replace(places=rows) for shard, rows in zip(facts.shards, found, strict=True)]
    facts.lengths = dict(lengths)
    facts.skipping = set(skipping)
    facts.versions = {key: StoredVersion(*version) for key, version in dict(*more).items()}
    facts.shards_cut, facts.passes_cut = shards_cut, passes_cut
    return facts


class Checkpoint(NamedTuple):
    """The state of a reading service."""

    signature: Signature  # what it belongs to
    epoch: int  # how many epochs had begun
    in_epoch: bool  # whether the last one is still running
    generator: bytes  # the seed generator at the start of that epoch
    stream_seeds: Seeds | None  # those of the epoch in which the streams began; None before the first
    streams: Any  # their positions; None if the next epoch starts them anew

    def dump(self) -> bytes:
        """Returns the state as bytes."""
        return zlib.compress(pickle.dumps(tuple(self), pickle.HIGHEST_PROTOCOL))

    @classmethod
    def load(cls, state: bytes) -> Checkpoint:
        """Reverses `dump`; raises a ValueError if the bytes are not such a state."""
        try:
            return cls(*pickle.loads(zlib.decompress(state)))
        except Exception as error:
            raise ValueError(f"not a state of WorkersReadingService: {type(error).__name__}: {error}") from error


def pack_runs(end: DataPipe, runs: Sequence[Any], graph: Any, *, in_epoch: bool) -> Any:
    """Packs the positions of the `runs` of a service's graph; None if the next epoch starts them anew."""
    continues = any(run.streams.continues for run in runs)
    if (in_epoch or continues) and len(runs) > 1:
        raise RuntimeError(
            f"a state cannot be taken of {len(runs)} sets of workers that are joined in the main process: join their "
            "streams in the workers, with one .join_workers() after all of them"
        )
    if any(has_epoch(end, run) for run in runs):
        raise RuntimeError(
            "a state cannot be taken with .wds_epoch() after .join_workers(): put it before, where it still counts the "
            "items of all workers"
        )
    if not in_epoch and not continues:
        return None
    taken = taken_by(end, runs[0]) if in_epoch else 0
    runs[0].wait_for_facts()
    return pack_streams(graph, runs[0].streams, taken)


def pack_streams(branch: IterDataPipe[Any], streams: Streams, taken: int) -> Any:
    """Packs the positions of streams after `taken` items of the epoch; raises a RuntimeError if they are unknown."""
    chain = find_chain(branch)
    if len(chain.epochs) > 1:
        raise RuntimeError("a state cannot be taken of a graph with several .wds_epoch(). Use one")
    if not all(facts.passes for facts in streams.facts):
        raise RuntimeError(
            "a state between epochs cannot be taken: a stage after .wds_epoch() did not take all items of the epoch, "
            "and how many it took is unknown. Put .wds_epoch() after that stage"
        )
    counts, order = streams.turns.at(taken)
    before, behind = chain.ratios
    told = zip(streams.facts, counts, strict=True)
    return counts, order, [pack_facts(facts, count * behind, before, len(counts)) for facts, count in told]


def unpack_streams(branch: IterDataPipe[Any], packed: Any, stream_seeds: Seeds, epoch: int) -> Streams:
    """Reverses `pack_streams`, and logs whether items will be made again; `epoch` is the number to log."""
    counts, order, facts = packed
    chain = find_chain(branch)
    facts = [unpack_facts(one) for one in facts]
    skipping = sorted(set().union(*(one.skipping for one in facts)))
    obstacle = chain.obstacle
    if obstacle is None and skipping:
        obstacle = f"{' and '.join(skipping)} dropped items"
    if chain.private:
        logger.warning(
            "functions of %s have random generators of their own, whose states are not kept: their results may differ "
            "from here on. Draw from the global generators of random, numpy or torch instead",
            " and ".join(chain.private),
        )
    place = f"resuming at item {sum(counts):,} of epoch {epoch}"
    if obstacle is None:
        logger.info("%s: the items before it are skipped", place)
    elif any(counts):
        logger.warning("%s: the items before it are made again and dropped, because %s", place, obstacle)
    streams = Streams(len(counts), facts, continues=bool(chain.epochs))
    streams.turns, streams.restart = Turns(counts, order), (stream_seeds, obstacle is None)
    return streams


def taken_by(end: DataPipe, front: DataPipe) -> int:
    """Returns how many items of `front` went into those that `end` delivered; raises a RuntimeError if unknown."""
    taken: int = end._number_of_samples_yielded
    ((pipe, sources),) = traverse_dps(end).values()
    while pipe is not front:
        known = is_one_to_one(pipe) or is_torchdata(pipe, "FullSync")
        if type(pipe) is Batcher:
            taken *= pipe.batch_size
        elif len(sources) != 1 or vars(pipe).get("skipped") or not known:
            raise RuntimeError(
                f"a state in the middle of an epoch cannot be taken: {short_name(pipe)}, which runs in the main "
                "process, may hold items that it has not delivered, or drop some. Run it in the workers (before "
                ".join_workers()), or take the state between epochs"
            )
        elif has_functions(pipe):
            warn_once(
                f"main {short_name(pipe)}",
                f"a function of {short_name(pipe)} runs in the main process: states of the loader do not cover its "
                "random draws. Run it in the workers, before .join_workers()",
            )
        ((pipe, sources),) = sources.values()
    return taken


def has_epoch(end: Any, front: Any) -> bool:
    """Returns whether a ``wds_epoch`` follows the workers, in the main process."""
    above = set(map(id, upstream(front)))
    return any(getattr(type(pipe), "cuts_epochs", False) and id(pipe) not in above for pipe in upstream(end))
