"""Decodes ordinary JPEG files with simplejpeg, whole or at a fraction of their size, to the same pixels as Pillow."""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

from torchdata_wds.codecs.images.files import open_image, read_orientation
from torchdata_wds.codecs.images.pixels import Pixels

# JPEG files: the first bytes, the frame header, and the markers of segments.
_START = b"\xff\xd8\xff"
_FRAME = struct.Struct(">BHHB")
_SKIPPED = frozenset([0xDB, 0xC4, 0xDD, 0xFE])  # quantization and Huffman tables, the restart interval, comments
_FRAMES = frozenset([0xC0, 0xC1, 0xC2])  # baseline, extended and progressive: with Huffman tables, not lossless
_SCAN, _FIRST_APPLICATION, _LAST_APPLICATION = 0xDA, 0xE0, 0xEF

# EXIF, XMP and Photoshop's resources: Pillow parses these when it opens a file, and some damage in them makes it fail.
_METADATA = frozenset([0xE1, 0xED])
_SEVERAL_IMAGES = b"MPF\0"

# Pillow refuses files with a truncated application segment; of the usual ones only Adobe's is below 16 bytes.
_USUAL_LENGTH = 16
_ADOBE = 14, 0xEE
_SPACES = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}

#: The factors by which libjpeg reduces an image while it decodes it, at less cost than the whole image has.
STEPS = (8, 4, 2, 1)


class JpegFile(NamedTuple):
    """An ordinary JPEG file."""

    data: bytes
    mode: str  # of the pixels that are wanted: L, RGB or RGBA
    size: tuple[int, int]  # width and height
    orientation: int  # by its EXIF data, if that is wanted

    def decode(self, step: int = 1) -> Pixels | None:
        """Decodes to HWC, or HW for L, one pixel for each `step` pixels of a side; None if Pillow must do it."""
        libraries = _libraries()
        if libraries is None:
            return None
        width, height = (-(-side // step) for side in self.size)
        try:
            pixels: Pixels = libraries[0].decode_jpeg(self.data, _SPACES[self.mode], min_width=width, min_height=height)
        except Exception:  # noqa: BLE001 - Pillow decides about what it refuses or warns about
            return None
        if pixels.shape[:2] != (height, width):
            return None
        return pixels[:, :, 0] if self.mode == "L" else pixels


def open_jpeg(data: bytes, mode: str, *, exif_transpose: bool) -> JpegFile | None:
    """Reads the header of a JPEG file that simplejpeg can decode; None if Pillow must read the file."""
    # Both use libjpeg-turbo with the same settings, so complete 8-bit grey and colour files become the same pixels. All
    # others go to Pillow: neither the values nor the exceptions of a file may depend on what is installed.
    libraries = _libraries()
    if libraries is None or not data.startswith(_START):
        return None
    limit = libraries[1].MAX_IMAGE_PIXELS
    try:
        header = _read_header(data)
    except (IndexError, struct.error):
        return None
    if header is None:
        return None
    width, height, channels, has_metadata = header
    is_bomb = limit is not None and width * height > limit
    if is_bomb or (mode == "L" and channels != 1):  # simplejpeg rounds the grey of a colour file differently
        return None
    orientation = 1
    if has_metadata:  # only Pillow knows whether the file opens, and its orientation
        with open_image(data) as image:
            orientation = read_orientation(image) if exif_transpose else 1
    return JpegFile(data, mode, (width, height), orientation)


def _read_header(data: bytes) -> tuple[int, int, int, bool] | None:
    """Reads width, height, channels (1 or 3) and whether there is metadata, up to the first scan; None if unusual."""
    # After FF D8 come segments: FF, a marker, and a length of two bytes that counts itself but not the marker. From
    # byte 2, a segment of length 16 ends before byte 2 + 2 + 16 = 20, where the next begins. Segments of kinds that are
    # not listed above may change what Pillow returns, so files that have them are left to Pillow.
    position, width, height, channels, has_metadata = 2, 0, 0, 0, False
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
            if bits != 8 or channels not in (1, 3) or not width or not height:
                return None
        else:
            return (width, height, channels, has_metadata) if marker == _SCAN and channels else None
        position += 2 + length


@functools.cache
def _libraries() -> tuple[Any, Any] | None:
    """Returns simplejpeg, and PIL.Image for its pixel limit; None if simplejpeg is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    from PIL import Image

    return simplejpeg, Image
