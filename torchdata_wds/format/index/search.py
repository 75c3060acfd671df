"""Finds the indexes of listed shards: where `shard_lookup` finds them, among those kept for this user, or by a scan."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.index import ShardIndex, shard_name
from torchdata_wds.format.index.columns import Columns, ShardColumns, pack
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.kept import KeptIndexes
from torchdata_wds.format.index.scan import scan_shard
from torchdata_wds.format.index.shard_lookup import ListedShard, Wanted, combined_digest, look_at, read_index
from torchdata_wds.handlers import warn_once, warn_rarely
from torchdata_wds.storage import ByteStream, StorageOptions, mask_url
from torchdata_wds.storage.byte_streams import interrupt
from torchdata_wds.storage.cache.names import digest_of
from torchdata_wds.storage.meters import reads_ahead
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.urls import local_path

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
_THREADS = 16
_PATIENCE = 1.0  # seconds


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
    look = partial(look_at, wanted, unique)
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


def _list_name(wanted: Wanted, shards: Sequence[ListedShard]) -> str:
    """Returns the name of a kept list: a digest of the shards, their versions, and the indexes that it is made of."""
    parts = [
        (shard_name(shard.url), shard.name, shard.found and (digest_of(shard.places[0]), shard.found))
        for shard in shards
    ]
    return combined_digest([wanted.scans, wanted.folder and digest_of(wanted.folder), *parts])


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
        running.update((place, pool.submit(reads_ahead()(work), items[place])) for place in remote)
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


def _find(wanted: Wanted, kept: KeptIndexes, scans: _Scans, shard: ListedShard) -> _Found:
    """Returns the index of a shard: that beside it or in the folder, else that kept, else by a scan."""
    was_stale = False
    # What is kept lacks the names and sizes of members, so an index for the folder cannot be made of it.
    may_be_kept = wanted.scans and shard.target is None
    if may_be_kept and not shard.is_local and (columns := kept.load_shard(shard.name, shard.url)) is not None:
        return _Found(columns)
    try:
        if (columns := read_index(wanted, shard)) is not None:
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
