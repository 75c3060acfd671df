"""Image files, small, upright and flat."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.kits.shards import image_file
from torchdata_wds.cli.show import data_uri
from torchdata_wds.cli.show.contact_sheets import on_checkerboard
from torchdata_wds.cli.show.summaries import view_image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def two_halves() -> Image.Image:
    """Red above, blue below, and wider than high."""
    image = Image.new("RGB", (64, 32), BLUE)
    image.paste(RED, (0, 0, 64, 16))
    return image


def colours(image: Image.Image) -> tuple[str, str]:
    """Which colour is above, and which below."""
    pixels = np.asarray(image.convert("RGB")).astype(int)
    height, width = pixels.shape[:2]
    rows = (pixels[height // 4, width // 2], pixels[3 * height // 4, width // 2])
    above, below = ("red" if row[0] > row[2] + 60 else "blue" if row[2] > row[0] + 60 else "?" for row in rows)
    return above, below


# the inverse of what EXIF says to do with a file
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize(("orientation", "transpose"), STORED.items())
def test_picture_is_upright_when_exif_says_how(orientation: int, transpose: Image.Transpose | None) -> None:
    """Whichever way the camera was held."""
    image = two_halves() if transpose is None else two_halves().transpose(transpose)
    exif = Image.Exif()
    exif[0x0112] = orientation
    view = view_image(image_file(image, "JPEG", exif=exif), 32)
    assert view.picture is not None
    assert view.picture.size == (32, 16)
    assert colours(view.picture) == ("red", "blue")
    assert view.text.endswith(f", EXIF orientation {orientation}") == (orientation != 1)


FORMS = {"PNG": ("RGB", "RGBA", "P"), "JPEG": ("RGB", "CMYK"), "TIFF": ("RGB", "RGBA", "CMYK", "P"), "WEBP": ("RGB",)}


@pytest.mark.parametrize(("form", "mode"), [(form, mode) for form, modes in FORMS.items() for mode in modes])
def test_picture_has_the_images_colours_when_its_mode_is_another(mode: str, form: str) -> None:
    """Files of print shops and palettes, too."""
    view = view_image(image_file(two_halves().convert(mode), form), 32)
    assert view.picture is not None
    assert view.picture.mode in ("RGB", "RGBA")
    assert colours(view.picture) == ("red", "blue")


def test_picture_is_scaled_when_the_image_has_16_bits() -> None:
    """A ramp stays a ramp: nothing clips."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(1, 256).repeat(4, axis=0)
    view = view_image(image_file(Image.fromarray(ramp)), 256)
    assert view.picture is not None
    assert (np.abs(np.asarray(view.picture)[0, :, 0].astype(int) - np.arange(256)) <= 1).all()


def test_small_image_stays_when_the_thumbnail_is_larger() -> None:
    """It is never enlarged here."""
    view = view_image(image_file(Image.new("L", (3, 2))), 100)
    assert view.picture is not None
    assert view.picture.size == (3, 2)


@pytest.mark.parametrize("max_size", [None, 16])
def test_view_raises_when_the_file_is_cut(max_size: int | None) -> None:
    """Also without a thumbnail every pixel is looked at."""
    data = image_file(Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)))
    with pytest.raises(OSError, match="truncated"):
        view_image(data[:3000], max_size)


def test_checkerboard_shows_when_an_image_is_transparent() -> None:
    """Light and dark squares where there is nothing, the colour where there is something."""
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (16, 16, 32, 32))
    board = on_checkerboard(image)
    assert board.mode == "RGB"
    squares = {board.getpixel((x, y)) for x in (4, 12) for y in (4, 12)}
    assert squares == {(255, 255, 255), (216, 216, 216)}
    assert board.getpixel((4, 4)) != board.getpixel((12, 4))
    assert board.getpixel((4, 4)) != board.getpixel((4, 12))
    assert board.getpixel((24, 24)) == RED


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "jpeg"), ("RGBA", "png")])
def test_data_uri_holds_the_image_and_nothing_else_when_made(mode: str, kind: str) -> None:
    """What a file says besides its pixels does not get into a page."""
    image = view_image(image_file(two_halves(), "JPEG", comment=b"secret"), 32).picture
    assert image is not None
    head, _, data = data_uri(image.convert(mode)).partition(",")
    assert head == f"data:image/{kind};base64"
    stored = base64.b64decode(data)
    assert b"secret" not in stored
    with Image.open(io.BytesIO(stored)) as read:
        assert colours(read) == ("red", "blue")
