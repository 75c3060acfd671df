"""Byte ranges of remote shards from their copies in a cache folder."""

import os

from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.locked_files import ShardFacts, tag_of
from torchdata_wds.storage.cache.names import copy_name, origin_of
from torchdata_wds.storage.places import Place, StorageOptions
from torchdata_wds.storage.ranges.local import LocalRanges


def cache_of(given: object, options: StorageOptions) -> ShardCache | None:
    """Returns the cache that ``cache=`` chooses: a folder, a `ShardCache`, or None."""
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)) and os.fspath(given):
        folder = os.path.abspath(os.path.expanduser(os.fspath(given)))  # noqa: PTH100, PTH111 - a str
        return ShardCache(str(folder), while_reading=False, storage_options=options)
    if isinstance(given, ShardCache) and given.is_named_by_digest:
        return given
    raise TypeError(f"cache must be a folder (str or Path), or None for no copies, not {given!r}")


def open_copy(cache: ShardCache, place: Place, version: StoredVersion | None) -> LocalRanges | None:
    """Opens the copy of a shard, which is made if it is missing or of another version; None if it cannot be kept."""
    path = copy_path(cache, place.name)
    facts = None if version is None else ShardFacts(version.size, tag=version.tag)
    file = cache.make(place.name, path, facts)
    if file is None:
        return None
    try:
        known = StoredVersion(os.fstat(file.fileno()).st_size, tag_of(file.fileno()))
        return LocalRanges(path, os.dup(file.fileno()), known)
    finally:
        file.leave()  # the duplicate keeps the lock that prevents eviction


def copy_path(cache: ShardCache, url: str) -> str:
    """Returns the path of a shard's copy, whether or not it exists yet."""
    return os.path.join(cache.folder, copy_name(url, None, origin_of(url, cache.storage_options)))  # noqa: PTH118
