"""PNG files through pyspng: the same pixels and the same errors as through Pillow."""

import contextlib
import itertools
import random
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyspng
import pytest
from PIL import Image, PngImagePlugin

from tests.codecs.images.test_jpeg import ARRAY_SPECS, outcome
from tests.kits.shards import image_file
from torchdata_wds import center_crop_decoder, image_decoder
from torchdata_wds.codecs import IMAGE_SPECS
from torchdata_wds.codecs.images import png

SIZES = [(1, 1), (2, 3), (17, 16), (33, 31), (100, 75)]
CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


class Counter:
    """pyspng that counts what it has decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def load(self, *arguments: Any, **options: Any) -> Any:
        pixels = pyspng.load(*arguments, **options)
        self.decoded += 1
        return pixels


@contextlib.contextmanager
def decoding_by(module: Any) -> Iterator[None]:
    """The module, or None, in the place of pyspng."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(png, "_libraries", lambda: None if module is None else (module, Image))
        yield


def both(data: bytes, decoder: Any) -> tuple[Any, Any, int]:
    """The outcome with pyspng, the one without, and how many images pyspng has decoded."""
    counter = Counter()
    with decoding_by(counter):
        fast = outcome(decoder.decode, data)
    with decoding_by(None):
        return fast, outcome(decoder.decode, data), counter.decoded


def picture(mode: str = "RGB", size: tuple[int, int] = (33, 31)) -> Image.Image:
    """Noise on a gradient, so that all filters of PNG are met."""
    generator = np.random.default_rng(0)
    if mode == "P":
        return picture("RGB", size).quantize(min(200, size[0] * size[1]))
    shape = size[1], size[0], CHANNELS[mode]
    pixels = np.linspace(0, 255, shape[0] * shape[1] * shape[2]).reshape(shape) + generator.integers(-9, 9, shape)
    pixels[: shape[0] // 2] = generator.integers(0, 256, (shape[0] // 2, *shape[1:]))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8).squeeze().reshape(shape[: 2 + (shape[2] > 1)]), mode)


def chunk(kind: bytes, contents: bytes = b"") -> bytes:
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))


def with_chunk(data: bytes, kind: bytes, contents: bytes = b"") -> bytes:
    """The file with one more chunk, after the header."""
    return data[:33] + chunk(kind, contents) + data[33:]


@pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P"])
def test_pixels_equal_pillows_for_each_spec(mode: str) -> None:
    """Every colour type with 8 bits, size, effort and spec gives exactly Pillow's values, by pyspng where it can."""
    for size, effort in itertools.product(SIZES, [0, 6]):
        data = image_file(picture(mode, size), compress_level=effort)
        is_deep_enough = data[24] == 8  # a small palette has fewer bits
        for spec in ARRAY_SPECS:
            fast, slow, decoded = both(data, image_decoder(spec))
            assert fast == slow, (size, spec)
            assert decoded == (is_deep_enough and (mode == "L" or IMAGE_SPECS[spec].mode != "L"))
        for decoder in (image_decoder("rgb8", max_size=12), center_crop_decoder(20, "rgba8")):
            fast, slow, decoded = both(data, decoder)
            assert (fast, decoded) == (slow, is_deep_enough)


def test_pixels_equal_pillows_when_there_are_other_chunks() -> None:
    """Gamma, resolution and the like change nothing in either; what Pillow parses is left to it."""
    data = image_file(picture())
    harmless = {
        b"gAMA": struct.pack(">I", 45455), b"cHRM": bytes(32), b"sRGB": b"\0", b"pHYs": bytes(9), b"tIME": bytes(7),
        b"bKGD": bytes(6), b"sBIT": b"\5\5\5", b"tEXt": b"Software\0mine", b"PLTE": bytes(range(30)),
    }  # fmt: skip
    whole = data
    for kind, contents in harmless.items():
        fast, slow, decoded = both(with_chunk(data, kind, contents), image_decoder("rgb8"))
        assert (fast, decoded) == (slow, 1), kind
        whole = with_chunk(whole, kind, contents)
    fast, slow, decoded = both(whole, image_decoder("torchrgba8"))
    assert (fast, decoded) == (slow, 1)
    others = {
        b"tRNS": struct.pack(">HHH", *picture().getpixel((0, 0))), b"iTXt": b"XML\0\0\0\0\0<x/>", b"zTXt": b"a\0\0",
        b"iCCP": b"a\0\0" + zlib.compress(b"b"), b"eXIf": b"II*\0\x08\0\0\0\0\0", b"acTL": bytes(8), b"gAMA": b"\0",
        b"pHYs": b"", b"sRGB": b"", b"IHDR": bytes(13), b"abCd": b"", b"CRIT": b"", b"tEXt": bytes(2**20 + 1),
    }  # fmt: skip
    for kind, contents in others.items():
        for spec in ("rgb8", "rgba8"):
            fast, slow, decoded = both(with_chunk(data, kind, contents), image_decoder(spec))
            assert (fast, decoded) == (slow, 0), kind


def test_pillow_decodes_when_the_file_is_no_ordinary_png() -> None:
    """16 bits, less than 8, interlaced rows, transparent colours, animations and what is not PNG."""
    deep = image_file(Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30)))
    palette = picture("P")
    interlaced = bytearray(image_file(picture()))
    interlaced[28] = 1
    interlaced[29:33] = struct.pack(">I", zlib.crc32(interlaced[12:29]))
    frames = [picture(), picture().rotate(90)]
    for data in [
        deep, image_file(picture("L").convert("1")), image_file(picture().quantize(4), bits=2), bytes(interlaced),
        image_file(palette, transparency=3), image_file(palette, transparency=bytes([0, 99])),
        image_file(picture("L"), transparency=7), image_file(frames[0], save_all=True, append_images=frames[1:]),
        image_file(picture(), "BMP"), b"\x89PNG\r\n\x1a\n", image_file(picture())[:33], b"",
    ]:  # fmt: skip
        for spec in ("rgb8", "l8", "torchrgba"):
            fast, slow, decoded = both(data, image_decoder(spec))
            assert (fast, decoded) == (slow, 0)


def test_palette_equals_pillows_when_pixels_are_beyond_it() -> None:
    """A pixel without a colour has the same one in both, or fails in both."""
    data = image_file(picture("P"))
    start = data.index(b"PLTE") - 4
    (length,) = struct.unpack_from(">I", data, start)
    for colours in (1, 2, 100):
        cut = data[:start] + chunk(b"PLTE", data[start + 8 :][: 3 * colours]) + data[start + 12 + length :]
        for spec in ("rgb8", "rgba8"):
            fast, slow, _ = both(cut, image_decoder(spec))
            assert fast == slow, colours


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_outcome_equals_pillows_when_cut(mode: str) -> None:
    """At every byte: the same error, or the same pixels where only the end is missing."""
    data = image_file(picture(mode, (24, 16)))
    for spec in ("rgb8", "torchrgba8"):
        for size in [*range(len(data) - 40, len(data)), *range(0, len(data) - 40, 7)]:
            fast, slow, decoded = both(data[:size], image_decoder(spec))
            assert (fast, decoded) == (slow, 0), size
    fast, slow, _ = both(data + b"more", image_decoder("rgb8"))
    assert fast == slow


def fixed(data: bytes) -> bytes:
    """The file with the right checksum in each chunk."""
    made, position = [data[:8]], 8
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        if position + 12 + length > len(data):
            break
        made.append(chunk(data[position + 4 : position + 8], data[position + 8 : position + 8 + length]))
        position += 12 + length
    return b"".join([*made, data[position:]])


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_outcome_equals_pillows_when_damaged(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed, lost and doubled bytes, with wrong checksums and with right ones, in files of one and several chunks."""
    chance = random.Random(1)
    files = [image_file(picture(mode, (24, 16)))]
    monkeypatch.setattr(PngImagePlugin.ImageFile, "MAXBLOCK", 200)
    files.append(image_file(picture(mode, (24, 16))))
    assert files[1].count(b"IDAT") > 1
    decoders = [image_decoder("rgb8"), image_decoder("rgba8")]
    with warnings.catch_warnings(action="ignore"):
        for number, data in itertools.product(range(250), files):
            broken = bytearray(data)
            for _ in range(chance.choice([1, 1, 3])):
                place = chance.randrange(8, len(broken))
                broken[place : place + chance.choice([0, 1, 1, 1, 5])] = chance.randbytes(chance.choice([0, 1, 1, 3]))
            made = bytes(broken) if number % 2 else fixed(bytes(broken))
            fast, slow, _ = both(made, decoders[number % 3 == 0])
            # deflate's own checksum, after the last row, is compared only by Pillow: see `decode_png`
            if fast != slow:
                assert number % 2 == 0, made
                assert slow == (OSError, "broken data stream when reading image file"), made


def test_pillows_limit_holds_when_an_image_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit is Pillow's error; None lifts it."""
    data = image_file(picture(size=(40, 30)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 2 - 1)
    fast, slow, decoded = both(data, image_decoder("rgb8"))
    assert (fast, decoded) == (slow, 0)
    assert fast[0] is Image.DecompressionBombError
    for limit in (40 * 30, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert both(data, image_decoder("rgb8"))[2] == 1


def test_pillow_decodes_when_pyspng_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra all works, only slower; PIL images are Pillow's anyway."""
    data = image_file(picture())
    assert both(data, image_decoder("pil"))[2] == 0
    monkeypatch.setitem(sys.modules, "pyspng", None)
    png._libraries.cache_clear()
    try:
        assert png._libraries() is None
        assert image_decoder("rgb8").decode(data).shape == (31, 33, 3)
    finally:
        monkeypatch.undo()
        png._libraries.cache_clear()
