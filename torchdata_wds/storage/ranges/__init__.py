"""Random access to the stored bytes of shards, wherever they are, and the versions of shards."""

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn, Self

from torchdata_wds.errors import WdsError
from torchdata_wds.storage.byte_streams import StoredVersion, naming
from torchdata_wds.storage.places import Place, StorageOptions, resolve
from torchdata_wds.storage.ranges.local import LocalRanges, file_status
from torchdata_wds.storage.ranges.shards import RangeReader, StaleError
from torchdata_wds.storage.sources.aistore import web_place
from torchdata_wds.storage.urls import AIS, STDIN, cannot_open, url_text

__all__ = ["ShardRanges", "find_version"]

_Url = str | os.PathLike[str]
_Options = Mapping[str, Mapping[str, Any]] | None
_TIMES = 4  # how often a shard is opened that is replaced meanwhile


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

    Local files are read by ``pread``, which costs a few microseconds more than the system call; at most `max_open` of
    them are open. Web servers and stores get one request for each range, on connections that are kept open. Threads
    may share an object; forked processes open their own files and connections; pickles hold none.

    Args:
        storage_options: As for `open_shard`, including rewriting rules.
        max_open: The most shards that are kept open; the least recently used is closed first.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("x.tar").write_bytes(b"0123456789")
        >>> with ShardRanges() as ranges:
        ...     ranges.read("x.tar", 2, 5, find_version("x.tar"))
        b'234'
    """

    def __init__(self, storage_options: _Options = None, *, max_open: int = 64) -> None:
        if isinstance(max_open, bool) or not isinstance(max_open, int) or max_open < 1:
            raise ValueError(f"max_open must be an int of at least 1, found {max_open!r}")
        self.storage_options = (
            storage_options if isinstance(storage_options, StorageOptions) else StorageOptions(storage_options)
        )
        self.max_open = max_open
        self._start_empty()

    def read(self, url: _Url, start: int, stop: int, version: StoredVersion | None = None) -> bytes:
        """Reads exactly the bytes from `start` up to `stop`, as stored: compressed shards are not decompressed.

        Raises ChangedShardError, a ShardFormatError, if the shard differs from `version` or ends before `stop`, and
        ShardOpenError if it cannot be read.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"a range must be 0 <= start <= stop, found {start:,} to {stop:,}")
        text = url if type(url) is str else url_text(url)
        with self._lock:
            reader = self._open.get(text)
            if reader is not None:
                self._open.move_to_end(text)
        for _ in range(_TIMES):
            try:
                return (reader or self._add(text)).read(start, stop, version)
            except StaleError:
                reader = None
            except WdsError as error:
                self._drop(text)
                _raise_named(error, self._place(text))
        raise cannot_open(self._place(text).shown, "it is replaced again and again while it is read")

    def is_local(self, url: _Url) -> bool:
        """Returns whether a shard is a local file, which is read without a request."""
        return self._place(url).is_local

    def close(self) -> None:
        """Closes all shards; a later read opens them again."""
        with self._lock:
            dropped = list(self._open.values())
            self._open.clear()
        del dropped

    def _start_empty(self) -> None:
        """Begins without open shards, in a new object and in a forked child, whose parent may hold the lock."""
        self._lock = threading.Lock()
        self._open: OrderedDict[str, RangeReader] = OrderedDict()
        _all.add(self)

    def _place(self, url: _Url) -> Place:
        return resolve(url, self.storage_options)

    def _add(self, url: str) -> RangeReader:
        """Opens a shard, outside of the lock: if two threads open the same one, the later is kept."""
        reader = _reader_of(self._place(url))
        dropped = []  # closed outside of the lock too, or when their last reader is done
        with self._lock:
            dropped.append(self._open.pop(url, None))
            self._open[url] = reader
            while len(self._open) > self.max_open:
                dropped.append(self._open.popitem(last=False)[1])
        return reader

    def _drop(self, url: str) -> None:
        with self._lock:
            dropped = self._open.pop(url, None)
        del dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_open")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()

    def __repr__(self) -> str:
        return f"ShardRanges({self.storage_options!r}, max_open={self.max_open})"


_all: "weakref.WeakSet[ShardRanges]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for ranges in list(_all):
        ranges._start_empty()


os.register_at_fork(after_in_child=_forget_in_child)


def _reader_of(place: Place) -> RangeReader:
    """Returns the reader of a place; a local file is opened."""
    if place.is_local:
        return LocalRanges.open(place)
    if place.scheme in (STDIN, "pipe"):
        what = "standard input" if place.scheme == STDIN else "the output of a command"
        raise cannot_open(place.shown, f"{what} can only be read from its start to its end")
    if place.scheme in ("http", "https", AIS):
        from torchdata_wds.storage.ranges.http import HttpRanges  # which imports urllib3

        return HttpRanges(web_place(place) if place.scheme == AIS else place)
    from torchdata_wds.storage.ranges.stores import StoreRanges

    return StoreRanges(place)


def _raise_named(error: WdsError, place: Place) -> NoReturn:
    """Raises an error with the URL by which the shard was listed, where the place is another."""
    why = "AIStore's address of" if place.scheme == AIS else "where a rewriting rule looks for"
    try:
        with naming(place.name, why) if place.is_moved or place.scheme == AIS else contextlib.nullcontext():
            raise error
    finally:
        del error  # with its traceback, it would keep the file open until the next garbage collection
