"""Compressed shards, known by their first bytes: the table from magic to decoder.

A decoder is a generator of decompressed pieces. It takes its input in small pieces and limits its output per step, so
that memory stays bounded whatever the shard holds, and everything before damage is delivered before the error.
"""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.storage.compression.gzip import decode_gzip
from torchdata_wds.storage.compression.input import CompressedInput
from torchdata_wds.storage.compression.zstd import ZSTD_MAGICS, decode_zstd

Decoder = Callable[[CompressedInput], Iterator[bytes]]

#: Output per step. Python drops the output of the step that meets an error, so it is small.
_STEP = 4096

#: What a stream may ask for, in bytes: four times what ``xz -9`` does. A small file can ask for 4 GiB.
XZ_MEMORY_LIMIT = 256 << 20
_XZ = b"\xfd7zXZ\x00"


def _decode(data: CompressedInput, *, kind: str, new: Callable[[], Any], magic: bytes) -> Iterator[bytes]:
    """Decompresses bzip2 or xz, several streams too."""
    data.format = kind
    another = True
    while another:
        decompressor = new()
        while not decompressor.eof:
            chunk = data.chunk_or_cut() if decompressor.needs_input else b""
            try:
                piece = decompressor.decompress(chunk, _STEP)
            except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
                if "Memory usage limit" in str(error):
                    raise ShardFormatError(
                        f"shard {data.shard} takes more than {XZ_MEMORY_LIMIT >> 20} MiB of memory to decompress: its "
                        "xz dictionary is larger. Compress it again with a preset of xz, or read it through "
                        "'pipe:xz -dc PATH'.",
                        kind="compression",
                        shard=data.shard,
                    ) from error
                raise data.damaged(error) from error
            if piece:
                yield piece
        data.give_back(decompressor.unused_data)
        another = data.has_another(lambda head: head.startswith(magic) or magic.startswith(head))


_decode_bzip2 = partial(_decode, kind="bzip2", new=bz2.BZ2Decompressor, magic=b"BZh")
_new_xz = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)

# The magic of the first block belongs to bzip2's: a shard whose first member is "BZh9.jpg" is not compressed.
_MAGICS: tuple[tuple[bytes, Decoder], ...] = (
    (b"\x1f\x8b\x08", decode_gzip),
    (_XZ, partial(_decode, kind="xz", new=_new_xz, magic=_XZ)),
    *((magic, decode_zstd) for magic in ZSTD_MAGICS),
    *((b"BZh%d" % level + block, _decode_bzip2) for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90")),
)

#: How many bytes tell every compression.
HEAD_SIZE = max(len(magic) for magic, _ in _MAGICS)


def find_decoder(data: CompressedInput) -> Decoder | None:
    """Finds the decoder for what begins here, or None for data that is not compressed.

    Peeks at no more bytes than it needs: a slow command may not have written more.
    """
    for size in range(1, HEAD_SIZE + 1):
        head = data.peek(size)
        candidates = [(magic, decoder) for magic, decoder in _MAGICS if magic.startswith(head[: len(magic)])]
        if not head or not candidates:
            return None
        if len(head) < size:
            data.exactly(len(head))
            raise data.cut("the rest of its header")
        magic, decoder = candidates[0]
        if len(magic) == size:
            return decoder
    return None


def is_compressed(head: bytes) -> bool:
    """Returns whether a shard that begins with these bytes (`HEAD_SIZE` of them) is compressed."""
    return any(head.startswith(magic) for magic, _ in _MAGICS)
