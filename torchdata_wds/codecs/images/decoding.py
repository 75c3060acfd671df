"""Decodes image fields with Pillow or simplejpeg into what an image spec names."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from torchdata_wds.checks import check_flags, checked_int
from torchdata_wds.codecs.images.files import JPEG_FORMATS, load_at, open_image, read_deep, read_orientation
from torchdata_wds.codecs.images.jpeg import STEPS, open_jpeg
from torchdata_wds.codecs.images.pixels import (
    IMAGE_FIELDS,
    Pixels,
    fitting_size,
    parse_image_spec,
    to_pil,
    to_values,
    turn,
)
from torchdata_wds.codecs.images.png import decode_png
from torchdata_wds.codecs.images.resampling import resample
from torchdata_wds.codecs.plans import shown_call

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile


class ImageFieldDecoder(ABC):
    """Decodes the fields that hold images; called as ``decoder(key, data)``, it returns None for others."""

    #: Whether each call draws from the generator of ``random``, which resuming must know.
    draws = False
    #: Whether the size of the result is limited.
    is_bounded = True

    def __init__(self, spec: str, *, exif_transpose: bool) -> None:
        check_flags(exif_transpose=exif_transpose)
        self._parsed = parse_image_spec(spec)
        self.spec = spec
        self.exif_transpose = exif_transpose

    def __call__(self, key: str, data: bytes) -> Any:
        """Decodes an image field; None if the key's last part is not an image extension."""
        return self.decode(data) if key.lower().rpartition(".")[2] in IMAGE_FIELDS else None

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Decodes an image file into an array, a tensor or a PIL image."""

    def turning(self) -> Self:
        """Returns the decoder that also turns images upright."""
        turning = copy.copy(self)
        turning.exif_transpose = True
        return turning


class ImageDecoder(ImageFieldDecoder):
    """Decodes image fields, for ``.wds_decode(...)``; its public name is ``image_decoder``.

    With ``max_size`` the longest side of the result is ``min(max_size, the file's longest side)``; the other side
    keeps the aspect ratio, rounded to the nearest pixel and at least 1. Images are never enlarged. Larger ones are
    reduced with torch's bicubic filter, which weighs all pixels it covers. A JPEG is first decoded at the smallest of
    its sizes 1/1, 1/2, 1/4 and 1/8 that is not below the result: faster than decoding all of it, from 1/2 on.

    With the ``[fast]`` extra, simplejpeg decodes ordinary JPEG files to arrays and tensors, and pyspng PNG files: the
    same pixels in two thirds of the time. Pillow decodes all else, and files that these refuse or warn about, so
    exceptions are always Pillow's. The decoder is called as ``decoder(key, data)``, and returns None for fields that
    are not images.

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
        super().__init__(spec, exif_transpose=exif_transpose)
        self.max_size = None if max_size is None else checked_int("max_size", max_size, 1)
        self.is_bounded = max_size is not None

    def decode(self, data: bytes) -> Any:
        """Decodes an image file into an array, a tensor or a PIL image."""
        spec, max_size, exif_transpose = self._parsed, self.max_size, self.exif_transpose
        if spec.container != "pil":
            jpeg = open_jpeg(data, spec.mode, exif_transpose=exif_transpose)
            if jpeg is not None:
                reduction = _reduction(jpeg.size, max_size)
                pixels = jpeg.decode(reduction.step)
                if pixels is not None:
                    return to_values(turn(reduction.of_pixels(pixels), jpeg.orientation), spec)
            pixels = decode_png(data, spec.mode)
            if pixels is not None:
                reduction = _reduction(pixels.shape[1::-1], max_size, is_jpeg=False)
                return to_values(reduction.of_pixels(pixels), spec, is_own=True)
        with open_image(data) as image:
            deep = read_deep(image, data, spec.mode)
            if deep is None:
                reduction = _load(image, max_size)
                flat = convert_flat(image, spec.mode)
            orientation = read_orientation(image) if exif_transpose else 1
            if deep is not None:
                pixels = _reduction(deep.shape[1::-1], max_size, is_jpeg=False).of_pixels(deep)
            elif spec.container == "pil" and orientation == 1:
                return reduction.of_image(flat.copy() if flat is image else flat)
            else:
                pixels = reduction.of_pixels(np.asarray(flat))
        return to_values(turn(pixels, orientation), spec)

    def __repr__(self) -> str:
        return shown_call("image_decoder", self, repr(self.spec))


image_decoder = ImageDecoder


class _Reduction(NamedTuple):
    """How an image is made smaller: by its decoder, by a step, and then to a size; sizes are (width, height)."""

    whole: tuple[int, int]
    size: tuple[int, int]
    step: int

    def of_pixels(self, pixels: Pixels) -> Pixels:
        """Reduces decoded pixels; returns those of the right size as they are."""
        if pixels.shape[1::-1] == self.size:
            return pixels
        width, height = self.whole
        extent = height / self.step, width / self.step
        return resample(pixels, self.size[::-1], "bicubic", extent=extent)

    def of_image(self, image: Image) -> Image:
        """Reduces a decoded PIL image; returns one of the right size as it is."""
        if image.size == self.size:
            return image
        reduced = to_pil(self.of_pixels(np.asarray(image)))
        reduced.info = image.info.copy()
        return reduced


def _reduction(whole: tuple[int, ...], max_size: int | None, *, is_jpeg: bool = True) -> _Reduction:
    # 1001 x 600 to 100 x 60 has the factor min(1001 // 100, 600 // 60) = 10, so 1/8, rounded up to 126 x 75.
    full = whole[0], whole[1]
    size = fitting_size(full, max_size)
    factor = min(full[0] // size[0], full[1] // size[1]) if is_jpeg else 1
    return _Reduction(full, size, next(step for step in STEPS if step <= factor))


def _load(image: ImageFile, max_size: int | None) -> _Reduction:
    """Loads an opened image, a JPEG at a fraction of its size if that is enough."""
    if image.format not in JPEG_FORMATS:
        image.load()
        return _reduction(image.size, max_size, is_jpeg=False)
    reduction = _reduction(image.size, max_size)
    load_at(image, reduction.step)
    return reduction


def convert_flat(image: Image, mode: str) -> Image:
    """Converts a loaded image of at most 8 bits per channel to a mode; may return the same image."""
    if image.mode == mode:
        return image
    # Pillow warns when it converts a palette with transparency to RGB; by way of RGBA the colours are the same.
    if image.mode in ("P", "PA") and mode != "RGBA" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)
