"""Connections to stores that fsspec knows: one client of each for a process, made in it."""

from __future__ import annotations

import os
import sys
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.braces import unexpanded
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.urls import mask_text, mask_url, masked_cause

__all__ = ["HOPELESS", "connect", "error_words", "protocol_of", "refusal"]

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
