"""Compressed fields, by name suffix. They are decompressed whole: twice as fast as the streaming that shards need."""

from __future__ import annotations

import bz2
import lzma
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES, MissingPackageError, import_optional
from torchdata_wds.storage import open_compressor
from torchdata_wds.storage.compressed_input import XZ_MEMORY_LIMIT

_FIRST_PIECE = 512
_NOT_ZERO = re.compile(rb"[^\0]|\Z")


class _TooLargeError(ValueError):
    """Data decompresses to more than the limit."""


def split_suffix(field: str) -> tuple[str, str]:
    """Splits off a compression suffix: ``x.json.gz`` becomes ``("x.json", "gz")``, ``json`` ``("json", "")``."""
    inner, _, suffix = field.rpartition(".")
    suffix = suffix.lower()
    return (inner, suffix) if suffix in SUFFIXES else (field, "")


def decompress(suffix: str, data: bytes, max_bytes: int) -> bytes:
    """Decompresses a field of one or more streams; refuses one that is cut off."""
    # zstandard cannot limit what one call returns, and has no padding between frames. A block of a few bytes can
    # decompress to 128 KiB, so its input comes in small pieces.
    is_zstd = suffix == "zst"
    largest_piece = 4096 if is_zstd else sys.maxsize
    parts: list[bytes] = []
    end, left = 0, max_bytes
    while end < len(data) or not parts:
        machine = SUFFIXES[suffix][1]()
        # The first stream, usually the only one, gets all the data. Later ones get 512 bytes, then 1024, 2048, ...: the
        # rest of a piece is copied when a stream ends, which in large pieces would take quadratic time.
        size = min(largest_piece, _FIRST_PIECE if end else len(data))
        while not machine.eof:
            if end == len(data):
                raise ValueError("the compressed data is cut off before its end")
            piece = data[end : end + size]
            part = machine.decompress(piece) if is_zstd else machine.decompress(piece, left + 1)
            end = min(end + size, len(data))
            left -= len(part)
            if left < 0:
                raise _TooLargeError(f"it decompresses to more than max_bytes={max_bytes:,}")
            parts.append(part)
            size = min(2 * size, largest_piece)
        end -= len(machine.unused_data)
        if not is_zstd:
            end = _NOT_ZERO.search(data, end).start()  # type: ignore[union-attr]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def compress(suffix: str, data: bytes) -> bytes:
    """Compresses a whole field into one stream; the same data always gives the same bytes."""
    if suffix == "zst":
        _zstandard()  # if it is missing, the error is about fields; that of open_compressor is about shards
    compressor = open_compressor(suffix)
    return compressor.compress(data) + compressor.flush()


def is_compressed(suffix: str, data: bytes) -> bool:
    """Returns whether data is complete in a suffix's compression; raises if readers refuse its size by default."""
    if not data.startswith(SUFFIXES[suffix][0]):
        return False
    try:
        decompress(suffix, data, DEFAULT_MAX_BYTES)
    except (MissingPackageError, _TooLargeError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - each library has its own errors for damage
        return False
    return True


def _zstandard() -> Any:
    return import_optional("zstandard", extra="zstd", fields="fields that end in .zst")


#: Suffix -> the first bytes of a stream, and a function that makes a decompressor.
SUFFIXES: dict[str, tuple[bytes, Callable[[], Any]]] = {
    "gz": (b"\x1f\x8b", partial(zlib.decompressobj, zlib.MAX_WBITS | 16)),
    "bz2": (b"BZh", bz2.BZ2Decompressor),
    "xz": (b"\xfd7zXZ\0", partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)),
    "zst": (b"\x28\xb5\x2f\xfd", lambda: _zstandard().ZstdDecompressor(max_window_size=128 << 20).decompressobj()),
}
