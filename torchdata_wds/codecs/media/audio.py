"""Audio files to samples: exact to the sample wherever a clip begins."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from torchdata_wds.codecs.media.files import import_av, open_media
from torchdata_wds.codecs.media.video import origin_of

Values = np.ndarray[Any, Any]

# FFmpeg's name of a sample format, without the p of the planar ones -> what is subtracted, and what is full scale.
_SCALES = {"u8": (128, 2**7), "s16": (0, 2**15), "s32": (0, 2**31), "s64": (0, 2**63), "flt": (0, 1), "dbl": (0, 1)}

# Formats with a time for every sample. Lossy codecs are read from the beginning all the same: they take over values
# from one frame to the next, and return others when they are started in the middle.
_SEEKABLE = ("flac", "wav", "mov,mp4,m4a,3gp,3g2,mj2")
_LOSSLESS = ("flac", "alac", "pcm_")

# Seconds; below it, times differ because they are rounded or clocks drift. FFmpeg's resampler fills from there on, too.
_SHORTEST_PAUSE = Fraction(1, 10)

# The number of frames in the first frame of an MP3 file may be wrong by as many samples as a few frames have.
_MP3_TOLERANCE = 3 * 1152

# The number of a decoded frame's first sample, counted from second 0, and its values.
_Part = tuple[int, Values]


def read_samples(
    data: bytes, start: float, end: float | None, max_bytes: int, *, with_video: bool
) -> tuple[Values, int, float] | None:
    """Decodes the audio of a clip into float32 (channels, n), its rate, and the second of the first; None: no audio."""
    # with video, seconds are counted as for the frames, instead of from the first sample, and pauses are silent
    with open_media(data) as container:
        if not container.streams.audio:
            return None
        context = container.streams.audio[0].codec_context
        if context is None or not context.sample_rate:
            raise ValueError("its audio codec is not known")
        rate, channels = context.sample_rate, context.channels
    first = round(start * rate)
    last = None if end is None else round(end * rate)
    found: list[Values] = []
    size, place = 0, first
    with closing(_parts(data, first, with_video)) as parts:
        for begin, values in parts:
            if last is not None and begin >= last:
                break
            values = values[:, max(0, first - begin) : None if last is None else last - begin]
            if not values.shape[1]:
                continue
            place = place if found else max(first, begin)
            size += values.size * 4
            if size > max_bytes:
                raise ValueError(
                    f"its audio takes more than max_bytes={max_bytes:,}; decode less with start and end, or raise "
                    "max_bytes"
                )
            found.append(values)
    values = np.concatenate(found, axis=1) if found else np.empty((channels, 0), np.float32)
    return values, rate, place / rate


def _parts(data: bytes, first: int, with_video: bool) -> Generator[_Part, None, None]:
    """Yields a file's audio in order, from a sample or one before it on."""
    with open_media(data) as container:
        stream = container.streams.audio[0]
        zero = origin_of(container) if with_video else max(Fraction(0), (stream.start_time or 0) * stream.time_base)
        if _seek(container, stream, first, zero):
            parts = _decode(container, stream, zero, fills=with_video)
            head = next(parts, None)
            if head is not None and head[0] <= first:
                yield from chain([head], parts)
                return
    with open_media(data) as container:
        stream = container.streams.audio[0]
        count = 0
        for part in _decode(container, stream, origin_of(container) if with_video else None, fills=with_video):
            yield part
            count += part[1].shape[1]
        _check_count(data, container, stream, count)


def _seek(container: Any, stream: Any, first: int, zero: Fraction) -> bool:
    """Moves to before a sample; False where the file is read from its beginning, as most are."""
    rate = stream.codec_context.sample_rate
    is_exact = container.format.name in _SEEKABLE and stream.time_base * rate == 1
    if first > 0 and is_exact and stream.codec_context.name.startswith(_LOSSLESS):
        with suppress(import_av().FFmpegError):
            container.seek(int(first + zero * rate), stream=stream)
            return True
    return False


def _decode(container: Any, stream: Any, zero: Fraction | None, *, fills: bool) -> Iterator[_Part]:
    """Decodes audio; `zero` is the time of sample 0, None for that of the first one; `fills` puts silence in pauses."""
    context = stream.codec_context
    context.thread_count = 1  # workers share the cores already
    if context.name == "flac":
        context.options = {"err_detect": "crccheck+explode"}
    shape: tuple[int, int] | None = None
    rate = context.sample_rate
    place = 0
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise ValueError(f"it is damaged or cut off after sample {place:,}")
        for frame in packet.decode():
            values = _to_values(frame)
            has_time = zero is not None and frame.pts is not None
            time = round((frame.pts * frame.time_base - zero) * rate) if has_time else place
            if shape is None:
                shape, place = (values.shape[0], rate), time
            if shape != (values.shape[0], frame.sample_rate):
                raise ValueError(
                    f"its audio changes from {shape[0]} channels at {rate} samples a second to {values.shape[0]} at "
                    f"{frame.sample_rate} after sample {place:,}; decode one part with start and end"
                )
            if frame.is_corrupt:
                raise ValueError(f"it is damaged after sample {place:,}")
            if fills and time - place > rate * _SHORTEST_PAUSE:
                # takes no memory before it is known whether it is wanted, and how much of it may be
                yield place, np.broadcast_to(np.float32(0), (shape[0], time - place))
                place = time
            yield place, values
            place += values.shape[1]


def _check_count(data: bytes, container: Any, stream: Any, count: int) -> None:
    """Compares the samples of a whole file with their number in its header, where there is one."""
    announced = (stream.duration or 0) * stream.time_base * stream.codec_context.sample_rate
    has_count, tolerance = container.format.name == "flac", 0
    if container.format.name == "mp3":
        start, tolerance = 0, _MP3_TOLERANCE
        if data[:3] == b"ID3":  # tags, whose size is written with seven bits to the byte
            start = 10 + sum(part << 7 * (3 - number) for number, part in enumerate(data[6:10]))
        has_count = any(mark in data[start : start + 256] for mark in (b"Xing", b"Info"))
    if has_count and count + tolerance < announced:
        raise ValueError(f"it is damaged or cut off: it has {count:,} samples, and its header says {int(announced):,}")


def _to_values(frame: Any) -> Values:
    name = frame.format.name.removesuffix("p")
    if name not in _SCALES:
        raise ValueError(f"its samples have the format {frame.format.name}; {' '.join(_SCALES)} can be read")
    offset, full = _SCALES[name]
    values: Values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(frame.samples, -1).T
    if offset:
        values = values.astype(np.int16) - offset
    return values.astype(np.float32, order="C") / np.float32(full)
