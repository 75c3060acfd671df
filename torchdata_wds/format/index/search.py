"""Finds the indexes of listed shards: beside each, in a folder, among those kept for this user, or by a scan."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote

from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.index import ShardIndex, shard_name
from torchdata_wds.format.index.columns import Columns, ShardColumns, pack
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.foreign import dali_name, energon_name, foreign_urls, load_foreign
from torchdata_wds.format.index.kept import KeptIndexes
from torchdata_wds.format.index.scan import scan_shard
from torchdata_wds.format.index.sidecars import INDEX_SUFFIX, index_in_folder, index_urls
from torchdata_wds.handlers import warn_once, warn_rarely
from torchdata_wds.storage import ByteStream, StorageOptions, mask_url
from torchdata_wds.storage.byte_streams import StoredVersion, interrupt
from torchdata_wds.storage.cache.locked_files import ShardFacts
from torchdata_wds.storage.cache.names import digest_of, origin_of, unsigned
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.ranges import find_version
from torchdata_wds.storage.urls import local_path

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Keys = Literal["first_dot", "last_dot"]
_THREADS = 16
_PATIENCE = 1.0  # seconds
_SCANS = 1  # a number to raise when scans find other samples than before, which makes all that is kept void
_CURE = "Make it again with index_shard or `wds index`"


class Wanted(NamedTuple):
    """What is searched for, and where."""

    keys: Keys  # how names are split
    options: StorageOptions
    scans: bool  # whether shards without an index are scanned; else they are an error
    folder: str | None = None  # of indexes named after their shards
    is_beside: bool = True  # whether to look beside the shards, before that


class _Scans:
    """The streams of shards that threads scan, to end all of them when one fails or the user presses Ctrl-C."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[ByteStream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_stopped = False

    def add(self, stream: ByteStream) -> None:
        """Notes an open stream."""
        with self._lock:
            self._streams.add(stream)
            if self._is_stopped:
                raise ShardOpenError("another shard has failed")  # nobody waits for this

    def stop(self) -> None:
        """Makes all reads end soon."""
        with self._lock:
            self._is_stopped = True
            streams = list(self._streams)
        for stream in streams:
            interrupt(stream)


class _Shard(NamedTuple):
    """A shard as it is now, and the place of its index."""

    url: str
    is_local: bool
    version: StoredVersion | None  # None for the output of a command
    name: str  # a digest of where it is, which version, and how names are split
    places: tuple[str, ...]  # where its index may lie
    found: StoredVersion | None  # which index lies at the only place left; None if that was not looked for
    target: str | None  # where the index is written if it is made


class _Found(NamedTuple):
    """The index of a shard, and what was done for it."""

    columns: ShardColumns
    is_scanned: bool = False
    was_stale: bool = False  # whether there is an index of another version of the shard
    is_saved: bool = False  # whether the index was written to the folder


def search_indexes(urls: Sequence[str], wanted: Wanted) -> DatasetIndex:
    """Returns the index of shards, and keeps it packed for the next time, under what it depends on.

    Raises:
        ShardListError: if a shard has no index, and none is to be made.
        ShardOpenError: if a shard is missing.
        ShardFormatError: if a shard that is scanned, or an index that must be used, is damaged or does not fit.
    """
    listed = sorted(set(urls))
    numbers = {url: number for number, url in enumerate(listed)}
    chosen = [numbers[url] for url in urls]
    are_local = [resolve(url, wanted.options).is_local for url in listed]
    names = Counter(map(shard_name, listed))
    unique = frozenset(name for name, count in names.items() if count == 1)
    look = partial(_look, wanted, unique)
    shards = _each(look, list(zip(listed, are_local, strict=True)), are_local)
    kept = KeptIndexes.of_user()
    if not shards or any(shard.version is None for shard in shards):
        kept.folder = None  # nothing says whether a command's output is still the same
    name = _list_name(wanted, shards)
    if (found := kept.load_list(name, urls, chosen)) is not None:
        return found
    scans = _Scans()
    with kept.locked(name):
        if (found := kept.load_list(name, urls, chosen)) is not None:  # of the process that had the lock
            return found
        start = time.monotonic()
        made = _each(partial(_find, wanted, kept, scans), shards, are_local, scans.stop)
        if any(one.is_saved for one in made):  # the next time, these indexes are found in the folder
            again = zip(shards, made, strict=True)
            name = _list_name(wanted, [look((old.url, old.is_local)) if new.is_saved else old for old, new in again])
        image = pack(Columns.of(wanted.keys, [one.columns._replace(url=shard_name(one.columns.url)) for one in made]))
        found = kept.keep_list(name, image, urls, chosen)
    _report(made, time.monotonic() - start, kept, wanted.folder)
    return found


def _list_name(wanted: Wanted, shards: Sequence[_Shard]) -> str:
    """Returns the name of a kept list: a digest of the shards, their versions, and the indexes that it is made of."""
    parts = [
        (shard_name(shard.url), shard.name, shard.found and (digest_of(shard.places[0]), shard.found))
        for shard in shards
    ]
    return _digest([wanted.scans, wanted.folder and digest_of(wanted.folder), *parts])


def _each(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    are_local: Sequence[bool],
    stop: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Does some work for each shard: for remote ones in threads, which `stop` ends; for local ones in this thread."""
    remote = [place for place, is_local in enumerate(are_local) if not is_local]
    if not remote:
        return list(map(work, items))
    pool = ThreadPoolExecutor(min(_THREADS, len(remote)))
    running: dict[int, Future[Result]] = {}
    try:
        running.update((place, pool.submit(work, items[place])) for place in remote)
        results = {place: work(item) for place, item in enumerate(items) if place not in running}
        done, _ = wait(running.values(), return_when=FIRST_EXCEPTION)
        results.update((place, future.result()) for place, future in running.items() if future in done)
        return [results[place] for place in range(len(items))]
    except BaseException:
        stop()
        pool.shutdown(wait=False, cancel_futures=True)
        wait(running.values(), _PATIENCE)  # a thread may wait for an answer, which nothing ends
        raise
    finally:
        pool.shutdown(wait=False)


def _look(wanted: Wanted, unique: frozenset[str], listed: tuple[str, bool]) -> _Shard:
    """Finds out which version of a shard there is, and where its index is."""
    url, is_local = listed
    version = find_version(url, storage_options=wanted.options)
    name = _digest([wanted.keys, digest_of(unsigned(origin_of(url, wanted.options))), version])
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
                return _Shard(url, is_local, version, name, (place,), found, target)
        places = []
    return _Shard(url, is_local, version, name, tuple(places), None, target)


def _version_of(place: str, options: StorageOptions) -> StoredVersion | None:
    """Returns which index lies at a place; None if none does."""
    resolved = resolve(place, options)
    if resolved.is_local and not os.path.lexists(local_path(resolved.url)):
        return None
    try:
        return find_version(place, storage_options=options)
    except ShardOpenError:
        return None


def _find(wanted: Wanted, kept: KeptIndexes, scans: _Scans, shard: _Shard) -> _Found:
    """Returns the index of a shard: that beside it or in the folder, else that kept, else by a scan."""
    was_stale = False
    # What is kept lacks the names and sizes of members, so an index for the folder cannot be made of it.
    may_be_kept = wanted.scans and shard.target is None
    if may_be_kept and not shard.is_local and (columns := kept.load_shard(shard.name, shard.url)) is not None:
        return _Found(columns)
    try:
        if (columns := _read(wanted, shard)) is not None:
            return _Found(columns)
    except ChangedShardError:
        if not wanted.scans:
            raise
        was_stale = True
    except (ShardFormatError, ShardOpenError) as error:
        if not wanted.scans:
            raise
        warn_rarely("not used", error)
    if not wanted.scans:
        shown = mask_url(shard.url)
        where = "beside it" if wanted.is_beside else f"in {mask_url(wanted.folder or '')}"
        if wanted.folder is not None and shard.target is None:
            where += ", where shards of one base name could not be told apart"
        raise ShardListError(
            f"shard {shown} has no index {where}. Make one with index_shard or `wds index`, or pass index='auto', "
            "which scans such shards once",
            shard=shown,
        )
    if may_be_kept and (columns := kept.load_shard(shard.name, shard.url)) is not None:
        return _Found(columns, was_stale=was_stale)
    made = scan_shard(shard.url, wanted.keys, wanted.options, scans.add)
    columns = ShardColumns.of(shard.url, made)
    if columns.version is not None and shard.version is not None and shard.version.difference(columns.version):
        shown = mask_url(shard.url)
        raise ChangedShardError(f"shard {shown} was changed while its index was made. Try again", shard=shown)
    is_saved = shard.target is not None and _save(made, shard.target, wanted.options)
    if not is_saved:
        kept.keep_shard(shard.name, columns)
    return _Found(columns, is_scanned=True, was_stale=was_stale, is_saved=is_saved)


def _save(index: ShardIndex, url: str, options: StorageOptions) -> bool:
    """Writes an index to the user's folder of indexes, which is made if it is missing; returns whether that worked."""
    place = resolve(url, options)
    try:
        if place.is_local:
            Path(local_path(place.url)).parent.mkdir(parents=True, exist_ok=True)
        index.save(url, storage_options=options)
    except OSError as error:  # a ShardOpenError is one
        folder = mask_url(url.rpartition("/")[0])
        warn_once(f"index folder {folder}", f"indexes cannot be written to {folder}: {error}. They are kept elsewhere")
        return False
    return True


def _read(wanted: Wanted, shard: _Shard) -> ShardColumns | None:
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
    wanted = Wanted(keys, options or StorageOptions(), scans=True)
    try:
        return _read(wanted, _look(wanted, frozenset(), (url, resolve(url, wanted.options).is_local)))
    except (ShardFormatError, ShardOpenError):
        return None


def _read_foreign(place: str, shard: _Shard, wanted: Wanted) -> ShardColumns:
    """Reads an index of another program, which splits names at the first dot."""
    columns = load_foreign(place, shard.url, version=shard.version, storage_options=wanted.options)
    if columns.keys != wanted.keys:
        shown, name = mask_url(place), mask_url(shard.url)
        what = f"index {shown} of shard {name} splits names at keys={columns.keys!r}, expected {wanted.keys!r}"
        raise ShardFormatError(f"{what}. Make another one with index_shard", shard=name, kind="index")
    return columns


def _fit(index: ShardIndex, place: str, shard: _Shard, wanted: Wanted) -> None:
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


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.blake2b(repr((_SCANS, parts)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _report(made: Sequence[_Found], seconds: float, kept: KeptIndexes, folder: str | None) -> None:
    scanned = [one.columns for one in made if one.is_scanned]
    if not scanned:
        return
    samples = sum(len(columns.offsets) - 1 for columns in scanned)
    stale = sum(one.was_stale for one in made)
    notes = f", {stale:,} of which had an index of another version" if stale else ""
    where = "memory" if kept.folder is None else str(kept.folder)
    if folder is not None and any(one.is_saved for one in made):
        where = mask_url(folder)
    logger.info(
        "scanned %s of %s shards for their index%s: %s samples in %.1f s; it is kept in %s",
        *(f"{len(scanned):,}", f"{len(made):,}", notes, f"{samples:,}", seconds, where),
    )
