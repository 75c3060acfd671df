"""The decoder of zstd: walks over frames and their blocks, which detects a cut anywhere and bounds the memory."""

from collections.abc import Callable, Iterator
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.compressed_input import ZSTD_MEMORY_LIMIT, CompressedInput

#: The first bytes of frames that are skipped.
SKIPPABLE = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))

_RLE_BLOCK, _COMPRESSED_BLOCK, _RESERVED_BLOCK = 1, 2, 3

# The most bytes that a block decompresses to.
_BLOCK = 128 * 1024


def decode_zstd(data: CompressedInput) -> Iterator[memoryview | int]:
    """Decompresses frames group by group: what precedes a damaged block is delivered before the error."""
    try:
        import zstandard
    except ImportError as error:
        raise ShardOpenError(
            f"shard {data.shard} is compressed with zstd, and the package zstandard is not installed: "
            "pip install 'torchdata_wds[zstd]'",
            shard=data.shard,
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_MEMORY_LIMIT)
    for _ in data.streams():
        if data.peek(4) in SKIPPABLE:
            data.exactly(4)
            size = int.from_bytes(data.exactly(4), "little")
            while size:
                size -= len(data.exactly(min(size, 4096)))
            continue
        frame = _Frame(data)
        source: Any = frame  # of which zstandard needs only `read`
        try:
            yield from _decode_frame(data, frame, decompressor.stream_reader(source).readinto1)
        except zstandard.ZstdError as error:
            frame.give_back()
            # Its traceback would keep buffers of zstandard's cffi backend, which crash Python when they are collected.
            raise data.damaged(error) from error.with_traceback(None)


def _decode_frame(
    data: CompressedInput, frame: "_Frame", readinto: Callable[[memoryview], int]
) -> Iterator[memoryview | int]:
    scratch = memoryview(b"")
    while True:
        if not frame.is_at_hand():
            yield 0
        target = data.target
        if len(target) < 2 * _BLOCK:  # else the decompressor would keep what does not fit
            target = scratch = scratch or memoryview(bytearray(2 * _BLOCK))
        if not (count := readinto(target)):
            return
        yield scratch[:count] if target is scratch else count


class _Frame:
    """The source of zstandard's reader, which calls `read` until it has some output.

    `read` returns the header of a frame, then groups of blocks, then the checksum. A group is one block, and the
    uncompressed ones that follow it: these cannot be damaged, so that an error costs no output.
    """

    def __init__(self, data: CompressedInput) -> None:
        start = data.exactly(5)
        # RFC 8878, 3.1.1: the descriptor's bits say how long the other fields are. 0x24 is a single segment (bit 5)
        # with a checksum (bit 2) and a content size of one byte (bits 7-6 are 0), so one byte is left of its header.
        descriptor = start[4]
        single_segment = descriptor >> 5 & 1
        window = 0 if single_segment else 1
        dictionary = (0, 1, 2, 4)[descriptor & 3]
        content = (single_segment, 2, 4, 8)[descriptor >> 6]
        self._data = data
        self._header = start + data.exactly(window + dictionary + content)
        self._checksum = descriptor & 4  # its length
        self._is_last = False  # whether no block follows
        self._followers = memoryview(b"")  # the last group without its first block

    def is_at_hand(self) -> bool:
        """Returns whether the next group can be read without waiting for the source."""
        held = self._data.held
        if self._is_last:
            return len(held) >= self._checksum
        return len(held) > _BLOCK + 3 or (len(held) >= 3 and len(held) >= _block(held)[2])

    def read(self, _: int) -> bytes | memoryview:
        """Returns the next part of the frame."""
        header, self._header = self._header, b""
        if header:
            return header
        self._followers = memoryview(b"")
        if self._is_last:
            size, self._checksum = self._checksum, 0
            return self._data.exactly(size)
        return self._group()

    def give_back(self) -> None:
        """Gives back the blocks after the first one of the last group, in which the damage must be."""
        self._data.give_back(bytes(self._followers))

    def _group(self) -> memoryview:
        data = self._data
        if not data.hold(3):
            data.exactly(3)
        self._is_last, kind, first = _block(data.held)
        if kind == _RESERVED_BLOCK:
            raise data.damaged("a block of the reserved type")
        if not data.hold(first):
            data.exactly(first)
        held, end, room = data.held, first, _BLOCK
        while not self._is_last and end + 3 <= len(held):
            bits = held[end] | held[end + 1] << 8 | held[end + 2] << 16
            kind, size = bits >> 1 & 3, bits >> 3
            behind = end + (4 if kind == _RLE_BLOCK else 3 + size)
            if kind >= _COMPRESSED_BLOCK or size > room or behind > len(held):
                break
            self._is_last, end, room = bool(bits & 1), behind, room - size
        group = data.take(end)
        self._followers = group[first:]
        return group


def _block(held: memoryview) -> tuple[bool, int, int]:
    """Returns whether the block that begins there is the last one, its kind, and its length with its header."""
    bits = held[0] | held[1] << 8 | held[2] << 16
    kind = bits >> 1 & 3
    return bool(bits & 1), kind, 4 if kind == _RLE_BLOCK else 3 + (bits >> 3)
