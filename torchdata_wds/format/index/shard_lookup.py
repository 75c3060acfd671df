"""The index of one shard: where it lies, and whether it is of the present version of the shard."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardOpenError
from torchdata_wds.format.index import ShardIndex, shard_name
from torchdata_wds.format.index.columns import ShardColumns
from torchdata_wds.format.index.foreign import dali_name, energon_name, foreign_urls, load_foreign
from torchdata_wds.format.index.sidecars import INDEX_SUFFIX, index_in_folder, index_urls
from torchdata_wds.handlers import warn_once
from torchdata_wds.storage import StorageOptions, mask_url
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.cache.locked_files import ShardFacts
from torchdata_wds.storage.cache.names import digest_of, origin_of, unsigned
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.ranges import find_version
from torchdata_wds.storage.urls import local_path

Keys = Literal["first_dot", "last_dot"]
_CURE = "Make it again with index_shard or `wds index`"
_SCANS = 1  # a number to raise when scans find other samples than before, which makes all that is kept void


class Wanted(NamedTuple):
    """What is searched for, and where."""

    keys: Keys  # how names are split
    options: StorageOptions
    scans: bool  # whether shards without an index are scanned; else they are an error
    folder: str | None = None  # of indexes named after their shards
    is_beside: bool = True  # whether to look beside the shards, before that


class ListedShard(NamedTuple):
    """A shard as it is now, and the place of its index."""

    url: str
    is_local: bool
    version: StoredVersion | None  # None for the output of a command
    name: str  # a digest of where it is, which version, and how names are split
    places: tuple[str, ...]  # where its index may lie
    found: StoredVersion | None  # which index lies at the only place left; None if that was not looked for
    target: str | None  # where the index is written if it is made


def look_at(wanted: Wanted, unique: frozenset[str], listed: tuple[str, bool]) -> ListedShard:
    """Finds out which version of a shard there is, and where its index is."""
    url, is_local = listed
    version = find_version(url, storage_options=wanted.options)
    name = combined_digest([wanted.keys, digest_of(unsigned(origin_of(url, wanted.options))), version])
    target = None
    places: list[str] = []
    others: list[str] = []  # those of other programs, which do not say of which version they are
    with suppress(ValueError):  # nothing lies beside the output of a command
        if wanted.is_beside:
            places += index_urls(url)
            others += foreign_urls(url)
        if wanted.folder is not None and shard_name(url) in unique:
            places.append(target := index_in_folder(url, wanted.folder))
            others += [index_in_folder(url, wanted.folder, rename) for rename in (energon_name, dali_name)]
    places += [] if wanted.scans else others
    if is_local or not wanted.scans:
        # Which index there is, is part of what the kept list depends on. For a remote shard that costs a request, which
        # pays only where the index must be used: what was scanned of this version stays right.
        for place in places:
            if (found := _version_of(place, wanted.options)) is not None:
                return ListedShard(url, is_local, version, name, (place,), found, target)
        places = []
    return ListedShard(url, is_local, version, name, tuple(places), None, target)


def _version_of(place: str, options: StorageOptions) -> StoredVersion | None:
    """Returns which index lies at a place; None if none does."""
    resolved = resolve(place, options)
    if resolved.is_local and not os.path.lexists(local_path(resolved.url)):
        return None
    try:
        return find_version(place, storage_options=options)
    except ShardOpenError:
        return None


def read_index(wanted: Wanted, shard: ListedShard) -> ShardColumns | None:
    """Reads the index of a shard and checks that it fits; returns None if there is none."""
    for place in shard.places:
        try:
            if not shard_name(place).endswith(INDEX_SUFFIX):
                return _read_foreign(place, shard, wanted)
            index = ShardIndex.load(place, storage_options=wanted.options)
        except ShardOpenError:
            if shard.found is not None:
                raise
            continue
        _fit(index, place, shard, wanted)
        return ShardColumns.of(shard.url, index)
    return None


def read_existing(url: str, keys: Keys, options: StorageOptions | None = None) -> ShardColumns | None:
    """Returns the index that lies beside a shard; None if there is none, or it does not fit the shard."""
    with suppress(ShardFormatError):
        index = existing_index(url, keys, options)
        return None if index is None else ShardColumns.of(url, index)
    return None


def existing_index(url: str, keys: Keys, options: StorageOptions | None = None) -> ShardIndex | None:
    """Returns the index beside a shard as `read_existing` does, with its rows, which are not checked yet."""
    wanted = Wanted(keys, options or StorageOptions(), scans=True)
    with suppress(ShardFormatError, ShardOpenError):
        shard = look_at(wanted, frozenset(), (url, resolve(url, wanted.options).is_local))
        for place in shard.places:
            with suppress(ShardOpenError):
                index = ShardIndex.load(place, storage_options=wanted.options)
                _fit(index, place, shard, wanted)
                return index
    return None


def _read_foreign(place: str, shard: ListedShard, wanted: Wanted) -> ShardColumns:
    """Reads an index of another program, which splits names at the first dot."""
    columns = load_foreign(place, shard.url, version=shard.version, storage_options=wanted.options)
    if columns.keys != wanted.keys:
        shown, name = mask_url(place), mask_url(shard.url)
        what = f"index {shown} of shard {name} splits names at keys={columns.keys!r}, expected {wanted.keys!r}"
        raise ShardFormatError(f"{what}. Make another one with index_shard", shard=name, kind="index")
    return columns


def _fit(index: ShardIndex, place: str, shard: ListedShard, wanted: Wanted) -> None:
    """Checks that an index is of a shard and of its present version, and notes that version in its header."""
    header, version, shown = index.header, shard.version, mask_url(shard.url)

    def unfit(error: type[ShardFormatError], what: str) -> ShardFormatError:
        message = f"index {mask_url(place)} cannot be used for shard {shown}: {what}. {_CURE}"
        return error(message, shard=shown, kind="index")

    if unquote(header.shard) != unquote(shard_name(shard.url)):  # a web address may have x%20y.tar for x y.tar
        raise unfit(ShardFormatError, f"it is the index of {header.shard!r:.99}")
    if header.keys != wanted.keys:
        raise unfit(ShardFormatError, f"it was made with keys={header.keys!r}, expected {wanted.keys!r}")
    if version is None:
        return
    if header.bytes is not None:
        then = StoredVersion(header.bytes, header.tag or "")
        if difference := then.difference(version):
            # Under "auto", a scan of the headers says as much as a hash of all contents, and costs less.
            if wanted.scans or not has_digest(shard.url, then, header.sha256, wanted.options):
                raise unfit(ChangedShardError, f"it is of another version of the shard, which has {difference}")
            warn_once(
                "copied shards",
                f"shard {shown} has another modification time than its index says, as after a copy; its SHA-256 is "
                "that in the index. Run `wds index` on such shards, or each first use hashes them",
            )
    index.header = header._replace(bytes=version.size, tag=version.tag or None)


def has_digest(url: str, then: StoredVersion, sha256: str | None, options: StorageOptions) -> bool:
    """Returns whether a local shard has the size and digest that its index states: it was only copied or touched."""
    place = resolve(url, options)
    if not place.is_local or sha256 is None or (path := Path(local_path(place.url))).stat().st_size != then.size:
        return False
    with path.open("rb") as file:
        return not ShardFacts(then.size, sha256).difference(file.fileno())


def combined_digest(parts: Sequence[Any]) -> str:
    """Returns a digest of what a kept index depends on, 32 hexadecimal digits."""
    return hashlib.blake2b(repr((_SCANS, parts)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
