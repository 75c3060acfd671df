"""Shards from all other stores, by fsspec: ``s3:``, ``gs:``, ``abfs:``, ``hf:``, ``memory:``, ``zip://..::..``.

Each process makes its own client of a store, and uses it for all shards there.
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

#: Further attempts without new bytes, after a failure, before a shard is given up.
RETRIES = 5

#: The same for opening it: fewer, because clients retry that themselves, and the address may be wrong.
OPEN_RETRIES = 2

# The stores' names for what distinguishes versions of an object; the first that both versions have decides.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "crc32c", "blob_id", "generation", "VersionId", "version_id",
    "LastModified", "last_modified", "updated", "mtime", "modified", "created",
)  # fmt: skip

# Those of them that change with the content, and only then.
_TAGS = _VERSIONS[:7]

# The asynchronous clients that existed when this process, or its parent, forked.
_kept: dict[int, Any] = {}


def _keep_clients() -> None:
    """Keeps the parent's clients from being collected in a forked child, which never uses them.

    fsspec drops them there, and closing each waits a second for a thread that exists only in the parent.
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
            raise refusal(error, shard) from masked_cause(error)
        known = fsspec.available_protocols()
        unknown = ", ".join(protocol for protocol in protocols if protocol not in known) or protocols[0]
        names = ", ".join(sorted({"http", "https", "pipe", "ais", *known}))
        raise cannot_open(shard, f"unknown scheme {unknown}; known are {names}") from error
    return filesystem, str(path)


def protocol_of(part: str) -> str:
    """Returns the protocol of one part of a chained URL: ``s3`` for ``s3://b/x``, ``simplecache`` for itself."""
    protocol, slashes, _ = part.partition("://")
    return protocol if slashes or part.isidentifier() else "file"


def _options_for(protocol: str, options: StorageOptions) -> dict[str, Any]:
    """Returns the options under this protocol, or under another one of the same store (``gs`` and ``gcs``)."""
    import fsspec

    if protocol in options or not options:
        return dict(options.get(protocol, {}))
    names = fsspec.get_filesystem_class(protocol).protocol
    aliases = (names,) if isinstance(names, str) else names
    return next((dict(options[alias]) for alias in aliases if alias in options), {})


def refusal(error: Exception, shard: str, filesystem: Any = None, path: str = "") -> ShardOpenError:
    """Returns the error for a shard that a store does not open."""
    reason = error_words(error)
    if isinstance(error, IsADirectoryError) or (isinstance(error, FileNotFoundError) and _is_folder(filesystem, path)):
        reason = "it is a folder; .list_shards() lists its shards if its URL ends in /"
    elif isinstance(error, FileNotFoundError):
        reason = f"not found{unexpanded(shard)}"
    return cannot_open(shard, reason)


def _is_folder(filesystem: Any, path: str) -> bool:
    """Returns whether a path is a folder, which some stores open as an empty object."""
    with contextlib.suppress(Exception):  # permission to read does not imply permission to list
        filesystem.invalidate_cache()  # it may be older than the folder
        return bool(filesystem.isdir(path))
    return False


class RemoteSource(RetryingSource):
    """An object in a store; a `chained` one is read through another filesystem, and has no known version."""

    def __init__(self, filesystem: Any, path: str, shard: str, start: int = 0, *, chained: bool = False) -> None:
        super().__init__(shard, start, OPEN_RETRIES)
        # An archive's filesystem closes the archive when it is collected.
        self._filesystem = filesystem
        self._path = path
        self._chained = chained
        self._version: dict[str, Any] = {}

    def stored_version(self) -> StoredVersion | None:
        """Returns the size and tag of the version being read, if the store reports the size."""
        if self._connection is None or self._total is None:
            return None
        return StoredVersion(self._total, tag_of(self._version))

    def _connect(self) -> None:
        if self._has_begun:
            with contextlib.suppress(Exception):
                self._filesystem.invalidate_cache()  # s3fs, for one, would take size and version from an old listing
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
        """Opens the object for one sequential read: with large blocks, which are not kept."""
        from fsspec.asyn import AsyncFileSystem

        if isinstance(self._filesystem, AsyncFileSystem):
            with contextlib.suppress(TypeError):
                return self._filesystem.open(self._path, "rb", block_size=16 << 20, cache_type="readahead")
        return self._filesystem.open(self._path, "rb")

    def _check(self, file: Any) -> None:
        """Compares a file with the one opened before; any version will do until bytes were read."""
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
        # Some stores quote a value here that they do not quote in listings.
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

    def _refusal(self, failure: Failure, more: str) -> ShardOpenError:  # noqa: ARG002 - clients report their attempts
        assert failure.error is not None
        return refusal(failure.error, self._shard, self._filesystem, self._path)

    def _close(self) -> None:
        super()._close()
        self._filesystem = None


def tag_of(details: Mapping[str, Any]) -> str:
    """Returns the tag of a version for `StoredVersion`, from what a store reports about an object."""
    return next((str(details[name]).strip('"')[:40] for name in _TAGS if details.get(name)), "")


def _change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describes how two versions differ; "" if they are the same as far as the store reports."""
    if None not in (before["size"], now["size"]) and before["size"] != now["size"]:
        return f"it had {before['size']:,} bytes, and has {now['size']:,}"
    name = next((name for name in _VERSIONS if name in before and name in now), None)
    return f"its {name} was {before[name]}, and is {now[name]}" if name and before[name] != now[name] else ""


def open_remote(place: Place, offset: int) -> io.BufferedReader:
    """Opens a shard by any URL that fsspec knows, also chained; seeks to the offset if the shard is not compressed."""
    filesystem, path = connect(place.url, place.options)
    plain = False
    if offset:
        try:
            head = attempt(partial(filesystem.cat_file, path, start=0, end=HEAD_SIZE), OPEN_RETRIES, place.shown)
        except Exception as error:  # noqa: BLE001 - client libraries raise anything
            raise refusal(error, place.shown, filesystem, path) from masked_cause(error)
        plain = not may_be_compressed(head)
    start = offset if plain else 0
    source = RemoteSource(filesystem, path, place.shown, start, chained="::" in place.url)
    source.connect()
    return wrap_source(source, place.shown, skip=offset - start, plain=plain)
