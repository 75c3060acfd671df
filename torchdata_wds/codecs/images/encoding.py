"""Encodes images as files, in modes that read back equal, including 16-bit colour, which Pillow cannot write."""

from __future__ import annotations

import io
import operator
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.codecs.images.files import read_orientation
from torchdata_wds.codecs.images.pixels import Pixels, to_pixels
from torchdata_wds.codecs.options import BYTES_TYPES, EncodeOptions

if TYPE_CHECKING:
    from PIL.Image import Image

# By the number of channels.
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_PNG_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}

_EXIF_PREFIX = b"Exif\0\0"  # of EXIF data in JPEG files and in Pillow, but not in PNG and WebP files
_PNG_MAGIC, _PNG_FILTER_UP = b"\x89PNG\r\n\x1a\n", 2
_CHUNK_BYTES = 1 << 30  # the length of a PNG chunk must stay below 2**31


@dataclass(frozen=True)
class _FileFormat:
    """An image format: the modes that it holds (Pillow's names, separated by spaces), and how to encode images."""

    name: str
    modes: str  # up to 8 bits per channel, which read back equal
    deep_modes: str = ""  # 16 bits per channel, which read back equal
    keyed_modes: str = ""  # those that keep a transparent colour, or a palette's transparency
    keeps_exif: bool = False  # including the orientation
    keeps_palette_alpha: bool = False
    max_side: int = 0  # in pixels; 0 if larger than memory

    def encode(self, value: Any, options: EncodeOptions) -> bytes:
        """Encodes a PIL image, array or tensor as a file; refuses what would not read back equal."""
        from PIL import Image

        if not isinstance(value, Image.Image):
            pixels = to_pixels(value, channels_first=options.channels_first)
            self._check_size(pixels.shape[:2])
            if pixels.itemsize > 1:
                return self._write_deep(pixels, b"", options)
            return self._write(Image.fromarray(pixels), b"", options)
        value.load()
        self._check_size(value.size)
        # Keep the EXIF data of the file, unless getexif() has another orientation: one that the user set, or from XMP.
        # getexif() caches what it parses on the image, so it is called on a copy unless the user has called it before.
        parsed = value if getattr(value, "_exif", None) is not None else value._new(value.im)
        exif = value.info.get("exif")
        exif = exif if isinstance(exif, bytes) else b""
        if read_orientation(parsed) != read_orientation(exif):  # damaged data counts as 1 in both, and is kept
            exif = parsed.getexif().tobytes()
        is_deep = value.mode.startswith("I")
        image = self._without_state(value, is_deep)
        if image.mode == "P":
            self._check_palette(image)
        if not self.keeps_exif and (orientation := read_orientation(exif)) != 1:
            raise ValueError(
                f"a {self.name} file does not keep the EXIF orientation, here {orientation}; turn the image "
                "with PIL.ImageOps.exif_transpose(image), or name the field jpg, png or webp"
            )
        if not is_deep:
            return self._write(image, exif, options)
        pixels = np.asarray(image)
        lowest, highest = int(pixels.min()), int(pixels.max())
        if lowest < 0 or highest > 65535:
            raise ValueError(
                f"its 32-bit pixels go from {lowest} to {highest}, but only 0..65535 is kept; scale them, or name "
                "the field npy"
            )
        return self._write_deep(pixels.astype(np.uint16), exif, options)

    def _check_size(self, size: tuple[int, ...]) -> None:
        from PIL import Image

        if 0 in size:
            raise ValueError("it has no pixels, and no image file can be empty; leave the sample out")
        if self.max_side and max(size) > self.max_side:
            raise ValueError(
                f"its longer side has {max(size):,} pixels, and a {self.name} file has {self.max_side:,} at "
                "most; reduce it, cut it into parts, or name the field png"
            )
        if Image.MAX_IMAGE_PIXELS is not None and size[0] * size[1] > Image.MAX_IMAGE_PIXELS:
            raise ValueError(
                f"it has {size[0] * size[1]:,} pixels, which readers refuse as a decompression bomb; cut it into "
                "parts, name the field npy, or raise PIL.Image.MAX_IMAGE_PIXELS wherever it is written and read"
            )

    def _without_state(self, image: Image, is_deep: bool) -> Image:
        """Makes an image that shares the pixels, without attributes that saving reads except a transparent colour."""
        fresh = image._new(image.im)
        key = fresh.info.pop("transparency", None)
        if key is None:
            return fresh
        if is_deep or image.mode not in self.keyed_modes.split():
            raise ValueError(
                f"a {self.name} file of mode {image.mode!r} does not keep the transparent colour in "
                "image.info['transparency']; use image.convert('RGBA') for a png field, or delete that entry"
            )
        cause: Exception | None = None
        try:
            if isinstance(key, BYTES_TYPES):
                plain: Any = bytes(key)
                is_right = image.mode == "P" and len(plain) <= 256
            elif np.ndim(key):
                plain = tuple(map(operator.index, key))
                is_right = image.mode == "RGB" and len(plain) == 3 and min(plain) >= 0 and max(plain) <= 255
            else:
                plain = operator.index(key)
                is_right = image.mode in ("L", "P") and 0 <= plain <= 255
        except TypeError as error:
            cause, is_right = error, False
        if not is_right:
            raise ValueError(
                "image.info['transparency'] must be an int (modes L and P), three of them (RGB), or bytes (P), each as "
                f"large as its pixels can be, not {key!r}; correct it, or use image.convert('RGBA')"
            ) from cause
        fresh.info["transparency"] = plain
        return fresh

    def _check_palette(self, image: Image) -> None:
        colours = max(1, len(image.getpalette() or ()) // 3)  # without any, black is written
        highest = int(np.asarray(image).max())
        if highest >= colours:
            raise ValueError(
                f"it has pixels of colour {highest}, but its palette has only {colours} colours; extend that with "
                "image.putpalette(), or use image.convert('RGB')"
            )
        has_alpha = image.palette is not None and "A" in image.palette.mode
        if has_alpha and not self.keeps_palette_alpha and min((image.getpalette("RGBA") or [255])[3::4]) < 255:
            raise ValueError(
                f"a {self.name} file does not keep the alpha of its palette; use image.convert('RGBA') for a png or "
                "tif field, or image.convert('RGB')"
            )

    def _refuse_mode(self, mode: str) -> None:
        modes = self.modes.split()
        # suggest the nearest mode that the format holds, without alpha if it holds none
        drops_alpha = mode in ("RGBA", "LA", "PA", "RGBa", "La") and "RGBA" not in modes
        wanted = "RGBA" if mode.endswith(("A", "a")) and not drops_alpha else "RGB"
        nearest = wanted if wanted in modes else modes[-1]
        cure = f"use image.convert({nearest!r})"
        if mode == "F":
            cure = "make it an array of 0..1: numpy.asarray(image) / highest"
        elif drops_alpha:
            dropped = f"image.convert({nearest!r}) or array[..., :-1]"
            cure = f"drop the alpha with {dropped}, or name the field png, which keeps it"
        raise ValueError(f"a {self.name} file holds images of mode {', '.join(modes)}, but not {mode}; {cure}")

    def _write(self, image: Image, exif: bytes, options: EncodeOptions) -> bytes:
        if image.mode not in self.modes.split():
            self._refuse_mode(image.mode)
        if self.name not in ("PBM", "PGM", "PPM", "PNM"):
            return self._save(image, exif, options)
        if self.name == "PBM":
            levels = np.asarray(image)
            if image.mode == "L" and np.any((levels != 0) & (levels != 255)):
                raise ValueError("a PBM file holds only black and white; use image.convert('1'), or name the field pgm")
            return _write_pnm(levels.astype(bool))
        if self.name == "PPM" or (self.name == "PGM" and image.mode == "1"):
            image = image.convert("RGB" if self.name == "PPM" else "L")
        return _write_pnm(np.asarray(image))

    def _write_deep(self, pixels: Pixels, exif: bytes, options: EncodeOptions) -> bytes:
        mode = _MODES[1 if pixels.ndim == 2 else pixels.shape[2]]
        if mode not in self.deep_modes.split():
            held = f"16 bits per channel only as {self.deep_modes}" if self.deep_modes else "only 8 bits per channel"
            raise ValueError(
                f"a {self.name} file holds {held}, and this is {mode} with 16; name the field png, which holds it, or "
                "reduce it to 8 bits: (array // 257).astype(numpy.uint8)"
            )
        if self.name == "PNG":
            return _write_deep_png(pixels, options.png_compression, exif)
        if self.name == "TIFF":
            from PIL import Image

            return self._save(Image.fromarray(pixels), b"", options)
        if self.name == "PPM" and pixels.ndim == 2:
            pixels = np.repeat(pixels[:, :, np.newaxis], 3, axis=2)
        return _write_pnm(pixels)

    def _save(self, image: Image, exif: bytes, options: EncodeOptions) -> bytes:
        by_format: dict[str, dict[str, Any]] = {
            "JPEG": {"quality": int(options.jpeg_quality), "icc_profile": image.info.get("icc_profile")},
            "PNG": {"compress_level": int(options.png_compression)},
            "WEBP": {"lossless": True, "exact": True},  # exact keeps the colours of fully transparent pixels
            "TIFF": {"compression": "tiff_adobe_deflate"},
        }
        chosen = by_format.get(self.name, {})
        if exif and self.keeps_exif:
            # EXIF data read from a WebP file has no prefix, and Pillow adds none
            chosen["exif"] = _EXIF_PREFIX + exif.removeprefix(_EXIF_PREFIX)
        out = io.BytesIO()
        image.save(out, self.name, **chosen)
        return out.getvalue()


_FORMATS = {
    "jpg jpeg jpe jfif": _FileFormat("JPEG", "L RGB CMYK", keeps_exif=True, max_side=65500),
    "png apng img image": _FileFormat("PNG", "1 L LA P RGB RGBA", "L LA RGB RGBA", "L P RGB", True, True),
    "webp": _FileFormat("WEBP", "1 L LA P RGB RGBA", "", "L P", True, True, max_side=16383),
    "bmp": _FileFormat("BMP", "1 L P RGB"),
    "tif tiff": _FileFormat("TIFF", "1 L LA P PA RGB RGBA CMYK LAB", "L"),
    "ppm": _FileFormat("PPM", "1 L RGB", "L RGB"),
    "pgm": _FileFormat("PGM", "1 L", "L"),
    "pbm": _FileFormat("PBM", "1 L"),
    "pnm": _FileFormat("PNM", "1 L RGB", "L RGB"),
}

#: Extension -> the encoder of its images.
IMAGE_ENCODERS: dict[str, Callable[[Any, EncodeOptions], bytes]] = {
    extension: file_format.encode for extensions, file_format in _FORMATS.items() for extension in extensions.split()
}


def refuse_image(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Refuses to write an image in a format that is only read, because its files would not read back equal."""
    raise TypeError("images of this format are only read, not written: give the bytes of a file, or name the field png")


def _write_deep_png(pixels: Pixels, compression: int, exif: bytes) -> bytes:
    """Writes a PNG file of uint16 pixels, HW, or HWC with 2 (grey and alpha), 3 or 4 channels."""
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    rows = pixels.astype(">u2").reshape(height, -1).view(np.uint8)
    lines = np.empty((height, 1 + rows.shape[1]), np.uint8)
    lines[:, 0] = _PNG_FILTER_UP
    lines[0, 1:] = rows[0]
    # Filter "up": each byte minus the byte above it, modulo 256 (3 below 250 becomes 9), which compresses much better.
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])
    data = zlib.compress(lines.data, compression)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, _PNG_COLOUR_TYPES[channels], 0, 0, 0))]
    if exif:
        chunks.append((b"eXIf", exif.removeprefix(_EXIF_PREFIX)))
    chunks += [(b"IDAT", data[start : start + _CHUNK_BYTES]) for start in range(0, len(data), _CHUNK_BYTES)]
    parts = [_PNG_MAGIC]
    for kind, content in [*chunks, (b"IEND", b"")]:
        checksum = zlib.crc32(content, zlib.crc32(kind)).to_bytes(4)
        parts += [len(content).to_bytes(4), kind, content, checksum]
    return b"".join(parts)


def _write_pnm(pixels: Pixels) -> bytes:
    """Writes HW bools (True is white) as binary PBM, and uint8 or uint16 pixels as PGM (HW) or PPM (HWC)."""
    size = f"{pixels.shape[1]} {pixels.shape[0]}"
    if pixels.dtype == np.bool_:
        return f"P4\n{size}\n".encode() + np.packbits(~pixels, axis=1).tobytes()
    header = f"{'P5' if pixels.ndim == 2 else 'P6'}\n{size}\n{np.iinfo(pixels.dtype).max}\n"
    return header.encode() + pixels.astype(pixels.dtype.newbyteorder(">"), copy=False).tobytes()
