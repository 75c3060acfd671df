"""Decodes crops of images: a JPEG no larger than the crop needs, and of others the crop alone is resampled."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchdata_wds.checks import check_choice, checked_int, is_number
from torchdata_wds.codecs.images.decoding import ImageFieldDecoder, convert_flat
from torchdata_wds.codecs.images.files import (
    JPEG_FORMATS,
    check_pixels,
    load_at,
    open_image,
    read_deep,
    read_orientation,
)
from torchdata_wds.codecs.images.jpeg import open_jpeg
from torchdata_wds.codecs.images.pixels import Pixels, to_uint8, to_values, turn
from torchdata_wds.codecs.images.png import decode_png
from torchdata_wds.codecs.images.regions import Region, Span, centre_crop, draw_crop, region_of
from torchdata_wds.codecs.images.resampling import INTERPOLATIONS, resample
from torchdata_wds.codecs.plans import shown_call


class _RegionDecoder(ImageFieldDecoder):
    """Decodes a region of an image."""

    def __init__(self, size: int | tuple[int, int], spec: str, *, interpolation: str, exif_transpose: bool) -> None:
        super().__init__(spec, exif_transpose=exif_transpose)
        check_choice("interpolation", interpolation, INTERPOLATIONS)
        self.size = size
        self._size = _checked_size(size)
        self.interpolation = interpolation

    @abstractmethod
    def _spans(self, side: tuple[int, int], seed: int) -> tuple[Span, Span]:
        """Chooses rows and columns of an upright image of a height and width."""

    def _decode(self, data: bytes, seed: int = 0, *, is_flipped: bool = False) -> Any:
        spec = self._parsed
        jpeg = open_jpeg(data, spec.mode, exif_transpose=self.exif_transpose)
        if jpeg is not None:
            region = self._region(jpeg.size, jpeg.orientation, seed)
            pixels = jpeg.decode(region.step, rows=_placed(region, region.step)[0].stop)
            if pixels is not None:
                pixels = self._cut(pixels, region, region.step)
                return _finished(pixels, jpeg.orientation, is_flipped, spec)
        pixels = decode_png(data, spec.mode)
        if pixels is not None:
            region = self._region(pixels.shape[1::-1], 1, seed)
            return _finished(self._cut(pixels, region), 1, is_flipped, spec)
        pixels, orientation = self._read(data, seed)
        return _finished(pixels, orientation, is_flipped, spec)

    def _read(self, data: bytes, seed: int) -> tuple[Pixels, int]:
        """Reads the region of any image with Pillow; also returns its orientation."""
        spec = self._parsed
        with open_image(data) as image:
            deep = read_deep(image, data, spec.mode)
            if deep is not None:
                orientation = read_orientation(image) if self.exif_transpose else 1
                region = self._region(deep.shape[1::-1], orientation, seed)
                return self._cut(deep if spec.is_float else to_uint8(deep), region), orientation
            if image.format not in JPEG_FORMATS:
                image.load()  # which turns TIFF files, and finds the orientation behind the pixels of PNG files
            orientation = read_orientation(image) if self.exif_transpose else 1
            region = self._region(image.size, orientation, seed)
            step = region.step if image.format in JPEG_FORMATS else 1
            load_at(image, step)
            rows, columns = _placed(region, step)
            part = image.crop((columns.start, rows.start, columns.stop, rows.stop))
            return self._resample(np.array(convert_flat(part, spec.mode)), region, step), orientation

    def _region(self, size: tuple[int, ...], orientation: int, seed: int) -> Region:
        side = (size[0], size[1]) if orientation > 4 else (size[1], size[0])
        return region_of(*self._spans(side, seed), orientation)

    def _cut(self, pixels: Pixels, region: Region, step: int = 1) -> Pixels:
        return self._resample(pixels[_placed(region, step)], region, step)

    def _resample(self, pixels: Pixels, region: Region, step: int) -> Pixels:
        rows, columns, _ = region
        extent = rows.length / step, columns.length / step
        made = resample(pixels, (rows.made, columns.made), self.interpolation, extent=extent)
        if (rows.made, columns.made) == (rows.kept, columns.kept):
            return made
        return np.array(made[rows.first : rows.first + rows.kept, columns.first : columns.first + columns.kept])


class CropDecoder(_RegionDecoder):
    """Decodes random crops of images, for ``.wds_decode(...)``; its public name is ``crop_decoder``.

    The same as decoding an image, torchvision's ``RandomResizedCrop(size)`` and ``RandomHorizontalFlip(flip)``, at less
    cost: the crop is drawn first; a JPEG is decoded at the smallest of its sizes 1/1, 1/2, 1/4 and 1/8 at which the
    crop still has the pixels of the result (with the ``[fast]`` extra by simplejpeg, else by Pillow, to the same
    pixels); and only the crop is resampled. At 1/2, 1/4 and 1/8 the crop's borders are rounded to multiples of 2, 4
    and 8 pixels. Exceptions are those of ``image_decoder``.

    Each image takes two numbers of the generator of Python's ``random``, so that crops resume exactly, and follow the
    seed of the loader, as random functions do. Put it after ``.wds_shuffle()``.

    Args:
        size: Height and width of the result: an int for a square, or ``(height, width)``.
        spec: An image spec, as in ``image_decoder``; the default gives uint8 tensors (3, height, width).
        scale: The least and the largest part of the image's area that a crop covers.
        ratio: The least and the largest ratio of its width to its height.
        flip: How likely the crop is mirrored from left to right, from 0 to 1.
        interpolation: ``"bilinear"`` or ``"bicubic"``, with antialiasing.
        exif_transpose: Whether to turn the image upright by its EXIF orientation first.

    Raises:
        TypeError, ValueError: if an argument is wrong.

    Example:
        >>> import io, PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.new("RGB", (640, 480)).save(file, "JPEG")
        >>> crop_decoder(224, flip=0.5)(".jpg", file.getvalue()).shape
        torch.Size([3, 224, 224])
    """

    draws = True

    def __init__(
        self,
        size: int | tuple[int, int],
        spec: str = "torchrgb8",
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.0,
        interpolation: str = "bilinear",
        exif_transpose: bool = False,
    ) -> None:
        super().__init__(size, spec, interpolation=interpolation, exif_transpose=exif_transpose)
        self.scale, self.ratio = _checked_range("scale", scale, 1), _checked_range("ratio", ratio, math.inf)
        if not is_number(flip):
            raise TypeError(f"flip must be a number, how likely a crop is mirrored, not {flip!r}")
        if not 0 <= flip <= 1:
            raise ValueError(f"flip must be from 0 to 1, how likely a crop is mirrored, not {flip!r}")
        self.flip = flip

    def decode(self, data: bytes) -> Any:
        """Decodes a random crop of an image file into what the spec names."""
        # Two numbers whatever the file is: the crops of the images that follow do not depend on this one.
        is_flipped, seed = random.random() < self.flip, random.getrandbits(64)
        return self._decode(data, seed, is_flipped=is_flipped)

    def _spans(self, side: tuple[int, int], seed: int) -> tuple[Span, Span]:
        return draw_crop(side, self._size, self.scale, self.ratio, random.Random(seed))

    def __repr__(self) -> str:
        return shown_call("crop_decoder", self, repr(self.size), repr(self.spec))


class CentreCropDecoder(_RegionDecoder):
    """Decodes the middle of images, for ``.wds_decode(...)``; its public name is ``center_crop_decoder``.

    The twin of ``crop_decoder`` for evaluation, with the same speed: as decoding an image, torchvision's
    ``Resize(resize)`` and ``CenterCrop(size)``. It draws no random numbers. For an image so narrow that it would be
    resized to more pixels than Pillow's limit, it raises Pillow's ``DecompressionBombError``.

    Args:
        size: Height and width of the result: an int for a square, or ``(height, width)``.
        spec: An image spec, as in ``image_decoder``; the default gives uint8 tensors (3, height, width).
        resize: The length to which the image's shorter side is resized before the crop, at least the longer side of
            ``size``; None for 8/7 of it, which is 256 for 224.
        interpolation: ``"bilinear"`` or ``"bicubic"``, with antialiasing.
        exif_transpose: Whether to turn the image upright by its EXIF orientation first.

    Raises:
        TypeError, ValueError: if an argument is wrong.

    Example:
        >>> import io, PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.new("RGB", (640, 480)).save(file, "JPEG")
        >>> center_crop_decoder(224, "rgb8")(".jpg", file.getvalue()).shape
        (224, 224, 3)
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        spec: str = "torchrgb8",
        *,
        resize: int | None = None,
        interpolation: str = "bilinear",
        exif_transpose: bool = False,
    ) -> None:
        super().__init__(size, spec, interpolation=interpolation, exif_transpose=exif_transpose)
        longer = max(self._size)
        self.resize = resize
        self._resize = round(longer * 8 / 7) if resize is None else checked_int("resize", resize, longer)

    def decode(self, data: bytes) -> Any:
        """Decodes the middle of an image file into what the spec names."""
        return self._decode(data)

    def _spans(self, side: tuple[int, int], seed: int) -> tuple[Span, Span]:  # noqa: ARG002
        rows, columns = centre_crop(side, self._size, self._resize)
        # 65,500 x 1 pixels, a file of 2 KB, would become 16,768,000 x 256
        check_pixels(f"resized to {columns.made} x {rows.made}, it would have", rows.made * columns.made)
        return rows, columns

    def __repr__(self) -> str:
        return shown_call("center_crop_decoder", self, repr(self.size), repr(self.spec))


crop_decoder = CropDecoder
center_crop_decoder = CentreCropDecoder


def _placed(region: Region, step: int) -> tuple[slice, slice]:
    """Returns the pixels of a region in an image that was decoded at a step."""
    rows, columns, _ = region
    top, left = rows.start // step, columns.start // step
    return slice(top, top - (-rows.length // step)), slice(left, left - (-columns.length // step))


def _finished(pixels: Pixels, orientation: int, is_flipped: bool, spec: Any) -> Any:
    pixels = turn(pixels, orientation)
    if is_flipped and pixels.itemsize == 1:
        import torch

        # torch mirrors pixels 20 times as fast as NumPy, but none of 16 bits
        pixels = torch.from_numpy(np.ascontiguousarray(pixels)).flip(1).numpy()
    elif is_flipped:
        pixels = pixels[:, ::-1]
    return to_values(pixels, spec, is_own=True)


def _checked_size(size: Any) -> tuple[int, int]:
    if isinstance(size, Sequence) and not isinstance(size, str):
        if len(size) != 2:
            raise ValueError(f"size must be an int or (height, width), not {size!r}")
        return checked_int("the height of size", size[0], 1), checked_int("the width of size", size[1], 1)
    side = checked_int("size", size, 1)
    return side, side


def _checked_range(name: str, limits: Any, most: float) -> tuple[float, float]:
    if not isinstance(limits, Sequence) or len(limits) != 2 or not all(map(is_number, limits)):
        raise TypeError(f"{name} must be two numbers, the least and the largest, not {limits!r}")
    least, largest = limits
    if not (0 < least <= largest <= most and largest < math.inf):
        valid = f"at most {most}" if most < math.inf else "finite"
        raise ValueError(f"{name} must be two numbers above 0 and {valid}, the least first, not {limits!r}")
    return float(least), float(largest)
