"""Opens image files, and reads those with more than 8 bits per channel at full depth, as uint16."""

from __future__ import annotations

import functools
import io
import re
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchdata_wds.codecs.images.pixels import Pixels
from torchdata_wds.memory import keep_memory

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

# The formats accepted under any field name. Pillow reads more, but would run Ghostscript for a PostScript file.
_FORMATS = ("JPEG", "PNG", "WEBP", "PPM", "TIFF", "BMP", "DIB", "GIF", "AVIF", "JPEG2000", "ICO")
#: Those that Pillow can decode at a fraction of their size.
JPEG_FORMATS = ("JPEG", "MPO")

_ORIENTATION, _TIFF_PHOTOMETRIC = 0x0112, 262
_COLOUR = re.compile(r"(RGB|RGBA|RGBX);16[LBN]")


def open_image(data: bytes) -> ImageFile:
    """Reads the header of an image file; raises ``DecompressionBombError`` where Pillow would only warn."""
    keep_memory()
    pillow, formats = _pillow()
    image = pillow.open(io.BytesIO(data), formats=formats)
    try:
        check_pixels("it has", image.width * image.height)
    except pillow.DecompressionBombError:
        image.close()
        raise
    return cast("ImageFile", image)


def check_pixels(where: str, pixels: int) -> None:
    """Raises ``DecompressionBombError`` for more pixels than Pillow's limit; `where` begins the message."""
    pillow, _ = _pillow()
    limit = pillow.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise pillow.DecompressionBombError(
            f"{where} {pixels:,} pixels, more than the limit of {limit:,}. If you trust it, raise "
            "PIL.Image.MAX_IMAGE_PIXELS"
        )


@functools.cache
def _pillow() -> tuple[Any, tuple[str, ...]]:
    """Returns PIL.Image, and the accepted formats that it can read: old versions have no AVIF."""
    import PIL.Image
    from PIL import IcoImagePlugin, Jpeg2KImagePlugin, TiffImagePlugin, WebPImagePlugin  # noqa: F401  (registers them)

    PIL.Image.preinit()
    with suppress(ImportError):
        from PIL import AvifImagePlugin  # noqa: F401
    return PIL.Image, tuple(name for name in _FORMATS if name in PIL.Image.OPEN)


def load_at(image: ImageFile, step: int) -> None:
    """Loads an opened JPEG file at one pixel for each 1, 2, 4 or 8 pixels of a side."""
    # Pillow takes the largest step at which no side is below what it is asked for.
    if step > 1:
        image.draft(None, (image.width // step, image.height // step))
    image.load()


def read_orientation(source: Image | bytes) -> int:
    """Reads the EXIF orientation of an image or of EXIF data, 1 to 8; damaged data counts as 1."""
    with suppress(ValueError, SyntaxError, TypeError, KeyError, IndexError, OSError, struct.error):
        exif = _pillow()[0].Exif() if isinstance(source, bytes) else source.getexif()
        if isinstance(source, bytes):
            exif.load(source)
        value: Any = exif.get(_ORIENTATION)
        return value if value in range(1, 9) else 1
    return 1


def deep_reader(image: ImageFile) -> Callable[[ImageFile, bytes], Pixels] | None:
    """Returns the reader for an opened, unloaded image with more than 8 bits per channel; None for any other."""
    if image.mode.startswith(("I", "F")):
        return _read_grey
    if not image.tile:
        return None
    codec, _, _, arguments = image.tile[0]
    if codec == "ppm" and image.mode == "RGB" and isinstance(arguments, tuple) and int(arguments[1]) > 255:
        return _read_ppm
    raw_mode = _raw_mode(image)
    if raw_mode == "LA;16B":
        return _read_grey_alpha
    return _read_colour if _COLOUR.fullmatch(raw_mode) else None


def read_deep(image: ImageFile, data: bytes, mode: str) -> Pixels | None:
    """Reads a deep image, opened from `data`, as uint16: HW for mode ``L``, else HWC; None if it is not deep."""
    read = deep_reader(image)
    if read is None:
        return None
    stacked = read(image, data)
    if stacked.ndim == 2:
        stacked = stacked[:, :, np.newaxis]
    colour = image.info.get("transparency")  # a PNG file's transparent colour becomes alpha
    has_alpha = stacked.shape[2] in (2, 4)
    if not has_alpha and isinstance(colour, int | tuple):
        opaque = np.any(stacked != np.asarray(colour, np.uint16), axis=2, keepdims=True)
        stacked, has_alpha = np.concatenate([stacked, opaque * np.uint16(65535)], axis=2), True
    colours = stacked[:, :, :-1] if has_alpha else stacked
    is_grey = colours.shape[2] == 1
    if mode == "L":
        if is_grey:
            return colours[:, :, 0]
        # Pillow's weights for L add up to 65536; white is 65535 * 65536 + 0x8000, just below 2**32
        weighted = colours.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
        return ((weighted + 0x8000) >> 16).astype(np.uint16)
    rgb = np.repeat(colours, 3, axis=2) if is_grey else colours
    if mode == "RGB":
        return rgb
    alpha = stacked[:, :, -1:] if has_alpha else np.full((*rgb.shape[:2], 1), 65535, np.uint16)
    return np.concatenate([rgb, alpha], axis=2)


def _raw_mode(image: ImageFile) -> str:
    arguments: Any = image.tile[0][3]
    return str(arguments if isinstance(arguments, str) else arguments[0])


def _read_grey(image: ImageFile, _: bytes) -> Pixels:
    is_twelve_bit = bool(image.tile) and _raw_mode(image) == "I;12"
    brightest = 1 if image.mode == "F" else 4095 if is_twelve_bit else 65535
    image.load()
    pixels = np.asarray(image)
    lowest, highest = pixels.min(), pixels.max()
    if not (lowest >= 0 and highest <= brightest):
        raise ValueError(
            f"its {pixels.dtype} pixels go from {lowest} to {highest}, but only 0..{brightest} is known to be "
            "brightness; read such data with a decoder of your own"
        )
    pixels = _scale(pixels, brightest)
    # Pillow inverts TIFF's "0 is white" only for 8 bits
    return 65535 - pixels if getattr(image, "tag_v2", {}).get(_TIFF_PHOTOMETRIC) == 0 else pixels


def _scale(pixels: Pixels, brightest: int) -> Pixels:
    """Stretches 0..brightest to 0..65535."""
    if brightest == 65535:
        return pixels.astype(np.uint16)
    return np.clip(np.round(pixels * (65535 / brightest)), 0, 65535).astype(np.uint16)


def _read_ppm(image: ImageFile, data: bytes) -> Pixels:
    offset, (_, brightest) = cast("Any", image.tile[0][2:])
    needed = image.width * image.height * 6
    if len(data) - offset < needed:
        raise ValueError(f"cut off: expected {needed:,} bytes of pixels, found {len(data) - offset:,}")
    pixels = np.frombuffer(data, ">u2", needed // 2, offset).reshape(image.height, image.width, 3)
    return _scale(pixels, int(brightest))


def _read_grey_alpha(image: ImageFile, _: bytes) -> Pixels:
    # four bytes per pixel: read as if they were RGBA, they are grey and alpha, high bytes first
    _set_raw_mode(image, "RGBA")
    image.load()
    return np.frombuffer(image.tobytes(), ">u2").astype(np.uint16).reshape(image.height, image.width, 2)


def _read_colour(image: ImageFile, data: bytes) -> Pixels:
    """Reads the file twice, in its own and in the other byte order, for the upper and the lower bytes."""
    # Pillow keeps only the upper byte of 16-bit colour: 0x12 of 0x12F0, and 0xF0 in the other byte order.
    channels, _, order = _raw_mode(image).partition(";16")
    is_little = order == "L" or (order == "N" and sys.byteorder == "little")
    with open_image(data) as other:
        _set_raw_mode(other, f"{channels};16{'B' if is_little else 'L'}")
        other.load()
        image.load()
        return (np.asarray(image, np.uint16) << 8) | np.asarray(other, np.uint16)


def _set_raw_mode(image: ImageFile, raw_mode: str) -> None:
    tiles: list[Any] = list(image.tile)
    for index, tile in enumerate(tiles):
        old = tile[3]
        arguments = raw_mode if isinstance(old, str) else (raw_mode, *old[1:])
        tiles[index] = type(tile)(*tile[:3], arguments) if hasattr(tile, "_replace") else (*tile[:3], arguments)
    image.tile = tiles
