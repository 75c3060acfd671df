"""Crops that are decoded no larger than needed: near the plain chain of decode, crop and resize, with its errors."""

import io
import itertools
import math
import pickle
import random
import re
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kits.shards import image_file
from torchdata_wds import center_crop_decoder, crop_decoder, image_decoder
from torchdata_wds.codecs import Decoder
from torchdata_wds.codecs.images import jpeg
from torchdata_wds.codecs.images.regions import Region, draw_crop
from torchdata_wds.errors import DecodingError

MAKERS: list[Callable[..., Any]] = [crop_decoder, center_crop_decoder]


@pytest.fixture(params=["simplejpeg", "Pillow"])
def jpegs_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEG files are decoded by simplejpeg, and by Pillow."""
    if request.param == "Pillow":
        monkeypatch.setattr(jpeg, "_libraries", lambda: None)


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Slow gradients with grain, and tiles with sharp edges."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, np.int16) + rng.integers(-6, 7, (size[1], size[0], 1))
    y, x = np.mgrid[: size[1], : size[0]]
    pixels = np.where(((x // 37 + y // 23) % 4 == 0)[:, :, None], 255 - pixels, pixels)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)


def plain(image: Image.Image, region: Region, interpolation: str) -> Any:
    """What Pillow makes of a region of the whole image."""
    rows, columns, _ = region
    box = (columns.start, rows.start, columns.start + columns.length, rows.start + rows.length)
    size = columns.made, rows.made
    resized = np.asarray(image.resize(size, Image.Resampling[interpolation.upper()], box=box))
    return resized[rows.first : rows.first + rows.kept, columns.first : columns.first + columns.kept]


def same(decoder: Any, data: bytes, seed: int = 1) -> Any:
    """What a decoder makes of a file after the generator was seeded, as an array HWC or HW."""
    random.seed(seed)
    return as_array(decoder.decode(data))


def as_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.permute(1, 2, 0).numpy()
        return value[:, :, 0] if value.shape[2] == 1 else value
    return np.asarray(value)


# ---------------------------------------------------------------------------------------------------------- the values
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("jpegs_by")
def test_crop_has_the_type_and_size_of_its_spec(make: Callable[..., Any]) -> None:
    """Every spec, square or not, of images that are larger, smaller, narrow and tiny."""
    sizes = [(300, 200), (64, 64), (30, 300), (300, 3), (1, 1)]
    for (width, height), form in itertools.product(sizes, ["JPEG", "PNG"]):
        data = image_file(picture((width, height)), form)
        tensor = make(48)(".jpg", data)
        assert (tensor.shape, tensor.dtype) == ((3, 48, 48), torch.uint8)
        assert tensor.permute(1, 2, 0).is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        wide = make((24, 60), "rgb8").decode(data)
        assert (wide.shape, wide.dtype, wide.flags.writeable) == ((24, 60, 3), np.uint8, True)
        floats = make(48, "torchrgb").decode(data)
        assert (floats.shape, floats.dtype, floats.is_contiguous()) == ((3, 48, 48), torch.float32, True)
        assert 0 <= floats.min() <= floats.max() <= 1
        assert make(48, "torchl8").decode(data).shape == (1, 48, 48)
        assert make(48, "l8").decode(data).shape == (48, 48)
        assert make(48, "rgba8").decode(data).shape == (48, 48, 4)
        image = make((24, 60), "pil").decode(data)
        assert (type(image), image.mode, image.size) == (Image.Image, "RGB", (60, 24))


@pytest.mark.parametrize("make", MAKERS)
def test_crop_is_near_the_plain_chain_at_each_step(make: Callable[..., Any]) -> None:
    """On average 0.2 of 255 from Pillow's decode, crop and resize where all is decoded, 4 where it is reduced."""
    met = set()
    for size, interpolation in itertools.product(
        [(120, 90), (250, 190), (501, 375), (1001, 753)], ["bilinear", "bicubic"]
    ):
        data = image_file(picture(size), "JPEG", quality=88)
        whole = Image.open(io.BytesIO(data))
        decoder = make(56, "rgb8", interpolation=interpolation)
        for seed in range(4):
            region = decoder._region(size, 1, seed)
            met.add(region.step)
            found = decoder._decode(data, seed).astype(int)
            differences = np.abs(found - plain(whole, region, interpolation))
            assert differences.mean() < (0.2 if region.step == 1 else 4), (size, seed, region)
    assert met == {1, 2, 4, 8}


@pytest.mark.parametrize("make", MAKERS)
def test_crop_is_in_its_place_to_a_part_of_a_pixel(make: Callable[..., Any]) -> None:
    """A gradient shows where its pixels come from, on average of a quarter of them, at any step and odd sizes."""
    for size in ((203, 151), (403, 301), (803, 601), (1599, 1207)):
        ramp = np.linspace(0, 255, size[0])[None, :] * np.ones((size[1], 1))
        data = image_file(Image.fromarray(np.round(ramp).astype(np.uint8)), "JPEG", quality=100)
        decoder = make(80, "l8")
        for seed in range(3):
            region = decoder._region(size, 1, seed)
            columns = region.columns
            places = columns.start + (np.arange(columns.first, columns.first + columns.kept) + 0.5) * (
                columns.length / columns.made
            )
            found = decoder._decode(data, seed).mean(axis=0) / 255 * (size[0] - 1) + 0.5
            away = (found - places)[2:-2].reshape(4, -1).mean(axis=1)
            assert np.abs(away).max() < max(0.1 * region.step, 0.25 * size[0] / 255), (size, seed, region)


@pytest.mark.parametrize("make", MAKERS)
def test_crop_equals_pillows_when_simplejpeg_decodes(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pixels without the extra, by Pillow's draft mode: colour and grey, at each step and orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    made = []
    for mode, size, options in itertools.product(
        ["RGB", "L"], [(97, 131), (203, 300), (601, 451)], [{}, {"subsampling": 0}, {"exif": exif}]
    ):
        data = image_file(picture(size, mode), "JPEG", **options)
        made += [(make(50, spec, exif_transpose=True), data) for spec in ("rgb8", "torchl", "rgba8")]
    fast = [same(*each) for each in made]
    monkeypatch.setattr(jpeg, "_libraries", lambda: None)
    for each, expected in zip(made, fast, strict=True):
        assert np.array_equal(same(*each), expected)


def test_crop_decodes_at_a_fraction_when_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft mode, at the smallest size that still has the pixels of the result."""
    from PIL import JpegImagePlugin

    loaded = []
    load = JpegImagePlugin.JpegImageFile.load
    monkeypatch.setattr(jpeg, "_libraries", lambda: None)
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", lambda self: (loaded.append(self.size), load(self))[1])
    for size, decoded in {75: (100, 75), 76: (200, 150), 150: (200, 150), 151: (400, 300), 301: (800, 600)}.items():
        loaded.clear()
        crop_decoder(size, scale=(1, 1), ratio=(4 / 3, 4 / 3)).decode(image_file(picture((800, 600)), "JPEG"))
        assert loaded == [decoded] * len(loaded)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM"])
def test_crop_of_another_format_is_that_of_the_same_pixels(make: Callable[..., Any], form: str) -> None:
    """The same seed gives the same crop of every format; nothing is decoded at a fraction there."""
    image = picture((301, 203))
    if form == "GIF":
        image = image.quantize(16).convert("RGB")
    options = {"lossless": True} if form == "WEBP" else {}
    data, reference = image_file(image, form, **options), image_file(image, "PNG")
    assert np.array_equal(same(make(40), data), same(make(40), reference))


@pytest.mark.usefixtures("jpegs_by")
def test_crop_of_cmyk_palette_and_deep_images_is_near_the_plain_chain() -> None:
    """Kinds that only Pillow reads; 16 bits keep their depth in floats."""
    cmyk = image_file(picture((640, 480)).convert("CMYK"), "JPEG", quality=95)
    palette = image_file(picture((300, 200)).quantize(32))
    for data, spec in itertools.product([cmyk, palette], ["rgb8", "l8"]):
        decoder = center_crop_decoder(64, spec)
        mode = "L" if spec == "l8" else "RGB"
        image = Image.open(io.BytesIO(data)).convert(mode)
        expected = plain(image, decoder._region(image.size, 1, 0), "bilinear")
        assert np.abs(decoder.decode(data).astype(int) - expected).mean() < 4
    deep = np.linspace(0, 65535, 100 * 100).reshape(100, 100).astype(np.uint16)
    data = image_file(Image.fromarray(deep))
    floats = center_crop_decoder(50, "l", resize=50).decode(data)
    assert len(np.unique(floats)) > 1000
    assert np.abs(floats - deep.reshape(50, 2, 50, 2).mean(axis=(1, 3)) / 65535).max() < 0.01
    assert np.abs(center_crop_decoder(50, "l8", resize=50).decode(data) / 255 - floats).max() < 0.01


def test_crop_does_not_mix_in_the_colour_of_transparent_pixels() -> None:
    """As Pillow, colours are weighed by their alpha."""
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[:, ::2] = (255, 0, 0, 255)
    pixels[:, 1::2] = (0, 255, 0, 0)
    data = image_file(Image.fromarray(pixels))
    found = center_crop_decoder(16, "rgba8", resize=16).decode(data)
    assert (found[:, 2:-2, :2] == (255, 0)).all()
    assert abs(int(found[8, 8, 3]) - 128) <= 2


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("jpegs_by")
def test_crop_is_upright_when_told_to_turn(make: Callable[..., Any]) -> None:
    """Of a file with an orientation, the crop is that of the upright image; without the option, of the stored one."""
    from PIL import ImageOps

    for orientation, form in itertools.product((1, 2, 6, 7), ["PNG", "TIFF", "JPEG"]):
        exif = Image.Exif()
        exif[0x0112] = orientation
        size = (203, 152)
        options: dict[str, Any] = {"quality": 100, "subsampling": 0} if form == "JPEG" else {}
        data = image_file(picture(size), form, exif=exif, **options)
        upright = image_file(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        found = same(make((80, 75), exif_transpose=True), data).astype(int)
        difference = np.abs(found - same(make((80, 75)), upright))
        assert difference.mean() < (1.5 if form == "JPEG" else 0.3), (orientation, form)
        through = Decoder(make((80, 75)), exif_transpose=True)
        random.seed(1)
        assert np.array_equal(as_array(through({"jpg": data})["jpg"]), found)
        if form != "TIFF":  # Pillow always turns those
            assert np.array_equal(same(make(60), data), same(make(60), image_file(picture(size), form, **options)))


def test_center_crop_is_that_of_resize_and_crop() -> None:
    """The same places as torchvision's Resize(256) and CenterCrop(224) with Pillow."""
    for size in ((500, 375), (375, 500), (300, 301), (256, 256), (100, 80), (1000, 257)):
        image = picture(size)
        width, height = size
        resized = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
        small = image.resize(resized, Image.Resampling.BILINEAR)
        left, top = round((resized[0] - 224) / 2.0), round((resized[1] - 224) / 2.0)
        expected = np.asarray(small.crop((left, top, left + 224, top + 224)))
        found = center_crop_decoder(224, "rgb8").decode(image_file(image))
        assert np.abs(found.astype(int) - expected).max() <= 1, size


# ------------------------------------------------------------------------------------------------------------ the draws
def test_draws_follow_scale_and_ratio() -> None:
    """Areas and ratios fill their ranges, crops lie inside; shapes that do not fit become the largest in the middle."""
    generator = random.Random(0)
    areas, ratios = [], []
    for _ in range(500):
        rows, columns = draw_crop((300, 400), (9, 9), (0.25, 0.5), (0.5, 2), generator)
        assert min(rows.start, columns.start) >= 0
        assert rows.start + rows.length <= 300
        assert columns.start + columns.length <= 400
        areas.append(rows.length * columns.length / 120_000)
        ratios.append(columns.length / rows.length)
    assert 0.245 < min(areas) < 0.26 < 0.49 < max(areas) < 0.505
    assert 0.48 < min(ratios) < 0.6 < 1.7 < max(ratios) < 2.05
    for side, found in {(10, 1000): (10, 13), (1000, 10): (13, 10), (1, 1): (1, 1)}.items():
        rows, columns = draw_crop(side, (9, 9), (1, 1), (3 / 4, 4 / 3), generator)
        assert (rows.length, columns.length) == found
        assert (rows.start, columns.start) == ((side[0] - found[0]) // 2, (side[1] - found[1]) // 2)


def test_crop_follows_the_generator_of_random() -> None:
    """Equal seeds give equal crops, others others; each image takes as much of it, damaged ones too."""
    files = [image_file(picture((200, 150)), form) for form in ("JPEG", "PNG")]
    decoder = crop_decoder(32, flip=0.5)
    assert np.array_equal(same(decoder, files[0], 3), same(decoder, files[0], 3))
    assert len({same(decoder, files[0], seed).tobytes() for seed in range(10)}) == 10
    states = set()
    for data in (*files, files[0][:300], b"", image_file(picture((1, 1)))):
        random.seed(1)
        try:
            decoder.decode(data)
        except Exception as error:
            assert type(error) is not AssertionError
        states.add(random.random())
    assert len(states) == 1
    random.seed(1)
    expected = random.getrandbits(64)
    random.seed(1)
    center_crop_decoder(32).decode(files[0])
    assert random.getrandbits(64) == expected


def test_flip_mirrors_the_same_crop() -> None:
    """From left to right, as often as told, also with 16 bits."""
    data = image_file(picture((200, 150)))
    deep = image_file(Image.fromarray(np.arange(30_000, dtype=np.uint16).reshape(150, 200)))
    for spec in ("rgb8", "torchrgb8", "torchrgb", "l8", "l", "torchl", "rgba"):
        for file in (data, deep):
            found, plain = same(crop_decoder(32, spec, flip=1), file), same(crop_decoder(32, spec), file)
            assert np.array_equal(found, plain[:, ::-1])
    decoder = crop_decoder(32, flip=0.25)
    flipped = [not np.array_equal(same(decoder, data, s), same(crop_decoder(32), data, s)) for s in range(200)]
    assert 25 < sum(flipped) < 75


# ----------------------------------------------------------------------------------------------------- damage, options
def outcome(decoder: Any, data: bytes) -> Any:
    """The exception without its addresses, or None."""
    random.seed(0)
    try:
        decoder.decode(data)
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "", str(error))
    return None


@pytest.mark.usefixtures("jpegs_by")
def test_crop_raises_as_image_decoder_when_damaged() -> None:
    """At every place where a file is cut, and where bytes are changed: the same exception, or none in both."""
    whole = image_decoder("torchrgb8")
    # of 64 x 48, the first and the last are decoded at 1/8
    decoders = [make(size, **options) for make, size, options in [
        (crop_decoder, 6, {"scale": (1, 1)}), (crop_decoder, 40, {}), (center_crop_decoder, 5, {}),
    ]]  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        for form, options in [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {})]:
            data = image_file(picture((64, 48)), form, **options)
            chance = random.Random(1)
            cut = [data[:size] for size in [*range(0, 200, 9), *range(200, len(data), 97), len(data) - 1]]
            changed = []
            for _ in range(40):
                broken = bytearray(data)
                broken[chance.randrange(2, len(data))] = chance.randrange(256)
                changed.append(bytes(broken))
            for broken, decoder in itertools.product([*cut, *changed], decoders):
                assert outcome(decoder, broken) == outcome(whole, broken), (form, decoder)


def test_crop_is_refused_when_the_image_is_a_bomb() -> None:
    """Pillow's limit holds for files that would be decoded at a fraction, too."""
    data = image_file(picture((40, 30)), "JPEG")
    place = data.index(b"\xff\xc0") + 5
    data = data[:place] + struct.pack(">HH", 65500, 65500) + data[place + 4 :]
    for make in MAKERS:
        with pytest.raises(DecodingError, match="DecompressionBombError"):
            Decoder(make(8))({"__key__": "k", "jpg": data})


def test_center_crop_is_refused_when_the_resized_image_would_be_a_bomb() -> None:
    """A line of 8,000 pixels, a file of 1 KB, would become 2,048,000 x 256 of them: 1.6 GB."""
    for form, size in itertools.product(("JPEG", "PNG", "WEBP"), [(8000, 1), (1, 8000)]):
        data = image_file(Image.new("RGB", size), form)
        with pytest.raises(Image.DecompressionBombError, match="it would have 524,288,000 pixels, more than the limit"):
            center_crop_decoder(224).decode(data)
        assert crop_decoder(224).decode(data).shape == (3, 224, 224)


def test_crop_decoder_leaves_other_fields_to_the_next_decoder() -> None:
    """By their extension, in any case; messages name the decoder."""
    data = image_file(picture((40, 30)))
    for make in MAKERS:
        sample = Decoder(make(8))({"__key__": "k", "left.PNG": data, "cls": b"1", "bin": data})
        assert sample["left.PNG"].shape == (3, 8, 8)
        assert (sample["cls"], sample["bin"]) == (1, data)
        with pytest.raises(DecodingError, match=r"crop_decoder\(8, 'torchrgb8'\): UnidentifiedImageError"):
            Decoder(make(8))({"__key__": "k", "jpg": b"no image"})


@pytest.mark.parametrize("make", MAKERS)
def test_crop_decoder_pickles_and_shows_its_options(make: Callable[..., Any]) -> None:
    """What it shows makes an equal decoder."""
    decoder = make((24, 32), "l8", interpolation="bicubic", exif_transpose=True)
    shown = repr(decoder)
    assert shown == f"{make(1)!r}".partition("(")[0] + "((24, 32), 'l8', interpolation='bicubic', exif_transpose=True)"
    data = image_file(picture((100, 80)))
    for again in (pickle.loads(pickle.dumps(decoder)), eval(shown)):
        assert np.array_equal(same(again, data), same(decoder, data))
    assert (
        repr(crop_decoder(9, scale=(0.2, 0.9), flip=0.5)) == "crop_decoder(9, 'torchrgb8', scale=(0.2, 0.9), flip=0.5)"
    )
    assert repr(center_crop_decoder(9, resize=12)) == "center_crop_decoder(9, 'torchrgb8', resize=12)"


@pytest.mark.parametrize("make", MAKERS)
def test_crop_decoder_raises_when_size_or_spec_is_wrong(make: Callable[..., Any]) -> None:
    """What it takes is said."""
    for size, error in [
        (0, ValueError), (-3, ValueError), ((0, 4), ValueError), ((4,), ValueError), ((4, 4, 3), ValueError),
        (2.5, TypeError), ("224", TypeError), (None, TypeError), (True, TypeError), ((4, 4.0), TypeError),
        (math.nan, TypeError),
    ]:  # fmt: skip
        with pytest.raises(error, match="size"):
            make(size)
    assert make(np.int64(8)).decode(image_file(picture((20, 20)))).shape == (3, 8, 8)
    with pytest.raises(ValueError, match="did you mean 'torchrgb8'"):
        make(8, "rgb8torch")
    with pytest.raises(ValueError, match="interpolation must be one of 'bilinear', 'bicubic'"):
        make(8, interpolation="lanczos")
    with pytest.raises(TypeError, match="exif_transpose"):
        make(8, exif_transpose=1)


def test_crop_decoder_raises_when_ranges_are_wrong() -> None:
    """Two numbers, the least first, above 0, finite; a scale up to 1; a chance from 0 to 1."""
    nan, inf = math.nan, math.inf
    for name, limits in {
        "scale": [(0, 1), (0.5, 0.2), (0.5, 1.5), (-1, 1), (nan, 1), (0.1, nan), (inf, inf)],
        "ratio": [(0, 1), (2, 1), (-1, 1), (nan, 1), (1, nan), (1, inf)],
    }.items():
        for given in limits:
            with pytest.raises(ValueError, match=f"{name} must be two numbers"):
                crop_decoder(8, **{name: given})
        for given in [1.0, (1,), (1, 1, 1), "ab", None, ("1", 2), (True, 1)]:
            with pytest.raises(TypeError, match=f"{name} must be two numbers"):
                crop_decoder(8, **{name: given})
    for flip, error in [(-0.1, ValueError), (1.1, ValueError), (nan, ValueError), ("1", TypeError), (True, TypeError)]:
        with pytest.raises(error, match="flip must be"):
            crop_decoder(8, flip=flip)
    for resize, error in [(7, ValueError), (0, ValueError), (8.0, TypeError), (True, TypeError)]:
        with pytest.raises(error, match="resize must be"):
            center_crop_decoder(8, resize=resize)
    assert crop_decoder(8, scale=[0.5, 1], ratio=(1, 1)).scale == (0.5, 1.0)
