"""Packs the facts about a stream into a few plain values, and unpacks them again."""

from __future__ import annotations

import base64
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torchdata_wds.pipes.resume_facts import Facts, PassBegun, ShardBegun
from torchdata_wds.storage.byte_streams import StoredVersion

_MOST_BYTES = 6000  # about how many bytes the facts about all workers take in a state, before compression

#: How many shards' versions (size and ETag) a state keeps over all workers, at least one each.
_MOST_VERSIONS = 64
_SHARD = struct.Struct("<IQQI")
_PLACE = struct.Struct("<QQ")


def pack_facts(facts: Facts, item: int, ratio: int, workers: int) -> dict[str, Any]:
    """Packs the facts about a stream that resumes at `item`, of `ratio` samples each; thins out those far from it."""
    # Resuming needs the last shard that began before the position, and the two after it to know that none lies between.
    # Earlier ones only serve samples in a shuffle buffer: where one is left out, reading starts at a shard before it.
    # So each of 4 workers keeps at most about 62 shards of 24 bytes, even after reading 100,000.
    most = _MOST_BYTES // workers // _SHARD.size
    width = max((len(shard.places) for shard in _thinned(facts.shards, len(facts.shards), most)), default=0)
    room = max(4, _MOST_BYTES // workers // (_SHARD.size + width * _PLACE.size))
    place = bisect_right(facts.passes, item, key=lambda begun: begun.item)
    passes = _thinned(facts.passes[: place + 2], place, max(2, room // 4))
    known = {begun.passing: None for begun in passes}
    begun = facts.passes[max(0, place - 1)]
    shards = list(chain.from_iterable(_shards_of(facts, number) for number in known))
    place = bisect_right(shards, (begun.passing, (item - begun.item) * ratio), key=lambda shard: shard[:2])
    kept = _thinned(shards[: place + 2], place, room)
    # The stream may resume in any of the last ones before the position.
    resumable = [(shard.passing, shard.ordinal) for shard in shards[:place][-max(1, _MOST_VERSIONS // workers) :]]
    return {
        "passes": [list(begun) for begun in passes],
        "shards": _text(b"".join(_SHARD.pack(*shard[:4]) for shard in kept)),
        "lengths": [[number, length] for number, length in facts.lengths.items() if number in known],
        "skipping": sorted(facts.skipping),
        "shards_cut": facts.shards_cut or len(shards) > place + 2,
        "passes_cut": facts.passes_cut or passes[-1] != facts.passes[-1],
        "places": [_text(b"".join(_PLACE.pack(*place) for place in shard.places)) for shard in kept] if width else [],
        "versions": [[*key, *facts.versions[key]] for key in resumable if key in facts.versions],
    }


def _shards_of(facts: Facts, passing: int) -> list[ShardBegun]:
    first = bisect_left(facts.shards, passing, key=lambda shard: shard.passing)
    return facts.shards[first : bisect_right(facts.shards, passing, key=lambda shard: shard.passing)]


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


def unpack_facts(packed: dict[str, Any]) -> Facts:
    """Reverses `pack_facts`."""
    facts = Facts(PassBegun(*begun) for begun in packed["passes"])
    facts.shards = [ShardBegun(*shard) for shard in _SHARD.iter_unpack(base64.b64decode(packed["shards"]))]
    if packed["places"]:
        found = [tuple(_PLACE.iter_unpack(base64.b64decode(places))) for places in packed["places"]]
        facts.shards = [shard._replace(places=rows) for shard, rows in zip(facts.shards, found, strict=True)]
    facts.lengths = dict(packed["lengths"])
    facts.skipping = set(packed["skipping"])
    facts.versions = {(passing, ordinal): StoredVersion(*more) for passing, ordinal, *more in packed["versions"]}
    facts.shards_cut, facts.passes_cut = packed["shards_cut"], packed["passes_cut"]
    return facts


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
