"""Compressed members: the suffixes of field names, and how such fields are read and written."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torchdata_wds.codecs.optional import MissingPackageError, import_optional
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.storage import open_compressor

__all__ = ["SUFFIXES", "Compression", "compress", "decompress", "is_compressed"]

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
        part, rest = SUFFIXES[suffix].read(rest, max_bytes - total)
        total += len(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def compress(suffix: str, data: bytes) -> bytes:
    r"""Compresses a whole field; the same data gives the same bytes at any time.

    Args:
        suffix: One of ``SUFFIXES``.
        data: The bytes to compress.

    Returns:
        One stream.

    Raises:
        MissingPackageError: for ``zst`` without the zstandard package.

    Example:
        >>> compress("gz", b"7")[:8]
        b'\x1f\x8b\x08\x00\x00\x00\x00\x00'
    """
    if suffix == "zst":
        _zstandard()  # says of fields what the storage would say of shards
    compressor = open_compressor(suffix)
    return compressor.compress(data) + compressor.flush()


def is_compressed(suffix: str, data: bytes) -> bool:
    """Tells whether data is whole in a suffix's compression, so that a field of it reads back.

    Args:
        suffix: One of ``SUFFIXES``.
        data: Any bytes.

    Raises:
        ValueError: if it seems so, but decompresses to more than readers accept by themselves.
        MissingPackageError: for ``zst`` without the zstandard package.

    Example:
        >>> is_compressed("gz", b"7"), is_compressed("gz", compress("gz", b"7"))
        (False, True)
    """
    if not data.startswith(SUFFIXES[suffix].magic):
        return False
    try:
        decompress(suffix, data, DEFAULT_MAX_BYTES)
    except (MissingPackageError, _TooLargeError):
        raise
    except Exception:  # noqa: BLE001 - each library has its own for damage
        return False
    return True


class _TooLargeError(ValueError):
    """Data decompresses to more than the limit."""


def _too_large(limit: int) -> ValueError:
    return _TooLargeError(f"it decompresses to more than the {limit:,} bytes that max_bytes leaves")


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
    machine = _zstandard().ZstdDecompressor().decompressobj()
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


def _zstandard() -> Any:
    return import_optional("zstandard", extra="zstd", fields="fields that end in .zst")


class Compression(NamedTuple):
    """One compression.

    Attributes:
        magic: What a stream begins with.
        read: A function of (data, limit) that reads one stream and gives (content, what follows).
    """

    magic: bytes
    read: Callable[[bytes, int], tuple[bytes, bytes]]


#: Suffix -> its compression.
SUFFIXES: dict[str, Compression] = {
    "gz": Compression(b"\x1f\x8b", _read_gzip),
    "bz2": Compression(b"BZh", _read_bzip2),
    "xz": Compression(b"\xfd7zXZ\0", _read_xz),
    "zst": Compression(b"\x28\xb5\x2f\xfd", _read_zstd),
}
