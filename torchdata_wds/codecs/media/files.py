"""Media files: opened from memory alone, and whether they are whole as far as their own headers tell."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchdata_wds.codecs.options import import_optional

# What a member may be, whatever it is called: FFmpeg's names of the formats that hold their data themselves. It also
# knows playlists and scripts (hls, dash, concat, ...), which name other files and addresses to read.
_FORMATS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpegts", "mpeg", "ogg", "asf"),
    *("h264", "hevc", "mjpeg", "m4v", "mpegvideo", "flac", "wav", "mp3", "aac"),
)

_OPTIONS = {"format_whitelist": ",".join(_FORMATS), "protocol_whitelist": "none"}

# Boxes of an MP4 file that hold what cannot be missing, and sizes that writers use where they cannot seek back.
_BOXES = (b"moov", b"mdat", b"moof")
_UNKNOWN_RIFF = 0x7FFF0000
_SEGMENT = b"\x18\x53\x80\x67"


def import_av() -> Any:
    """Imports PyAV, which is optional."""
    return import_optional("av", extra="media", fields="fields that torch_video and torch_audio decode")


@contextmanager
def open_media(data: bytes) -> Iterator[Any]:
    """Opens a video or audio file for PyAV, which reads from these bytes and from nothing else."""
    av = import_av()
    if cut := find_cut(data):
        raise ValueError(cut)
    try:
        container = av.open(io.BytesIO(data), container_options=_OPTIONS, metadata_errors="replace")
    except av.error.ArgumentError as cause:
        raise ValueError(f"it is not a file of the formats that are read here ({' '.join(_FORMATS)})") from cause
    with container:
        yield container


def find_cut(data: bytes) -> str | None:
    """Says what is missing at the end of a file that is shorter than its headers say; None where nothing is known.

    MP4 and MOV, Matroska and WebM, AVI and WAV, and Ogg say how long they are; MPEG, WMV, MP3 and raw streams do not.
    """
    find = _FINDERS.get(data[4:8]) or _FINDERS.get(data[:4])
    found = find(data) if find is not None else None
    if found is None or found[1] <= len(data):
        return None
    return f"it is cut off: it has {len(data):,} bytes, and its {found[0]} goes on to byte {found[1]:,}"


def _end_of_boxes(data: bytes) -> tuple[str, int] | None:
    start = 0
    while start + 8 <= len(data):
        size, name = int.from_bytes(data[start : start + 4]), data[start + 4 : start + 8]
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16])
        if size < 8:  # 0: to the end of the file
            return None
        start += size
        if start > len(data):
            return (f"{name.decode()} box", start) if name in _BOXES else None
    return None


def _end_of_riff(data: bytes) -> tuple[str, int] | None:
    start = 0
    if data[8:12] == b"WAVE":
        return _end_of_wave(data)
    while data[start : start + 4] == b"RIFF":
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        if size >= _UNKNOWN_RIFF or size == 0:
            return None
        start += 8 + size
        # large AVI files have several, the odd ones padded; some writers count the 8 bytes of the head, too
        if start > len(data) + 8:
            return "RIFF chunk", start
        start += start % 2
    return None


def _end_of_wave(data: bytes) -> tuple[str, int] | None:
    """Looks at the chunk with the samples: the size of the whole is often wrong."""
    start = 12
    while start + 8 <= len(data):
        name, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        start += 8 + size
        if name == b"data":
            return None if size >= _UNKNOWN_RIFF else ("data chunk", start)
        start += size % 2
    return None


def _end_of_segment(data: bytes) -> tuple[str, int] | None:
    start, size = _read_size(data, 4)
    start += size
    if data[start : start + 4] != _SEGMENT:
        return None
    begin, size = _read_size(data, start + 4)
    length = begin - start - 4
    return None if size == (1 << 7 * length) - 1 else ("Segment", begin + size)  # all ones: unknown, a live stream


def _read_size(data: bytes, start: int) -> tuple[int, int]:
    """Reads a size of Matroska's; returns where it ends, and the size."""
    first = data[start] if start < len(data) else 0
    length = 9 - first.bit_length()
    return start + length, int.from_bytes(data[start : start + length]) & ((1 << 7 * length) - 1)


def _end_of_pages(data: bytes) -> tuple[str, int] | None:
    start = 0
    while data[start : start + 4] == b"OggS":
        count = data[start + 26] if start + 26 < len(data) else 0
        start += 27 + count + sum(data[start + 27 : start + 27 + count])
        if start > len(data):
            return "last page", start
    return None


_FINDERS: dict[bytes, Callable[[bytes], tuple[str, int] | None]] = {
    **dict.fromkeys((b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"), _end_of_boxes),
    b"RIFF": _end_of_riff,
    b"\x1a\x45\xdf\xa3": _end_of_segment,
    b"OggS": _end_of_pages,
}
