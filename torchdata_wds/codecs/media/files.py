"""Opens media files from memory only, and checks that they are complete, as far as their headers say."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from torchdata_wds.codecs.options import import_optional

# The formats accepted under any field name, by FFmpeg's names: those that contain their own data. FFmpeg also knows
# playlists and scripts (hls, dash, concat, ...), which name other files and addresses to read.
_FORMATS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpegts", "mpeg", "ogg", "asf"),
    *("h264", "hevc", "mjpeg", "m4v", "mpegvideo", "flac", "wav", "mp3", "aac"),
)

_OPTIONS = {"format_whitelist": ",".join(_FORMATS), "protocol_whitelist": "none"}

# The MP4 boxes that must be complete, and the least size that a RIFF writer leaves if it cannot seek back.
_BOXES = (b"moov", b"mdat", b"moof")
_UNKNOWN_RIFF = 0x7FFF0000
_SEGMENT = b"\x18\x53\x80\x67"


def import_av() -> Any:
    """Imports PyAV, which is optional."""
    return import_optional("av", extra="media", fields="fields that torch_video and torch_audio decode")


@contextmanager
def open_media(data: bytes) -> Iterator[Any]:
    """Opens a video or audio file with PyAV, which can read nothing but these bytes."""
    av = import_av()
    if cut := find_cut(data):
        raise ValueError(cut)
    # metadata that is not UTF-8: no error. PyAV 19 has no such option, and never raises
    lenient = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    try:
        container = av.open(io.BytesIO(data), container_options=_OPTIONS, **lenient)
    except av.error.ArgumentError as cause:
        raise ValueError(f"it is not a file of the formats that are read here ({' '.join(_FORMATS)})") from cause
    with container:
        yield container


def find_cut(data: bytes) -> str | None:
    """Describes what is missing if a file is shorter than its headers say; None if it is not, or they do not say."""
    walk = _WALKS.get(data[4:8]) or _WALKS.get(data[:4])
    for name, end in () if walk is None else walk(data):
        if end > len(data):
            return f"it is cut off: it has {len(data):,} bytes, and its {name} goes on to byte {end:,}"
    return None


def check_count(data: bytes, kind: str, count: int, announced: Fraction | float) -> None:
    """Compares the number of samples in a whole file with that in its header, if files of this kind have one."""
    has_count, tolerance = kind == "flac", 0
    if kind == "mp3":
        tolerance = 3 * 1152  # the number in the first frame may be wrong by a few frames
        start = tag_size(data)
        has_count = any(mark in data[start : start + 256] for mark in (b"Xing", b"Info"))
    if has_count and count + tolerance < announced:
        raise ValueError(f"it is damaged or cut off: it has {count:,} samples, and its header says {int(announced):,}")


def tag_size(data: bytes) -> int:
    """Returns the size of the ID3 tag at the beginning of a file, 0 without one."""
    if data[:3] != b"ID3":
        return 0
    return 10 + sum((part & 127) << 7 * (3 - number) for number, part in enumerate(data[6:10]))  # seven bits per byte


# Each of these yields the parts that must be complete, with the byte at which they end.


def _boxes(data: bytes) -> Iterator[tuple[str, int]]:
    start = 0
    while start + 8 <= len(data):
        size, name = int.from_bytes(data[start : start + 4]), data[start + 4 : start + 8]
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16])
        if size < 8:  # 0: to the end of the file
            return
        start += size
        if name in _BOXES:
            yield f"{name.decode()} box", start


def _riff(data: bytes) -> Iterator[tuple[str, int]]:
    if data[8:12] == b"WAVE":
        yield from _wave(data)
        return
    start = 0
    while data[start : start + 4] == b"RIFF":
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        if size >= _UNKNOWN_RIFF or size == 0:
            return
        start += 8 + size
        # large AVI files have several chunks, padded to even sizes; some writers also count the header's 8 bytes
        if start > len(data) + 8:
            yield "RIFF chunk", start
        start += start % 2


def _wave(data: bytes) -> Iterator[tuple[str, int]]:
    """Checks only the chunk of samples: the size of the whole file is often wrong."""
    start = 12
    while start + 8 <= len(data):
        name, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        start += 8 + size
        if name == b"data":
            if size < _UNKNOWN_RIFF:
                yield "data chunk", start
            return
        start += size % 2


def _segment(data: bytes) -> Iterator[tuple[str, int]]:
    start, size = _read_size(data, 4)
    start += size
    if data[start : start + 4] == _SEGMENT:
        begin, size = _read_size(data, start + 4)
        if size != (1 << 7 * (begin - start - 4)) - 1:  # all ones: unknown, a live stream
            yield "Segment", begin + size


def _read_size(data: bytes, start: int) -> tuple[int, int]:
    """Reads a Matroska size; returns where it ends, and the size."""
    # the zero bits in front say how long it is: 40 02 has one, so two bytes, and without the marker bit the value 2
    first = data[start] if start < len(data) else 0
    length = 9 - first.bit_length()
    return start + length, int.from_bytes(data[start : start + length]) & ((1 << 7 * length) - 1)


def _pages(data: bytes) -> Iterator[tuple[str, int]]:
    start = 0
    while data[start : start + 4] == b"OggS":
        count = data[start + 26] if start + 26 < len(data) else 0
        start += 27 + count + sum(data[start + 27 : start + 27 + count])
        yield "last page", start


_WALKS: dict[bytes, Callable[[bytes], Iterator[tuple[str, int]]]] = {
    **dict.fromkeys((b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"), _boxes),
    **{b"RIFF": _riff, b"\x1a\x45\xdf\xa3": _segment, b"OggS": _pages},
}
