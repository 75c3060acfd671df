"""Compressors for writing shards: each writes one stream with a checksum, so that readers notice a cut anywhere.

The output is reproducible: it depends only on the data, not on the size of the pieces, and contains no time or file
name. Another version of a compression library may produce different bytes that decompress to the same data.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Protocol

from torchdata_wds.storage.urls import STDIN, is_local, scheme_of

#: Suffix -> compression.
SUFFIXES = {
    **dict.fromkeys((".gz", ".tgz"), "gz"),
    **dict.fromkeys((".zst", ".tzst", ".zstd"), "zst"),
    **dict.fromkeys((".bz2", ".tbz2", ".tbz"), "bz2"),
    **dict.fromkeys((".xz", ".txz"), "xz"),
}

#: The suffixes of shards: ".tar", ".tar.gz", ".tgz", ...
SHARD_SUFFIXES = (".tar", *(suffix if suffix.startswith(".t") else f".tar{suffix}" for suffix in SUFFIXES))


class Compressor(Protocol):
    """Compresses a stream piece by piece."""

    def compress(self, data: bytes | bytearray | memoryview, /) -> bytes:
        """Compresses a piece and returns the output so far, if any."""

    def flush(self) -> bytes:
        """Returns the remaining output with the checksum, and ends the stream."""


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
    # 16 + MAX_WBITS makes zlib write a gzip header, with time 0 and no file name.
    "gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS),
    "bz2": bz2.BZ2Compressor,
    "xz": lambda: lzma.LZMACompressor(lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=6),
    "zst": _new_zstd,
}

_KINDS = ", ".join(map(repr, _COMPRESSORS))


def compression_for(url: str, compress: bool | str | None) -> str | None:
    """Returns how to compress a shard: ``gz``, ``bz2``, ``xz``, ``zst`` or None. The URL of a file object is "".

    `compress` is one of these, True for gzip, False for no compression, or None to go by the name's suffix
    (``.tar.gz``, ``.tgz``, ...); ``-`` and ``pipe:`` are then not compressed.
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
    """Returns a new compressor; raises ImportError for ``zst`` without the package zstandard."""
    if kind not in _COMPRESSORS:
        raise ValueError(f"the compression must be one of {_KINDS}; found {kind!r}")
    return _COMPRESSORS[kind]()
