"""Resamples pixels with torch's filters, which weigh all pixels that they cover and are vectorised for uint8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.codecs.images.pixels import Pixels

if TYPE_CHECKING:
    from torch import Tensor

#: The filters.
INTERPOLATIONS = ("bilinear", "bicubic")

_MORE = 1 + 1e-12  # the number of pixels is cut down to a whole one, and 223.99999999999997 are 224


def resample(
    pixels: Pixels, size: tuple[int, int], interpolation: str, *, extent: tuple[float, float] | None = None
) -> Pixels:
    """Resamples uint8 or uint16 pixels, HW or HWC, to a height and width, in memory of their own.

    The result shows the `extent` (height, width) from the upper left corner, which may end within the last pixels.
    """
    extent = pixels.shape[:2] if extent is None else extent
    if extent == size == pixels.shape[:2]:
        return np.array(pixels, order="C")
    is_clear = pixels.ndim == 3 and pixels.shape[2] == 4 and bool((pixels[:, :, 3] < np.iinfo(pixels.dtype).max).any())
    if is_clear and pixels.itemsize == 1:  # what is transparent has no colour that could bleed
        return _convert(_resample(_convert(pixels, "RGBA", "RGBa"), size, interpolation, extent), "RGBa", "RGBA")
    return _resample(pixels, size, interpolation, extent)


def _resample(pixels: Pixels, size: tuple[int, int], interpolation: str, extent: tuple[float, float]) -> Pixels:
    import torch

    brightest = np.iinfo(pixels.dtype).max
    if pixels.itemsize > 1:
        pixels = pixels.astype(np.float32)
    elif not pixels.flags.writeable:  # torch warns of memory that it must not write to
        pixels = pixels.copy()
    rows = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None])
    height, width, channels = rows.shape
    # The first stride has no meaning for one image, but this one tells torch to leave the pixels in HWC memory.
    strides = height * rows.stride(0), 1, rows.stride(0), rows.stride(1)
    planes = rows.as_strided((1, channels, height, width), strides)
    made = _interpolate(planes, size, interpolation, extent)[0, :, : size[0], : size[1]].permute(1, 2, 0)
    if made.is_floating_point():
        made = made.clamp_(0, brightest).round_()
    values: Pixels = made.numpy()
    values = values if values.dtype == np.uint8 else values.astype(np.uint16)
    return values if pixels.ndim == 3 else values[:, :, 0]


def _interpolate(planes: Tensor, size: tuple[int, int], mode: str, extent: tuple[float, float]) -> Tensor:
    from torch.nn.functional import interpolate

    options: dict[str, Any] = {"mode": mode, "antialias": True, "align_corners": False}
    if tuple(planes.shape[2:]) == extent:
        return interpolate(planes, size, **options)
    factors = [made / length * _MORE for made, length in zip(size, extent, strict=True)]
    return interpolate(planes, scale_factor=factors, recompute_scale_factor=False, **options)


def _convert(pixels: Pixels, old: str, new: str) -> Pixels:
    from PIL import Image

    image = Image.frombytes(old, pixels.shape[1::-1], np.ascontiguousarray(pixels).tobytes())
    return np.array(image.convert(new))
