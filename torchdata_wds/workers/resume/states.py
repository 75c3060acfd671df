"""Where the streams of a set of workers are, packed into the few bytes of a state.

Whose turn it is, and how many items each worker has given, follow from how many were taken in all: with 3 workers,
after 7 items, worker 0 has given 3 and the others 2, and it is worker 1's turn.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from torchdata_wds.pipes.resume_facts import Facts, PassBegun, ShardBegun
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.workers.resume.stream import Point, Seeds


class Turns:
    """The turns of workers that are asked one after another until each has ended.

    Stages after them may be ahead of what is delivered, so the question is always how things stood some items ago.
    `counts` says how many items each worker had given before, `order` which workers have not ended, next one first.

    Example:
        >>> turns = Turns([0, 0], [0, 1])
        >>> turns.note_end(taken=3, worker=1)
        >>> turns.at(2), turns.at(5)
        (([1, 1], [0, 1]), ([4, 1], [0]))
    """

    def __init__(self, counts: Sequence[int], order: Sequence[int]) -> None:
        self.counts = list(counts)
        self.order = list(order)
        self._ends: list[tuple[int, int]] = []

    def note_end(self, taken: int, worker: int) -> None:
        """Notes that a worker had no item when it was asked, after `taken` items in all."""
        self._ends.append((taken, worker))

    def at(self, taken: int) -> tuple[list[int], list[int]]:
        """Returns how many items each worker had given when `taken` were taken in all, and whose turns came then."""
        counts, order = list(self.counts), deque(self.order)
        done = 0
        for ended, worker in list(self._ends):
            if ended > taken:
                break
            _take(counts, order, ended - done)
            done = ended
            order.remove(worker)
        _take(counts, order, taken - done)
        return counts, list(order)


def _take(counts: list[int], order: deque[int], number: int) -> None:
    if not order:
        return
    rounds, rest = divmod(number, len(order))
    for place, worker in enumerate(order):
        counts[worker] += rounds + (place < rest)
    order.rotate(-rest)


#: How many bytes the facts about all workers may take in a state, before they are compressed.
_MOST_BYTES = 6000

#: Of how many shards a state keeps the versions that their stores have told, over all workers if they are not more.
_MOST_VERSIONS = 64
_SHARD = struct.Struct("<IQQI")
_PLACE = struct.Struct("<QQ")


class Streams:
    """The streams of a set of workers in one epoch, as the main process knows them.

    Attributes:
        turns: Whose turn it is, and how many items each had given before.
        facts: What the graph of each has told.
        taken: How many items have been taken of all since this epoch began here.
        continues: Whether streams go on from epoch to epoch, by ``wds_epoch``.
        epoch: The number of the epoch, counted from 0.
    """

    def __init__(
        self, workers: int, *, turns: Turns | None = None, facts: list[Facts] | None = None, continues: bool = False
    ) -> None:
        self.turns = turns or Turns([0] * workers, range(workers))
        self.facts = [begun_facts() for _ in range(workers)] if facts is None else list(facts)
        self.taken = 0
        self.continues = continues
        self.epoch = 0
        self._restart: tuple[Seeds, bool] | None = None

    def restart(self, stream_seeds: Seeds, skips: bool) -> None:
        """Makes the streams begin where `turns` and `facts` say.

        `stream_seeds` are those of the epoch that the streams began with; with `skips`, the items before are not made
        again.
        """
        self._restart = stream_seeds, skips

    def points(self) -> list[Point | None]:
        """Returns where each worker's stream begins."""
        if self._restart is None:
            return [None] * len(self.facts)
        seeds, skips = self._restart
        return [Point(count, seeds, facts, skips) for count, facts in zip(self.turns.counts, self.facts, strict=True)]

    def next_epoch(self) -> Streams:
        """Returns where the streams are when the next epoch begins.

        Where a continuing stream stands after an early break, only its worker knows, and reports.
        """
        if not self.continues:
            return Streams(len(self.facts))
        for facts in self.facts:
            ended, facts.ended = facts.ended, None
            facts.passes = [] if ended is None else [PassBegun(ended.passing, -ended.taken)]
            facts.passes_cut = False
            facts.skips = []
        return Streams(len(self.facts), facts=self.facts, continues=True)


def begun_facts() -> Facts:
    """Returns what is known of a stream that begins."""
    facts = Facts()
    facts.passes.append(PassBegun(0, 0))
    return facts


def pack_facts(facts: Facts, item: int, ratio: int, workers: int) -> tuple[Any, ...]:
    """Packs facts about one worker's stream, leaving out beginnings of shards and passes that are hardly needed.

    The stream will go on with `item` of the epoch; `ratio` samples make an item.
    """
    width = max((len(shard.places) for shard in facts.shards), default=0)
    room = max(4, _MOST_BYTES // workers // (_SHARD.size + width * _PLACE.size))
    place = bisect_right(facts.passes, item, key=lambda begun: begun.item)
    passes = _thinned(facts.passes[: place + 2], place, max(2, room // 4))
    known = {begun.passing for begun in passes}
    begun = facts.passes[max(0, place - 1)]
    at = begun.passing, (item - begun.item) * ratio
    shards = [shard for shard in facts.shards if shard.passing in known]
    place = bisect_right(shards, at, key=lambda shard: shard[:2])
    kept = _thinned(shards[: place + 2], place, room)
    # The stream may go on with any of the last ones before the place.
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
    """Keeps the first item, those right before a place and all after it, and ever fewer of those farther away.

    With room for 16, the last 12 before the place stay, and of the earlier ones those 14, 18, 26 and 42 before it:
    resuming then starts a little too early at worst, and passes over a few shards.
    """
    place = max(0, here - max(1, most * 3 // 4))
    kept = list(items[place:])
    gap = 2
    while place > 0 and len(kept) < most:
        place = max(0, place - gap)
        kept.insert(0, items[place])
        gap *= 2
    return kept if place == 0 else [items[0], *kept]


def unpack_facts(packed: Sequence[Any]) -> Facts:
    """Undoes `pack_facts`."""
    passes, shards, lengths, skipping, shards_cut, passes_cut, places, *more = packed
    facts = Facts()
    facts.passes = [PassBegun(*begun) for begun in passes]
    facts.shards = [ShardBegun(*shard) for shard in _SHARD.iter_unpack(shards)]
    if places:
        found = [tuple(_PLACE.iter_unpack(packed)) for packed in places]
        facts.shards = [shard._replace(places=rows) for shard, rows in zip(facts.shards, found, strict=True)]
    facts.lengths = dict(lengths)
    facts.skipping = set(skipping)
    facts.versions = {key: StoredVersion(*version) for key, version in dict(*more).items()}
    facts.shards_cut, facts.passes_cut = shards_cut, passes_cut
    return facts
