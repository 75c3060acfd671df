"""Random access to the stored bytes of shards, wherever they are, and the versions of shards."""

import contextlib
import os
import weakref
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NoReturn, Self

from torchdata_wds.errors import WdsError
from torchdata_wds.storage.byte_streams import StoredVersion, naming
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.places import Place, StorageOptions, resolve
from torchdata_wds.storage.ranges.base import RangeReader, StaleError
from torchdata_wds.storage.ranges.copies import cache_of, copy_path, open_copy
from torchdata_wds.storage.ranges.local import LocalRanges, file_status
from torchdata_wds.storage.ranges.recent import Recent
from torchdata_wds.storage.sources.aistore import web_place
from torchdata_wds.storage.urls import AIS, STDIN, cannot_open, url_text

__all__ = ["ShardRanges", "find_version"]

_Url = str | os.PathLike[str]
_Options = Mapping[str, Mapping[str, Any]] | None
_TIMES = 20  # how often a shard is opened that is replaced meanwhile
_MOST_REMOTE = 4096  # shards whose clients and versions are kept; they take no file descriptor


def find_version(url: _Url, *, storage_options: _Options = None) -> StoredVersion | None:
    """Returns the version of a shard as its store reports it now; None if it reports none, as for a command.

    The tag of a local file is its modification time, ``mtime-<nanoseconds>``; that of a web server or store a strong
    ETag, or ``date-<Last-Modified>`` where a server has no ETag, or "". Raises ShardOpenError if the shard is missing.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("x.tar").write_bytes(bytes(10240))
        >>> find_version("x.tar")
        StoredVersion(size=10240, tag='mtime-...')
    """
    place = resolve(url, storage_options)
    if place.scheme in (STDIN, "pipe"):
        return None
    try:
        if place.is_local:
            status = file_status(place)
            return None if status is None else StoredVersion.of_file(status)
        return _reader_of(place).version()
    except WdsError as error:
        _raise_named(error, place)


class ShardRanges:
    """Reads ranges of the stored bytes of shards, and checks that each shard is the expected version.

    Local files are read by ``pread``, which costs a few microseconds more than the system call. Web servers and stores
    get one request for each range, on connections that are kept open. Threads may share an object and read in parallel;
    forked processes open their own files and connections; pickles hold none.

    Args:
        storage_options: As for `open_shard`, including rewriting rules.
        max_open: The most local files, copies included, that are kept open; the least recently used is closed first.
        cache: A folder, or a `ShardCache`, for copies of the shards that are not local: each is copied as a whole when
            it is first read, and the copy is read from then on. Copies of another version are made again.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("x.tar").write_bytes(b"0123456789")
        >>> with ShardRanges() as ranges:
        ...     ranges.read("x.tar", 2, 5, find_version("x.tar"))
        b'234'
    """

    def __init__(
        self,
        storage_options: _Options = None,
        *,
        max_open: int = 64,
        cache: str | os.PathLike[str] | ShardCache | None = None,
    ) -> None:
        if isinstance(max_open, bool) or not isinstance(max_open, int) or max_open < 1:
            raise ValueError(f"max_open must be an int of at least 1, found {max_open!r}")
        self.storage_options = StorageOptions(storage_options)
        self.max_open = max_open
        self.cache = cache_of(cache, self.storage_options)
        self._start_empty()

    def read(self, url: _Url, start: int, stop: int, version: StoredVersion | None = None) -> bytes:
        """Reads exactly the bytes from `start` up to `stop`, as stored: compressed shards are not decompressed.

        Raises ChangedShardError, a ShardFormatError, if the shard differs from `version` or ends before `stop`, and
        ShardOpenError if it cannot be read.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"a range must be 0 <= start <= stop, found {start:,} to {stop:,}")
        text = url if type(url) is str else url_text(url)
        reader = self._local.get(text) or self._remote.get(text)
        for remaining in reversed(range(_TIMES)):
            try:
                reader = reader or self._open(text, version)
                return reader.meter.read_range(reader.read, start, stop, version)
            except WdsError as error:
                # The next read opens the shard anew: it may be repaired by then.
                self._local.drop(text)
                self._remote.drop(text)
                if not (remaining and isinstance(error, StaleError)):
                    _raise_named(error, self._place(text), is_copy=reader is not None and reader.is_copy)
                reader = None
        raise AssertionError

    def is_local(self, url: _Url) -> bool:
        """Returns whether a shard is a local file itself, so that reading it needs no request and no copy."""
        return self._place(url).is_local

    def copy_path(self, url: _Url) -> str | None:
        """Returns the path of a shard's copy, whether or not it exists yet; None if it is read without a copy."""
        return None if self.cache is None or self.is_local(url) else copy_path(self.cache, url_text(url))

    def close(self) -> None:
        """Closes all shards; a later read opens them again."""
        self._local.clear()
        self._remote.clear()

    def _start_empty(self) -> None:
        """Begins without open shards: a new object, or a forked child, whose parent's threads may hold the locks."""
        self._local: Recent[LocalRanges] = Recent(self.max_open)
        self._remote: Recent[RangeReader] = Recent(_MOST_REMOTE)
        _all.add(self)

    def _place(self, url: _Url) -> Place:
        return resolve(url, self.storage_options)

    def _open(self, url: str, version: StoredVersion | None) -> RangeReader:
        """Opens a shard; if two threads open the same one, the later is kept."""
        place, file, begin = self._place(url), None, perf_counter()
        if place.is_local:
            file = LocalRanges.open(place)
        elif self.cache is not None and place.scheme != STDIN:
            file = open_copy(self.cache, place, version)
        if file is not None:
            file.meter.opened(0.0 if file.is_copy else perf_counter() - begin)  # downloads are counted as they read
            self._local.put(url, file)
            return file
        reader = _reader_of(place)
        reader.meter.opened(perf_counter() - begin)
        self._remote.put(url, reader)
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_local", "_remote")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()


_all: "weakref.WeakSet[ShardRanges]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for ranges in list(_all):
        ranges._start_empty()


os.register_at_fork(after_in_child=_forget_in_child)


def _reader_of(place: Place) -> RangeReader:
    """Returns the reader of a place that is not local."""
    if place.scheme in (STDIN, "pipe"):
        what = "standard input" if place.scheme == STDIN else "the output of a command"
        raise cannot_open(place.shown, f"{what} can only be read from its start to its end")
    if place.scheme in ("http", "https", AIS):
        from torchdata_wds.storage.ranges.http import HttpRanges  # which imports urllib3

        return HttpRanges(web_place(place) if place.scheme == AIS else place)
    from torchdata_wds.storage.ranges.stores import StoreRanges

    return StoreRanges(place)


def _raise_named(error: WdsError, place: Place, *, is_copy: bool = False) -> NoReturn:
    """Raises an error with the URL by which the shard was listed, where the place is another."""
    why = "the copy in the cache of" if is_copy else "where a rewriting rule looks for" if place.is_moved else ""
    why = "AIStore's address of" if place.scheme == AIS and not is_copy else why
    try:
        with naming(place.name, why) if why else contextlib.nullcontext():
            raise error
    finally:
        del error  # with its traceback, it would keep the file open until the next garbage collection
