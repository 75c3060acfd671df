"""Compressed members: the suffixes that are peeled off a field's name before its type is looked up."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from torchdata_wds.codecs.optional import import_optional

__all__ = ["SUFFIXES", "decompress"]

# A zstd block of a few bytes can hold 128 KiB, and zstandard has no limit on what one call gives: small pieces do.
_ZSTD_PIECE = 4096


def decompress(suffix: str, data: bytes, max_bytes: int) -> bytes:
    """Decompresses a whole field and verifies that it is whole.

    Args:
        suffix: One of ``SUFFIXES``.
        data: The compressed bytes, one or more streams after one another.
        max_bytes: The most to give back.

    Returns:
        The decompressed bytes.

    Raises:
        ValueError: if the data is cut or damaged, or the limit is passed.
        MissingPackageError: for ``zst`` without the zstandard package.

    Example:
        >>> import gzip
        >>> decompress("gz", gzip.compress(b"7"), max_bytes=100)
        b'7'
    """
    parts: list[bytes] = []
    rest, total = data, 0
    while rest or not parts:
        part, rest = SUFFIXES[suffix](rest, max_bytes - total)
        total += len(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> ValueError:
    return ValueError(f"it decompresses to more than the {limit:,} bytes that max_bytes leaves")


def _cut() -> ValueError:
    return ValueError("the compressed data is cut off before its end")


def _finish(machine: Any, part: bytes, limit: int) -> tuple[bytes, bytes]:
    """Checks that one stream came to its end within the limit; gives its content and what follows it."""
    if len(part) > limit:
        raise _too_large(limit)
    if not machine.eof:
        raise _cut()
    # gzip and xz allow zero bytes as padding behind a stream
    return part, machine.unused_data.lstrip(b"\0")


def _read_gzip(data: bytes, limit: int) -> tuple[bytes, bytes]:
    machine = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    return _finish(machine, machine.decompress(data, limit + 1), limit)


def _read_bzip2(data: bytes, limit: int) -> tuple[bytes, bytes]:
    import bz2

    machine = bz2.BZ2Decompressor()
    return _finish(machine, machine.decompress(data, limit + 1), limit)


def _read_xz(data: bytes, limit: int) -> tuple[bytes, bytes]:
    import lzma

    machine = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
    return _finish(machine, machine.decompress(data, limit + 1), limit)


def _read_zstd(data: bytes, limit: int) -> tuple[bytes, bytes]:
    zstandard = import_optional("zstandard", extra="zstd", fields="fields that end in .zst")
    machine = zstandard.ZstdDecompressor().decompressobj()
    out = bytearray()
    used = 0
    while used < len(data) and not machine.eof:
        out += machine.decompress(data[used : used + _ZSTD_PIECE])
        used += _ZSTD_PIECE
        if len(out) > limit:
            raise _too_large(limit)
    if not machine.eof:
        raise _cut()
    return bytes(out), machine.unused_data + data[used:]


#: Suffix -> a function of (data, limit) that reads one stream and gives (content, what follows).
SUFFIXES: dict[str, Callable[[bytes, int], tuple[bytes, bytes]]] = {
    "gz": _read_gzip,
    "bz2": _read_bzip2,
    "xz": _read_xz,
    "zst": _read_zstd,
}
