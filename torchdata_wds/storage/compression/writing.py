"""Compressors for shards that are written: each makes one stream with a checksum, so that every cut is noticed.

The same data gives the same bytes, in pieces of any size and at any time: they hold no time and no name. Another
version of a library may give other bytes, which decompress to the same.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Protocol

from torchdata_wds.storage.urls import LOCAL, STDIN, scheme_of

_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_GZIP_LEVEL = 6
_XZ_PRESET = 6
_ZSTD_LEVEL = 3

#: What the names of compressed shards end in.
SUFFIXES = {
    **dict.fromkeys((".gz", ".tgz"), "gz"),
    **dict.fromkeys((".zst", ".tzst", ".zstd"), "zst"),
    **dict.fromkeys((".bz2", ".tbz2", ".tbz"), "bz2"),
    **dict.fromkeys((".xz", ".txz"), "xz"),
}


class Compressor(Protocol):
    """Compresses a stream piece by piece."""

    def compress(self, data: bytes | bytearray | memoryview, /) -> bytes:
        """Takes a piece and returns the output that is ready, if any."""

    def flush(self) -> bytes:
        """Returns the rest, with the checksum; nothing can be compressed after it."""


def _new_zstd() -> Compressor:
    try:
        import zstandard
    except ImportError as error:
        raise ModuleNotFoundError(
            "shards compressed with zstd need the zstandard package, which is not installed: "
            "pip install 'torchdata_wds[zstd]'",
            name="zstandard",
        ) from error
    compressor: Compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compressobj()
    return compressor


_COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    # zlib writes a header with time 0 and without a name.
    "gz": lambda: zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_FORMAT),
    "bz2": bz2.BZ2Compressor,
    "xz": lambda: lzma.LZMACompressor(lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=_XZ_PRESET),
    "zst": _new_zstd,
}

_KINDS = ", ".join(map(repr, _COMPRESSORS))


def compression_for(url: str, compress: bool | str | None) -> str | None:
    """Decides how a shard is compressed.

    Args:
        url: Where the shard goes; "" for a file object.
        compress: None for what the name says (``.tar.gz``, ``.tgz``, ``.tar.zst``, ...), never for ``-`` and
            ``pipe:``. False for no compression, True for gzip; or ``gz``, ``bz2``, ``xz``, ``zst``.

    Returns:
        ``gz``, ``bz2``, ``xz``, ``zst``, or None for no compression.

    Raises:
        ValueError: if it is none of these.

    Example:
        >>> compression_for("x.tar.gz", None), compression_for("x.tar", None), compression_for("x.tar", "zst")
        ('gz', None, 'zst')
    """
    if isinstance(compress, bool):
        return "gz" if compress else None
    if compress is not None and compress not in _COMPRESSORS:
        raise ValueError(f"compress must be one of None (by the name), True (gz), False, {_KINDS}; found {compress!r}")
    scheme = scheme_of(url)
    if compress is not None or scheme in (STDIN, "pipe"):
        return compress
    # simplecache::s3://b/x.tar.gz: the first part with a path is the shard's.
    part = url if scheme in LOCAL else next((part for part in url.split("::") if "://" in part), url)
    return next((kind for suffix, kind in SUFFIXES.items() if part.lower().endswith(suffix)), None)


def open_compressor(kind: str) -> Compressor:
    """Makes a compressor.

    Args:
        kind: ``gz``, ``bz2``, ``xz`` or ``zst``.

    Raises:
        ImportError: for ``zst`` without the package zstandard.
        ValueError: if it is none of these.

    Example:
        >>> import gzip
        >>> compressor = open_compressor("gz")
        >>> gzip.decompress(compressor.compress(b"shard") + compressor.flush())
        b'shard'
    """
    if kind not in _COMPRESSORS:
        raise ValueError(f"the compression must be one of {_KINDS}; found {kind!r}")
    return _COMPRESSORS[kind]()
