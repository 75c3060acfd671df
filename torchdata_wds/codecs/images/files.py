"""Opening image files: their header and their orientation, before any pixel is decoded."""

from __future__ import annotations

import functools
import io
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

# What a member may be, whatever it is called. Pillow would also start Ghostscript for a PostScript file.
_FORMATS = ("JPEG", "PNG", "WEBP", "PPM", "TIFF", "BMP", "DIB", "GIF", "AVIF", "JPEG2000", "ICO")
_ORIENTATION = 0x0112


def open_image(data: bytes) -> ImageFile:
    """Opens an image file of one of the accepted formats; reads only its header.

    Above ``PIL.Image.MAX_IMAGE_PIXELS`` it raises ``DecompressionBombError``, where Pillow itself only warns.
    """
    pillow, formats = _pillow()
    image = pillow.open(io.BytesIO(data), formats=formats)
    limit, pixels = pillow.MAX_IMAGE_PIXELS, image.width * image.height
    if limit is not None and pixels > limit:
        image.close()
        raise pillow.DecompressionBombError(
            f"it has {pixels:,} pixels, more than the limit of {limit:,}. If you trust it, raise "
            "PIL.Image.MAX_IMAGE_PIXELS"
        )
    return cast("ImageFile", image)


@functools.cache
def _pillow() -> tuple[Any, tuple[str, ...]]:
    """Returns Pillow's module of images, and the accepted formats that it reads: an old one has no AVIF."""
    import PIL.Image
    from PIL import IcoImagePlugin, Jpeg2KImagePlugin, TiffImagePlugin, WebPImagePlugin  # noqa: F401  (registers them)

    PIL.Image.preinit()
    with suppress(ImportError):
        from PIL import AvifImagePlugin  # noqa: F401
    return PIL.Image, tuple(name for name in _FORMATS if name in PIL.Image.OPEN)


def read_orientation(source: Image | bytes) -> int:
    """Reads the EXIF orientation of an image or of EXIF data, 1 to 8; damaged data says nothing and counts as 1."""
    try:
        if isinstance(source, bytes):
            exif = _pillow()[0].Exif()
            exif.load(source)
        else:
            exif = source.getexif()
        value = exif.get(_ORIENTATION, 1)
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError, OSError, struct.error):
        return 1
    return value if value in range(1, 9) else 1
