"""Shards from every other store, by fsspec: ``s3:``, ``gs:``, ``abfs:``, ``hf:``, ``memory:``, ``zip://..::..``.

Connections to stores that fsspec knows: one client of each for a process, made in it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchdata_wds.errors import TRY_AGAIN, ShardFormatError, ShardOpenError
from torchdata_wds.storage.braces import unexpanded
from torchdata_wds.storage.byte_streams import Source, StoredVersion, wrap_source
from torchdata_wds.storage.compression import HEAD_SIZE, is_compressed
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.retrying import Patience
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause
from torchdata_wds.storage.urls import mask_url

__all__ = ["HOPELESS", "connect", "error_words", "protocol_of", "refusal", "open_remote"]


#: Errors that no second attempt will change.
HOPELESS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ImportError,
    NotImplementedError,
    TypeError,
)

_PROTOCOLS_OF_EXTRAS = {
    "s3": ("s3", "s3a"),
    "gcs": ("gs", "gcs"),
    "azure": ("abfs", "abfss", "az", "adl"),
    "hf": ("hf",),
}

_EXTRAS = {protocol: extra for extra, protocols in _PROTOCOLS_OF_EXTRAS.items() for protocol in protocols}

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
    """Finds the filesystem of a URL, made in this process, and the path in it.

    Raises:
        ShardOpenError: if the scheme is unknown or its package is missing.
    """
    import fsspec

    shard = mask_url(url)
    protocols = [protocol_of(part) for part in url.split("::")]
    try:
        chosen = {name: _options_for(name, options) for name in protocols}
        filesystem, path = fsspec.core.url_to_fs(url, **{name: found for name, found in chosen.items() if found})
    except ImportError as error:
        raise ShardOpenError(f"cannot open shard {shard}: {_cure(protocols, error)}", shard=shard) from error
    except Exception as error:
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            raise ShardOpenError(f"cannot open shard {shard}: {_known_schemes(protocols)}", shard=shard) from error
        raise refusal(error, shard) from masked_cause(error)
    return filesystem, str(path)


def protocol_of(part: str) -> str:
    """Gives the protocol of one part of a chained URL: ``s3`` of ``s3://b/x``, ``simplecache`` of itself."""
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


def refusal(error: Exception, shard: str) -> ShardOpenError:
    """The error that a store does not open a shard, in words."""
    if isinstance(error, FileNotFoundError):
        return ShardOpenError(f"cannot open shard {shard}: not found{unexpanded(shard)}", shard=shard)
    if isinstance(error, IsADirectoryError):
        return ShardOpenError(
            f"cannot open shard {shard}: it is a folder; .list_shards() lists its shards if its URL ends in /",
            shard=shard,
        )
    return ShardOpenError(f"cannot open shard {shard}: {error_words(error)}", shard=shard)


def error_words(error: Exception) -> str:
    """An exception of a client library as a text without secrets.

    Example:
        >>> error_words(OSError("token=abc"))
        'OSError: token=***'
    """
    return f"{type(error).__name__}: {mask_text(str(error))}"


def _cure(protocols: list[str], error: ImportError) -> str:
    for protocol in protocols:
        if protocol in _EXTRAS:
            return f"the package for {protocol}: is not installed: pip install 'torchdata_wds[{_EXTRAS[protocol]}]'"
    return f"a package for {'::'.join(protocols)} is not installed: {error}"


def _known_schemes(protocols: list[str]) -> str:
    import fsspec

    known = ", ".join(sorted({"http", "https", "pipe", "ais", *fsspec.available_protocols()}))
    unknown = [protocol for protocol in protocols if protocol not in fsspec.available_protocols()]
    return f"unknown scheme {', '.join(unknown) or protocols[0]}; known are {known}"


#: Attempts without a byte of progress before a shard is given up.
RETRIES = 5

#: The same before it is open: clients make several attempts themselves, and the address may be wrong.
OPEN_RETRIES = 2

_READ_AHEAD = 16 << 20

# What tells one version of an object from another, as stores call it; the first that both sides have decides.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "crc32c", "blob_id", "generation", "VersionId", "version_id",
    "LastModified", "last_modified", "updated", "mtime", "modified", "created",
)  # fmt: skip

T = TypeVar("T")


class RemoteShard:
    """An object in a store: opens it, and opens it again as long as it is the same.

    Args:
        filesystem: The store, connected to in this process.
        path: The object's path in it.
        shard: The masked URL.
        chained: Whether the store reads through another one, and may not know versions.
    """

    def __init__(self, filesystem: Any, path: str, shard: str, *, chained: bool = False) -> None:
        # An archive's filesystem closes the archive when it is collected.
        self._filesystem = filesystem
        self._path = path
        self._chained = chained
        self._version: dict[str, Any] | None = None
        self.shard = shard

    @property
    def tag(self) -> str:
        """The entity tag of the version that is read, if the store has such; else ""."""
        version = self._version or {}
        return str(version.get("ETag") or version.get("etag") or "")[:40]

    def open(self, position: int, *, untouched: bool = True) -> Any:
        """Opens the object at a byte.

        Args:
            position: The byte.
            untouched: Whether nothing was read of it yet, so that another version is as good.

        Raises:
            ShardOpenError: if it is not what it was when it was opened first.
            ShardFormatError: if it ends before the byte.
        """
        if self._version is not None:
            with contextlib.suppress(Exception):
                self._filesystem.invalidate_cache()  # s3fs, for one, takes size and version from an older listing
        file = _open_file(self._filesystem, self._path)
        try:
            version = self._version_of(file)
            if not version.get("size") and self._is_folder(file, known_to_be_empty=version.get("size") == 0):
                raise IsADirectoryError(self._path)
            if self._version is None or untouched:
                self._version = version
            elif change := _change(self._version, version):
                raise self._changed(change, position)
            size = version.get("size")
            if isinstance(size, int) and position > size:
                raise ShardFormatError(
                    f"shard {self.shard} ends at byte {size:,}, before the offset {position:,} that was asked for; "
                    "is its index older than the shard?",
                    shard=self.shard,
                    kind="index",
                )
            if position:
                file.seek(position)
        except BaseException:
            _close(file)
            raise
        return file

    def is_plain(self) -> bool:
        """Whether the object is known not to be compressed."""
        head = self._filesystem.cat_file(self._path, start=0, end=HEAD_SIZE)
        return len(head) == HEAD_SIZE and not is_compressed(head)

    def _is_folder(self, file: Any, *, known_to_be_empty: bool) -> bool:
        details = getattr(file, "details", None)
        is_directory = isinstance(details, Mapping) and details.get("type") == "directory"
        return is_directory or (known_to_be_empty and self.is_folder())

    def is_folder(self) -> bool:
        """Whether the path is that of a folder, which some stores open as an empty object."""
        with contextlib.suppress(Exception):  # read permission does not imply permission to list
            self._filesystem.invalidate_cache()  # which may be older than the folder
            return bool(self._filesystem.isdir(self._path))
        return False

    def size_of(self, file: Any) -> int | None:
        """How many bytes the object has, where its store says so."""
        size = getattr(file, "size", None)
        return size if isinstance(size, int) else None

    def attempt(self, work: Callable[[], T]) -> T:
        """Does something that may be tried again.

        Raises:
            Exception: the last failure, or one that will not go away.
        """
        patience = Patience(OPEN_RETRIES, self.shard)
        while True:
            try:
                return work()
            except (ShardOpenError, ShardFormatError, MemoryError):
                raise
            except Exception as error:
                if isinstance(error, HOPELESS) or not patience.endures(error_words(error)):
                    raise

    def _version_of(self, file: Any) -> dict[str, Any]:
        details = getattr(file, "details", None)
        if not isinstance(details, Mapping) and not self._chained:
            details = None
            with contextlib.suppress(Exception):  # who may read need not be allowed to look
                details = self._filesystem.info(self._path)
        # Some stores put quotes around what is the same without them in a listing.
        known = {name: str(details[name]).strip('"') for name in _VERSIONS if details.get(name)} if details else {}
        return {**known, "size": self.size_of(file)}

    def _changed(self, change: str, position: int) -> ShardOpenError:
        return ShardOpenError(
            f"shard {self.shard} was changed while it was read, before byte {position:,}: {change}. "
            "What was read of it is of the older version; read it again from the start when nobody writes it",
            shard=self.shard,
        )


class RemoteSource(Source):
    """An object of a store, which is opened again at the same byte where reading it fails."""

    def __init__(self, remote: RemoteShard, file: Any, position: int) -> None:
        self._remote: RemoteShard | None = remote
        self._shard = remote.shard
        self._patience = Patience(RETRIES, remote.shard)
        self._file = file
        self._start = self._position = position

    def take(self, size: int) -> bytes:
        remote = self._remote
        assert remote is not None
        while True:
            try:
                data = self._read(remote, size)
            except (ShardOpenError, ShardFormatError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever a client library raises
                self._close_file()
                reason = f"failed at byte {self._position:,}: {error_words(error)}"
                if isinstance(error, HOPELESS) or not self._patience.endures(reason):
                    raise self._broken_off(error) from masked_cause(error)
            else:
                self._patience.renew()
                return data

    def interrupt(self) -> None:
        """Ends a pause that another thread waits in; what the client has begun, it ends by itself."""
        self._patience.interrupt()

    def stored_version(self) -> StoredVersion | None:
        size = None if self._remote is None or self._file is None else self._remote.size_of(self._file)
        return None if self._remote is None or size is None else StoredVersion(size, self._remote.tag)

    def _read(self, remote: RemoteShard, size: int) -> bytes:
        if self._file is None:
            self._file = remote.open(self._position, untouched=self._position == self._start)
        data: bytes = self._file.read(size)
        if not data:
            total = remote.size_of(self._file)
            if total is not None and self._position < total:
                raise EOFError(f"it ended after {self._position:,} of {total:,} bytes")
        self._position += len(data)
        return data

    def _broken_off(self, error: Exception) -> ShardOpenError:
        attempts = self._patience.failures
        tried = f", {attempts} times in a row" if attempts > 1 else ""
        return ShardOpenError(
            f"shard {self._shard} broke off at byte {self._position:,}{tried}: {error_words(error)}.",
            shard=self._shard,
            advice=TRY_AGAIN,
        )

    def _close_file(self) -> None:
        _close(self._file)
        self._file = None

    def _close(self) -> None:
        self._close_file()
        self._remote = None


def open_remote(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:
    """Opens a shard by fsspec.

    Args:
        url: Any URL that fsspec knows, chained ones too.
        offset: Decompressed bytes to leave out: by seeking where the shard is not compressed.
        options: Per protocol, what its filesystem takes.

    Raises:
        ShardOpenError: if the scheme is unknown, its package is missing, or the store refuses.
        ShardFormatError: if the shard is known to end before the offset.
    """
    shard = mask_url(url)
    filesystem, path = connect(url, options)
    remote = RemoteShard(filesystem, path, shard, chained="::" in url)
    try:
        plain = bool(offset) and remote.attempt(remote.is_plain)
        position = offset if plain else 0
        file = remote.attempt(lambda: remote.open(position))
    except (ShardOpenError, ShardFormatError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a client library raises
        if isinstance(error, FileNotFoundError) and remote.is_folder():
            error = IsADirectoryError(path)
        raise refusal(error, shard) from masked_cause(error)
    source = RemoteSource(remote, file, position)
    return wrap_source(source, shard, skip=offset - position, plain=plain)


def _open_file(filesystem: Any, path: str) -> Any:
    """Opens for one long read: large blocks ahead, nothing kept behind."""
    from fsspec.asyn import AsyncFileSystem

    if isinstance(filesystem, AsyncFileSystem):
        with contextlib.suppress(TypeError):
            return filesystem.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")
    return filesystem.open(path, "rb")


def _close(file: Any) -> None:
    with contextlib.suppress(Exception):
        file.close()


def _change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Says what differs; "" where it is the same object as far as its store tells."""
    if None not in (before["size"], now["size"]) and before["size"] != now["size"]:
        return f"it had {before['size']:,} bytes, and has {now['size']:,}"
    name = next((name for name in _VERSIONS if name in before and name in now), None)
    if name is None or before[name] == now[name]:
        return ""
    return f"its {name} was {before[name]}, and is {now[name]}"
