"""Images to files: every format and mode reads back equal or is refused."""

import io
import itertools
import struct
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.codecs.images.test_sixteen_bit import as_rgba, random_pixels
from torchdata_wds.codecs import IMAGE_FIELDS, Encoder, decode_sample, encode_sample
from torchdata_wds.errors import EncodingError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
PIXELS[0, :2] = [[0, 0, 0, 0], [255, 255, 255, 0]]
JPEGS = ("jpg", "jpeg", "jpe", "jfif")
READ_ONLY = ("gif", "avif", "jp2", "j2k", "ico")
WRITTEN = [field for field in IMAGE_FIELDS if field not in READ_ONLY]
LOSSLESS = [field for field in WRITTEN if field not in JPEGS]
MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "F"]
MODES += ["I", "I;16", "I;16L", "I;16B"]
PNG = {"1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16", "I;16L", "I;16B"}
PNM = {"1", "L", "RGB", "I", "I;16", "I;16L", "I;16B"}
ACCEPTED = {
    "jpg jpeg jpe jfif": {"L", "RGB", "CMYK"},
    "png apng img image": PNG,
    "webp": {"1", "L", "LA", "P", "RGB", "RGBA"},
    "bmp": {"1", "L", "P", "RGB"},
    "tif tiff": {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "LAB", "I", "I;16", "I;16L", "I;16B"},
    "ppm pnm": PNM,
    "pgm": PNM - {"RGB"},
    "pbm": {"1"},
}
CASES = [
    (field, mode, mode in modes) for fields, modes in ACCEPTED.items() for field in fields.split() for mode in MODES
]


def make_image(mode: str) -> Image.Image:
    """An image of any of Pillow's modes."""
    grey = np.random.default_rng(1).integers(0, 65536, (5, 7), dtype=np.uint16)
    rgb = Image.fromarray(PIXELS[:, :, :3].copy())
    if mode.startswith("I"):
        if mode == "I":
            return Image.fromarray(grey.astype(np.int32))
        return Image.frombytes(mode, (7, 5), grey.astype(">u2" if mode == "I;16B" else "<u2").tobytes())
    if mode == "F":
        return Image.fromarray(grey.astype(np.float32) / 65535)
    if mode in ("P", "PA"):
        return rgb.quantize(16).convert(mode)
    if mode in ("La", "RGBa"):
        return Image.fromarray(PIXELS).convert({"La": "LA", "RGBa": "RGBA"}[mode]).convert(mode)
    return (Image.fromarray(PIXELS) if mode in ("LA", "RGBA") else rgb).convert(mode)


def expected_pixels(image: Image.Image) -> Any:
    """What the image is as float RGBA."""
    if image.mode.startswith("I"):
        return as_rgba(np.asarray(image).astype(np.uint16)[:, :, np.newaxis]) / np.float32(65535)
    plain = image if image.mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA") else image.convert("RGB")
    return np.asarray(plain.convert("RGBA")) / np.float32(255)


def encode(field: str, value: Any, encoder: Any = True, **options: Any) -> bytes:
    """The bytes of one field."""
    data = encode_sample({"__key__": "k", field: value}, encoder, **options)[field]
    assert type(data) is bytes
    return data


def decode(spec: str, field: str, data: bytes, **options: Any) -> Any:
    """The value of one field."""
    return decode_sample({"__key__": "k", field: data}, spec, **options)[field]


def refuse(field: str, value: Any, encoder: Any = True) -> str:
    """The message of the refusal, which names key and field."""
    with pytest.raises(EncodingError) as caught:
        encode(field, value, encoder)
    assert (caught.value.key, caught.value.field) == ("k", field)
    assert f"field {field!r} of sample 'k'" in str(caught.value)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_cases_are_complete_when_listed() -> None:
    """Every image field has its modes."""
    assert {field for field, _, _ in CASES} == set(WRITTEN)


def test_image_reads_back_equal_or_is_refused_when_of_any_mode() -> None:
    """Every pair of a format and a mode of Pillow gives equal pixels, or an error that names the mode."""
    for field, mode, is_accepted in CASES:
        image = make_image(mode)
        before, info = image.tobytes(), dict(image.info)
        if is_accepted:
            difference = np.abs(decode("rgba", field, encode(field, image)) - expected_pixels(image))
            assert difference.mean() < 0.2 if field in JPEGS else not difference.any()
        else:
            message = refuse(field, image)
            assert mode.partition(";")[0] in message or "16" in message or "black and white" in message
            assert "convert" in message or "uint8" in message or "asarray" in message
        assert (image.mode, image.tobytes(), image.info) == (mode, before, info)


def test_image_is_refused_when_its_format_is_only_read() -> None:
    """What would not read back equal is not written; bytes of a file pass."""
    for field in READ_ONLY:
        assert "name the field png" in refuse(field, PIXELS)
        assert encode(field, b"file") == b"file"


def test_float_image_is_written_when_it_rounds_into_range() -> None:
    """What rounding leaves outside 0..1 is a pixel's value all the same; half a step further is an error."""
    for kind in [np.float16, np.float32, np.float64, torch.float32]:
        values = [-1e-7, 0.0, 0.25, 1.0, 1 + 2e-7, 1 + 1 / 600, -1 / 600]
        pixels = torch.tensor([values], dtype=kind) if isinstance(kind, torch.dtype) else np.array([values], kind)
        assert decode("l8", "png", encode("png", pixels)).tolist() == [[0, 0, 64, 255, 255, 255, 0]]
        for wrong in (1 + 1 / 400, -1 / 400, float("nan"), float("inf")):
            assert "0..1" in refuse("png", pixels + wrong * 1)


def test_array_reads_back_equal_or_is_refused_when_uint8() -> None:
    """Arrays of 8 bits keep every value, also below full transparency."""
    for channels, field in itertools.product([1, 2, 3, 4], LOSSLESS):
        pixels = PIXELS[:, :, :channels]
        mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
        accepted = next(modes for fields, modes in ACCEPTED.items() if field in fields.split())
        if mode not in accepted:
            refuse(field, pixels)
            continue
        shown = decode("rgba8", field, encode(field, pixels))
        assert np.array_equal(shown[:, :, [0, 3]] if channels == 2 else shown[:, :, :channels], pixels)


def test_array_keeps_its_depth_or_is_refused_when_uint16() -> None:
    """16 bits stay 16 bits where the format has them, and are never cut off where it has not."""
    for channels, field in itertools.product([1, 2, 3, 4], WRITTEN):
        pixels = random_pixels(channels)
        accepted = {
            **dict.fromkeys(("png", "apng", "img", "image"), (1, 2, 3, 4)),
            **dict.fromkeys(("ppm", "pnm"), (1, 3)),
            **dict.fromkeys(("pgm", "tif", "tiff"), (1,)),
        }
        if channels not in accepted.get(field, ()):
            assert "png" in refuse(field, pixels)
            continue
        for value in (pixels, pixels.astype(">u2"), pixels[:, ::-1][:, ::-1]):
            shown = decode("rgba", field, encode(field, value))
            assert np.array_equal(shown, as_rgba(pixels) / np.float32(65535))


def test_deep_png_is_read_by_others_when_written() -> None:
    """Pillow finds the grey values; each chunk's length leads to the next, up to the end."""
    pixels = random_pixels(1)
    with Image.open(io.BytesIO(encode("png", pixels))) as image:
        assert np.array_equal(np.asarray(image), pixels[:, :, 0])
    data = encode("png", random_pixels(4))
    position, kinds = 8, []
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kinds.append(data[position + 4 : position + 8])
        position += 12 + length
    assert position == len(data)
    assert kinds == [b"IHDR", b"IDAT", b"IEND"]


def test_array_is_rounded_to_8_bits_when_float() -> None:
    """Floats in 0..1 become the nearest of 256 values: decoded images come back."""
    for dtype in [np.float16, np.float32, np.float64]:
        pixels = np.arange(256).reshape(16, 16)
        assert np.array_equal(decode("l8", "png", encode("png", (pixels / 255).astype(dtype))), pixels)
        assert decode("l8", "png", encode("png", np.array([[0.11, 0.87]], dtype))).tolist() == [[28, 222]]


def test_image_comes_back_when_encoded_with_the_spec_that_decoded_it() -> None:
    """Decoding and encoding with one spec changes nothing."""
    for spec, torch_prefix, field in itertools.product(
        ["l8", "rgb8", "rgba8", "l", "rgb", "rgba"], ["", "torch"], ["png", "webp", "tiff"]
    ):
        data = encode(field, PIXELS)
        value = decode(torch_prefix + spec, field, data)
        again = decode(torch_prefix + spec, field, encode(field, value, torch_prefix + spec))
        assert again.shape == value.shape
        assert (again == value).all()


def test_tensor_is_chw_when_the_spec_is_a_torch_one() -> None:
    """HW, 1HW, CHW and bfloat16 are written; a tensor that requires grad too, and none is changed."""
    chw = torch.from_numpy(PIXELS.transpose(2, 0, 1).copy())
    data = encode("png", PIXELS)
    assert encode("png", chw, "torch") == encode("png", torch.from_numpy(PIXELS)) == data
    assert encode("png", torch.from_numpy(PIXELS), "rgb8") == data
    grey = encode("png", PIXELS[:, :, 0])
    assert encode("png", chw[0], "torchrgb8") == encode("png", chw[:1], "torchl") == encode("png", chw[0]) == grey
    ramp = torch.tensor([[0.0, 0.5, 1.0]], requires_grad=True)
    assert decode("l8", "png", encode("png", ramp, "torch")).tolist() == [[0, 128, 255]]
    assert decode("l8", "png", encode("png", ramp.to(torch.bfloat16))).tolist() == [[0, 128, 255]]
    assert ramp.requires_grad


def test_tensor_is_refused_when_it_looks_like_chw_without_a_torch_spec() -> None:
    """The message names the encoder that is missing."""
    assert 'encoder="torchrgb8"' in refuse("png", torch.zeros(3, 8, 8))
    assert "CHW" in refuse("png", torch.zeros(8, 8, 3), "torch")
    assert "transpose(1, 2, 0)" in refuse("png", np.zeros((3, 8, 8), np.uint8), "torch")


def test_value_is_refused_when_it_is_not_an_image() -> None:
    """One image for each field, with pixels, 1 to 4 channels and a type that the message says how to convert to."""
    for shape in [(8,), (8, 8, 5), (2, 8, 8, 3), ()]:
        assert "HWC" in refuse("png", np.zeros(shape, np.uint8))
    for shape in [(0, 8), (8, 0), (0, 8, 3), (8, 0, 3)]:
        assert "no pixels" in refuse("png", np.zeros(shape, np.uint8))
        if len(shape) == 2:
            assert "no pixels" in refuse("png", Image.new("RGB", shape))  # type: ignore[arg-type]
    for dtype, cure in [
        ("bool", "* 255"), ("i8", "uint8"), ("i4", "uint8"), ("u4", "uint16"), ("i1", "uint8"), ("c8", "float32"),
    ]:  # fmt: skip
        assert cure in refuse("png", np.zeros((2, 2), dtype))
    for value in ["a.png", 3, [[1]], np.ma.masked_array(np.zeros((2, 2), np.uint8))]:
        assert "expected a PIL image" in refuse("png", value)
    assert "transpose" not in refuse("png", np.zeros((2, 2, 5), np.uint8))


def test_array_is_refused_when_floats_are_not_in_0_and_1() -> None:
    """Nothing is clipped: the message names the least and the greatest value."""
    for wrong, shown in [(255.0, "255.0"), (-0.1, "-0.1"), (np.nan, "nan"), (np.inf, "inf")]:
        message = refuse("png", np.array([[0.0, wrong]]))
        assert shown in message
        assert "255" in message
        assert "clip" in message


def test_image_is_refused_when_32_bit_pixels_leave_16_bits() -> None:
    """Pillow would clip them."""
    for wrong, field in itertools.product([-1, 65536], ["png", "pgm", "tif"]):
        assert str(wrong) in refuse(field, Image.fromarray(np.array([[0, wrong]], np.int32)))


def test_pbm_is_refused_when_pixels_are_grey() -> None:
    """A bitmap holds 0 and 255 only; those it takes as 8 bits too."""
    pixels = np.where(PIXELS[:, :, 0] > 127, np.uint8(255), np.uint8(0))
    assert np.array_equal(decode("l8", "pbm", encode("pbm", pixels)), pixels)
    assert "black and white" in refuse("pbm", PIXELS[:, :, 0])


def test_pnm_has_the_magic_of_its_name_when_written() -> None:
    """A PPM is P6, a PGM P5, a PBM P4; a PNM what suits the image."""
    for field in ["ppm", "pgm", "pbm", "pnm"]:
        bits = make_image("1")
        assert encode(field, bits)[:2] == {"ppm": b"P6", "pgm": b"P5", "pbm": b"P4", "pnm": b"P4"}[field]
        assert encode("ppm", random_pixels(1))[:2] == b"P6"
        assert encode("pnm", PIXELS[:, :, 0])[:2] == b"P5"


KEYED = {"png": {"L", "P", "RGB"}, "webp": {"L", "P"}}


def test_image_keeps_its_transparent_colour_or_is_refused_when_it_has_one() -> None:
    """Transparency that the file would lose is an error."""
    for field, mode in itertools.product(["png", "webp", "bmp", "tif", "jpg", "pnm"], ["1", "L", "P", "RGB", "I;16"]):
        image = make_image(mode)
        image.info["transparency"] = image.getpixel((0, 0))
        if mode in KEYED.get(field, ()):
            value = decode("rgba8", field, encode(field, image))
            assert value[0, 0, 3] == 0
            assert np.array_equal(value, np.asarray(image.convert("RGBA")))
        else:
            refuse(field, image)


def exif_bytes(orientation: int) -> bytes:
    """EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def test_image_keeps_its_orientation_when_the_file_can() -> None:
    """What `exif_transpose` turns before, it turns after, be the orientation in image.info or in getexif()."""
    for field in ["jpg", "png", "webp"]:
        image = make_image("RGB")
        image.info["exif"] = exif_bytes(6)
        upright = decode("rgb8", field, encode(field, image), exif_transpose=True)
        assert upright.shape == (7, 5, 3)
        if field != "jpg":
            assert np.array_equal(upright, np.asarray(ImageOps.exif_transpose(image)))
        deep = make_image("I;16")
        deep.info["exif"] = exif_bytes(6)
        assert decode("l8", "png", encode("png", deep), exif_transpose=True).shape == (7, 5)
    for field in ["jpg", "png", "webp"]:
        image = make_image("RGB")
        image.getexif()[0x0112] = 6
        assert decode("rgb8", field, encode(field, image), exif_transpose=True).shape == (7, 5, 3)
        with Image.open(io.BytesIO(encode("webp", image))) as webp:
            data = encode(field, webp)
        assert decode("rgb8", field, data, exif_transpose=True).shape == (7, 5, 3)


def test_image_is_refused_when_the_file_would_lose_its_orientation() -> None:
    """An orientation of 1 says nothing and may be lost; damaged EXIF data too."""
    for field in ["bmp", "tif", "pnm"]:
        image = make_image("RGB")
        image.info["exif"] = exif_bytes(6)
        assert "exif_transpose" in refuse(field, image)
        for harmless in (exif_bytes(1), b"Exif\0\0nothing"):
            image.info["exif"] = harmless
            assert np.array_equal(decode("rgb8", field, encode(field, image)), np.asarray(image))
    for field in ["bmp", "tif", "pnm"]:
        image = make_image("RGB")
        image.getexif()[0x0112] = 6
        assert "exif_transpose" in refuse(field, image)


def test_image_is_written_when_it_was_opened_from_a_file() -> None:
    """A file that is not loaded yet is read; a cut one is an error."""
    data = encode("png", PIXELS)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode("rgba8", "tif", encode("tif", image)), PIXELS)
    big = encode("png", np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    with Image.open(io.BytesIO(big[:-2000])) as image:
        assert "OSError" in refuse("png", image)


def test_image_is_refused_when_reading_would_take_it_for_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pixels than Pillow opens are not written."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 17)
    assert "bomb" in refuse("png", PIXELS)
    assert "bomb" in refuse("png", make_image("RGB"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert encode("png", PIXELS)


def test_quality_and_compression_count_when_given() -> None:
    """A higher quality is larger, more effort smaller with the same pixels, of 8 and of 16 bits."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    low, high = (encode("jpg", pixels, jpeg_quality=quality) for quality in (1, 100))
    assert len(low) < len(encode("jpg", pixels)) < len(high)
    assert encode("jpg", pixels) == encode("jpeg", pixels, jpeg_quality=np.int64(95))
    for pixels in (np.zeros((64, 64), np.uint8), np.zeros((64, 64), np.uint16)):
        files = [encode("png", pixels, png_compression=level) for level in (0, 6, 9)]
        assert len(files[0]) > len(files[1]) >= len(files[2])
        assert encode("png", pixels) == files[1] == encode("png", pixels, png_compression=np.int32(6))
        assert all(not decode("l8", "png", file).any() for file in files)


def test_encoder_raises_when_an_image_option_is_wrong() -> None:
    """The constructor names the option."""
    for name, wrong in itertools.product(["jpeg_quality", "png_compression"], [-1, 101, True, 5.0, "5", None]):
        with pytest.raises((TypeError, ValueError), match=name):
            Encoder(**{name: wrong})
        with pytest.raises(ValueError, match="1 to 100"):
            Encoder(jpeg_quality=0)


def test_format_is_chosen_by_the_last_part_when_the_name_has_several() -> None:
    """As in decoding, in any case."""
    for field in ["a.seg.png", "PNG", "a.Png"]:
        assert encode(field, PIXELS) == encode("png", PIXELS)


def test_webp_keeps_transparent_colours_and_arrays_are_not_changed() -> None:
    """Lossless means all channels; the user's array stays as it is, and read-only arrays are fine."""
    pixels = PIXELS.copy()
    pixels[:, :, 3] = 0
    assert np.array_equal(decode("rgba8", "webp", encode("webp", pixels)), pixels)
    for pixels in (PIXELS.copy(), random_pixels(3), PIXELS.astype(np.float32) / 255):
        before = pixels.copy()
        pixels.setflags(write=False)
        encode("png", pixels)
        assert np.array_equal(pixels, before)


def test_palette_png_reads_back_when_it_has_few_colours() -> None:
    """Palettes of any size keep their colours."""
    for colours in (1, 2, 3, 16, 17, 256):
        image = Image.fromarray(PIXELS[:, :, :3].copy()).quantize(colours)
        for field in ("png", "bmp", "tif", "webp"):
            assert np.array_equal(decode("rgb8", field, encode(field, image)), np.asarray(image.convert("RGB")))


def test_palette_image_keeps_its_indices_or_is_refused_when_its_palette_is_short() -> None:
    """A pixel beyond the palette has no colour, and formats cut it."""
    for field in ["png", "webp", "bmp", "tif"]:
        image = Image.fromarray(np.array([[0, 1, 2], [7, 9, 40]], np.uint8))
        for colours in (10, 40):  # far too few, and one too few
            image.putpalette(list(range(3 * colours)))
            assert "putpalette" in refuse(field, image)
        image.putpalette(list(range(123)))
        data = encode(field, image)
        assert np.array_equal(decode("rgb8", field, data), np.asarray(image.convert("RGB")))
        with Image.open(io.BytesIO(data)) as again:
            assert field == "webp" or np.array_equal(np.asarray(again), np.asarray(image))
        assert not decode("rgb8", field, encode(field, Image.new("P", (2, 2)))).any()


def test_palette_image_keeps_its_alpha_or_is_refused_when_its_palette_has_some() -> None:
    """An alpha of 255 everywhere says nothing."""
    for field in ["png", "webp", "bmp", "tif"]:
        image = Image.fromarray(PIXELS).quantize(8)
        assert image.palette is not None
        assert image.palette.mode == "RGBA"
        if field in KEYED:
            assert np.array_equal(decode("rgba8", field, encode(field, image)), np.asarray(image.convert("RGBA")))
        else:
            assert "alpha of its palette" in refuse(field, image)
        image.putpalette([1, 2, 3, 255] * 8, "RGBA")
        assert np.array_equal(decode("rgba8", field, encode(field, image)), np.asarray(image.convert("RGBA")))


def test_image_object_is_not_changed_and_not_asked_when_saved() -> None:
    """What an earlier save left on it says nothing, and nothing is left on it."""
    for mode in ("RGB", "P", "L"):
        image, used = make_image(mode), make_image(mode)
        left = used.encoderinfo = {"quality": 1, "bits": 1, "compress_level": 0, "dpi": (3, 3)}
        before = set(vars(image))
        for field in ("jpg", "png", "webp", "tif", "bmp"):
            if (field, mode) != ("jpg", "P"):
                assert encode(field, image) == encode(field, used)
        assert set(vars(image)) == before
        assert used.encoderinfo is left
        assert left == {"quality": 1, "bits": 1, "compress_level": 0, "dpi": (3, 3)}


def test_message_names_the_most_pixels_when_a_side_is_too_long() -> None:
    """Before the library says less."""
    for field, side, most in [("jpg", 65501, "65,500"), ("webp", 16384, "16,383")]:
        assert most in refuse(field, np.zeros((1, side), np.uint8))


def test_transparent_colour_is_checked_when_given() -> None:
    """NumPy's numbers are numbers like others; what no pixel can have, Pillow would clip, or fail."""
    for mode, key in [("L", np.uint8(0)), ("RGB", (np.int64(0),) * 3), ("RGB", np.zeros(3, int)), ("P", np.int64(0))]:
        image = Image.new(mode, (2, 2))
        image.info["transparency"] = key
        assert not decode("rgba8", "png", encode("png", image)).any()
    for mode, key in [
        ("L", "x"), ("L", 300), ("L", -1), ("RGB", 3), ("RGB", (1, 2)), ("RGB", (0, -1, 0)), ("RGB", (0, 0, 256)),
        ("P", bytes(257)), ("P", 256), ("L", ()),
    ]:  # fmt: skip
        image = Image.new(mode, (2, 2))
        image.info["transparency"] = key
        assert "transparency" in refuse("png", image)
        image.info["transparency"] = None
        assert encode("png", image)
