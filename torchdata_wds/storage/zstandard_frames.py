"""zstd: frames are walked block by block, so that a cut is seen, and a small frame cannot explode in memory.

Each block gives at most 128 KiB. The decompressor gets one block at a time, and the checksum by itself: everything
before damage has been delivered when it is met.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.feeding import CompressedInput

__all__ = ["ZSTD_MAGICS", "decode_zstd"]

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))
#: What a frame begins with, an ordinary one or a skippable one.
ZSTD_MAGICS = (_MAGIC, *_SKIPPABLE)
_RAW, _RLE, _COMPRESSED, _RESERVED = range(4)


def decode_zstd(data: CompressedInput) -> Iterator[bytes]:
    """Decompresses zstd, several frames too.

    Raises:
        ShardOpenError: if `zstandard` is not installed.
    """
    data.format = "zstd"
    zstandard = _zstandard(data)
    another = True
    while another:
        if data.peek(4) in _SKIPPABLE:
            data.exactly(4)
            _skip(data, int.from_bytes(data.exactly(4), "little"))
        else:
            yield from _decode_frame(data, zstandard)
        another = data.has_another(_may_be_frame)


def _decode_frame(data: CompressedInput, zstandard: Any) -> Iterator[bytes]:
    frame = zstandard.ZstdDecompressor().decompressobj()
    header = _read_header(data)
    yield from _feed(data, frame, zstandard, header)
    last = False
    while not last:
        block_header = data.exactly(3)
        bits = int.from_bytes(block_header, "little")
        last, kind, size = bool(bits & 1), bits >> 1 & 3, bits >> 3
        if kind == _RESERVED:
            raise data.damaged("a block of the reserved type")
        block = data.exactly(1 if kind == _RLE else size)
        yield from _feed(data, frame, zstandard, block_header + block)
    if header[4] & 4:
        yield from _feed(data, frame, zstandard, data.exactly(4))


def _feed(data: CompressedInput, frame: Any, zstandard: Any, compressed: bytes) -> Iterator[bytes]:
    try:
        piece = frame.decompress(compressed)
    except zstandard.ZstdError as error:
        raise data.damaged(error) from error
    if piece:
        yield piece


def _read_header(data: CompressedInput) -> bytes:
    header = data.exactly(5)
    if not header.startswith(_MAGIC):
        raise data.damaged(f"its frame begins with {header[:4]!r}")
    descriptor = header[4]
    single_segment = descriptor >> 5 & 1
    window = 0 if single_segment else 1
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content = (single_segment, 2, 4, 8)[descriptor >> 6]
    return header + data.exactly(window + dictionary + content)


def _may_be_frame(head: bytes) -> bool:
    return any(magic.startswith(head) for magic in ZSTD_MAGICS)


def _skip(data: CompressedInput, size: int) -> None:
    while size:
        size -= len(data.exactly(min(size, 4096)))


def _zstandard(data: CompressedInput) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ShardOpenError(
            f"shard {data.shard} is compressed with zstd, and the package zstandard is not installed: "
            "pip install 'torchdata_wds[zstd]'",
            shard=data.shard,
        ) from error
    return zstandard
