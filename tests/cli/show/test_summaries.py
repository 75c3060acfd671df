"""Samples in a few words."""

import base64
import gzip
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kits.shards import image_file, jpeg_bytes
from torchdata_wds.cli.show import data_uri
from torchdata_wds.cli.show.contact_sheets import on_checkerboard
from torchdata_wds.cli.show.summaries import FieldSummary, Summarizer, summarize, view_image
from torchdata_wds.cli.terminal import guess_text
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.codecs.values import records


def summary(field: str, data: bytes, **options: Any) -> FieldSummary:
    """The summary of one field."""
    (found,) = Summarizer(**options)({"__key__": "k", "__url__": "x.tar", field: data})
    assert found.field == field
    assert found.size == len(data)
    return found


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def image(form: str, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (64, 48)).save(out, form, **options)
    return out.getvalue()


FIELDS = [
    ("txt", "größe\x1b[2J\n".encode(), r"größe\x1b[2J\n"),
    ("cls", b" 7\n", "7"),
    ("json", b'{"number": 3, "label": "a\\nb", "x": [1, null, true, 2.5]}',
     r'{"number": 3, "label": "a\nb", "x": [1, null, true, 2.5]}'),
    ("json", b"[[[[[[[[[[1]]]]]]]]]]", "[[[[[[[[[...]]]]]]]]]"),
    ("json", b"1" + b"0" * 300, "an integer of 997 bits"),
    ("npy", npy(np.array([[0.5, np.nan], [2, -1]], np.float32)), "array float32 (2, 2), -1 .. 2, 1 not finite"),
    ("npy", npy(np.zeros((0, 3), np.int8)), "array int8 (0, 3)"),
    ("npy", npy(np.array(["a", "b"])), "array <U1 (2,)"),
    ("npy", npy(np.array([True, False])), "array bool (2,), 0 .. 1"),
    ("pth", saved(torch.tensor([[1, 2]])), "tensor int64 (1, 2), 1 .. 2"),
    ("pth", saved({"w": torch.tensor([0.5, 1], dtype=torch.bfloat16), "step": 3}),
     '{"w": tensor bfloat16 (2,), 0.5 .. 1, "step": 3}'),
    ("pth", saved(torch.zeros(1).expand(1 << 36)), "tensor float32 (68719476736,)"),
    ("jpg", image("JPEG"), "JPEG image, RGB, 64 x 48"),
    ("seg.png", image("PNG", "L"), "PNG image, L, 64 x 48"),
    ("png.gz", gzip.compress(image("PNG", "RGBA"), mtime=0), "PNG image, RGBA, 64 x 48"),
    ("tif", image("TIFF", "CMYK"), "TIFF image, CMYK, 64 x 48"),
    ("pyd", b"cos\nsystem\n(S'exit'\ntR.", "a pickle, not loaded: it could run code"),
    ("mp4", b"\0\0\0\x20ftyp", "video"),
    ("flac", b"fLaC", "audio"),
    ("wnid", b"n01440764", "n01440764"),
    ("bin", bytes(range(30)), "30 bytes: " + bytes(range(24)).hex(" ") + "..."),
    ("bin", b"", "empty"),
]  # fmt: skip

DAMAGED = [
    ("cls", b"x", "does not decode: ValueError: expected a decimal integer, such as 7 or -1"),
    ("jpg", b"<html>", "does not decode: not an image of a known format"),
    ("jpg", jpeg_bytes(0)[:-200], "does not decode: OSError: "),
    ("txt", b"\xff", "does not decode: UnicodeDecodeError: "),
    ("json.gz", b"x", "does not decode: "),
]


@pytest.mark.parametrize(("field", "data", "text"), FIELDS)
def test_summary_says_what_a_field_holds_when_it_decodes(field: str, data: bytes, text: str) -> None:
    """By the field's name; nothing in it acts on a terminal."""
    found = summary(field, data, width=120)
    assert (found.text, found.is_damaged, found.picture) == (text, False, None)


@pytest.mark.parametrize(("field", "data", "text"), DAMAGED)
def test_summary_says_why_when_a_field_does_not_decode(field: str, data: bytes, text: str) -> None:
    """The reason stands in place of the value, and the sample's other fields are summarized."""
    found = Summarizer(width=200)({"a.txt": b"before", field: data, "z.txt": b"behind"})
    assert [each.text for each in found[::2]] == ["before", "behind"]
    assert found[1].text.startswith(text)
    assert found[1].is_damaged


def test_summary_keeps_to_its_width_when_values_are_long() -> None:
    """However long they are."""
    for field, data in (("txt", b"x" * 10**6), ("json", b"[" + b"1," * 10**5 + b"1]"), ("bin", b"\0" * 1000)):
        found = summary(field, data, width=30).text
        assert len(found) == 30
        assert found.endswith("...")


def test_summary_ends_when_a_value_holds_itself() -> None:
    """As what torch loads may do."""
    value: list[Any] = [1]
    value.append(value)
    assert summarize(value, 20) == "[1, [1, [1, [1, [..."
    assert summarize(value, 999).count("[") < 20


def test_summary_survives_when_the_value_has_code_of_its_own() -> None:
    """A repr that raises is not asked twice."""

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Odd" in summarize([Odd()], 200)


def test_summary_names_the_extra_when_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That field could not be looked at; the others are."""

    def missing() -> None:
        raise MissingPackageError("pip install 'torchdata_wds[msgpack]'")

    monkeypatch.setattr(records, "_msgpack", missing)
    broken, whole = Summarizer()({"a.mp": b"\x01", "b.cls": b"1"})
    assert broken.text == "not decoded: pip install 'torchdata_wds[msgpack]'"
    assert (broken.is_damaged, whole.text) == (True, "1")


def test_metadata_is_no_field_when_summarized() -> None:
    """Nor is what was decoded before."""
    assert Summarizer()({"__key__": "k", "__pad__": b"x", "cls": 3}) == []


def test_picture_is_a_thumbnail_when_asked_for() -> None:
    """Of its longest side, or the image's own size."""
    small = summary("jpg", image("JPEG"), max_size=32)
    assert small.is_image
    assert small.picture is not None
    assert small.picture.size == (32, 24)
    own = summary("jpg", image("JPEG"), max_size=0)
    assert own.picture is not None
    assert own.picture.size == (64, 48)
    broken = summary("jpg", b"x", max_size=32)
    assert (broken.is_image, broken.is_damaged, broken.picture) == (True, True, None)


def test_each_keeps_the_order_when_threads_work() -> None:
    """Every sample once, as without threads."""
    samples = [{"__key__": str(number), "cls": b"%d" % number} for number in range(20)]
    plain, threaded = (list(Summarizer().each(samples, threads)) for threads in (0, 3))
    assert plain == threaded
    assert [sample["__key__"] for sample, _ in threaded] == [str(number) for number in range(20)]


def test_each_stops_its_threads_when_left_early() -> None:
    """No more is read than a few samples ahead."""
    read = 0

    def samples() -> Iterator[dict[str, Any]]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield {"__key__": "k", "cls": b"1"}

    summaries = Summarizer().each(samples(), 2)
    next(summaries)
    summaries.close()
    assert read < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wds-summaries")]


def test_bytes_are_text_when_they_look_like_it() -> None:
    """UTF-8 without control characters; one that is cut by the length is left out."""
    for data, length, text in (
        ("größe".encode(), 99, "größe"),
        ("größe".encode(), 3, "gr"),
        (b"a\tb\r\n", 99, "a\tb\r\n"),
        (b"", 9, ""),
        (b"a\x00", 9, None),
        (b"a\xff", 9, None),
        (b"a\xc3", 9, None),
        (b"ok" + b"\xff" * 10, 8, None),
    ):
        assert guess_text(data, length) == text


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
