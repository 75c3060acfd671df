"""URL -> byte stream: where shards come from, and where they go.

One backend per file, and a table from scheme to backend for each direction (`OPENERS`, `targets.TARGETS`).
Nothing here knows what is inside a shard, and nothing here imports torch.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchdata_wds.storage.byte_streams import ByteStream, is_decompressed, open_named, wrap_stream
from torchdata_wds.storage.compression import compression_for, open_compressor
from torchdata_wds.storage.listing import list_urls
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
    "is_decompressed", "kill_commands", "list_targets", "list_urls", "mask_item", "mask_url", "open_compressor",
    "open_shard", "open_target", "remove_target", "wrap_stream",
]  # fmt: skip


def _open_http(place: Place, offset: int) -> ByteStream:
    from torchdata_wds.storage.sources.http import open_http  # which imports urllib3

    return open_http(place, offset)


#: Scheme -> backend, which raises what `open_shard` does; "" is a local path, and a scheme not listed is fsspec's.
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
    """Opens a shard as a forward-only stream of decompressed bytes, which the caller closes; closing early is quiet.

    The URL is a local path (taken verbatim), ``file:``, ``-`` (standard input), ``pipe:command``, ``http(s):``,
    ``ais:``, or any that fsspec knows. `offset` counts decompressed bytes to skip: uncompressed files, web servers and
    stores seek, the rest is read past. Options are by protocol: ``{"s3": {"anon": True}}``, ``{"https": {"headers":
    {...}}}``. The `rewrite` rules, or those of a `StorageOptions`, are tried before those in ``WDS_REWRITE`` and
    ``GOPEN_REWRITE``; the first that matches is applied, once.

    Compression (gzip, bzip2, xz, zstd) is found by the first bytes. ``read`` raises ShardOpenError if the source fails,
    and ShardFormatError if compressed data is cut or damaged; ``b""`` means that the end is verified. Opening raises
    the same, and UnsafeDataError for a command under ``WDS_SECURE=1``.
    """
    if offset < 0:
        raise ValueError(f"offset must not be negative, found {offset}")
    place = resolve(url, storage_options, rewrite)
    opener = OPENERS.get(place.scheme, open_remote)
    if not place.is_moved:
        return opener(place, offset)
    return open_named(partial(opener, place, offset), place.name, "where a rewriting rule looks for")


def can_reopen(url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
    """Returns whether a shard can be opened a second time with the same content.

    Standard input, the output of a command and a local path that is not a regular file (a FIFO) cannot.
    """
    place = resolve(url, storage_options)
    if not place.is_local:
        return place.scheme not in (STDIN, "pipe")
    path = Path(local_path(place.url))
    return path.is_file() or not path.exists()
