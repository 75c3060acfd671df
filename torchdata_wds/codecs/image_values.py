"""Arrays and tensors on their way to an image file: checked, and made uint8 or uint16 pixels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from torchdata_wds.codecs.pixels import Pixels

__all__ = ["to_pixels"]

_CHANNELS = (1, 2, 3, 4)
# Floats that are made into pixels at a time.
_CACHED = 2**16


def to_pixels(value: Any, *, channels_first: bool) -> Pixels:
    """Makes an array or tensor into pixels, without changing it.

    Args:
        value: An array, HW or HWC, of uint8, uint16, or floats in 0..1; or a tensor of the same.
        channels_first: Whether a tensor of three dimensions is CHW.

    Returns:
        uint8 or uint16, HW for one channel, else HWC; floats become 8 bits.

    Raises:
        TypeError: if it is something else, or has another type of numbers.
        ValueError: if it has no such shape, no pixels, or floats outside 0..1.

    Example:
        >>> to_pixels(np.array([[0.0, 1.0]]), channels_first=False)
        array([[  0, 255]], dtype=uint8)
    """
    torch = sys.modules.get("torch")  # before torch is imported, there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        array = _from_tensor(value, channels_first)
    elif isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        array = _check_shape(value, "array.transpose(1, 2, 0)")
    else:
        raise TypeError("expected a PIL image, a NumPy array or a tensor")
    if array.size == 0:
        raise ValueError("it has no pixels, and no image file can be empty; leave the sample out")
    return _to_depth(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _from_tensor(tensor: Any, channels_first: bool) -> Pixels:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: Pixels = tensor.numpy()
    if not channels_first:
        return _check_shape(array, 'encoder="torchrgb8"')
    if array.ndim == 2:
        return array
    if array.ndim == 3 and array.shape[0] in _CHANNELS:
        return array.transpose(1, 2, 0)
    raise ValueError(
        "expected a tensor of shape HW or CHW with 1 to 4 channels, as a torch image spec says; permute it"
    )


def _check_shape(array: Pixels, cure: str) -> Pixels:
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS):
        return array
    # a small last side is rather a wrong number of channels than the width of an image
    if array.ndim == 3 and array.shape[0] in _CHANNELS and min(array.shape[1:]) > 2 * max(_CHANNELS) - 1:
        raise ValueError(f"expected shape HW or HWC with 1 to 4 channels, but this looks like CHW; use {cure}")
    raise ValueError("expected shape HW or HWC with 1 to 4 channels; reshape it, one image for each field")


def _to_depth(pixels: Pixels) -> Pixels:
    kind, size = pixels.dtype.kind, pixels.dtype.itemsize
    if kind == "u" and size <= 2:
        return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if kind == "f" and size <= 8:
        return _from_floats(pixels)
    if kind == "b":
        raise TypeError("images have no truth values; use array.astype(numpy.uint8) * 255")
    if kind in "iu":
        raise TypeError(
            f"images have no {pixels.dtype} pixels; use .astype(numpy.uint8) if they are 0..255, or "
            ".astype(numpy.uint16) if they are 0..65535"
        )
    raise TypeError(f"images have no {pixels.dtype} pixels; use uint8, uint16, or float32 in 0..1")


def _from_floats(pixels: Pixels) -> Pixels:
    # a few rows at a time stay in the processor's cache from one step to the next
    result = np.empty(pixels.shape, np.uint8)
    rows = max(1, _CACHED * len(pixels) // pixels.size)
    # half precision has no room for 255 times a fraction
    wide = np.float64 if pixels.dtype.itemsize == 8 else np.float32
    for start in range(0, len(pixels), rows):
        part = pixels[start : start + rows]
        scaled = np.multiply(part, 255, dtype=wide)
        np.rint(scaled, out=scaled)
        # What rounds to a pixel's value is one: normalizing and undoing it leaves 1.0000001. NaN fails both tests.
        if not (scaled.min() >= 0 and scaled.max() <= 255):
            raise ValueError(
                f"floats must be finite and in 0..1, but these go from {pixels.min()} to {pixels.max()}; divide them "
                "by 255 if they go to 255, or clip them"
            )
        result[start : start + rows] = scaled
    return result
