"""Shards from every other store, by fsspec: ``s3:``, ``gs:``, ``abfs:``, ``hf:``, ``memory:``, ``zip://..::..``.

Each process makes its own client of a store, one for all its shards.
"""

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion, ends_before, wrap_source
from torchdata_wds.storage.decompression import HEAD_SIZE, may_be_compressed
from torchdata_wds.storage.places import Place, StorageOptions
from torchdata_wds.storage.retrying import Failure, RetryingSource, attempt, error_words
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.urls import cannot_open, mask_url, unexpanded

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
    "hf": "hf",
}

#: How many further attempts without a new byte follow the first failure, before a shard is given up.
RETRIES = 5

#: The same before it is open: clients make several attempts themselves, and the address may be wrong.
OPEN_RETRIES = 2

# What tells one version of an object from another, as stores call it; the first that both sides have decides.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "crc32c", "blob_id", "generation", "VersionId", "version_id",
    "LastModified", "last_modified", "updated", "mtime", "modified", "created",
)  # fmt: skip

# The asynchronous clients that this process, or the one that it was forked from, had when it forked.
_kept: dict[int, Any] = {}


def _keep_clients() -> None:
    """Keeps a parent's clients from being collected in a forked child, which never uses them.

    fsspec forgets them there, and closing one waits, a second each time, for the thread that only the parent has.
    """
    if "fsspec.asyn" not in sys.modules:
        return
    from fsspec.asyn import AsyncFileSystem
    from fsspec.registry import registry

    for kind in registry.values():
        if issubclass(kind, AsyncFileSystem):
            _kept.update((id(client), client) for client in list(kind._cache.values()))


os.register_at_fork(before=_keep_clients)


def connect(url: str, options: StorageOptions) -> tuple[Any, str]:
    """Returns the filesystem of a URL, made in this process, and the path in it."""
    import fsspec

    shard = mask_url(url)
    protocols = [protocol_of(part) for part in url.split("::")]
    try:
        chosen = {name: _options_for(name, options) for name in protocols}
        filesystem, path = fsspec.core.url_to_fs(url, **{name: found for name, found in chosen.items() if found})
    except ImportError as error:
        reason = f"a package for {'::'.join(protocols)} is not installed: {error}"
        if protocol := next((protocol for protocol in protocols if protocol in _EXTRAS), ""):
            extra = f"pip install 'torchdata_wds[{_EXTRAS[protocol]}]'"
            reason = f"the package for {protocol}: is not installed: {extra}"
        raise cannot_open(shard, reason) from error
    except Exception as error:
        if not isinstance(error, ValueError) or "Protocol not known" not in str(error):
            raise _refusal(error, shard) from masked_cause(error)
        known = fsspec.available_protocols()
        unknown = ", ".join(protocol for protocol in protocols if protocol not in known) or protocols[0]
        names = ", ".join(sorted({"http", "https", "pipe", "ais", *known}))
        raise cannot_open(shard, f"unknown scheme {unknown}; known are {names}") from error
    return filesystem, str(path)


def protocol_of(part: str) -> str:
    """Returns the protocol of one part of a chained URL: ``s3`` of ``s3://b/x``, ``simplecache`` of itself."""
    protocol, slashes, _ = part.partition("://")
    return protocol if slashes or part.isidentifier() else "file"


def _options_for(protocol: str, options: StorageOptions) -> dict[str, Any]:
    """The options under this protocol's name, or under another name of the same store (``gs`` and ``gcs``)."""
    import fsspec

    if protocol in options or not options:
        return dict(options.get(protocol, {}))
    names = fsspec.get_filesystem_class(protocol).protocol
    aliases = (names,) if isinstance(names, str) else names
    return next((dict(options[alias]) for alias in aliases if alias in options), {})


def _refusal(error: Exception, shard: str, filesystem: Any = None, path: str = "") -> ShardOpenError:
    """Makes the error for a store that does not open a shard."""
    reason = error_words(error)
    if isinstance(error, IsADirectoryError) or (isinstance(error, FileNotFoundError) and _is_folder(filesystem, path)):
        reason = "it is a folder; .list_shards() lists its shards if its URL ends in /"
    elif isinstance(error, FileNotFoundError):
        reason = f"not found{unexpanded(shard)}"
    return cannot_open(shard, reason)


def _is_folder(filesystem: Any, path: str) -> bool:
    """Whether the path is that of a folder, which some stores open as an empty object."""
    with contextlib.suppress(Exception):  # permission to read does not imply permission to list
        filesystem.invalidate_cache()  # which may be older than the folder
        return bool(filesystem.isdir(path))
    return False


class RemoteSource(RetryingSource):
    """An object of a store; a `chained` one reads through another, and knows no versions."""

    def __init__(self, filesystem: Any, path: str, shard: str, start: int = 0, *, chained: bool = False) -> None:
        super().__init__(shard, start, OPEN_RETRIES)
        # An archive's filesystem closes the archive when it is collected.
        self._filesystem = filesystem
        self._path = path
        self._chained = chained
        self._version: dict[str, Any] = {}

    def stored_version(self) -> StoredVersion | None:
        """Returns the size and entity tag of the version that is read, if the store tells the size."""
        if self._connection is None or self._total is None:
            return None
        return StoredVersion(self._total, str(self._version.get("ETag") or self._version.get("etag") or "")[:40])

    def _connect(self) -> None:
        if self._has_begun:
            with contextlib.suppress(Exception):
                self._filesystem.invalidate_cache()  # s3fs, for one, takes size and version from an older listing
        file = self._open()
        try:
            self._check(file)
            if self._position:
                file.seek(self._position)
        except BaseException:
            with contextlib.suppress(Exception):
                file.close()
            raise
        self._connection = file
        if not self._has_begun:
            self._has_begun = True
            self._patience.renew()
            self._patience.retries = RETRIES

    def _open(self) -> Any:
        """Opens for one long read: large blocks ahead, nothing kept of what was read."""
        from fsspec.asyn import AsyncFileSystem

        if isinstance(self._filesystem, AsyncFileSystem):
            with contextlib.suppress(TypeError):
                return self._filesystem.open(self._path, "rb", block_size=16 << 20, cache_type="readahead")
        return self._filesystem.open(self._path, "rb")

    def _check(self, file: Any) -> None:
        """Compares a file with the one opened before; until something was read, another version is as good."""
        details = getattr(file, "details", None)
        if not isinstance(details, Mapping):
            details = {}
            if not self._chained:
                with contextlib.suppress(Exception):  # permission to read does not imply permission to stat
                    details = self._filesystem.info(self._path)
        size = getattr(file, "size", None)
        size = size if isinstance(size, int) else None
        is_directory = details.get("type") == "directory"
        if not size and (is_directory or (size == 0 and _is_folder(self._filesystem, self._path))):
            raise IsADirectoryError(self._path)
        # Some stores put quotes around what is the same without them in a listing.
        known = {name: str(details[name]).strip('"') for name in _VERSIONS if details.get(name)}
        version = {**known, "size": size}
        if self._has_begun and self._position > self._start and (change := _change(self._version, version)):
            raise self._changed(change)
        self._version, self._total = version, size
        if size is not None and self._position > size:
            raise ends_before(self._shard, size, self._position)

    def _receive(self, view: memoryview) -> int:
        data: bytes = self._connection.read(len(view))
        if not data and self._total is not None and self._position < self._total:
            raise EOFError(f"it ended after {self._position:,} of {self._total:,} bytes")
        view[: len(data)] = data
        return len(data)

    def _refusal(self, failure: Failure, more: str) -> ShardOpenError:  # noqa: ARG002 - clients tell of their attempts
        assert failure.error is not None
        return _refusal(failure.error, self._shard, self._filesystem, self._path)

    def _close(self) -> None:
        super()._close()
        self._filesystem = None


def _change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Says what differs; "" if it is the same object as far as its store tells."""
    if None not in (before["size"], now["size"]) and before["size"] != now["size"]:
        return f"it had {before['size']:,} bytes, and has {now['size']:,}"
    name = next((name for name in _VERSIONS if name in before and name in now), None)
    return f"its {name} was {before[name]}, and is {now[name]}" if name and before[name] != now[name] else ""


def open_remote(place: Place, offset: int) -> io.BufferedReader:
    """Opens a shard by any URL that fsspec knows, chained ones too; seeks to the offset if it is not compressed."""
    filesystem, path = connect(place.url, place.options)
    plain = False
    if offset:
        try:
            head = attempt(partial(filesystem.cat_file, path, start=0, end=HEAD_SIZE), OPEN_RETRIES, place.shown)
        except Exception as error:  # noqa: BLE001 - whatever a client library raises
            raise _refusal(error, place.shown, filesystem, path) from masked_cause(error)
        plain = not may_be_compressed(head)
    start = offset if plain else 0
    source = RemoteSource(filesystem, path, place.shown, start, chained="::" in place.url)
    source.connect()
    return wrap_source(source, place.shown, skip=offset - start, plain=plain)
