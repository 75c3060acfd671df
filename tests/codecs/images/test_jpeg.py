"""JPEG files through simplejpeg: the same pixels and the same errors as through Pillow."""

import contextlib
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageFile

from tests.kits.shards import image_file, jpeg_bytes
from torchdata_wds.codecs import IMAGE_SPECS, Decoder, image_decoder
from torchdata_wds.codecs.images import jpeg as jpegs

ARRAY_SPECS = [name for name, spec in IMAGE_SPECS.items() if spec.container != "pil"]
SIZES = [(1, 1), (2, 3), (8, 8), (17, 16), (33, 31), (100, 75)]


class Counter:
    """simplejpeg that keeps what it has decoded."""

    def __init__(self) -> None:
        self.decoded: list[Any] = []

    def decode_jpeg(self, *arguments: Any, **options: Any) -> Any:
        pixels = simplejpeg.decode_jpeg(*arguments, **options)
        self.decoded.append(pixels)
        return pixels


@contextlib.contextmanager
def decoding_by(module: Any) -> Iterator[None]:
    """The module, or None, in the place of simplejpeg."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpegs, "_libraries", lambda: None if module is None else (module, Image))
        yield


def outcome(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """What comes of a file, as something that compares: the value's bytes, or the exception without its addresses."""
    try:
        value = np.asarray(decode(data))
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "", str(error))
    return value.dtype.str, value.shape, value.tobytes()


def both(data: bytes, spec: str = "rgb8", **options: Any) -> tuple[Any, Any, int]:
    """The outcome with simplejpeg, the one without, and how many images simplejpeg has decoded."""
    decode = image_decoder(spec, **options).decode
    counter = Counter()
    with decoding_by(counter):
        fast = outcome(decode, data)
    with decoding_by(None):
        return fast, outcome(decode, data), len(counter.decoded)


def picture(size: tuple[int, int], noise: int = 30, mode: str = "RGB") -> Image.Image:
    """An image of gradients and noise."""
    x, y = np.meshgrid(np.linspace(0, 250, size[0]), np.linspace(0, 250, size[1]))
    grain = np.random.default_rng(0).integers(-noise, noise + 1, (size[1], size[0], 3))
    pixels = np.stack([x, y, (x + y) / 2], axis=2) + grain
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    """The data with one piece of it replaced."""
    assert old in data
    return data.replace(old, new, 1)


def turned(orientation: int = 6, **tags: Any) -> Image.Exif:
    """EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    for tag, value in tags.items():
        exif[int(tag.removeprefix("tag"), 16)] = value
    return exif


WAYS = [
    {},
    {"quality": 10},
    {"quality": 100, "subsampling": 0},
    {"subsampling": 0},
    {"subsampling": 1},
    {"subsampling": "4:1:1"},
    {"progressive": True},
    {"progressive": True, "subsampling": 0},
    {"restart_marker_blocks": 1},
    {"restart_marker_rows": 1, "progressive": True},
    {"keep_rgb": True},
    {"optimize": True, "comment": b"hello", "dpi": (72, 72), "icc_profile": bytes(1000)},
]


def test_pixels_equal_pillows_when_colour() -> None:
    """Every sampling, size and coding of colour gives exactly Pillow's pixels; libjpeg-turbo is under both."""
    for options, (noise, spec) in itertools.product(WAYS, [(0, "rgba8"), (120, "rgb8")]):
        for size in SIZES:
            fast, slow, decoded = both(image_file(picture(size, noise), "JPEG", **options), spec)
            assert fast == slow, (size, spec)
            assert decoded == 1


def test_pixels_equal_pillows_when_another_encoder_wrote_them() -> None:
    """So do samplings that Pillow does not write."""
    for sampling in ["440", "411", "444", "422", "420", "Gray"]:
        for size in SIZES:
            pixels = np.asarray(picture(size))
            data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), colorspace="RGB", colorsubsampling=sampling)
            fast, slow, decoded = both(data)
            assert fast == slow, size
            assert decoded == 1


def test_value_equals_pillows_when_any_spec() -> None:
    """Type, shape and values are the same for each spec; grey of colour files is Pillow's to compute."""
    for spec, mode, progressive in itertools.product(ARRAY_SPECS, ["RGB", "L"], [False, True]):
        for size in SIZES:
            fast, slow, decoded = both(image_file(picture(size, mode=mode), "JPEG", progressive=progressive), spec)
            assert fast == slow, size
            assert decoded == (mode == "L" or IMAGE_SPECS[spec].mode != "L")


def test_max_size_equals_pillows_when_set() -> None:
    """Draft mode and the filter give the same pixels at each of the sizes 1/1, 1/2, 1/4 and 1/8."""
    for mode, spec in itertools.product(["RGB", "L"], ["rgb8", "rgba8", "l8", "torchrgb"]):
        for size, options in itertools.product(
            [(333, 97), (97, 333), (1000, 9), (64, 64), (9, 9)], ({}, {"subsampling": 0})
        ):
            data = image_file(picture(size, mode=mode), "JPEG", **options)
            for max_size in (1, 8, 15, 16, 33, 64, 100, 200, 500):
                fast, slow, decoded = both(data, spec, max_size=max_size)
                assert fast == slow, (size, max_size)
                assert decoded == (mode == "L" or spec != "l8")


def test_max_size_equals_pillows_when_the_image_has_a_few_pixels() -> None:
    """At 3/8 of 3 or 5 pixels libjpeg makes as many as at 1/2."""
    for size, max_size in itertools.product(itertools.product(range(1, 10), repeat=2), range(1, 5)):
        fast, slow, _ = both(image_file(picture(size, 200), "JPEG", subsampling=0), max_size=max_size)
        assert fast == slow, (size, max_size)


def test_max_size_decodes_at_a_fraction_when_the_image_is_large() -> None:
    """A large file is decoded at the smallest fraction of its size that is not below the result."""
    data = image_file(picture((800, 600)), "JPEG")
    for max_size, shape in ((100, (75, 100, 3)), (101, (150, 200, 3)), (300, (300, 400, 3)), (500, (600, 800, 3))):
        counter = Counter()
        with decoding_by(counter):
            image_decoder("rgb8", max_size=max_size).decode(data)
        assert [pixels.shape for pixels in counter.decoded] == [shape]


def test_image_is_turned_as_by_pillow_when_it_has_exif_or_xmp() -> None:
    """The orientation is read by Pillow, the pixels are not; Pillow finds an orientation in XMP too."""
    for orientation, exif_transpose in itertools.product(range(1, 9), [False, True]):
        data = image_file(picture((20, 10)), "JPEG", exif=turned(orientation))
        for options in ({}, {"max_size": 8}):
            fast, slow, decoded = both(data, "rgb8", exif_transpose=exif_transpose, **options)
            assert (fast, decoded) == (slow, 1)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    data = jpeg_bytes(1)
    data = data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:]
    fast, slow, decoded = both(data, exif_transpose=True)
    assert fast == slow
    assert (fast[1], decoded) == ((16, 12, 3), 1)


def test_values_are_the_only_copy_when_made() -> None:
    """What simplejpeg has decoded is the value; tensors are writable and hold nothing but their own pixels."""
    counter = Counter()
    with decoding_by(counter):
        array = image_decoder("rgb8").decode(jpeg_bytes(1))
    assert array is counter.decoded[0]
    assert array.flags.owndata
    assert array.flags.writeable
    for spec, module in itertools.product(["torchl8", "torchrgb8", "torchrgb"], [simplejpeg, None]):
        with decoding_by(module):
            tensor = image_decoder(spec).decode(jpeg_bytes(1, mode="L"))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        with warnings.catch_warnings(action="error"):
            torch.from_numpy(tensor.numpy())  # warns of memory that is read-only


def test_pillow_decodes_when_a_pil_image_is_asked_for() -> None:
    """PIL images keep what Pillow finds in the file besides the pixels, and are no open file."""
    for spec in ["pil", "pill", "pilrgba"]:
        fast, slow, decoded = both(image_file(picture((20, 10)), "JPEG"), spec)
        assert (fast, decoded) == (slow, 0)
        image = image_decoder(spec).decode(image_file(picture((20, 10)), "JPEG", dpi=(72, 72)))
        assert type(image) is Image.Image
        assert image.info["dpi"] == (72, 72)


PLAIN = image_file(picture((40, 30)), "JPEG")
OTHERS = {
    "PNG": image_file(picture((40, 30)), "PNG"),
    "CMYK": image_file(picture((40, 30), mode="CMYK"), "JPEG"),
    "two images": image_file(picture((40, 30)), "MPO", save_all=True, append_images=[picture((40, 30))]),
    "arithmetic coding": changed(PLAIN, b"\xff\xc0\x00\x11\x08", b"\xff\xc9\x00\x11\x08"),
    "lossless": changed(PLAIN, b"\xff\xc0\x00\x11\x08", b"\xff\xc3\x00\x11\x08"),
    "12 bits": changed(PLAIN, b"\xff\xc0\x00\x11\x08", b"\xff\xc1\x00\x11\x0c"),
    "two channels": changed(
        PLAIN, b"\xff\xc0\x00\x11\x08\x00\x1e\x00\x28\x03", b"\xff\xc0\x00\x11\x08\x00\x1e\x00\x28\x02"
    ),
    "no height": changed(PLAIN, b"\xff\xc0\x00\x11\x08\x00\x1e", b"\xff\xc0\x00\x11\x08\x00\x00"),
    "a second frame": changed(PLAIN, b"\xff\xda", PLAIN[PLAIN.index(b"\xff\xc0") :][:19] + b"\xff\xda"),
    "a filled marker": PLAIN[:2] + b"\xff\xff" + PLAIN[2:],
    "junk between segments": changed(PLAIN, b"\xff\xdb", b"junk\xff\xdb"),
    "a short JFIF segment": changed(PLAIN, PLAIN[2:20], b"\xff\xe0\x00\x07JFIF\0"),
    "a resolution that is no number": changed(
        image_file(picture((40, 30)), "JPEG", exif=turned(tag011a=72.0, tag0128=2)),
        b"\x01\x1a\0\x05",
        b"\x01\x1a\0\x07",
    ),
    "only a start": b"\xff\xd8\xff",
    "an empty segment at the end": b"\xff\xd8\xff\xe0",
    "data behind a premature end": PLAIN[:-100] + b"\xff\xd9" + PLAIN[-100:],
    "extraneous bytes": PLAIN[:-2] + b"garbage" + PLAIN[-2:],
}


def test_pillow_decides_when_the_file_is_no_ordinary_jpeg() -> None:
    """Kinds that are rare, odd or damaged come from Pillow: its pixels or its exception."""
    for data in OTHERS.values():
        for spec in ("rgb8", "l8"):
            fast, slow, decoded = both(data, spec)
            assert (fast, decoded) == (slow, 0)


def test_outcome_equals_pillows_when_adobe_says_the_colours() -> None:
    """Adobe's segment, which says RGB or YCbCr, is understood the same way; unknown codes are Pillow's to judge."""
    for transform in [0, 1, 2, 9]:
        segment = b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
        for data in (PLAIN[:2] + segment + PLAIN[20:], PLAIN[:20] + segment + PLAIN[20:]):
            fast, slow, _ = both(data)
            assert fast == slow


def test_outcome_equals_pillows_at_every_truncation_point() -> None:
    """A cut file is an error wherever it is cut, and the same one."""
    for options in [{}, {"progressive": True}, {"restart_marker_blocks": 3}]:
        data = image_file(picture((24, 16)), "JPEG", **options)
        for size in range(len(data)):
            fast, slow, decoded = both(data[:size])
            assert fast == slow, size
            assert isinstance(fast[0], type), size
            assert decoded == 0


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The data with some bytes changed, removed or added, mostly in its header."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2])):
        position = chance.randrange(2, len(changed) if chance.random() < 0.4 else changed.find(b"\xff\xda") + 14)
        length = chance.choice([0, 0, 0, 1, 5])
        changed[position : position + 1 + length] = chance.randbytes(chance.choice([0, 1, 1, 1, 1, 4]))
    return bytes(changed)


def test_outcome_equals_pillows_when_damaged() -> None:
    """Damage has the same outcome, be it an error, other pixels or none."""
    for options in [*WAYS, {"exif": turned()}]:
        chance = random.Random(1)
        data = image_file(picture((24, 16)), "JPEG", **options)
        with warnings.catch_warnings(action="ignore"):
            for _ in range(60):
                broken = damaged(data, chance)
                fast, slow, _ = both(broken)
                assert fast == slow, broken


def test_cut_image_is_given_when_pillow_is_told_to() -> None:
    """Pillow's switch for truncated images works as without simplejpeg."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        fast, slow, _ = both(PLAIN[:-100])
    assert fast == slow
    assert fast[1] == (30, 40, 3)


def test_pillows_limit_holds_when_an_image_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit is an error, None lifts it, and no memory is taken for pixels that a file only declares."""
    data = changed(PLAIN, b"\xff\xc0\x00\x11\x08\x00\x1e\x00\x28", b"\xff\xc0\x00\x11\x08\xff\xdc\xff\xdc")
    fast, slow, decoded = both(data)
    assert fast == slow
    assert (fast[0], decoded) == (Image.DecompressionBombError, 0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        fast, slow, decoded = both(PLAIN)
    assert fast == slow
    assert (fast[0], decoded) == (Image.DecompressionBombError, 0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 2 - 1)
    fast, slow, _ = both(PLAIN)
    assert fast == slow
    assert fast[0] is Image.DecompressionBombError
    for limit in (40 * 30, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert both(PLAIN)[2] == 1


def test_pillow_decodes_when_simplejpeg_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra all works, only slower."""
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpegs._libraries.cache_clear()
    try:
        assert jpegs._libraries() is None
        assert Decoder("rgb8")({"jpg": PLAIN})["jpg"].shape == (30, 40, 3)
    finally:
        monkeypatch.undo()
        jpegs._libraries.cache_clear()
    assert both(PLAIN)[2] == 1
