"""Images with more than 8 bits a channel: read at full depth, as uint16.

Pillow has 16-bit grey images, but reads 16-bit colour as its upper bytes. There the file is read twice, once as
big-endian and once as little-endian, which gives the upper and the lower bytes.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.codecs.image_files import open_image
from torchdata_wds.codecs.pixels import Pixels, fitting_size

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

__all__ = ["is_deep", "read_deep", "resize_deep"]

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
