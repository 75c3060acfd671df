"""Shards from every other store, by fsspec: ``s3:``, ``gs:``, ``abfs:``, ``hf:``, ``memory:``, ``zip://..::..``."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage.compression import HEAD_SIZE, is_compressed
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.streams import Source, wrap_source
from torchdata_wds.storage.urls import mask_text, mask_url, masked_cause

__all__ = ["connect", "open_remote", "protocol_of"]

_READ_AHEAD = 16 << 20
_PROTOCOLS_OF_EXTRAS = {
    "s3": ("s3", "s3a"),
    "gcs": ("gs", "gcs"),
    "azure": ("abfs", "abfss", "az", "adl"),
    "hf": ("hf",),
}
_EXTRAS = {protocol: extra for extra, protocols in _PROTOCOLS_OF_EXTRAS.items() for protocol in protocols}


class RemoteSource(Source):
    """A file object of fsspec."""

    def __init__(self, file: Any, shard: str, position: int, filesystem: Any) -> None:
        self._file = file
        # An archive's filesystem closes the archive when it is collected.
        self._filesystem = filesystem
        self._shard = shard
        self._position = position

    def take(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        self._position += len(data)
        if not data:
            self._check_size()
        return data

    def _check_size(self) -> None:
        size = getattr(self._file, "size", None)
        if isinstance(size, int) and self._position < size:
            raise ShardOpenError(
                f"shard {self._shard} broke off after {self._position:,} of {size:,} bytes. "
                "Try again, or skip failing shards with handler=warn_and_continue.",
                shard=self._shard,
            )

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._file.close()
        self._file = self._filesystem = None


def open_remote(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:
    """Opens a shard by fsspec.

    Args:
        url: Any URL that fsspec knows, chained ones too.
        offset: Decompressed bytes to leave out: by seeking where the shard is not compressed.
        options: Per protocol, what its filesystem takes.

    Raises:
        ShardOpenError: if the scheme is unknown, its package is missing, or the store refuses.
    """
    shard = mask_url(url)
    filesystem, path = connect(url, options)
    try:
        plain = bool(offset) and _is_plain(filesystem, path)
        file = _open_file(filesystem, path)
    except Exception as error:  # noqa: BLE001 - whatever a client library raises
        raise _refusal(error, shard) from masked_cause(error)
    if plain:
        return _at(file, offset, shard, filesystem)
    return wrap_source(RemoteSource(file, shard, 0, filesystem), shard, skip=offset)


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
        raise _refusal(error, shard) from masked_cause(error)
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


def _open_file(filesystem: Any, path: str) -> Any:
    """Opens for one long read: large blocks ahead, nothing kept behind."""
    from fsspec.asyn import AsyncFileSystem

    if isinstance(filesystem, AsyncFileSystem):
        with contextlib.suppress(TypeError):
            return filesystem.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")
    return filesystem.open(path, "rb")


def _is_plain(filesystem: Any, path: str) -> bool:
    head = filesystem.cat_file(path, start=0, end=HEAD_SIZE)
    return len(head) == HEAD_SIZE and not is_compressed(head)


def _at(file: Any, offset: int, shard: str, filesystem: Any) -> io.BufferedReader:
    size = getattr(file, "size", None)
    try:
        if isinstance(size, int) and offset > size:
            raise ShardFormatError(
                f"shard {shard} ends at byte {size:,}, before the offset {offset:,} that was asked for; "
                "is its index older than the shard?",
                shard=shard,
            )
        file.seek(offset)
    except BaseException:
        file.close()
        raise
    return wrap_source(RemoteSource(file, shard, offset, filesystem), shard, plain=True)


def _refusal(error: Exception, shard: str) -> ShardOpenError:
    if isinstance(error, FileNotFoundError):
        return ShardOpenError(f"cannot open shard {shard}: not found", shard=shard)
    if isinstance(error, IsADirectoryError):
        return ShardOpenError(
            f"cannot open shard {shard}: it is a folder; .list_shards() lists its shards if its URL ends in /",
            shard=shard,
        )
    return ShardOpenError(f"cannot open shard {shard}: {type(error).__name__}: {mask_text(str(error))}", shard=shard)


def _cure(protocols: list[str], error: ImportError) -> str:
    for protocol in protocols:
        if protocol in _EXTRAS:
            return f"the package for {protocol}: is not installed: pip install 'torchdata_wds[{_EXTRAS[protocol]}]'"
    return f"a package for {'::'.join(protocols)} is not installed: {error}"


def _known_schemes(protocols: list[str]) -> str:
    import fsspec

    known = ", ".join(sorted({"http", "https", "pipe", *fsspec.available_protocols()}))
    unknown = [protocol for protocol in protocols if protocol not in fsspec.available_protocols()]
    return f"unknown scheme {', '.join(unknown) or protocols[0]}; known are {known}"
