"""What the index of a data set says about each shard as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

from torchdata_wds.format.index.packed import COMPRESSED, SPECIAL, Array, PackedIndex
from torchdata_wds.storage.byte_streams import StoredVersion


class ShardEntry(NamedTuple):
    """What the index of a data set says about one shard.

    Attributes:
        url: The shard, as it was listed.
        samples: How many it has.
        tar_bytes: Size of the archive in bytes, decompressed.
        version: Which version of the shard was indexed, as far as that is known.
        compressed: Whether it is stored compressed.
        special: Whether it has hard links or global headers, so that a sample's bytes alone do not say what is in it.
    """

    url: str
    samples: int
    tar_bytes: int
    version: StoredVersion | None
    compressed: bool = False
    special: bool = False


class ShardEntries(Sequence[ShardEntry]):
    """The shards of an index, each made when it is asked for: a data set may have a million."""

    def __init__(
        self, packed: PackedIndex, chosen: Array | None, urls: Sequence[str] | None, moved: Array | None
    ) -> None:
        self._packed, self._chosen, self._urls, self._moved = packed, chosen, urls, moved
        self._count = len(packed.bounds) - 1 if chosen is None else len(chosen)
        self._made: dict[int, ShardEntry] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...

    @overload
    def __getitem__(self, number: slice) -> list[ShardEntry]: ...

    def __getitem__(self, number: int | slice) -> ShardEntry | list[ShardEntry]:
        if isinstance(number, slice):
            return [self[place] for place in range(self._count)[number]]
        entry = self._made.get(number)
        return self._make(range(self._count)[number]) if entry is None else entry

    def __repr__(self) -> str:
        return f"<{self._count:,} shards>"

    def _make(self, number: int) -> ShardEntry:
        packed = self._packed
        base = number if self._chosen is None else int(self._chosen[number])
        url = packed.url(base) if self._urls is None else self._urls[number]
        stored, flags = int(packed.stored[base]), int(packed.flags[base])
        tag = "" if self._moved is not None and self._moved[number] else packed.tag(base)
        entry = ShardEntry(
            url,
            int(packed.bounds[base + 1] - packed.bounds[base]),
            int(packed.tar_bytes[base]),
            None if stored < 0 else StoredVersion(stored, tag),
            bool(flags & COMPRESSED),
            bool(flags & SPECIAL),
        )
        return self._made.setdefault(number, entry)
