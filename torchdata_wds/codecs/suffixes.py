"""Compressed members: the suffixes of field names, and how such fields are read and written."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES, MissingPackageError, import_optional
from torchdata_wds.storage import open_compressor
from torchdata_wds.storage.compression import XZ_MEMORY_LIMIT

__all__ = ["SUFFIXES", "Compression", "compress", "decompress", "is_compressed"]


# A zstd block of a few bytes can hold 128 KiB, and zstandard has no limit on what one call gives: small pieces do.
_ZSTD_PIECE = 4096

_FIRST_PIECE = 512

_ZSTD_WINDOW = 128 << 20

_NOT_ZERO = re.compile(rb"[^\0]|\Z")


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
    compression = SUFFIXES[suffix]
    new = compression.prepare()
    parts: list[bytes] = []
    position, left = 0, max_bytes
    while position < len(data) or not parts:
        try:
            part, position = _read_stream(new(), data, position, left, compression.largest_piece)
        except _TooLargeError as error:
            raise _TooLargeError(f"it decompresses to more than max_bytes={max_bytes:,} bytes") from error
        left -= len(part)
        parts.append(part)
        if compression.may_be_padded:
            position = _NOT_ZERO.search(data, position).start()  # type: ignore[union-attr]
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
    except (MissingPackageError, _TooLargeError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - each library has its own for damage
        return False
    return True


class _TooLargeError(ValueError):
    """Data decompresses to more than the limit."""


def _read_stream(machine: Any, data: bytes, begin: int, limit: int, largest_piece: int) -> tuple[bytes, int]:
    """Reads one stream; gives its content and where it ends.

    The first stream, mostly the only one, is read in large pieces. For those after it they begin small, and grow with
    the stream: the machine copies what follows the stream in a piece, and so all streams together take linear time.
    """
    size = min(largest_piece, len(data) if begin == 0 else _FIRST_PIECE)
    parts: list[bytes] = []
    end = begin
    while not machine.eof:
        if end == len(data):
            raise ValueError("the compressed data is cut off before its end")
        part = machine.decompress(data[end : end + size], limit + 1)
        end = min(end + size, len(data))
        limit -= len(part)
        if limit < 0:
            raise _TooLargeError
        parts.append(part)
        size = min(2 * size, largest_piece)
    return parts[0] if len(parts) == 1 else b"".join(parts), end - len(machine.unused_data)


def _gzip() -> Callable[[], Any]:
    return partial(zlib.decompressobj, zlib.MAX_WBITS | 16)


def _bzip2() -> Callable[[], Any]:
    import bz2

    return bz2.BZ2Decompressor


def _xz() -> Callable[[], Any]:
    import lzma

    return partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)


def _zstd() -> Callable[[], Any]:
    decompressor = _zstandard().ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return lambda: _ZstdMachine(decompressor.decompressobj())


class _ZstdMachine:
    """zstandard's decompressor with the interface of the others; what one call gives is limited by its input only."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    @property
    def eof(self) -> bool:
        done: bool = self._machine.eof
        return done

    @property
    def unused_data(self) -> bytes:
        data: bytes = self._machine.unused_data
        return data

    def decompress(self, data: bytes, limit: int) -> bytes:  # noqa: ARG002
        content: bytes = self._machine.decompress(data)
        return content


def _zstandard() -> Any:
    return import_optional("zstandard", extra="zstd", fields="fields that end in .zst")


class Compression(NamedTuple):
    """One compression.

    Attributes:
        magic: What a stream begins with.
        prepare: Gives a function that makes a new decompressor, with ``decompress(data, limit)``.
        may_be_padded: Whether zero bytes may follow a stream.
        largest_piece: The most compressed bytes that a decompressor gets at a time.
    """

    magic: bytes
    prepare: Callable[[], Callable[[], Any]]
    may_be_padded: bool = True
    largest_piece: int = sys.maxsize


#: Suffix -> its compression.
SUFFIXES: dict[str, Compression] = {
    "gz": Compression(b"\x1f\x8b", _gzip),
    "bz2": Compression(b"BZh", _bzip2),
    "xz": Compression(b"\xfd7zXZ\0", _xz),
    "zst": Compression(b"\x28\xb5\x2f\xfd", _zstd, may_be_padded=False, largest_piece=_ZSTD_PIECE),
}
