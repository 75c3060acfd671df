"""Decoders for compressed shards, detected by their first bytes: gzip, bzip2, xz and zstd, also several streams in one.

A shard's name plays no part here; `compression` has the suffixes, which count when shards are written or listed.

A decoder is a generator of decompressed pieces, or of the lengths of those that it has put into its input's `target`; 0
means that the next piece may have to wait for the source. Its input comes in small pieces and its output per step is
limited. This bounds memory for any input, and delivers what precedes damage before the error: most decompressors drop
the output of the step that finds damage.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchdata_wds.storage.compressed_input import XZ_MEMORY_LIMIT, CompressedInput
from torchdata_wds.storage.zstd_frames import SKIPPABLE, decode_zstd

_GZIP, _XZ, _ZSTD = b"\x1f\x8b\x08", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"

Pieces = Iterator[bytes] | Iterator[memoryview | int]
_HEADER_TEXT_LIMIT = 1 << 16
_HAS_CRC, _HAS_EXTRA, _HAS_NAME, _HAS_COMMENT, _RESERVED = 2, 4, 8, 16, 224


def _decode_one(data: CompressedInput, decompressor: Any, step: int, errors: Any) -> Iterator[bytes]:
    """Decompresses one stream with an object that has the interface of `bz2.BZ2Decompressor`."""
    while not decompressor.eof:
        # A step returns at most `step` bytes, because 32 KiB of gzip can hold 32 MiB. While more output of the same
        # input is waiting, needs_input is False, and the decompressor is called with b"".
        chunk: bytes | memoryview = b""
        if decompressor.needs_input and not (chunk := data.chunk()):
            raise data.cut(f"more {data.format} data")
        try:
            piece = decompressor.decompress(chunk, step)
        except errors as error:
            raise data.damaged(error) from error
        if piece:
            yield piece
    data.give_back(decompressor.unused_data)


def _decode(data: CompressedInput, new: Callable[[], Any]) -> Iterator[bytes]:
    for _ in data.streams():
        yield from _decode_one(data, new(), 4096, (OSError, ValueError, EOFError, lzma.LZMAError))


def _decode_gzip(data: CompressedInput) -> Iterator[bytes]:
    """Checks the trailers itself: zlib would drop its last output when a checksum is wrong."""
    new: Callable[[], Any]
    errors: Any
    try:
        from isal import igzip_lib, isal_zlib
    except ImportError:
        new, crc32, errors, step = _ZlibDecompressor, zlib.crc32, zlib.error, 32 * 1024
    else:
        # isal is so fast that calls matter: with larger steps, text shards (mostly padding) are read a third faster.
        new = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_DEFLATE)
        crc32, errors, step = isal_zlib.crc32, igzip_lib.error, 64 * 1024
    for _ in data.streams():
        _read_gzip_header(data)
        crc = size = 0
        for piece in _decode_one(data, new(), step, errors):
            crc, size = crc32(piece, crc), size + len(piece)
            yield piece
        trailer = data.exactly(8)
        written_crc, written_size = int.from_bytes(trailer[:4], "little"), int.from_bytes(trailer[4:], "little")
        if written_crc != crc:
            raise data.damaged(f"expected CRC {written_crc:08x}, found {crc:08x}")
        if written_size != size & 0xFFFFFFFF:
            raise data.damaged(f"expected {written_size:,} decompressed bytes, found {size & 0xFFFFFFFF:,}")


def _read_gzip_header(data: CompressedInput) -> None:
    header = data.exactly(10)
    flags = header[3]
    if flags & _RESERVED:
        raise data.damaged(f"its header begins with {header[:4]!r}")
    if flags & _HAS_EXTRA:
        data.exactly(int.from_bytes(data.exactly(2), "little"))
    for flag in (_HAS_NAME, _HAS_COMMENT):
        if flags & flag and not any(data.exactly(1) == b"\0" for _ in range(_HEADER_TEXT_LIMIT)):
            raise data.damaged(f"a name of more than {_HEADER_TEXT_LIMIT:,} bytes in its header")
    if flags & _HAS_CRC:
        data.exactly(2)


class _ZlibDecompressor:
    """zlib's decompressor with the interface shared by those of bz2, lzma and isal."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
        self.eof, self.needs_input, self.unused_data = False, True, b""

    def decompress(self, chunk: bytes | memoryview, max_length: int) -> bytes:
        piece = self._zlib.decompress(b"".join((self._zlib.unconsumed_tail, chunk)), max_length)
        # After a full step zlib may still hold output, even if it has consumed all of its input.
        self.needs_input = len(piece) < max_length and not self._zlib.unconsumed_tail
        self.eof, self.unused_data = self._zlib.eof, self._zlib.unused_data
        return piece


# bzip2's include the magic number of the first block: a tar whose first member is "BZh9.jpg" is not compressed.
_BZIP2 = tuple(b"BZh%d" % level + block for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90"))
_new_xz = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)
_FORMATS: tuple[tuple[str, tuple[bytes, ...], Callable[[CompressedInput], Pieces]], ...] = (
    ("gzip", (_GZIP,), _decode_gzip),
    ("xz", (_XZ,), partial(_decode, new=_new_xz)),
    ("zstd", (_ZSTD, *SKIPPABLE), decode_zstd),
    ("bzip2", _BZIP2, partial(_decode, new=bz2.BZ2Decompressor)),
)
_MAGICS = {magic: found for found in _FORMATS for magic in found[1]}

#: The number of first bytes that identify any compression.
HEAD_SIZE = max(map(len, _MAGICS))


def find_decompression(data: CompressedInput) -> "Decompression | None":
    """Returns the decompression of the data that begins here; None if it is not compressed.

    Peeks at as few bytes as possible: a slow command may not have written more yet.
    """
    for size in range(1, HEAD_SIZE + 1):
        head = data.peek(size)
        candidates = [magic for magic in _MAGICS if magic.startswith(head[: len(magic)])]
        if not head or not candidates:
            return None
        if len(head) < size:
            data.exactly(len(head))
            raise data.cut("the rest of its header")
        if len(candidates[0]) == size:
            data.format, data.magics, decode = _MAGICS[head]
            return Decompression(data, decode(data))
    return None


class Decompression:
    """Fills buffers from the pieces of a decoder."""

    def __init__(self, data: CompressedInput, pieces: Pieces) -> None:
        self._data = data
        self._pieces = pieces
        self._piece = memoryview(b"")  # the part of the last piece that is not delivered yet

    def fill(self, view: memoryview) -> int:
        """Fills a buffer as far as that needs no waiting for the source, with at least one byte before the end."""
        filled = 0
        try:
            while filled < len(view):
                if not self._piece:
                    if filled and not self._data.held:  # the next piece may have to wait
                        break
                    self._data.target = view[filled:]
                    piece = next(self._pieces, None)
                    if piece is None or (filled and piece == 0):
                        break
                    if isinstance(piece, int):
                        filled += piece
                        continue
                    self._piece = memoryview(piece)
                count = min(len(view) - filled, len(self._piece))
                view[filled : filled + count], self._piece = self._piece[:count], self._piece[count:]
                filled += count
        except Exception as error:
            if not filled:
                raise
            self._pieces = _failing(error)  # raised after what precedes it
        finally:
            self._data.target = memoryview(b"")
        return filled


def _failing(error: Exception) -> Iterator[bytes]:
    raise error
    yield b""


def may_be_compressed(head: bytes) -> bool:
    """Returns whether a shard with these first `HEAD_SIZE` bytes may be compressed; a shorter one may be cut off."""
    return len(head) < HEAD_SIZE or head.startswith(tuple(_MAGICS))
