"""gzip: header, deflate data, CRC and length, several members.

The trailer is checked here and not in zlib, which would drop what it has just decompressed when the trailer is wrong.
isal, if installed, inflates three to six times as fast. Both drop the output of the step that meets damage in the
deflate data, which bounds how large a step may be.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torchdata_wds.storage.compression.input import CompressedInput

_MAGIC = b"\x1f\x8b\x08"
_HEADER_TEXT_LIMIT = 1 << 16
_HAS_CRC, _HAS_EXTRA, _HAS_NAME, _HAS_COMMENT, _RESERVED = 2, 4, 8, 16, 224


class _Inflater(NamedTuple):
    """What inflates."""

    new: Callable[[], Any]  # makes a decompressor of raw deflate data
    crc32: Callable[[bytes, int], int]  # continues a CRC
    errors: Any  # what the decompressor raises
    step: int  # the most bytes that it gives at once


def decode_gzip(data: CompressedInput) -> Iterator[bytes]:
    """Decompresses gzip, several members too."""
    data.format = "gzip"
    inflater = _find_inflater()
    another = True
    while another:
        _read_header(data)
        yield from _inflate(data, inflater)
        another = data.has_another(lambda head: head.startswith(_MAGIC) or _MAGIC.startswith(head))


def _inflate(data: CompressedInput, inflater: _Inflater) -> Iterator[bytes]:
    new, crc32, errors, step = inflater
    decompressor = new()
    crc = size = 0
    while not decompressor.eof:
        chunk = data.chunk_or_cut() if decompressor.needs_input else b""
        try:
            piece = decompressor.decompress(chunk, step)
        except errors as error:
            raise data.damaged(error) from error
        if piece:
            crc, size = crc32(piece, crc), size + len(piece)
            yield piece
    data.give_back(decompressor.unused_data)
    trailer = data.exactly(8)
    written_crc, written_size = int.from_bytes(trailer[:4], "little"), int.from_bytes(trailer[4:], "little")
    if written_crc != crc:
        raise data.damaged(f"expected CRC {written_crc:08x}, found {crc:08x}")
    if written_size != size & 0xFFFFFFFF:
        raise data.damaged(f"expected {written_size:,} decompressed bytes, found {size & 0xFFFFFFFF:,}")


def _read_header(data: CompressedInput) -> None:
    header = data.exactly(10)
    flags = header[3]
    if not header.startswith(_MAGIC) or flags & _RESERVED:
        raise data.damaged(f"its header begins with {header[:4]!r}")
    if flags & _HAS_EXTRA:
        data.exactly(int.from_bytes(data.exactly(2), "little"))
    for flag in (_HAS_NAME, _HAS_COMMENT):
        if flags & flag and not any(data.exactly(1) == b"\0" for _ in range(_HEADER_TEXT_LIMIT)):
            raise data.damaged(f"a name of more than {_HEADER_TEXT_LIMIT:,} bytes in its header")
    if flags & _HAS_CRC:
        data.exactly(2)


def _find_inflater() -> _Inflater:
    try:
        from isal import igzip_lib, isal_zlib
    except ImportError:
        return _Inflater(_ZlibDecompressor, zlib.crc32, zlib.error, step=32 * 1024)
    # isal is so fast that the calls count: text shards, which are mostly padding, gain a third by the larger step.
    new = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_DEFLATE)
    return _Inflater(new, isal_zlib.crc32, igzip_lib.error, step=64 * 1024)


class _ZlibDecompressor:
    """zlib's decompressor with the interface that bz2, lzma and isal share."""

    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        self._full = False

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def needs_input(self) -> bool:
        return not self._full

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data

    def decompress(self, chunk: bytes, max_length: int) -> bytes:
        piece = self._decompressor.decompress(self._decompressor.unconsumed_tail + chunk, max_length)
        # A full step may have left output inside even if it used up its input.
        self._full = len(piece) == max_length or bool(self._decompressor.unconsumed_tail)
        return piece
