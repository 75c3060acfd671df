"""Images with more than 8 bits a channel: read at full depth, as uint16.

Pillow has 16-bit grey images, but reads 16-bit colour as its upper bytes. There the file is read twice, once as
big-endian and once as little-endian, which gives the upper and the lower bytes.

Image files that are written without Pillow: 16-bit PNG, which it cannot do in colour, and PBM, PGM and PPM.
"""

from __future__ import annotations

import re
import struct
import sys
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.codecs.images.files import open_image
from torchdata_wds.codecs.images.pixels import Pixels, fitting_size

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

__all__ = ["is_deep", "read_deep", "resize_deep", "EXIF_PREFIX", "write_bitmap", "write_deep_png", "write_pnm"]


_COLOUR = re.compile(r"(RGB|RGBA|RGBX);16([LBN])")

_TIFF_PHOTOMETRIC = 262


def is_deep(image: ImageFile) -> bool:
    """Tells whether an opened image, not yet loaded, has more than 8 bits a channel that can be read here."""
    if image.mode.startswith(("I", "F")):
        return True
    return bool(image.tile) and (_is_deep_ppm(image) or _is_deep_colour(image))


def read_deep(image: ImageFile, data: bytes, mode: str) -> Pixels:
    """Reads a deep image as uint16.

    Args:
        image: The opened image.
        data: The bytes that it was opened from.
        mode: ``L``, ``RGB`` or ``RGBA``.

    Returns:
        uint16, HW for ``L``, else HWC.

    Raises:
        ValueError: if pixels of a 32-bit image lie outside 0..65535, or those of a float image outside 0..1.
    """
    if image.mode.startswith(("I", "F")):
        pixels = _read_grey(image)
    elif _is_deep_ppm(image):
        pixels = _read_ppm(image, data)
    elif _raw_mode(image) == "LA;16B":
        pixels = _read_grey_alpha(image)
    else:
        pixels = _read_colour(image, data)
    return _to_mode(_with_transparency(pixels, image.info.get("transparency")), mode)


def resize_deep(pixels: Pixels, max_size: int | None) -> Pixels:
    """Reduces an image to ``max_size``, each channel for itself, as ``image_decoder`` describes."""
    size = fitting_size((pixels.shape[1], pixels.shape[0]), max_size)
    if size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    if pixels.ndim == 2:
        return _resize_channel(pixels, size)
    return np.stack([_resize_channel(pixels[:, :, channel], size) for channel in range(pixels.shape[2])], axis=2)


def _raw_mode(image: ImageFile) -> str:
    arguments: Any = image.tile[0][3]
    return str(arguments if isinstance(arguments, str) else arguments[0])


def _is_deep_ppm(image: ImageFile) -> bool:
    codec: str = image.tile[0][0]
    arguments: Any = image.tile[0][3]
    return codec == "ppm" and image.mode == "RGB" and isinstance(arguments, tuple) and int(arguments[1]) > 255


def _is_deep_colour(image: ImageFile) -> bool:
    raw_mode = _raw_mode(image)
    return raw_mode == "LA;16B" or bool(_COLOUR.fullmatch(raw_mode))


def _read_grey(image: ImageFile) -> Pixels:
    brightest = _brightest(image)
    image.load()
    pixels = np.asarray(image)
    lowest, highest = pixels.min(), pixels.max()
    if not (lowest >= 0 and highest <= brightest):
        raise ValueError(
            f"its {pixels.dtype} pixels go from {lowest} to {highest}, but only 0..{brightest} is known to be "
            "brightness; read such data with a decoder of your own"
        )
    pixels = _scale(pixels, brightest)
    # Pillow turns TIFF's "0 is white" round only where it has 8 bits
    return 65535 - pixels if getattr(image, "tag_v2", {}).get(_TIFF_PHOTOMETRIC) == 0 else pixels


def _brightest(image: ImageFile) -> int:
    if image.mode == "F":
        return 1
    return 4095 if image.tile and _raw_mode(image) == "I;12" else 65535


def _scale(pixels: Pixels, brightest: int) -> Pixels:
    """Stretches 0..brightest to 0..65535."""
    if brightest == 65535:
        return pixels.astype(np.uint16)
    return np.clip(np.round(pixels * (65535 / brightest)), 0, 65535).astype(np.uint16)


def _read_ppm(image: ImageFile, data: bytes) -> Pixels:
    offset: int = image.tile[0][2]
    arguments: Any = image.tile[0][3]
    width, height = image.size
    maximum = int(arguments[1])
    needed = width * height * 6
    if len(data) - offset < needed:
        raise ValueError(f"cut off: expected {needed:,} bytes of pixels, found {len(data) - offset:,}")
    pixels = np.frombuffer(data, ">u2", width * height * 3, offset).reshape(height, width, 3)
    return _scale(pixels, maximum)


def _read_grey_alpha(image: ImageFile) -> Pixels:
    # four bytes a pixel: read as if they were RGBA, they are the grey and alpha values, high byte first
    _set_raw_mode(image, "RGBA")
    image.load()
    return np.frombuffer(image.tobytes(), ">u2").astype(np.uint16).reshape(image.height, image.width, 2)


def _read_colour(image: ImageFile, data: bytes) -> Pixels:
    match = _COLOUR.fullmatch(_raw_mode(image))
    assert match is not None
    channels, order = match.groups()
    native_is_little = sys.byteorder == "little"
    is_little = order == "L" or (order == "N" and native_is_little)
    with open_image(data) as other:
        _set_raw_mode(other, f"{channels};16{'B' if is_little else 'L'}")
        other.load()
        image.load()
        low = np.asarray(other, np.uint16)
        high = np.asarray(image, np.uint16)
    pixels: Pixels = (high << 8) | low
    return pixels


def _set_raw_mode(image: ImageFile, raw_mode: str) -> None:
    tiles: list[Any] = list(image.tile)
    for index, tile in enumerate(tiles):
        old = tile[3]
        arguments = raw_mode if isinstance(old, str) else (raw_mode, *old[1:])
        tiles[index] = type(tile)(*tile[:3], arguments) if hasattr(tile, "_replace") else (*tile[:3], arguments)
    image.tile = tiles


def _with_transparency(pixels: Pixels, colour: Any) -> Pixels:
    """Adds the alpha channel that a PNG's transparent colour stands for."""
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    if channels not in (1, 3) or not isinstance(colour, int | tuple):
        return pixels
    stacked = pixels.reshape(*pixels.shape[:2], channels)
    opaque = np.any(stacked != np.asarray(colour, np.uint16), axis=2, keepdims=True)
    return np.concatenate([stacked, opaque * np.uint16(65535)], axis=2)


def _to_mode(pixels: Pixels, mode: str) -> Pixels:
    stacked = pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels
    has_alpha = stacked.shape[2] in (2, 4)
    colours = stacked[:, :, :-1] if has_alpha else stacked
    if mode == "L":
        return _to_grey(colours)
    rgb = np.repeat(colours, 3, axis=2) if colours.shape[2] == 1 else colours
    if mode == "RGB":
        return rgb
    alpha = stacked[:, :, -1:] if has_alpha else np.full((*rgb.shape[:2], 1), 65535, np.uint16)
    return np.concatenate([rgb, alpha], axis=2)


def _to_grey(colours: Pixels) -> Pixels:
    if colours.shape[2] == 1:
        return colours[:, :, 0]
    # Pillow's weights for L, in 1/65536; the sum stays below 2**32
    weighted = colours.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
    return ((weighted + 0x8000) >> 16).astype(np.uint16)


def _resize_channel(channel: Pixels, size: tuple[int, int]) -> Pixels:
    from PIL import Image

    plane = Image.fromarray(channel.astype(np.float32)).resize(size, Image.Resampling.LANCZOS)
    return np.clip(np.round(np.asarray(plane)), 0, 65535).astype(np.uint16)


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
