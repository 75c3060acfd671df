"""zstd: frames are walked block by block, so that a cut is seen, and a small frame cannot explode in memory.

Each block gives at most 128 KiB. The decompressor gets one block at a time, and the checksum by itself: everything
before damage has been delivered when it is met.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.compression.input import CompressedInput

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))

#: What a frame begins with, an ordinary one or a skippable one.
ZSTD_MAGICS = (_MAGIC, *_SKIPPABLE)

#: The memory that a frame may ask for, in bytes; the command zstd has the same limit, unless told otherwise.
_LARGEST_WINDOW = 128 << 20
_RAW, _RLE, _COMPRESSED, _RESERVED = range(4)


def decode_zstd(data: CompressedInput) -> Iterator[bytes]:
    """Decompresses zstd, several frames too."""
    data.format = "zstd"
    try:
        import zstandard
    except ImportError as error:
        raise ShardOpenError(
            f"shard {data.shard} is compressed with zstd, and the package zstandard is not installed: "
            "pip install 'torchdata_wds[zstd]'",
            shard=data.shard,
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    another = True
    while another:
        if data.peek(4) in _SKIPPABLE:
            data.exactly(4)
            size = int.from_bytes(data.exactly(4), "little")
            while size:
                size -= len(data.exactly(min(size, 4096)))
        else:
            yield from _decode_frame(data, decompressor, zstandard.ZstdError)
        another = data.has_another(lambda head: any(magic.startswith(head) for magic in ZSTD_MAGICS))


def _decode_frame(data: CompressedInput, decompressor: Any, errors: Any) -> Iterator[bytes]:
    decompress = decompressor.decompressobj().decompress
    header = _read_header(data)
    has_checksum = header[4] & 4
    last = False
    try:
        decompress(header)
        while not last:
            part, last = _next_block(data)
            if piece := decompress(part):
                yield piece
        if has_checksum and (piece := decompress(data.exactly(4))):
            yield piece
    except errors as error:
        raise data.damaged(error) from error


def _next_block(data: CompressedInput) -> tuple[bytes, bool]:
    """Takes a block with its header; returns it, and whether it is the frame's last."""
    head = data.peek(3)
    if len(head) < 3:
        data.exactly(3)
    bits = int.from_bytes(head, "little")
    kind, size = bits >> 1 & 3, bits >> 3
    if kind == _RESERVED:
        raise data.damaged("a block of the reserved type")
    return data.exactly(3 + (1 if kind == _RLE else size)), bool(bits & 1)


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
