"""Decoders for compressed shards, detected by their first bytes: gzip, bzip2, xz and zstd, also several streams in one.

A shard's name plays no part here; `compression` has the suffixes, which count when shards are written or listed.

A decoder is a generator of decompressed pieces. Its input comes in small pieces and its output per step is limited.
This bounds memory for any input, and delivers what precedes damage before the error: most decompressors drop the
output of the step that finds damage.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchdata_wds.errors import DOWNLOAD_AGAIN, Advice, ShardFormatError, ShardOpenError

# Small, because zlib copies its unused input at each step.
_CHUNK = 32 * 1024

# Smaller still at the start of a stream: a decoder copies what follows the end of its stream.
_FIRST_CHUNK = 512

#: The most memory for an xz stream, in bytes: four times the need of ``xz -9``. A small file can demand 4 GiB.
XZ_MEMORY_LIMIT = 256 << 20

#: The largest window of a zstd frame, in bytes; also the default limit of the command zstd.
_ZSTD_MEMORY_LIMIT = 128 << 20

_GZIP, _XZ, _ZSTD = b"\x1f\x8b\x08", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))

_HEADER_TEXT_LIMIT = 1 << 16
_HAS_CRC, _HAS_EXTRA, _HAS_NAME, _HAS_COMMENT, _RESERVED = 2, 4, 8, 16, 224
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3


class CompressedInput:
    """The compressed bytes of a source whose `read(n)` returns up to n bytes, and none only at the verified end."""

    def __init__(self, source: io.RawIOBase, shard: str) -> None:
        self.shard = shard
        self.format = "compressed"  # the name of the compression, for messages
        self.magics: tuple[bytes, ...] = ()  # the first bytes that a stream of this format may have
        self._source = source
        self._held = b""
        self._taken = 0  # bytes of _held already taken: slicing it at each step would copy the rest each time
        self._fetched = 0
        self._size = _CHUNK  # of the next piece

    def streams(self) -> Iterator[None]:
        """Yields at the start of each stream; a complete one may be followed only by more streams and zero padding."""
        yield
        while data := self.chunk():
            rest = data.lstrip(b"\0")
            if not rest:
                continue
            self.give_back(rest)
            head = self.peek(4)
            if not any(magic.startswith(head[: len(magic)]) for magic in self.magics):
                raise self._error(
                    f"has {head!r} at byte {self._position:,}, after the end of its {self.format} data: expected the "
                    f"end of the file, zero bytes or more {self.format} data. Was something appended to it?"
                )
            yield

    def chunk(self) -> bytes:
        """Takes some bytes; returns b"" only at the end."""
        if self._taken == len(self._held):
            self._held, self._taken = self._fetch(), 0
        data = self._held[self._taken : self._taken + self._size]
        self._taken += len(data)
        self._size = min(2 * self._size, _CHUNK)
        return data

    def rest(self) -> bytes:
        """Takes the bytes fetched so far, or fetches some; the caller reads what follows from the source itself."""
        data = self._held[self._taken :]
        self._held, self._taken = b"", 0
        return data or self._fetch()

    def give_back(self, data: bytes) -> None:
        """Puts back the last bytes taken, which belong to the next stream."""
        # Usually they are still in _held: of 32,768 bytes 600 were taken and 88 come back, so 512 are taken now. They
        # are not if the decoder kept them from an earlier chunk, so they go in front of what is held.
        if len(data) <= self._taken:
            self._taken -= len(data)
        else:
            self._held, self._taken = data + self._held[self._taken :], 0
        self._size = _FIRST_CHUNK

    def peek(self, size: int) -> bytes:
        """Returns the next bytes without taking them, fewer only at the end."""
        if self._taken + size > len(self._held):
            self._held, self._taken = self._held[self._taken :], 0
            while len(self._held) < size and (data := self._fetch()):
                self._held += data
        return self._held[self._taken : self._taken + size]

    def exactly(self, size: int) -> bytes:
        """Takes exactly `size` bytes; raises ShardFormatError if the input ends too early."""
        data = self.peek(size)
        self._taken += len(data)
        if len(data) < size:
            raise self.cut(f"{size - len(data):,} more bytes")
        return data

    def cut(self, expected: str) -> ShardFormatError:
        """Returns the error for a stream that ends too early."""
        ends = f"is cut off: its {self.format} data ends at byte {self._position:,} (compressed)"
        return self._error(f"{ends}, expected {expected}.", DOWNLOAD_AGAIN)

    def damaged(self, found: object) -> ShardFormatError:
        """Returns the error for data that does not decompress or fails its checksum."""
        if "Memory usage limit" in str(found):
            return self._error(
                f"takes more than {XZ_MEMORY_LIMIT >> 20} MiB of memory to decompress: its xz dictionary is larger. "
                "Compress it again with a preset of xz, or read it through 'pipe:xz -dc PATH'."
            )
        wrong = f"is damaged: its {self.format} data is wrong before byte {self._position:,} (compressed)"
        return self._error(f"{wrong}: {found}.", DOWNLOAD_AGAIN)

    def _error(self, what: str, advice: Advice | str = "") -> ShardFormatError:
        return ShardFormatError(f"shard {self.shard} {what}", shard=self.shard, advice=advice, kind="compression")

    @property
    def _position(self) -> int:
        """The number of compressed bytes that the decoder has taken."""
        return self._fetched - len(self._held) + self._taken

    def _fetch(self) -> bytes:
        data = self._source.read(_CHUNK) or b""
        self._fetched += len(data)
        return data


def _decode_one(data: CompressedInput, decompressor: Any, step: int, errors: Any) -> Iterator[bytes]:
    """Decompresses one stream with an object that has the interface of `bz2.BZ2Decompressor`."""
    while not decompressor.eof:
        # A step returns at most `step` bytes, because 32 KiB of gzip can hold 32 MiB. While more output of the same
        # input is waiting, needs_input is False, and the decompressor is called with b"".
        chunk = b""
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

    def decompress(self, chunk: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + chunk, max_length)
        # After a full step zlib may still hold output, even if it has consumed all of its input.
        self.needs_input = len(piece) < max_length and not self._zlib.unconsumed_tail
        self.eof, self.unused_data = self._zlib.eof, self._zlib.unused_data
        return piece


def _decode_zstd(data: CompressedInput) -> Iterator[bytes]:
    """Feeds frames to zstd block by block: this detects a cut, and bounds the output of a step to 128 KiB."""
    try:
        import zstandard
    except ImportError as error:
        raise ShardOpenError(
            f"shard {data.shard} is compressed with zstd, and the package zstandard is not installed: "
            "pip install 'torchdata_wds[zstd]'",
            shard=data.shard,
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MEMORY_LIMIT)
    for _ in data.streams():
        if data.peek(4) in _SKIPPABLE:
            data.exactly(4)
            size = int.from_bytes(data.exactly(4), "little")
            while size:
                size -= len(data.exactly(min(size, 4096)))
            continue
        decompress = decompressor.decompressobj().decompress
        try:
            for part in _zstd_parts(data):
                if piece := decompress(part):
                    yield piece
        except zstandard.ZstdError as error:
            raise data.damaged(error) from error


def _zstd_parts(data: CompressedInput) -> Iterator[bytes]:
    """Yields the header of a frame, each block with its own header, and the checksum."""
    start = data.exactly(5)
    # RFC 8878, 3.1.1: the descriptor's bits say how long the other fields are. 0x24 is a single segment (bit 5) with a
    # checksum (bit 2) and a content size of one byte (bits 7-6 are 0), so one byte is left of its header.
    descriptor = start[4]
    single_segment = descriptor >> 5 & 1
    window = 0 if single_segment else 1
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content = (single_segment, 2, 4, 8)[descriptor >> 6]
    yield start + data.exactly(window + dictionary + content)
    is_last = False
    while not is_last:
        head = data.peek(3)
        if len(head) < 3:
            data.exactly(3)
        bits = int.from_bytes(head, "little")
        is_last, kind, size = bool(bits & 1), bits >> 1 & 3, bits >> 3
        if kind == _RESERVED_BLOCK:
            raise data.damaged("a block of the reserved type")
        yield data.exactly(3 + (1 if kind == _RLE_BLOCK else size))
    if descriptor & 4:
        yield data.exactly(4)


# bzip2's include the magic number of the first block: a tar whose first member is "BZh9.jpg" is not compressed.
_BZIP2 = tuple(b"BZh%d" % level + block for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90"))
_new_xz = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)
_FORMATS: tuple[tuple[str, tuple[bytes, ...], Callable[[CompressedInput], Iterator[bytes]]], ...] = (
    ("gzip", (_GZIP,), _decode_gzip),
    ("xz", (_XZ,), partial(_decode, new=_new_xz)),
    ("zstd", (_ZSTD, *_SKIPPABLE), _decode_zstd),
    ("bzip2", _BZIP2, partial(_decode, new=bz2.BZ2Decompressor)),
)
_MAGICS = {magic: found for found in _FORMATS for magic in found[1]}

#: The number of first bytes that identify any compression.
HEAD_SIZE = max(map(len, _MAGICS))


def find_decoder(data: CompressedInput) -> Iterator[bytes] | None:
    """Returns the decoder for the data that begins here; None if it is not compressed.

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
            return decode(data)
    return None


def may_be_compressed(head: bytes) -> bool:
    """Returns whether a shard with these first `HEAD_SIZE` bytes may be compressed; a shorter one may be cut off."""
    return len(head) < HEAD_SIZE or head.startswith(tuple(_MAGICS))
