"""Decodes ordinary PNG files with pyspng, to the same pixels as Pillow."""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Any

import numpy as np

from torchdata_wds.codecs.images.pixels import Pixels

_START = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">IIBBBBB")
_CHUNK = struct.Struct(">I4s")
_CHECK = struct.Struct(">I")

# The modes, in Pillow's words, to which both convert 8-bit pixels of a colour type alike.
_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_MODES = {_GREY: ("L", "RGB", "RGBA"), **dict.fromkeys((_RGB, _PALETTE, _GREY_ALPHA, _RGBA), ("RGB", "RGBA"))}

# Chunks that change no pixel and that Pillow accepts, with their length. Others may: tRNS makes pixels transparent,
# acTL begins an animation, iCCP and iTXt are parsed, and eXIf has an orientation.
_LENGTHS = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7, b"bKGD": None, b"sBIT": None, b"PLTE": None}
_TEXT, _MOST_TEXT = b"tEXt", 2**20


def decode_png(data: bytes, mode: str) -> Pixels | None:
    """Decodes a whole PNG file of 8 bits to HWC, or HW for L; None if Pillow must read it."""
    # Pillow decides about all files that are not ordinary, that are damaged, or that pyspng refuses: neither the values
    # nor the exceptions of a file may depend on what is installed. Only a file that was made so is told apart: if the
    # checksums of its chunks are right, but not that of the compressed pixels in them, pyspng gives the pixels.
    if not data.startswith(_START):
        return None
    libraries = _libraries()
    if libraries is None:
        return None
    pyspng, pillow = libraries
    try:
        header = _read_chunks(data, mode)
    except (IndexError, struct.error):
        return None
    if header is None:
        return None
    width, height, colours = header
    if pillow.MAX_IMAGE_PIXELS is not None and width * height > pillow.MAX_IMAGE_PIXELS:
        return None
    is_spread = colours == _GREY and mode == "RGB"  # NumPy does that faster
    try:
        pixels: Pixels = pyspng.load(data, format="L" if is_spread else mode)
    except Exception:  # noqa: BLE001 - Pillow decides about what it refuses
        return None
    return np.stack([pixels] * 3, axis=2) if is_spread else pixels


def _read_chunks(data: bytes, mode: str) -> tuple[int, int, int] | None:
    """Returns width, height and colour type of an ordinary, whole file; None for any other."""
    # After the start come chunks: a length of four bytes, a kind, the contents, and a checksum of kind and contents.
    # pyspng does not compare all checksums, and Pillow does not read all chunks in the same order: all must be right.
    view = memoryview(data)
    if data[12:16] != b"IHDR" or not _is_whole(view, 8, 33):
        return None
    width, height, bits, colours, *methods = _HEADER.unpack_from(data, 16)
    if bits != 8 or mode not in _MODES.get(colours, ()) or any(methods) or not width or not height:
        return None
    position, text, pixels, found = 33, 0, 0, set()
    while (length_and_kind := _CHUNK.unpack_from(data, position)) != (0, b"IEND"):
        length, kind = length_and_kind
        end = position + 12 + length
        if kind == b"IDAT":
            is_right = length > 0 and pixels in (0, position)  # one after the other
            pixels = end
        elif kind == _TEXT:
            text += length
            is_right = text <= _MOST_TEXT
        else:
            is_right = kind in _LENGTHS and _LENGTHS[kind] in (None, length) and kind not in found
            found.add(kind)
        if not is_right or not _is_whole(view, position, end):
            return None
        position = end
    is_end = position + 12 == len(data) and _is_whole(view, position, position + 12)
    return (width, height, colours) if is_end and pixels else None


def _is_whole(data: memoryview, start: int, end: int) -> bool:
    """Returns whether the checksum of a chunk is right."""
    return end <= len(data) and zlib.crc32(data[start + 4 : end - 4]) == _CHECK.unpack_from(data, end - 4)[0]


@functools.cache
def _libraries() -> tuple[Any, Any] | None:
    """Returns pyspng, and PIL.Image for its pixel limit; None if pyspng is not installed."""
    try:
        import pyspng
    except ImportError:
        return None
    from PIL import Image

    return pyspng, Image
