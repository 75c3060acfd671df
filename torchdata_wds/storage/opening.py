"""The table from scheme to backend, and `open_shard`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchdata_wds.storage.byte_streams import ByteStream
from torchdata_wds.storage.http import open_http
from torchdata_wds.storage.naming import named_stream, naming
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.rewriting import RewriteRules, rewritten
from torchdata_wds.storage.sources.aistore import is_in_aistore, open_ais
from torchdata_wds.storage.sources.command import open_command
from torchdata_wds.storage.sources.fsspec import open_remote
from torchdata_wds.storage.sources.local import open_local, open_standard_input
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of, url_text

__all__ = ["OPENERS", "can_reopen", "open_shard"]


Opener = Callable[[str, int, StorageOptions], ByteStream]

#: Scheme -> backend; "" is a local path, and every scheme that is not here belongs to fsspec.
OPENERS: dict[str, Opener] = {
    "": open_local,
    "file": open_local,
    STDIN: open_standard_input,
    "pipe": open_command,
    "http": open_http,
    "https": open_http,
}

_WHY = "where a rewriting rule looks for"


def open_shard(
    url: str | os.PathLike[str],
    *,
    offset: int = 0,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
) -> ByteStream:
    """Opens a shard as a forward-only stream of decompressed bytes.

    Args:
        url: A local path (taken verbatim), ``file:``, ``-`` (standard input), ``pipe:command``, ``http(s):``,
            ``ais:``, or any URL that fsspec knows.
        offset: Decompressed bytes to leave out. Uncompressed files, web servers and stores seek; the rest is read past.
        storage_options: Options by protocol: ``{"s3": {"anon": True}}``, ``{"https": {"headers": {...}}}``.
        rewrite: Rules that send the URL elsewhere, ``"regex=replacement;..."`` or a mapping, before those in
            ``WDS_REWRITE`` and ``GOPEN_REWRITE``; the first that matches its beginning is applied, once. None are those
            that a `StorageOptions` brings.

    Returns:
        The stream, to be closed by the caller; closing early is quiet. Compression (gzip, bzip2, xz, zstd) is found by
        the first bytes. ``read`` raises ShardOpenError where the source failed, and ShardFormatError where compressed
        data is cut or damaged; ``b""`` means that the end is verified.

    Raises:
        ShardOpenError: if it cannot be opened.
        ShardFormatError: if the offset is known to lie behind its end.
        UnsafeDataError: for a command under ``WDS_SECURE=1``.
        TypeError: if the URL is no str or path, or the options are no mapping of mappings.
        ValueError: if the offset is negative, or a rule is malformed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> _ = path.write_bytes(bytes(1024))
        >>> with open_shard(path) as stream:
        ...     len(stream.read(512)), len(stream.read(1000)), stream.read(512)
        (512, 512, b'')
    """
    if offset < 0:
        raise ValueError(f"offset must not be negative, found {offset}")
    text, options = url_text(url), StorageOptions(storage_options, rewrite=rewrite)
    place = rewritten(text, options.rewrite)
    if place == text:
        return _open(text, offset, options)
    with naming(text, _WHY):
        stream = _open(place, offset, options)
    return named_stream(stream, text, _WHY)


def _open(place: str, offset: int, options: StorageOptions) -> ByteStream:
    scheme = scheme_of(place)
    opener = open_ais if is_in_aistore(scheme) else OPENERS.get(scheme, open_remote)
    return opener(place, offset, options)


def can_reopen(url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
    """Tells whether a shard can be opened a second time with the same content.

    Standard input, the output of a command and a local path that is no regular file (a FIFO) cannot.

    Args:
        url: The shard, as `open_shard` takes it.
        storage_options: Those of `open_shard`, whose rules may send it elsewhere.

    Example:
        >>> can_reopen("x.tar"), can_reopen("s3://b/x.tar"), can_reopen("-"), can_reopen("pipe:cat x.tar")
        (True, True, False, False)
    """
    place = rewritten(url_text(url), StorageOptions(storage_options).rewrite)
    scheme = scheme_of(place)
    if scheme in ("", "file"):
        path = Path(local_path(place))
        return path.is_file() or not path.exists()
    return scheme not in (STDIN, "pipe")
