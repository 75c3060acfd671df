"""Image files as people look at them: in a few words, and small, upright and flat."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchdata_wds.codecs.images.decoding import image_decoder
from torchdata_wds.codecs.images.files import open_image, read_orientation
from torchdata_wds.codecs.images.pixels import to_pil, turn
from torchdata_wds.codecs.images.sixteen_bit import is_deep

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = ["ImageView", "data_uri", "on_checkerboard", "view_image"]


_SQUARE = 8

_LIGHT, _DARK = (255, 255, 255), (216, 216, 216)

_QUALITY = 85

# What can be reduced before its colours are converted, and how much larger the cheap first step leaves it.
_SMOOTH = frozenset(["L", "RGB", "RGBA", "CMYK", "YCbCr"])

_ROUGH = 1.25


class ImageView(NamedTuple):
    """What there is to see of an image file.

    Attributes:
        text: Its format, mode and size, such as ``JPEG image, RGB, 640 x 480``.
        picture: A thumbnail, RGB or RGBA, if one was asked for.
    """

    text: str
    picture: Image | None


def view_image(data: bytes, max_size: int | None = None) -> ImageView:
    """Looks at an image file, to its last pixel.

    Args:
        data: The file.
        max_size: The longest side of the thumbnail in pixels, turned upright as EXIF says, with 16 bits a channel
            scaled to 8. 0 keeps the image's own size, None makes no thumbnail.

    Raises:
        OSError: if the file is cut or Pillow does not know it.
        ValueError: if a thumbnail was asked for, and its pixels have no defined range.

    Example:
        >>> import PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.new("L", (640, 480)).save(file, "PNG")
        >>> view = view_image(file.getvalue(), 64)
        >>> view.text, view.picture.mode, view.picture.size
        ('PNG image, L, 640 x 480', 'RGB', (64, 48))
    """
    with open_image(data) as image:
        text = _describe(image)
        mode = "RGBA" if image.has_transparency_data else "RGB"
        if max_size is None:
            image.load()
            return ImageView(text, None)
        if 0 < max_size < max(image.size) and _is_smooth(image):
            return ImageView(text, _reduce(image, mode, max_size))
    spec = f"pil{mode.lower()}"
    return ImageView(text, image_decoder(spec, max_size=max_size or None, exif_transpose=True).decode(data))


def _is_smooth(image: ImageFile) -> bool:
    return image.mode in _SMOOTH and "transparency" not in image.info and not is_deep(image)


def _reduce(image: ImageFile, mode: str, max_size: int) -> Image:
    """Makes a thumbnail, sooner than images for training: by JPEG's own reduction and whole pixels first."""
    image.thumbnail((max_size, max_size), reducing_gap=_ROUGH)
    small, orientation = image.convert(mode), read_orientation(image)  # which Pillow has obeyed if it is a TIFF
    return small if orientation == 1 else to_pil(turn(np.asarray(small), orientation))


def _describe(image: ImageFile) -> str:
    depth = ", 16 bits" if is_deep(image) and not image.mode.startswith(("I", "F")) else ""
    orientation = read_orientation(image)
    turned = f", EXIF orientation {orientation}" if orientation != 1 else ""
    return f"{image.format} image, {image.mode}{depth}, {image.width} x {image.height}{turned}"


def on_checkerboard(image: Image) -> Image:
    """Lays an image on a checkerboard, which shows where it is transparent.

    Returns:
        An RGB image: the same, if it has no transparency.
    """
    if image.mode == "RGB":
        return image
    from PIL.Image import new

    board = new("RGB", image.size, _LIGHT)
    for top in range(0, image.height, _SQUARE):
        for left in range(top % (2 * _SQUARE), image.width, 2 * _SQUARE):
            board.paste(_DARK, (left, top, left + _SQUARE, top + _SQUARE))
    board.paste(image, mask=image.getchannel("A"))
    return board


def data_uri(image: Image) -> str:
    """Makes an image part of a page: as PNG if it has an alpha channel, else as JPEG.

    Example:
        >>> import PIL.Image
        >>> data_uri(PIL.Image.new("RGB", (2, 2)))[:23]
        'data:image/jpeg;base64,'
    """
    out = io.BytesIO()
    image.info.clear()  # Pillow would write some of the file's own comments
    name = "png" if image.mode == "RGBA" else "jpeg"
    image.save(out, name, quality=_QUALITY)
    return f"data:image/{name};base64,{base64.b64encode(out.getvalue()).decode()}"
