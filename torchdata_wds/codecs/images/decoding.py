"""Image fields, decoded by Pillow or simplejpeg to what an image spec asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.checks import checked_int
from torchdata_wds.codecs.images.files import open_image, read_deep, read_orientation, resize_deep
from torchdata_wds.codecs.images.jpeg import read_header, read_jpeg
from torchdata_wds.codecs.images.pixels import (
    IMAGE_FIELDS,
    Pixels,
    fitting_size,
    parse_image_spec,
    to_pil,
    to_values,
    turn,
)
from torchdata_wds.codecs.plans import shown_call

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile


class ImageDecoder:
    """Decodes image fields, in ``.wds_decode(...)``; its public name is ``image_decoder``.

    With ``max_size`` the longest side of the result is ``min(max_size, the file's longest side)``; the other side
    keeps the aspect, rounded to the nearest pixel and at least 1. A smaller image is decoded as without it, never
    enlarged. A larger one is reduced with a Lanczos filter that weighs all pixels it covers; a JPEG is first decoded
    at the smallest of its sizes 1/2, 1/4, 1/8 that is still at least twice the result, which is several times faster
    and changes the result by less than the filter does.

    With the ``[fast]`` extra, arrays and tensors of ordinary JPEG files come from simplejpeg: the same pixels in two
    thirds of the time. Pillow reads PIL images, the grey of colour files, all other files, and whatever simplejpeg
    refuses or warns of: the exceptions are always Pillow's.

    It is called as ``decoder(key, data)``, and returns None for fields that are not images.

    Args:
        spec: ``l8 rgb8 rgba8`` (uint8), ``l rgb rgba`` (float32 in 0..1), the same after ``torch`` (CHW tensors), or
            ``pil pill pilrgb pilrgba``.
        max_size: The longest side in pixels; None for the file's own size.
        exif_transpose: Whether to turn the image as its EXIF orientation says (Pillow turns TIFF files by itself).

    Raises:
        ValueError: for an unknown spec, or a ``max_size`` below 1.

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
        if key.lower().rpartition(".")[2] not in IMAGE_FIELDS:
            return None
        return self.decode(data)

    def decode(self, data: bytes) -> Any:
        """Decodes an image file into an array, a tensor or a PIL image."""
        spec, max_size, exif_transpose = self._parsed, self.max_size, self.exif_transpose
        if spec.container != "pil":
            pixels = _read_plain_jpeg(data, spec.mode, max_size, exif_transpose)
            if pixels is not None:
                return to_values(pixels, spec)
        with open_image(data) as image:
            deep = read_deep(image, data, spec.mode)
            flat = _read_flat(image, spec.mode, max_size) if deep is None else None
            orientation = read_orientation(image) if exif_transpose else 1
            if flat is not None and spec.container == "pil" and orientation == 1:
                return flat.copy() if flat is image else flat
            pixels = np.asarray(flat) if deep is None else resize_deep(deep, max_size)
        pixels = turn(pixels, orientation)
        return to_pil(pixels) if spec.container == "pil" else to_values(pixels, spec)

    def __repr__(self) -> str:
        return shown_call("image_decoder", self, repr(self.spec))


image_decoder = ImageDecoder


def _read_plain_jpeg(data: bytes, mode: str, max_size: int | None, exif_transpose: bool) -> Pixels | None:
    """Reads a JPEG file without Pillow; None where the file is left to Pillow."""
    header = read_header(data)
    if header is None:
        return None
    if max_size is None and not header.has_metadata:
        return read_jpeg(data, header, mode)
    orientation = 1
    if header.has_metadata:
        with open_image(data) as image:
            orientation = read_orientation(image) if exif_transpose else 1
    size = fitting_size(header.size, max_size)
    pixels = read_jpeg(data, header, mode, None if size == header.size else (2 * size[0], 2 * size[1]))
    if pixels is None:
        return None
    if size != header.size:
        from PIL import Image

        pixels = np.asarray(_resize(Image.fromarray(pixels), size))
    return turn(pixels, orientation)


def _read_flat(image: ImageFile, mode: str, max_size: int | None) -> Image:
    """Reads an image of at most 8 bits a channel into an image of the mode and size: another one or itself."""
    size = fitting_size(image.size, max_size)
    if size != image.size:
        image.draft(None, (2 * size[0], 2 * size[1]))
    image.load()
    flat: Image = image
    if image.mode != mode:
        # Pillow warns about palettes with transparency on the way to RGB; by way of RGBA the colours are the same.
        if image.mode in ("P", "PA") and mode != "RGBA" and "transparency" in image.info:
            flat = image.convert("RGBA")
        flat = flat.convert(mode)
    return _resize(flat, size)


def _resize(image: Image, size: tuple[int, int]) -> Image:
    if image.size == size:
        return image
    from PIL.Image import Resampling

    return image.resize(size, Resampling.LANCZOS)
