"""JPEG files through simplejpeg, which writes the pixels straight into an array: the ``[fast]`` extra.

Pillow has the same decoder, libjpeg-turbo, and the same settings: whole grey and colour files of 8 bits become the same
pixels. Everything else is left to Pillow (other kinds of JPEG, damage of any sort, images that it holds for bombs), so
that what a file becomes, or which exception, does not depend on what is installed.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

from torchdata_wds.codecs.images.pixels import Pixels

_START = b"\xff\xd8\xff"
_FRAME = struct.Struct(">BHHB")

# Quantization and Huffman tables, the restart interval, comments.
_SKIPPED = frozenset([0xDB, 0xC4, 0xDD, 0xFE])

# Baseline, extended and progressive: what is coded with Huffman tables and is not lossless.
_FRAMES = frozenset([0xC0, 0xC1, 0xC2])
_SCAN = 0xDA
_FIRST_APPLICATION, _LAST_APPLICATION = 0xE0, 0xEF

# EXIF, XMP and Photoshop's resources: Pillow parses them as it opens a file, and some damage there ends that.
_METADATA = frozenset([0xE1, 0xED])
_SEVERAL_IMAGES = b"MPF\0"

# Pillow refuses files where an application segment is cut short; of the usual ones only Adobe's is below 16 bytes.
_USUAL_LENGTH = 16
_ADOBE = 14, 0xEE
_SPACES = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}


class JpegHeader(NamedTuple):
    """What the header of an ordinary JPEG file says: width and height, 1 channel for grey or 3 for colour.

    With metadata, only Pillow can judge whether the file opens, and how the image is turned.
    """

    size: tuple[int, int]
    channels: int
    has_metadata: bool


def read_header(data: bytes) -> JpegHeader | None:
    """Reads the header of a JPEG file; None if simplejpeg is not installed or the file is to be left to Pillow."""
    libraries = _libraries()
    if libraries is None or not data.startswith(_START):
        return None
    try:
        header = _walk(data)
    except (IndexError, struct.error):
        return None
    limit = libraries[1].MAX_IMAGE_PIXELS
    if header is None or (limit is not None and header.size[0] * header.size[1] > limit):
        return None
    return header


def read_jpeg(data: bytes, header: JpegHeader, mode: str, wanted: tuple[int, int] | None = None) -> Pixels | None:
    """Decodes a JPEG file into uint8, HW for the mode ``L``, else HWC; None if it is to be left to Pillow.

    A size ``wanted`` that is smaller than the file's means the smallest of the sizes 1/1, 1/2, 1/4 and 1/8 that is at
    least this in both directions, as in Pillow's draft mode.
    """
    libraries = _libraries()
    if libraries is None or (mode == "L" and header.channels != 1):
        return None  # the decoder's own grey of colours is not rounded as Pillow's
    width, height = header.size
    if wanted is not None:
        factor = min(width // wanted[0], height // wanted[1])
        scale = next(scale for scale in (8, 4, 2, 1) if scale <= max(1, factor))
        width, height = -(-width // scale), -(-height // scale)
    try:
        pixels: Pixels = libraries[0].decode_jpeg(data, _SPACES[mode], min_width=width, min_height=height)
    except Exception:  # noqa: BLE001 - whatever it refuses or warns of: Pillow decides
        return None
    if pixels.shape[:2] != (height, width):
        return None
    return pixels[:, :, 0] if mode == "L" else pixels


def _walk(data: bytes) -> JpegHeader | None:
    """Walks over the segments before the first scan; None where there is one that is not ordinary."""
    position, channels, has_metadata = 2, 0, False
    size = 0, 0
    while True:
        marker, length = data[position + 1], data[position + 2] << 8 | data[position + 3]
        if data[position] != 0xFF:
            return None
        if marker in _SKIPPED:
            pass
        elif _FIRST_APPLICATION <= marker <= _LAST_APPLICATION:
            if length < _USUAL_LENGTH and (length, marker) != _ADOBE:
                return None
            if marker in _METADATA:
                has_metadata = True
            elif data[position + 4 : position + 8] == _SEVERAL_IMAGES:
                return None
        elif marker in _FRAMES and not channels:
            bits, height, width, channels = _FRAME.unpack_from(data, position + 4)
            size = width, height
            if bits != 8 or channels not in (1, 3) or not width or not height:
                return None
        else:
            return JpegHeader(size, channels, has_metadata) if marker == _SCAN and channels else None
        position += 2 + length


@functools.cache
def _libraries() -> tuple[Any, Any] | None:
    """simplejpeg, and Pillow for its limit of pixels; None where simplejpeg is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    from PIL import Image

    return simplejpeg, Image
