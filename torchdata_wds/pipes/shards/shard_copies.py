"""Shards with a local copy, as ``cache_shards`` yields them, and the check of a copy."""

import os
from pathlib import Path
from typing import NamedTuple

from torchdata_wds import storage
from torchdata_wds.format.headers import BLOCK, begins_a_tar
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar import check_whole
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.locked_files import ShardFacts
from torchdata_wds.storage.cache.names import names_a_tar
from torchdata_wds.storage.places import place_of
from torchdata_wds.storage.sources.local import open_local


class CachedShard(NamedTuple):
    """A shard and the path of its local copy, as ``.cache_shards()`` yields them to ``.load_wds_shards()``.

    Example:
        >>> CachedShard("https://me:secret@host/x.tar", "/cache/x.tar")
        CachedShard(url='https://me:***@host/x.tar', path='/cache/x.tar', part=None)
    """

    url: str  # as it was listed
    path: str  # the copy's absolute path, whether or not it exists yet
    part: ShardSlice | None = None  # the slice to read, if the item was a slice
    cache: ShardCache | None = None  # makes the copy; None reads the copy if it exists, else the URL
    facts: ShardFacts | None = None  # the size and digest from an index, which the copy must have

    def open(self, offset: int = 0, *, lingers: bool = False) -> storage.ByteStream:
        """Opens the decompressed shard at a byte offset, from its local copy, which it makes if missing.

        The copy of a shard that was read to its end is kept before the stream is closed; if it `lingers`, a moment
        later, by a thread. Raises ShardOpenError, or ShardFormatError if the copy disagrees with the index even after a
        second download.
        """
        if self.cache is None:
            there = os.path.exists(self.path)  # noqa: PTH110 - a str
            return storage.open_shard(self.path if there else self.url, offset=offset)
        is_part = self.part is not None
        return self.cache.open(self.url, self.path, offset, finish=is_part, lingers=lingers, facts=self.facts)

    def fetch(self) -> Path:
        """Returns the path of the copy, made if missing; raises what `open` does, or CacheError if it is not kept."""
        return Path(self.path) if self.cache is None else self.cache.fetch(self.url, self.path, self.facts)

    def __repr__(self) -> str:
        part = None if self.part is None else self.part._replace(url=storage.mask_url(self.part.url))
        return f"CachedShard(url={storage.mask_url(self.url)!r}, path={self.path!r}, part={part!r})"


def check_copy(path: str, url: str) -> None:
    """Raises ShardFormatError unless a file is complete: by its end marker if it is a tar, else by its checksum."""
    place = place_of(path, storage.StorageOptions())
    with open_local(place) as stream:
        is_tar = names_a_tar(url) or begins_a_tar(stream.read(BLOCK))
        while not is_tar and stream.read(1 << 20):
            pass
    if is_tar:
        with open_local(place) as stream:
            check_whole(stream, storage.mask_url(url))
