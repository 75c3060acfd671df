"""Decodes ordinary JPEG files with simplejpeg, whole or at a fraction of their size, to the same pixels as Pillow."""

from __future__ import annotations

import functools
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.codecs.images.files import open_image, read_orientation
from torchdata_wds.codecs.images.pixels import Pixels
from torchdata_wds.memory import keep_memory

# JPEG files: the first bytes, the frame header, and the markers of segments.
_START = b"\xff\xd8\xff"
_FRAME = struct.Struct(">BHHB")
_SKIPS_REST = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
_HEIGHT = 5  # where the height stands in a frame's segment
_SKIPPED = frozenset([0xDB, 0xC4, 0xDD, 0xFE])  # quantization and Huffman tables, the restart interval, comments
_FRAMES = frozenset([0xC0, 0xC1, 0xC2])  # baseline, extended and progressive: with Huffman tables, not lossless
_RESTARTS = 0xDD
_SEQUENTIAL = frozenset([0xC0, 0xC1])  # rows from top to bottom, if there is one scan
_SCAN, _FIRST_APPLICATION, _LAST_APPLICATION = 0xDA, 0xE0, 0xEF
_END = b"\xff\xd9"

# EXIF, XMP and Photoshop's resources: Pillow parses these when it opens a file, and some damage in them makes it fail.
_METADATA = frozenset([0xE1, 0xED])
_SEVERAL_IMAGES = b"MPF\0"

# Pillow refuses files with a truncated application segment; of the usual ones only Adobe's is below 16 bytes.
_USUAL_LENGTH = 16
_ADOBE = 14, 0xEE
_SPACES = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}

_WORTH = 0.95  # the part of a file's lines above which leaving out the rest is not worth a copy of the file

#: The factors by which libjpeg reduces an image while it decodes it, at less cost than the whole image has.
STEPS = (8, 4, 2, 1)


class JpegFile(NamedTuple):
    """An ordinary JPEG file."""

    data: bytes
    mode: str  # of the pixels that are wanted: L, RGB or RGBA
    size: tuple[int, int]  # width and height
    orientation: int  # by its EXIF data, if that is wanted
    frame: int  # where the header of a frame begins whose lines can be decoded from the top; 0 for others

    def decode(self, step: int = 1, rows: int | None = None) -> Pixels | None:
        """Decodes to HWC, or HW for L, one pixel for each `step` pixels of a side; None if Pillow must do it.

        If only the first `rows` rows of the result are needed, the others may be missing.
        """
        libraries = _libraries()
        if libraries is None:
            return None
        lines = self.size[1] if rows is None else self._lines(step, rows)
        width, height = -(-self.size[0] // step), -(-lines // step)
        if step > 1 and max(self.size[0], lines) < 8:
            return None  # 3/8 of 3 pixels, which libjpeg also makes, are as many as 1/2
        options = {"min_width": width, "min_height": height}
        try:
            if lines < self.size[1]:
                pixels = self._decode_lines(lines, libraries[0].decode_jpeg, options)
            else:
                pixels = libraries[0].decode_jpeg(self.data, _SPACES[self.mode], **options)
        except Exception:  # noqa: BLE001 - Pillow decides about what it refuses or warns about
            return None
        if pixels.shape[:2] != (height, width):
            return None
        return pixels[:, :, 0] if self.mode == "L" else pixels

    def _decode_lines(self, lines: int, decode_jpeg: Any, options: dict[str, int]) -> Pixels:
        """Decodes the first lines of the file."""
        # The file is given another height: libjpeg skips what follows the last line, with a warning, which is raised
        # once the pixels are there. It is the first of a file only if the lines themselves have no damage.
        place = self.frame + _HEIGHT
        data = b"".join((self.data[:place], lines.to_bytes(2, "big"), self.data[place + 2 :]))
        space = _SPACES[self.mode]
        pixels = np.empty((options["min_height"], options["min_width"], len(self.mode)), np.uint8)
        try:
            decode_jpeg(data, space, buffer=pixels, **options)
        except ValueError as error:
            if not _SKIPS_REST.fullmatch(str(error)):
                raise
        return pixels

    def _lines(self, step: int, rows: int) -> int:
        """Returns how many lines of the file must be decoded for the first `rows` rows of the result."""
        # Colours at half the size are interpolated with those of the next row. A truncated file is decoded whole, to
        # fail as it does elsewhere.
        lines = (rows + 2) * step
        is_worth = self.frame and lines <= _WORTH * self.size[1] and self.data.endswith(_END)
        return lines if is_worth else self.size[1]


def open_jpeg(data: bytes, mode: str, *, exif_transpose: bool) -> JpegFile | None:
    """Reads the header of a JPEG file that simplejpeg can decode; None if Pillow must read the file."""
    # Both use libjpeg-turbo with the same settings, so complete 8-bit grey and colour files become the same pixels. All
    # others go to Pillow: neither the values nor the exceptions of a file may depend on what is installed.
    libraries = _libraries()
    if libraries is None or not data.startswith(_START):
        return None
    keep_memory()
    limit = libraries[1].MAX_IMAGE_PIXELS
    try:
        header = _read_header(data)
    except (IndexError, struct.error):
        return None
    if header is None:
        return None
    width, height, channels, has_metadata, frame = header
    is_bomb = limit is not None and width * height > limit
    if is_bomb or (mode == "L" and channels != 1):  # simplejpeg rounds the grey of a colour file differently
        return None
    orientation = 1
    if has_metadata:  # only Pillow knows whether the file opens, and its orientation
        with open_image(data) as image:
            orientation = read_orientation(image) if exif_transpose else 1
    return JpegFile(data, mode, (width, height), orientation, frame)


def _read_header(data: bytes) -> tuple[int, int, int, bool, int] | None:
    """Reads width, height, channels (1 or 3), whether there is metadata, and `frame`; None if unusual."""
    # After FF D8 come segments: FF, a marker, and a length of two bytes that counts itself but not the marker. From
    # byte 2, a segment of length 16 ends before byte 2 + 2 + 16 = 20, where the next begins. Segments of kinds that are
    # not listed above may change what Pillow returns, so files that have them are left to Pillow.
    position, width, height, channels, has_metadata, frame = 2, 0, 0, 0, False, 0
    has_restarts = False
    while True:
        marker, length = data[position + 1], data[position + 2] << 8 | data[position + 3]
        if data[position] != 0xFF:
            return None
        if marker in _SKIPPED:
            has_restarts |= marker == _RESTARTS
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
            frame = position if marker in _SEQUENTIAL else 0
        elif marker == _SCAN and channels:
            is_only_scan = data[position + 4] == channels
            return width, height, channels, has_metadata, frame if is_only_scan and not has_restarts else 0
        else:
            return None
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
