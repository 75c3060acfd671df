"""Images with more than 8 bits a channel, read at full depth as uint16; and files that are written without Pillow.

Pillow has 16-bit grey images, but reads 16-bit colour as its upper bytes. There the file is read twice, once as
big-endian and once as little-endian, which gives the upper and the lower bytes. Nor does it write 16-bit colour: PNG
files of it, and PBM, PGM and PPM, are written here.
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

_COLOUR = re.compile(r"(RGB|RGBA|RGBX);16([LBN])")
_TIFF_PHOTOMETRIC = 262
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> PNG's colour type
_FILTER_UP = 2

# A chunk's length must stay below 2**31.
_CHUNK_BYTES = 1 << 30

#: What EXIF data begins with in JPEG files and in Pillow, but not in PNG and WebP files.
EXIF_PREFIX = b"Exif\0\0"


def is_deep(image: ImageFile) -> bool:
    """Returns whether an opened image, not yet loaded, has more than 8 bits a channel that can be read here."""
    if image.mode.startswith(("I", "F")):
        return True
    if not image.tile:
        return False
    raw_mode = _raw_mode(image)
    return _is_deep_ppm(image) or raw_mode == "LA;16B" or bool(_COLOUR.fullmatch(raw_mode))


def read_deep(image: ImageFile, data: bytes, mode: str) -> Pixels:
    """Reads a deep image, opened from these bytes, as uint16: HW for the mode ``L``, else HWC."""
    if image.mode.startswith(("I", "F")):
        pixels = _read_grey(image)
    elif _is_deep_ppm(image):
        pixels = _read_ppm(image, data)
    elif _raw_mode(image) == "LA;16B":
        pixels = _read_grey_alpha(image)
    else:
        pixels = _read_colour(image, data)
    stacked = pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels
    colour = image.info.get("transparency")
    if stacked.shape[2] in (1, 3) and isinstance(colour, int | tuple):  # a PNG's transparent colour is its alpha
        opaque = np.any(stacked != np.asarray(colour, np.uint16), axis=2, keepdims=True)
        stacked = np.concatenate([stacked, opaque * np.uint16(65535)], axis=2)
    return _to_mode(stacked, mode)


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
    codec, _, _, arguments = image.tile[0]
    return codec == "ppm" and image.mode == "RGB" and isinstance(arguments, tuple) and int(arguments[1]) > 255


def _read_grey(image: ImageFile) -> Pixels:
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
    # Pillow turns TIFF's "0 is white" round only where it has 8 bits
    return 65535 - pixels if getattr(image, "tag_v2", {}).get(_TIFF_PHOTOMETRIC) == 0 else pixels


def _scale(pixels: Pixels, brightest: int) -> Pixels:
    """Stretches 0..brightest to 0..65535."""
    if brightest == 65535:
        return pixels.astype(np.uint16)
    return np.clip(np.round(pixels * (65535 / brightest)), 0, 65535).astype(np.uint16)


def _read_ppm(image: ImageFile, data: bytes) -> Pixels:
    tile: Any = image.tile[0]
    _, _, offset, arguments = tile
    width, height = image.size
    needed = width * height * 6
    if len(data) - offset < needed:
        raise ValueError(f"cut off: expected {needed:,} bytes of pixels, found {len(data) - offset:,}")
    pixels = np.frombuffer(data, ">u2", width * height * 3, offset).reshape(height, width, 3)
    return _scale(pixels, int(arguments[1]))


def _read_grey_alpha(image: ImageFile) -> Pixels:
    # four bytes a pixel: read as if they were RGBA, they are the grey and alpha values, high byte first
    _set_raw_mode(image, "RGBA")
    image.load()
    return np.frombuffer(image.tobytes(), ">u2").astype(np.uint16).reshape(image.height, image.width, 2)


def _read_colour(image: ImageFile, data: bytes) -> Pixels:
    match = _COLOUR.fullmatch(_raw_mode(image))
    assert match is not None
    channels, order = match.groups()
    is_little = order == "L" or (order == "N" and sys.byteorder == "little")
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


def _to_mode(stacked: Pixels, mode: str) -> Pixels:
    has_alpha = stacked.shape[2] in (2, 4)
    colours = stacked[:, :, :-1] if has_alpha else stacked
    is_grey = colours.shape[2] == 1
    if mode == "L":
        if is_grey:
            return colours[:, :, 0]
        # Pillow's weights for L, in 1/65536; the sum stays below 2**32
        weighted = colours.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
        return ((weighted + 0x8000) >> 16).astype(np.uint16)
    rgb = np.repeat(colours, 3, axis=2) if is_grey else colours
    if mode == "RGB":
        return rgb
    alpha = stacked[:, :, -1:] if has_alpha else np.full((*rgb.shape[:2], 1), 65535, np.uint16)
    return np.concatenate([rgb, alpha], axis=2)


def _resize_channel(channel: Pixels, size: tuple[int, int]) -> Pixels:
    from PIL import Image

    plane = Image.fromarray(channel.astype(np.float32)).resize(size, Image.Resampling.LANCZOS)
    return np.clip(np.round(np.asarray(plane)), 0, 65535).astype(np.uint16)


def write_deep_png(pixels: Pixels, compression: int, exif: bytes | None = None) -> bytes:
    """Writes a PNG file of uint16 pixels, HW, or HWC with 2 (grey and alpha), 3 or 4 channels."""
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
    """Writes a binary PGM file of HW pixels, or a PPM file of HWC pixels with 3 channels; uint8 or uint16."""
    magic = "P5" if pixels.ndim == 2 else "P6"
    header = f"{magic}\n{pixels.shape[1]} {pixels.shape[0]}\n{np.iinfo(pixels.dtype).max}\n"
    return header.encode() + pixels.astype(pixels.dtype.newbyteorder(">"), copy=False).tobytes()


def write_bitmap(bits: Pixels) -> bytes:
    """Writes a binary PBM file of HW truth values, where True is white."""
    return f"P4\n{bits.shape[1]} {bits.shape[0]}\n".encode() + np.packbits(~bits, axis=1).tobytes()
