"""Pixels on their way from a decoded image to the array, tensor or PIL image that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.codecs.image_specs import ImageSpec

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Pixels", "fitting_size", "to_pil", "to_values", "turn"]

#: uint8 or uint16, HW or HWC.
Pixels = np.ndarray[Any, Any]

# EXIF orientation, where it is not 1 -> (swap the axes, then reverse the rows, reverse the columns)
_TURNS = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def fitting_size(size: tuple[int, int], max_size: int | None) -> tuple[int, int]:
    """Reduces a size so that its longest side is at most ``max_size``, keeping the aspect."""
    longest = max(size)
    if max_size is None or longest <= max_size:
        return size
    width, height = (max(1, round(side * max_size / longest)) for side in size)
    return width, height


def to_values(pixels: Pixels, spec: ImageSpec) -> Any:
    """Makes uint8 or uint16 pixels, HW or HWC, into the array or tensor that the spec asks for.

    Pixels in their final form already, in writable memory of their own, are taken as they are; others are copied once.
    """
    if spec.container == "torch" and pixels.ndim == 3:
        pixels = pixels.transpose(2, 0, 1)
    values = _to_float(pixels) if spec.is_float else _to_uint8(pixels)
    if spec.container == "numpy":
        return values
    import torch

    return torch.from_numpy(values if values.ndim == 3 else values[np.newaxis])


def _to_float(pixels: Pixels) -> Pixels:
    values = np.empty(pixels.shape, np.float32)
    np.divide(pixels, np.float32(np.iinfo(pixels.dtype).max), out=values)
    return values


def _to_uint8(pixels: Pixels) -> Pixels:
    if pixels.itemsize == 1:
        flags = pixels.flags
        return pixels if flags.c_contiguous and flags.owndata and flags.writeable else np.array(pixels, order="C")
    return np.ascontiguousarray((pixels.astype(np.uint32) + 128) // 257, dtype=np.uint8)


def to_pil(pixels: Pixels) -> Image:
    """Makes a PIL image of 8 bits a channel."""
    from PIL import Image

    return Image.fromarray(_to_uint8(pixels))


def turn(pixels: Pixels, orientation: int) -> Pixels:
    """Turns an image upright as its EXIF orientation, 1 to 8, says; gives a view, or for 1 the image itself."""
    if orientation == 1:
        return pixels
    swapped, rows, columns = _TURNS[orientation]
    if swapped:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if rows else 1, :: -1 if columns else 1]
