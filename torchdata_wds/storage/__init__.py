"""Opens shards by URL as byte streams, for reading and for writing.

Each backend has its own file, and each direction has a table from scheme to backend (`OPENERS`, `targets.TARGETS`).
This package does not know what a shard contains, and does not import torch.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchdata_wds.storage.byte_streams import ByteStream, is_decompressed, open_metered, open_named, wrap_stream
from torchdata_wds.storage.compression import compression_for, open_compressor
from torchdata_wds.storage.listing import list_each, list_urls
from torchdata_wds.storage.places import Place, RewriteRules, StorageOptions, resolve
from torchdata_wds.storage.sources.aistore import open_ais
from torchdata_wds.storage.sources.command import kill_commands, open_command
from torchdata_wds.storage.sources.fsspec import open_remote
from torchdata_wds.storage.sources.local import open_local, open_standard_input
from torchdata_wds.storage.targets.base import Target, Unique
from torchdata_wds.storage.targets.table import list_targets, open_target, remove_target
from torchdata_wds.storage.urls import AIS, STDIN, local_path, mask_item, mask_url

__all__ = [
    "ByteStream", "RewriteRules", "StorageOptions", "Target", "Unique", "can_reopen", "compression_for",
    "is_decompressed", "kill_commands", "list_each", "list_targets", "list_urls", "mask_item", "mask_url",
    "open_compressor", "open_shard", "open_target", "remove_target", "wrap_stream",
]  # fmt: skip


def _open_http(place: Place, offset: int) -> ByteStream:
    from torchdata_wds.storage.sources.http import open_http  # which imports urllib3

    return open_http(place, offset)


#: Scheme -> backend; "" is a local path, and fsspec opens all schemes not listed. Each raises what `open_shard` does.
OPENERS: dict[str, Callable[[Place, int], ByteStream]] = {
    "": open_local,
    "file": open_local,
    STDIN: open_standard_input,
    "pipe": open_command,
    "http": _open_http,
    "https": _open_http,
    AIS: open_ais,
}


def open_shard(
    url: str | os.PathLike[str],
    *,
    offset: int = 0,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
) -> ByteStream:
    """Opens a shard as a forward-only stream of decompressed bytes. The caller closes it, before its end or after.

    The URL is a local path (used verbatim), ``file:``, ``-`` (standard input), ``pipe:command``, ``http(s):``,
    ``ais:``, or any URL that fsspec knows. `offset` is the number of decompressed bytes to skip: uncompressed files,
    web servers and stores seek, other sources are read up to it. `storage_options` are keyed by protocol:
    ``{"s3": {"anon": True}}``, ``{"https": {"headers": {...}}}``. The `rewrite` rules, or those of a `StorageOptions`,
    are tried before those in ``WDS_REWRITE`` and ``GOPEN_REWRITE``; only the first match is applied, and only once.

    Compression (gzip, bzip2, xz, zstd) is detected from the first bytes. ``read`` raises ShardOpenError if the source
    fails, and ShardFormatError if compressed data is cut or damaged; ``b""`` means that the end was verified. Opening
    raises the same errors, and UnsafeDataError for a command under ``WDS_SECURE=1``.
    """
    if offset < 0:
        raise ValueError(f"offset must not be negative, found {offset}")
    place = resolve(url, storage_options, rewrite)
    opening = partial(open_metered, partial(OPENERS.get(place.scheme, open_remote), place, offset), place.shown)
    return open_named(opening, place.name, "where a rewriting rule looks for") if place.is_moved else opening()


def can_reopen(url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
    """Returns whether a shard can be opened a second time with the same content.

    Standard input, the output of a command and a local path that is not a regular file (a FIFO) cannot.
    """
    place = resolve(url, storage_options)
    if not place.is_local:
        return place.scheme not in (STDIN, "pipe")
    path = Path(local_path(place.url))
    return path.is_file() or not path.exists()
