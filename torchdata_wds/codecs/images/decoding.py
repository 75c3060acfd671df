"""Decodes image fields with Pillow or simplejpeg into what an image spec names."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.checks import checked_int
from torchdata_wds.codecs.images.files import open_image, read_deep, read_orientation, resize_deep
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS, Pixels, fitting_size, parse_image_spec, to_values, turn
from torchdata_wds.codecs.plans import shown_call

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

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


class ImageDecoder:
    """Decodes image fields, for ``.wds_decode(...)``; its public name is ``image_decoder``.

    With ``max_size`` the longest side of the result is ``min(max_size, the file's longest side)``; the other side
    keeps the aspect ratio, rounded to the nearest pixel and at least 1. Images are never enlarged. Larger ones are
    reduced with a Lanczos filter that weighs all pixels it covers. A JPEG is first decoded at the smallest of its sizes
    1/2, 1/4, 1/8 that is at least twice the result: several times faster, and a smaller change than the filter's.

    With the ``[fast]`` extra, simplejpeg decodes ordinary JPEG files to arrays and tensors: the same pixels in two
    thirds of the time. Pillow decodes all else, and files that simplejpeg refuses or warns about, so exceptions are
    always Pillow's. The decoder is called as ``decoder(key, data)``, and returns None for fields that are not images.

    Args:
        spec: ``l8 rgb8 rgba8`` (uint8), ``l rgb rgba`` (float32 in 0..1), the same after ``torch`` (CHW tensors), or
            ``pil pill pilrgb pilrgba``.
        max_size: The longest side in pixels; None for the file's own size.
        exif_transpose: Whether to turn the image upright by its EXIF orientation (Pillow always turns TIFF files).

    Raises:
        TypeError, ValueError: if the spec is unknown, or ``max_size`` is not an int of at least 1.

    Example:
        >>> import io, PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.new("RGB", (640, 480)).save(file, "JPEG")
        >>> image_decoder("rgb8", max_size=256)(".jpg", file.getvalue()).shape
        (192, 256, 3)
    """

    def __init__(self, spec: str, *, max_size: int | None = None, exif_transpose: bool = False) -> None:
        self._parsed = parse_image_spec(spec)
        self.spec = spec
        self.max_size = None if max_size is None else checked_int("max_size", max_size, 1)
        self.exif_transpose = exif_transpose

    def __call__(self, key: str, data: bytes) -> Any:
        """Decodes an image field; None if the key's last part is not an image extension."""
        return self.decode(data) if key.lower().rpartition(".")[2] in IMAGE_FIELDS else None

    def decode(self, data: bytes) -> Any:
        """Decodes an image file into an array, a tensor or a PIL image."""
        spec, max_size, exif_transpose = self._parsed, self.max_size, self.exif_transpose
        if spec.container != "pil":
            pixels = _read_jpeg(data, spec.mode, max_size, exif_transpose)
            if pixels is not None:
                return to_values(pixels, spec)
        with open_image(data) as image:
            deep = read_deep(image, data, spec.mode)
            flat = _read_flat(image, spec.mode, max_size) if deep is None else None
            orientation = read_orientation(image) if exif_transpose else 1
            if flat is not None and spec.container == "pil" and orientation == 1:
                return flat.copy() if flat is image else flat
            pixels = np.asarray(flat) if deep is None else resize_deep(deep, max_size)
        return to_values(turn(pixels, orientation), spec)

    def __repr__(self) -> str:
        return shown_call("image_decoder", self, repr(self.spec))


image_decoder = ImageDecoder


def _read_jpeg(data: bytes, mode: str, max_size: int | None, exif_transpose: bool) -> Pixels | None:
    """Reads a JPEG file with simplejpeg, straight into an array; None if Pillow must read it."""
    # Both use libjpeg-turbo with the same settings, so complete 8-bit grey and colour files become the same pixels. All
    # others go to Pillow: neither the values nor the exceptions of a file may depend on what is installed.
    libraries = _libraries()
    if libraries is None or not data.startswith(_START):
        return None
    simplejpeg, pillow = libraries
    try:
        header = _read_header(data)
    except (IndexError, struct.error):
        return None
    if header is None:
        return None
    width, height, channels, has_metadata = header
    is_bomb = pillow.MAX_IMAGE_PIXELS is not None and width * height > pillow.MAX_IMAGE_PIXELS
    if is_bomb or (mode == "L" and channels != 1):  # simplejpeg rounds the grey of a colour file differently
        return None
    orientation = 1
    if has_metadata:  # only Pillow knows whether the file opens, and its orientation
        with open_image(data) as image:
            orientation = read_orientation(image) if exif_transpose else 1
    size = fitting_size((width, height), max_size)
    if size != (width, height):
        # The smallest of the sizes 1/1, 1/2, 1/4 and 1/8 that is at least twice the result, as in Pillow's draft mode:
        # 1001 x 600 to 100 x 60 has the factor min(1001 // 200, 600 // 120) = 5, so 1/4, rounded up to 251 x 150.
        factor = min(width // (2 * size[0]), height // (2 * size[1]))
        scale = next(scale for scale in (8, 4, 2, 1) if scale <= max(1, factor))
        width, height = -(-width // scale), -(-height // scale)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, _SPACES[mode], min_width=width, min_height=height)
    except Exception:  # noqa: BLE001 - Pillow decides about what it refuses or warns about
        return None
    if pixels.shape[:2] != (height, width):
        return None
    if mode == "L":
        pixels = pixels[:, :, 0]
    if size != (width, height):
        pixels = np.asarray(pillow.fromarray(pixels).resize(size, pillow.Resampling.LANCZOS))
    return turn(pixels, orientation)


def _read_flat(image: ImageFile, mode: str, max_size: int | None) -> Image:
    """Converts an opened image of at most 8 bits per channel to a mode and size; may return the same image."""
    size = fitting_size(image.size, max_size)
    if size != image.size:
        image.draft(None, (2 * size[0], 2 * size[1]))
    image.load()
    flat: Image = image
    if image.mode != mode:
        # Pillow warns when it converts a palette with transparency to RGB; by way of RGBA the colours are the same.
        if image.mode in ("P", "PA") and mode != "RGBA" and "transparency" in image.info:
            flat = image.convert("RGBA")
        flat = flat.convert(mode)
    if flat.size == size:
        return flat
    from PIL.Image import Resampling

    return flat.resize(size, Resampling.LANCZOS)


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
