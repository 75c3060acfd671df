"""Compressors for shards that are written: each makes one stream with a checksum, of which every cut is noticed.

The same data gives the same bytes, whatever the sizes of the pieces it comes in and whenever it is written: there is
no time and no name in them. Another version of a library may give other bytes, which decompress to the same.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Protocol

from torchdata_wds.storage.urls import STDIN, scheme_of

__all__ = ["Compressor", "compression_for", "open_compressor"]


_GZIP_FORMAT = 16 + zlib.MAX_WBITS

_GZIP_LEVEL = 6

_XZ_PRESET = 6

_ZSTD_LEVEL = 3

_SUFFIXES = {
    ".gz": "gz",
    ".tgz": "gz",
    ".bz2": "bz2",
    ".tbz2": "bz2",
    ".tbz": "bz2",
    ".xz": "xz",
    ".txz": "xz",
    ".zst": "zst",
    ".tzst": "zst",
    ".zstd": "zst",
}


class Compressor(Protocol):
    """Compresses a stream piece by piece."""

    def compress(self, data: bytes | bytearray | memoryview, /) -> bytes:
        """Takes a piece and gives what is ready, which may be nothing."""

    def flush(self) -> bytes:
        """Gives the rest, with the checksum; nothing can be compressed after it."""


def _new_gzip() -> Compressor:
    # zlib writes a header with time 0 and without a name.
    return zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)


def _new_xz() -> Compressor:
    return lzma.LZMACompressor(lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=_XZ_PRESET)


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
    "gz": _new_gzip,
    "bz2": bz2.BZ2Compressor,
    "xz": _new_xz,
    "zst": _new_zstd,
}


def compression_for(url: str, compress: bool | str | None) -> str | None:
    """Decides how a shard is compressed.

    Args:
        url: Where the shard goes; "" for a file object.
        compress: None for what the name says (``.tar.gz``, ``.tgz``, ``.tar.zst``, ...), where there is a name: not for
            ``-`` and ``pipe:``. False for no compression, True for gzip; or ``gz``, ``bz2``, ``xz``, ``zst``.

    Returns:
        ``gz``, ``bz2``, ``xz``, ``zst``, or None for no compression.

    Raises:
        ValueError: if it is none of these.

    Example:
        >>> compression_for("x.tar.gz", None), compression_for("x.tar", None), compression_for("x.tar", "zst")
        ('gz', None, 'zst')
    """
    if compress is None:
        name = _name_in(url).lower()
        return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)
    if isinstance(compress, bool):
        return "gz" if compress else None
    if compress not in _COMPRESSORS:
        raise ValueError(_complaint("compress", f"None (by the name), True (gz), False, {_kinds()}", compress))
    return compress


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
        raise ValueError(_complaint("the compression", _kinds(), kind))
    return _COMPRESSORS[kind]()


def _name_in(url: str) -> str:
    """What in a URL has the shard's suffix; "" where nothing has."""
    scheme = scheme_of(url)
    if scheme in (STDIN, "pipe"):
        return ""
    if scheme in ("", "file"):
        return url
    # simplecache::s3://b/x.tar.gz: the first part with a path is the shard's.
    return next((part for part in url.split("::") if "://" in part), url)


def _kinds() -> str:
    return ", ".join(map(repr, _COMPRESSORS))


def _complaint(what: str, valid: str, found: object) -> str:
    return f"{what} must be one of {valid}; found {found!r}"
