"""Images of more than 8 bits a channel, written by hand because Pillow cannot write them all."""

import itertools
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.kits.shards import image_file
from torchdata_wds.codecs import Decoder, image_decoder
from torchdata_wds.errors import DecodingError


def random_pixels(channels: int, highest: int = 65535, size: tuple[int, int] = (7, 5)) -> Any:
    """uint16 pixels, HWC, with the extremes among them."""
    pixels = np.random.default_rng(channels).integers(0, highest + 1, (*size, channels), dtype=np.uint16)
    pixels[0, 0] = highest
    pixels[0, 1] = 0
    return pixels


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bytes(pixels: Any, transparent: bytes = b"", extra: bytes = b"") -> bytes:
    """A 16-bit PNG; HWC of 1 to 4 channels; rows go through the filters none and sub in turn."""
    height, width, channels = pixels.shape
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = []
    for number, row in enumerate(pixels.astype(">u2")):
        line = np.frombuffer(row.tobytes(), np.uint8)
        if number % 2:
            step = 2 * channels
            line = np.concatenate([line[:step], line[step:] - line[:-step]])
        rows.append(bytes([number % 2]) + line.tobytes())
    head = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + (png_chunk(b"tRNS", transparent) if transparent else b"")
        + extra
        + png_chunk(b"IDAT", zlib.compress(b"".join(rows)))
        + png_chunk(b"IEND", b"")
    )


def tiff_bytes(pixels: Any, order: str, *, compressed: bool = False, photometric: int | None = None) -> bytes:
    """A 16-bit TIFF of one strip; HWC of 1, 3 or 4 channels, the fourth being alpha."""
    height, width, channels = pixels.shape
    data = pixels.astype(order + "u2").tobytes()
    data = zlib.compress(data) if compressed else data
    if photometric is None:
        photometric = 1 if channels == 1 else 2
    entries = [(256, 3, width), (257, 3, height), (258, 3, 16), (259, 3, 8 if compressed else 1), (262, 3, photometric)]
    entries += [(273, 4, 0), (277, 3, channels), (278, 3, height), (279, 4, len(data)), (284, 3, 1)]
    entries += [(338, 3, 2)] if channels == 4 else []
    bits_at = 8 + 2 + 12 * len(entries) + 4
    out = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, len(entries))
    for tag, kind, value in entries:
        if tag == 258 and channels > 1:
            out += struct.pack(order + "HHII", tag, kind, channels, bits_at)
        elif tag == 273:
            out += struct.pack(order + "HHII", tag, kind, 1, bits_at + 2 * channels)
        elif kind == 3:
            out += struct.pack(order + "HHIHH", tag, kind, 1, value, 0)
        else:
            out += struct.pack(order + "HHII", tag, kind, 1, value)
    return out + bytes(4) + struct.pack(f"{order}{channels}H", *[16] * channels) + data


def ppm_bytes(pixels: Any, maximum: int = 65535) -> bytes:
    """A binary PGM or PPM of two bytes a value."""
    height, width, channels = pixels.shape
    magic = "P5" if channels == 1 else "P6"
    return f"{magic}\n# comment\n{width} {height}\n{maximum}\n".encode() + pixels.astype(">u2").tobytes()


def as_rgba(pixels: Any) -> Any:
    """The same pixels with four channels."""
    colours = pixels[:, :, :-1] if pixels.shape[2] in (2, 4) else pixels
    alpha = pixels[:, :, -1:] if pixels.shape[2] in (2, 4) else np.full_like(pixels[:, :, :1], 65535)
    return np.concatenate([np.repeat(colours, 3, axis=2) if colours.shape[2] == 1 else colours, alpha], axis=2)


def as_grey(pixels: Any) -> Any:
    """The weights of Pillow's L at full depth."""
    red, green, blue = (as_rgba(pixels)[:, :, channel].astype(np.uint64) for channel in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint16)


FILES = [
    *[(f"png-{channels}", random_pixels(channels), png_bytes(random_pixels(channels))) for channels in (1, 2, 3, 4)],
    *[
        (
            f"tiff-{channels}{order}{compressed}",
            random_pixels(channels),
            tiff_bytes(random_pixels(channels), order, compressed=compressed),
        )
        for channels in (1, 3, 4)
        for order in "<>"
        for compressed in (False, True)
    ],
    *[(f"ppm-{channels}", random_pixels(channels), ppm_bytes(random_pixels(channels))) for channels in (1, 3)],
]


def decode(spec: str, data: bytes, **options: Any) -> Any:
    """The value of an image field."""
    return Decoder(spec, **options)({"img": data})["img"]


def test_specs_keep_the_depth_when_image_has_16_bits() -> None:
    """Float specs divide by 65535, of colour and alpha too; 8-bit specs round v / 257, so that nothing clips.

    Grey is weighted at full depth, then scaled. A cut in the pixels is an error.
    """
    for name, pixels, data in FILES:
        full, grey = as_rgba(pixels), as_grey(pixels)
        floats = full / np.float32(65535)
        assert np.array_equal(decode("rgba", data), floats), name
        assert np.array_equal(decode("rgb", data), floats[:, :, :3]), name
        assert np.array_equal(decode("torchrgb", data).numpy(), floats[:, :, :3].transpose(2, 0, 1)), name
        assert np.array_equal(decode("l", data), grey / np.float32(65535)), name
        eight = np.round(full / 257).astype(np.uint8)
        assert np.array_equal(decode("rgba8", data), eight), name
        assert np.array_equal(decode("torchrgba8", data).numpy(), eight.transpose(2, 0, 1)), name
        assert np.array_equal(np.asarray(decode("pilrgba", data)), eight), name
        eight_grey = np.round(grey / 257).astype(np.uint8)
        assert np.array_equal(decode("l8", data), eight_grey), name
        assert np.array_equal(np.asarray(decode("pill", data)), eight_grey), name
        assert decode("pill", data).mode == "L"
        with pytest.raises(DecodingError, match="an image"):
            decode("rgb", data[:-60])


def test_ppm_is_scaled_when_its_maximum_is_smaller() -> None:
    """A PGM's or PPM's own maximum is 1.0."""
    for maximum, channels in itertools.product([256, 1023, 4095, 65534], [1, 3]):
        pixels = random_pixels(channels, maximum)
        value = decode("rgb", ppm_bytes(pixels, maximum))
        assert value.max() == 1
        assert np.abs(value - as_rgba(pixels)[:, :, :3] / maximum).max() < 1e-5


def test_png_has_alpha_when_one_colour_is_transparent() -> None:
    """A 16-bit PNG's transparent colour is compared at full depth."""
    for channels in [1, 3]:
        pixels = np.full((2, 2, channels), 1000, np.uint16)
        pixels[0, 0] += 1
        data = png_bytes(pixels, transparent=struct.pack(">H", 1000) * channels)
        assert decode("rgba", data)[:, :, 3].tolist() == [[1, 0], [0, 0]]
        assert np.array_equal(decode("rgb", data), as_rgba(pixels)[:, :, :3] / np.float32(65535))


def test_tiff_is_turned_round_when_0_is_white() -> None:
    """A TIFF that stores white as 0 becomes white as 1."""
    pixels = random_pixels(1)
    value = decode("l", tiff_bytes(pixels, "<", photometric=0))
    assert np.array_equal(value, (65535 - pixels[:, :, 0]) / np.float32(65535))


def test_32_bit_integers_count_as_16_when_they_fit() -> None:
    """A 32-bit integer image within 0..65535 is a 16-bit one; beyond that nothing is guessed."""
    values = np.array([[0, 300, 65535]], np.int32)
    data = image_file(Image.fromarray(values), "TIFF")
    assert np.array_equal(decode("l", data), values.astype(np.float32) / 65535)
    for wrong in (65536, -1):
        with pytest.raises(DecodingError, match=f"{wrong}.*only 0..65535"):
            decode("l8", image_file(Image.fromarray(np.array([[0, wrong]], np.int32)), "TIFF"))


def test_float_image_is_read_when_within_0_and_1() -> None:
    """A float TIFF in 0..1 is brightness; anything else is an error instead of a clipped image."""
    data = image_file(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), "TIFF")
    assert decode("l8", data).tolist() == [[0, 128, 255]]
    for wrong in [1.5, -0.1, float("nan")]:
        with pytest.raises(DecodingError, match=r"only 0\.\.1 "):
            decode("l8", image_file(Image.fromarray(np.array([[0, wrong]], np.float32)), "TIFF"))


def test_max_size_keeps_the_depth_when_image_has_16_bits() -> None:
    """Reducing works at full depth and does not leave 0..1."""
    for channels in [1, 3, 4]:
        ramp = np.linspace(0, 65535, 64).astype(np.uint16)
        pixels = np.broadcast_to(ramp[None, :, None], (32, 64, channels))
        value = image_decoder("rgb", max_size=16)(".png", png_bytes(pixels))
        assert value.shape == (8, 16, 3)
        assert np.abs(value[4, :, 0] - ramp.reshape(16, 4).mean(axis=1) / 65535).max() < 0.02
        assert len(np.unique(value)) > 8


def test_exif_transpose_turns_the_image_when_it_has_16_bits() -> None:
    """Deep images are turned as flat ones are."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = random_pixels(3)
    value = decode("rgb", png_bytes(pixels, extra=png_chunk(b"eXIf", exif.tobytes()[6:])), exif_transpose=True)
    assert np.array_equal(value, np.rot90(pixels, -1) / np.float32(65535))
    assert value.flags.c_contiguous
