"""Image files for people: in a few words, and as thumbnails, upright and on a checkerboard."""

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

_SQUARE = 8
_LIGHT, _DARK = (255, 255, 255), (216, 216, 216)
_QUALITY = 85

# Modes that can be reduced before their colours are converted, and how much larger the cheap first step leaves them.
_SMOOTH = frozenset(["L", "RGB", "RGBA", "CMYK", "YCbCr"])
_ROUGH = 1.25


class ImageView(NamedTuple):
    """An image file in words, such as ``JPEG image, RGB, 640 x 480``, and its thumbnail, RGB or RGBA, if wanted."""

    text: str
    picture: Image | None


def view_image(data: bytes, max_size: int | None = None) -> ImageView:
    """Reads an image file to its last pixel.

    Args:
        data: The file.
        max_size: The longest side of the thumbnail in pixels, turned upright as EXIF says, with 16 bits a channel
            scaled to 8. 0 keeps the image's own size, None makes no thumbnail.

    Raises:
        OSError: if the file is cut or Pillow does not know its format.
        ValueError: if a thumbnail is wanted, and its pixels have no defined range.
    """
    with open_image(data) as image:
        text = _describe(image)
        mode = "RGBA" if image.has_transparency_data else "RGB"
        if max_size is None:
            image.load()
            return ImageView(text, None)
        is_smooth = image.mode in _SMOOTH and "transparency" not in image.info and not is_deep(image)
        if 0 < max_size < max(image.size) and is_smooth:
            # faster than for training: JPEG's own reduction and whole pixels first
            image.thumbnail((max_size, max_size), reducing_gap=_ROUGH)
            small, orientation = image.convert(mode), read_orientation(image)  # Pillow has applied that of a TIFF
            return ImageView(text, small if orientation == 1 else to_pil(turn(np.asarray(small), orientation)))
    spec = f"pil{mode.lower()}"
    return ImageView(text, image_decoder(spec, max_size=max_size or None, exif_transpose=True).decode(data))


def _describe(image: ImageFile) -> str:
    depth = ", 16 bits" if is_deep(image) and not image.mode.startswith(("I", "F")) else ""
    orientation = read_orientation(image)
    turned = f", EXIF orientation {orientation}" if orientation != 1 else ""
    return f"{image.format} image, {image.mode}{depth}, {image.width} x {image.height}{turned}"


def on_checkerboard(image: Image) -> Image:
    """Returns an RGB image; a checkerboard shows where the original is transparent."""
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
    """Returns the image as a ``data:`` URL: PNG if it has an alpha channel, else JPEG."""
    out = io.BytesIO()
    image.info.clear()  # otherwise Pillow writes some of the file's own comments
    name = "png" if image.mode == "RGBA" else "jpeg"
    image.save(out, name, quality=_QUALITY)
    return f"data:image/{name};base64,{base64.b64encode(out.getvalue()).decode()}"
