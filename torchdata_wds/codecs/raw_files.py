"""Image files that are written without Pillow: 16-bit PNG, which it cannot do in colour, and PBM, PGM and PPM."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from torchdata_wds.codecs.pixels import Pixels

__all__ = ["EXIF_PREFIX", "write_bitmap", "write_deep_png", "write_pnm"]

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# channels -> PNG's colour type
_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
_FILTER_UP = 2
#: What EXIF data begins with in JPEG files and in Pillow, but not in PNG and WebP files.
EXIF_PREFIX = b"Exif\0\0"
# A chunk's length must stay below 2**31.
_CHUNK_BYTES = 1 << 30


def write_deep_png(pixels: Pixels, compression: int, exif: bytes | None = None) -> bytes:
    r"""Writes a PNG file of 16 bits a channel.

    Args:
        pixels: uint16, HW, or HWC with 2 (grey and alpha), 3 or 4 channels.
        compression: 0 to 9.
        exif: EXIF data to put in, if any.

    Example:
        >>> write_deep_png(np.zeros((2, 2), np.uint16), 6)[:16]
        b'\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR'
    """
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    rows = pixels.astype(">u2").reshape(height, -1).view(np.uint8)
    lines = np.empty((height, 1 + rows.shape[1]), np.uint8)
    lines[:, 0] = _FILTER_UP
    lines[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])
    data = zlib.compress(lines.data, compression)
    header = struct.pack(">IIBBBBB", width, height, 16, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = [_PNG_MAGIC, _chunk(b"IHDR", header)]
    if exif:
        parts.append(_chunk(b"eXIf", exif.removeprefix(EXIF_PREFIX)))
    parts += [_chunk(b"IDAT", data[start : start + _CHUNK_BYTES]) for start in range(0, len(data), _CHUNK_BYTES)]
    return b"".join([*parts, _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def write_pnm(pixels: Pixels) -> bytes:
    r"""Writes a binary PGM file of HW pixels, or a PPM file of HWC pixels with 3 channels; uint8 or uint16.

    Example:
        >>> write_pnm(np.array([[1, 2]], np.uint8))
        b'P5\n2 1\n255\n\x01\x02'
    """
    magic = "P5" if pixels.ndim == 2 else "P6"
    header = f"{magic}\n{pixels.shape[1]} {pixels.shape[0]}\n{np.iinfo(pixels.dtype).max}\n"
    return header.encode() + pixels.astype(pixels.dtype.newbyteorder(">"), copy=False).tobytes()


def write_bitmap(bits: Pixels) -> bytes:
    r"""Writes a binary PBM file of HW truth values, where True is white.

    Example:
        >>> write_bitmap(np.array([[True, False]]))
        b'P4\n2 1\n@'
    """
    return f"P4\n{bits.shape[1]} {bits.shape[0]}\n".encode() + np.packbits(~bits, axis=1).tobytes()
