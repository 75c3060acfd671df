"""Byte ranges of shards in other stores, by fsspec: one request each, by the client of this process."""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.meters import Meter
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.ranges.base import StaleError, changed, ends_inside, no_parts, stale
from torchdata_wds.storage.retrying import attempt
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.sources.fsspec import OPEN_RETRIES, RETRIES, connect, refusal, tag_of

T = TypeVar("T")

#: Seconds after which a store that does not check the version of each request itself is asked for the version again.
_TRUSTED_SECONDS = 30.0


#: The clients of this process, by class and arguments.
_clients: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_clients.clear)


def _connect_once(place: Place) -> tuple[Any, str]:
    """Connects as `connect`, but takes the same client in all threads.

    fsspec makes one for each thread, with connections of its own. Clients that are asynchronous serve all threads.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.utils import tokenize

    client, path = connect(place.url, place.options)
    if isinstance(client, AsyncFileSystem):
        token = tokenize(type(client), client.storage_args, client.storage_options)
        client = _clients.setdefault(token, client)
    return client, path


class StoreRanges:
    """A shard in a store.

    S3 gets the expected ETag with each request. Other stores are asked for the version with the first read, and then
    with those that are 30 seconds later: with each read, that would double the number of requests.
    """

    is_copy = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self.meter = Meter(place.shown)
        self._filesystem, self._path = _connect_once(place)
        self._look()

    def read(self, start: int, stop: int, version: StoredVersion | None) -> bytes:
        """Reads a range; raises StaleError if the shard was replaced since it was opened."""
        if not self._is_pinned and time.monotonic() - self._looked > _TRUSTED_SECONDS:
            self._look()
        shard, known = self._place.shown, self._version
        if version is not None and known is not None and (difference := version.difference(known)):
            raise changed(shard, difference)
        if known is not None and stop > known.size:
            raise ends_inside(shard, known.size, start, stop)
        if start == stop:
            return b""
        data = self._attempt(partial(self._fetch, start, stop), RETRIES)
        if len(data) < stop - start:
            raise ends_inside(shard, start + len(data), start, stop)
        if len(data) > stop - start:
            raise no_parts(shard)
        return data

    def version(self) -> StoredVersion | None:
        """Returns the version found when the shard was opened."""
        return self._version

    def _look(self) -> None:
        """Opens the shard, which sends a request for its size and version."""
        self._forget()  # a listing may be older than the shard
        self._looked = time.monotonic()
        file, details = self._attempt(self._open, OPEN_RETRIES)
        size = details.get("size", getattr(file, "size", None))
        tag = "" if "::" in self._place.url else tag_of(details)
        self._version = StoredVersion(size, tag) if isinstance(size, int) else None
        conditions = {**getattr(file, "req_kw", {}), **getattr(file, "read_kw", {})}
        self._is_pinned = "IfMatch" in conditions
        self._fetch_range: Callable[[int, int], bytes] | None = getattr(file, "_fetch_range", None)

    def _open(self) -> tuple[Any, Mapping[str, Any]]:
        from fsspec.spec import AbstractBufferedFile

        try:
            file = self._filesystem.open(self._path, "rb", cache_type="none")
        except TypeError:
            file = self._filesystem.open(self._path, "rb")
        details = getattr(file, "details", None)
        if not isinstance(file, AbstractBufferedFile):
            file.close()
            file = None
        if not isinstance(details, Mapping):
            details = {}
            with contextlib.suppress(Exception):  # permission to read does not imply permission to stat
                details = self._filesystem.info(self._path)
        if details.get("type") == "directory":
            raise IsADirectoryError(self._path)
        return file, details

    def _fetch(self, start: int, stop: int) -> bytes:
        # By default, cat_file opens the shard and reads ahead: of Hugging Face, 5 MB for 50 KB, after a request for
        # the size. A file's own method sends one request for just the range, and may be called by several threads.
        if self._fetch_range is None:
            return bytes(self._filesystem.cat_file(self._path, start=start, end=stop))
        try:
            return self._fetch_range(start, stop)
        except OSError as error:
            if type(error).__name__ != "FileExpired":
                raise
            raise stale(self._place.shown) from masked_cause(error)

    def _forget(self) -> None:
        """Drops what the client knows of this shard from listings."""
        with contextlib.suppress(Exception):
            self._filesystem.invalidate_cache(self._path)

    def _attempt(self, work: Callable[[], T], retries: int) -> T:
        shard = self._place.shown
        try:
            return attempt(work, retries, shard)
        except StaleError:
            raise
        except Exception as error:  # noqa: BLE001 - client libraries raise anything
            raise refusal(error, shard, self._filesystem, self._path) from masked_cause(error)
