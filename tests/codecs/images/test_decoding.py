"""Image fields of 8 bits a channel."""

import io
import itertools
import pickle
import struct
import sys
from typing import Any

import numpy as np
import pytest
import torch
import webdataset.autodecode
from PIL import Image
from PIL.ImageFilter import GaussianBlur

from tests.kits.shards import image_file, jpeg_bytes
from torchdata_wds.codecs import IMAGE_FIELDS, IMAGE_SPECS, Decoder, image_decoder
from torchdata_wds.codecs.images import files as image_files
from torchdata_wds.codecs.images import jpeg as jpegs
from torchdata_wds.errors import DecodingError

SPECS = list(IMAGE_SPECS)
MODES = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}


@pytest.fixture(params=["simplejpeg", "Pillow"])
def jpegs_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEG files are decoded by simplejpeg (where it is installed), and by Pillow."""
    if request.param == "Pillow":
        monkeypatch.setattr(jpegs, "_libraries", lambda: None)


def picture(mode: str = "RGB", size: tuple[int, int] = (7, 5)) -> Image.Image:
    """An image of random pixels."""
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode) if mode in ("LA", "CMYK") else Image.fromarray(pixels.squeeze())


def smooth(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """An image of slow gradients, which JPEG and resampling keep."""
    x, y = np.meshgrid(np.linspace(0, 250, size[0]), np.linspace(0, 250, size[1]))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=2).astype(np.uint8)).convert(mode)


def decode(data: bytes, spec: str, field: str = "png", **options: Any) -> Any:
    """The value of an image field."""
    return Decoder(spec, **options)({"__key__": "k", field: data})[field]


def as_array(value: Any) -> Any:
    """Any image value as an array, HWC or HW."""
    if isinstance(value, torch.Tensor):
        value = value.numpy().transpose(1, 2, 0)
        return value[:, :, 0] if value.shape[2] == 1 else value
    return np.asarray(value)


def test_spec_gives_its_type_and_shape_when_image_is_rgb() -> None:
    """Arrays are HWC (HW for grey), tensors CHW, floats float32 in 0..1, PIL images of the spec's mode."""
    for spec in SPECS:
        value = decode(image_file(picture()), spec)
        word = spec.removeprefix("torch").removeprefix("pil").removesuffix("8") or "rgb"
        if spec.startswith("pil"):
            assert type(value) is Image.Image
            assert (value.mode, value.size) == (MODES[word], (7, 5))
            continue
        channels = len(word)
        if spec.startswith("torch"):
            assert value.shape == (channels, 5, 7)
            assert value.dtype == (torch.uint8 if spec.endswith("8") else torch.float32)
            continue
        assert value.shape == ((5, 7) if channels == 1 else (5, 7, channels))
        assert value.dtype == (np.uint8 if spec.endswith("8") else np.float32)
        assert value.flags.c_contiguous
        assert value.flags.owndata or not isinstance(value.base, np.ndarray) or value.base.nbytes == value.nbytes
        assert value.flags.writeable


@pytest.mark.usefixtures("jpegs_by")
def test_tensor_is_a_view_of_rows_of_pixels_when_of_bytes() -> None:
    """Tensors of uint8 are CHW views of HWC memory, as torchvision's decoders give; floats are in CHW memory."""
    turned = Image.Exif()
    turned[0x0112] = 6
    for spec, form in itertools.product(SPECS, ["JPEG", "PNG"]):
        if not spec.startswith("torch"):
            continue
        for options in ({}, {"max_size": 4}, {"exif_transpose": True}):
            value = image_decoder(spec, **options).decode(image_file(picture(), form, exif=turned))
            array = image_decoder(spec.removeprefix("torch") or "rgb", **options).decode(
                image_file(picture(), form, exif=turned)
            )
            assert np.array_equal(as_array(value), array)
            assert value.is_contiguous() or spec in ("torchrgb8", "torchrgba8")
            if spec.endswith("8"):
                assert value.permute(1, 2, 0).is_contiguous()
            assert value.untyped_storage().nbytes() == value.nbytes


def test_spec_equals_webdataset_when_file_has_eight_bits() -> None:
    """Pixels equal webdataset's, except that grey tensors have their channel axis here."""
    for spec in SPECS:
        for mode in ("L", "LA", "RGB", "RGBA"):
            data = image_file(picture(mode))
            theirs = webdataset.autodecode.ImageHandler(spec)(".png", data)
            ours = decode(data, spec)
            if isinstance(theirs, torch.Tensor) and theirs.ndim == 2:
                theirs = theirs[None]
            assert type(ours) is type(theirs)
            assert np.array_equal(np.asarray(ours), np.asarray(theirs)), mode


def test_spec_equals_pillow_when_file_has_another_mode() -> None:
    """One-bit, palette and CMYK images become grey, colour and alpha as Pillow converts them."""
    for spec, mode in itertools.product(SPECS, ["1", "P", "CMYK"]):
        source = picture("CMYK") if mode == "CMYK" else picture().convert(mode)
        data = image_file(source, "TIFF" if mode == "CMYK" else "PNG")
        parsed = IMAGE_SPECS[spec]
        expected = np.asarray(source.convert(parsed.mode))
        value = as_array(decode(data, spec))
        assert np.array_equal(value, expected / np.float32(255) if parsed.is_float else expected)


def test_palette_has_alpha_when_it_has_transparency() -> None:
    """Transparent palette entries become alpha under rgba, and are colours under rgb, without a warning."""
    for transparency in [3, bytes([0, 255, 100, 7])]:
        image = Image.fromarray(np.arange(4, dtype=np.uint8).reshape(1, 4)).convert("P")
        image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
        data = image_file(image, transparency=transparency)
        alpha = [255, 255, 255, 0] if transparency == 3 else list(transparency)
        assert decode(data, "rgba8")[0, :, 3].tolist() == alpha
        assert decode(data, "rgb8")[0].tolist() == [[10, 20, 30], [40, 50, 60], [70, 80, 90], [100, 110, 120]]
        assert decode(data, "l8").shape == (1, 4)


def test_grey_uses_pillows_weights_when_image_is_rgb() -> None:
    """l8 of a colour image is exactly Pillow's L."""
    image = picture(size=(64, 64))
    assert np.array_equal(decode(image_file(image), "l8"), np.asarray(image.convert("L")))


def test_spec_decodes_each_image_field_when_given() -> None:
    """All image extensions are decoded, by content: the name does not choose the format."""
    for field in IMAGE_FIELDS:
        for name in (field, f"left.{field.upper()}"):
            assert decode(image_file(picture()), "rgb8", name).shape == (5, 7, 3)


@pytest.mark.usefixtures("jpegs_by")
def test_spec_decodes_each_format_when_written_by_pillow() -> None:
    """Every image extension is read in the format that it stands for."""
    for form in ["JPEG", "PNG", "PPM", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "JPEG2000"]:
        source = smooth((40, 30))
        value = decode(image_file(source, form), "rgb8", "image")
        assert np.abs(value.astype(int) - np.asarray(source)).mean() < 12


def test_spec_decodes_the_first_frame_when_an_image_moves() -> None:
    """Of an animated GIF the first frame is the image; an icon is its largest size."""
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue")]
    moving = decode(image_file(frames[0], "GIF", save_all=True, append_images=frames[1:]), "rgb8", "gif")
    assert (moving.shape, moving[0, 0].tolist()) == ((3, 4, 3), [255, 0, 0])
    icon = image_file(Image.new("RGBA", (32, 32), "blue"), "ICO", sizes=[(16, 16), (32, 32)])
    assert decode(icon, "rgba8", "ico")[0, 0].tolist() == [0, 0, 255, 255]
    assert decode(icon, "pil", "ico").size == (32, 32)


def test_spec_refuses_a_format_when_pillow_is_too_old_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pillow without AVIF says that it cannot identify the file; other images are read as before."""
    data = image_file(picture(), "AVIF")
    monkeypatch.delitem(Image.OPEN, "AVIF")
    monkeypatch.setitem(sys.modules, "PIL.AvifImagePlugin", None)
    image_files._pillow.cache_clear()
    try:
        with pytest.raises(DecodingError, match="cannot identify"):
            decode(data, "rgb8", "avif")
        assert decode(image_file(picture()), "rgb8").shape == (5, 7, 3)
    finally:
        image_files._pillow.cache_clear()


def test_spec_is_about_images_only_when_given() -> None:
    """Without a spec images stay bytes; image_decoder leaves other fields to the next decoder."""
    data = image_file(picture())
    assert Decoder("rgb8")({"bin": data, "cls": b"1", "mp4": data}) == {"bin": data, "cls": 1, "mp4": data}
    assert Decoder()({"png": data}) == {"png": data}
    assert image_decoder("rgb8")(".json", b"x") is None
    assert image_decoder("rgb8")(".xjpg", b"x") is None


def test_pil_image_is_loaded_when_decoded() -> None:
    """A PIL image holds its pixels and no file: it pickles and lives on."""
    again = pickle.loads(pickle.dumps(decode(image_file(picture()), "pil")))
    assert np.array_equal(np.asarray(again), np.asarray(picture()))


@pytest.mark.usefixtures("jpegs_by")
def test_image_raises_when_cut() -> None:
    """A cut image is an error, never an image with a grey rest, also where the header is whole."""
    for spec, form in itertools.product(["rgb8", "pil", "torch"], ["JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP"]):
        data = image_file(picture(size=(64, 64)), form)
        for cut in (0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 100):
            with pytest.raises(DecodingError, match="an image"):
                decode(data[:cut], spec)
    data = image_file(picture(size=(64, 64)))
    position = data.index(b"IDAT") - 4
    (length,) = struct.unpack(">I", data[position : position + 4])
    with pytest.raises(DecodingError, match="an image"):
        decode(data[: position + 8 + length // 2], "rgb8")


def test_image_raises_when_it_is_not_one_that_is_read() -> None:
    """The error says spec, size and first bytes; Pillow would run Ghostscript on PostScript; a bomb is refused."""
    with pytest.raises(DecodingError, match=r"(?s)spec 'rgb8'.*18 bytes.*b'<html>not an ima'"):
        decode(b"<html>not an image", "rgb8")
    with pytest.raises(DecodingError, match="cannot identify"):
        decode(image_file(picture(), "EPS"), "rgb8", "jpg")
    with pytest.raises(DecodingError, match="DecompressionBombError"):
        decode(b"P6 100000 100000 255\n", "rgb8", "ppm")


def test_exif_transpose_turns_the_image_when_it_has_an_orientation() -> None:
    """With the option the image is upright, without it as stored; Pillow itself turns TIFF, and once is enough."""
    for orientation, spec, form in itertools.product(range(1, 9), ["rgb8", "torchrgb", "pil", "l8"], ["PNG", "TIFF"]):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = image_file(picture(), form, exif=exif)
        with Image.open(io.BytesIO(data)) as stored:
            from PIL import ImageOps

            upright = ImageOps.exif_transpose(stored).convert(IMAGE_SPECS[spec].mode)
        expected = np.asarray(upright)
        value = as_array(decode(data, spec, exif_transpose=True))
        assert np.array_equal(value, expected / np.float32(255) if spec == "torchrgb" else expected)
        if form == "PNG":
            assert as_array(decode(data, spec)).shape[:2] == (5, 7)


@pytest.mark.usefixtures("jpegs_by")
def test_exif_transpose_is_not_applied_twice_when_the_user_turns_again() -> None:
    """A PIL image that was turned has no orientation left."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = 6
    image = decode(image_file(picture(), "JPEG", exif=exif), "pil", "jpg", exif_transpose=True)
    assert image.size == (5, 7)
    assert ImageOps.exif_transpose(image).size == (5, 7)


@pytest.mark.usefixtures("jpegs_by")
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_transpose_leaves_the_image_when_exif_is_damaged() -> None:
    """Damaged EXIF data says nothing, nor does an orientation outside 1..8: the pixels are good."""
    for exif in [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0"]:
        data = image_file(picture(), "JPEG", exif=exif)
        assert decode(data, "rgb8", "jpg", exif_transpose=True).shape == (5, 7, 3)
    for value in [0, 9, 77]:
        exif = Image.Exif()
        exif[0x0112] = value
        assert decode(image_file(picture(), "JPEG", exif=exif), "rgb8", "jpg", exif_transpose=True).shape == (5, 7, 3)


@pytest.mark.usefixtures("jpegs_by")
def test_max_size_bounds_the_longest_side_when_larger() -> None:
    """The longest side is at most `max_size`, the aspect kept, nothing enlarged."""
    for form, (size, max_size, expected) in itertools.product(
        ["JPEG", "PNG"],
        [
            ((640, 480), 256, (192, 256, 3)),
            ((480, 640), 256, (256, 192, 3)),
            ((300, 200), 256, (171, 256, 3)),
            ((256, 100), 256, (100, 256, 3)),
            ((100, 50), 256, (50, 100, 3)),
            ((2000, 3), 100, (1, 100, 3)),
            ((37, 41), 1, (1, 1, 3)),
        ],
    ):
        assert image_decoder("rgb8", max_size=max_size)(".jpg", image_file(smooth(size), form)).shape == expected


@pytest.mark.usefixtures("jpegs_by")
def test_max_size_changes_nothing_when_the_image_is_small_and_works_with_any_spec() -> None:
    """An image within the limit is decoded to exactly the same pixels; every kind of result can be bounded."""
    data = jpeg_bytes(5, (100, 80))
    assert np.array_equal(image_decoder("rgb8", max_size=100)(".jpg", data), image_decoder("rgb8")(".jpg", data))
    for spec in ["pil", "torchl", "rgba", "l8"]:
        value = image_decoder(spec, max_size=16)(".png", image_file(smooth((64, 32))))
        assert as_array(value).shape[:2] == (8, 16)


@pytest.mark.usefixtures("jpegs_by")
def test_max_size_is_close_to_full_decoding_when_jpeg() -> None:
    """The quick way for JPEG gives nearly the pixels of decoding all and reducing then, in smooth images and others."""
    for size, max_size in itertools.product([(640, 480), (1024, 512), (517, 389)], [32, 100, 256]):
        for image, worst, average in ((smooth(size), 6, 1), (picture(size=size).filter(GaussianBlur(1)), 60, 6)):
            data = image_file(image, "JPEG", quality=95)
            value = image_decoder("rgb8", max_size=max_size)(".jpg", data)
            full = Image.open(io.BytesIO(data)).resize(value.shape[1::-1], Image.Resampling.BICUBIC)
            difference = np.abs(value.astype(int) - np.asarray(full))
            assert difference.max() <= worst
            assert difference.mean() <= average


@pytest.mark.usefixtures("jpegs_by")
def test_max_size_is_pillows_bicubic_filter_when_nothing_is_decoded_at_a_fraction() -> None:
    """Up to the rounding of one level, for every mode; the colours of transparent pixels are left out."""
    for mode, spec in (("L", "l8"), ("RGB", "rgb8"), ("RGBA", "rgba8")):
        image = picture(mode, (90, 70))
        value = image_decoder(spec, max_size=40).decode(image_file(image))
        expected = np.asarray(image.resize(value.shape[1::-1], Image.Resampling.BICUBIC)).astype(int)
        seen = value[..., 3:] > 40 if mode == "RGBA" else True
        assert (np.abs(value - expected) * seen).max() <= (4 if mode == "RGBA" else 1)


@pytest.mark.usefixtures("jpegs_by")
def test_max_size_gives_pil_images_the_pixels_of_arrays() -> None:
    """They keep what Pillow found in the file besides."""
    for form, (spec, array) in itertools.product(
        ["JPEG", "PNG"], [("pil", "rgb8"), ("pill", "l8"), ("pilrgba", "rgba8")]
    ):
        data = image_file(picture(size=(90, 70)), form, dpi=(72, 72))
        image = image_decoder(spec, max_size=40).decode(data)
        assert np.array_equal(np.asarray(image), image_decoder(array, max_size=40).decode(data))
        assert round(image.info["dpi"][0]) == 72


def test_max_size_uses_draft_mode_when_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without simplejpeg, a large JPEG is decoded at a fraction of its size, at least twice the result."""
    from PIL import JpegImagePlugin

    loaded = []
    load = JpegImagePlugin.JpegImageFile.load
    monkeypatch.setattr(jpegs, "_libraries", lambda: None)
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", lambda self: (loaded.append(self.size), load(self))[1])
    image_decoder("rgb8", max_size=100)(".jpg", image_file(smooth((1600, 1200)), "JPEG"))
    assert loaded[0] == (200, 150)


@pytest.mark.usefixtures("jpegs_by")
def test_max_size_bounds_the_turned_image_when_orientation_swaps_sides() -> None:
    """Reducing and turning go together."""
    exif = Image.Exif()
    exif[0x0112] = 8
    data = image_file(smooth((640, 480)), "JPEG", exif=exif)
    assert image_decoder("rgb8", max_size=64, exif_transpose=True)(".jpg", data).shape == (64, 48, 3)
    assert Decoder(image_decoder("rgb8", max_size=64), exif_transpose=True)({"jpg": data})["jpg"].shape == (64, 48, 3)


def test_image_decoder_raises_when_its_arguments_are_wrong() -> None:
    """A limit is a whole number of pixels; two image specs contradict each other."""
    for max_size in [0, -5]:
        with pytest.raises(ValueError, match="max_size"):
            image_decoder("rgb8", max_size=max_size)
    for max_size in ["256", 2.5, True, (4, 4)]:
        with pytest.raises(TypeError, match="max_size"):
            image_decoder("rgb8", max_size=max_size)
    with pytest.raises(ValueError, match="rgb8, pil"):
        Decoder("rgb8", "pil")


def test_spec_raises_when_unknown() -> None:
    """The constructor names the nearest valid spec and lists all."""
    for (spec, nearest), make in itertools.product(
        [
            ("rbg8", "rgb8"), ("RGB8", "rgb8"), ("PIL", "pil"), ("torchrgb9", "torchrgb"), ("pilgb", "pilrgb"),
            ("tensor", "torch"), ("rgbtorch", "torchrgb"), ("rgb8torch", "torchrgb8"), ("lpil", "pill"),
        ],
        [Decoder, image_decoder],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"did you mean '{nearest}'") as caught:
            make(spec)
        assert all(name in str(caught.value) for name in SPECS)
