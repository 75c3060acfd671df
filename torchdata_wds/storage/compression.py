"""Compressors for shards that are written: each makes one stream with a checksum, so that every cut is noticed.

The same data gives the same bytes, in pieces of any size and at any time: they hold no time and no name. Another
version of a library may give other bytes, which decompress to the same.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Protocol

from torchdata_wds.storage.urls import STDIN, is_local, scheme_of

#: What the names of compressed shards end in.
SUFFIXES = {
    **dict.fromkeys((".gz", ".tgz"), "gz"),
    **dict.fromkeys((".zst", ".tzst", ".zstd"), "zst"),
    **dict.fromkeys((".bz2", ".tbz2", ".tbz"), "bz2"),
    **dict.fromkeys((".xz", ".txz"), "xz"),
}

#: What the names of shards end in: ".tar", ".tar.gz", ".tgz", ...
SHARD_SUFFIXES = (".tar", *(suffix if suffix.startswith(".t") else f".tar{suffix}" for suffix in SUFFIXES))


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
    compressor: Compressor = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    return compressor


_COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    # zlib writes a header with time 0 and without a name.
    "gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS),
    "bz2": bz2.BZ2Compressor,
    "xz": lambda: lzma.LZMACompressor(lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=6),
    "zst": _new_zstd,
}

_KINDS = ", ".join(map(repr, _COMPRESSORS))


def compression_for(url: str, compress: bool | str | None) -> str | None:
    """Returns ``gz``, ``bz2``, ``xz``, ``zst`` or None: how a shard is compressed, whose URL is "" for a file object.

    `compress` is one of these, True for gzip, False for none, or None for what the name says (``.tar.gz``, ``.tgz``,
    ...), which is nothing for ``-`` and ``pipe:``.
    """
    if isinstance(compress, bool):
        return "gz" if compress else None
    if compress is not None and compress not in _COMPRESSORS:
        raise ValueError(f"compress must be one of None (by the name), True (gz), False, {_KINDS}; found {compress!r}")
    if compress is not None or scheme_of(url) in (STDIN, "pipe"):
        return compress
    # simplecache::s3://b/x.tar.gz: the first part with a path is the shard's.
    part = url if is_local(url) else next((part for part in url.split("::") if "://" in part), url)
    return next((kind for suffix, kind in SUFFIXES.items() if part.lower().endswith(suffix)), None)


def open_compressor(kind: str) -> Compressor:
    """Makes a compressor; an ImportError for ``zst`` without the package zstandard."""
    if kind not in _COMPRESSORS:
        raise ValueError(f"the compression must be one of {_KINDS}; found {kind!r}")
    return _COMPRESSORS[kind]()
