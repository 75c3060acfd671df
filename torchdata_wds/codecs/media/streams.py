"""Decodes the streams of media files into frames and samples: exactly those of a clip, wherever it begins."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from torchdata_wds.codecs.images.pixels import Pixels, turn
from torchdata_wds.codecs.media.files import check_count, import_av, open_media

Values = np.ndarray[Any, Any]

# Display matrix -> EXIF orientation: its signs (a, b, c, d), where x' = ax + cy and y' = bx + dy.
_ORIENTATIONS = {
    **{(-1, 0, 0, 1): 2, (-1, 0, 0, -1): 3, (1, 0, 0, -1): 4},
    **{(0, 1, 1, 0): 5, (0, 1, -1, 0): 6, (0, -1, -1, 0): 7, (0, -1, 1, 0): 8},
}

# The formats and codecs where each packet holds one frame and the time when it is shown.
_WHOLE_FORMATS, _WHOLE_CODECS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"), ("h264", "hevc", "vp9")

# The second at which a frame is shown, PyAV's frame, and the second of the last damaged frame since an intact
# keyframe: its damage may have spread to this frame.
_Timed = tuple[float, Any, float | None]

# FFmpeg's name of a sample format, without the p of planar ones -> the offset to subtract, and full scale.
_SCALES = {"u8": (128, 2**7), "s16": (0, 2**15), "s32": (0, 2**31), "s64": (0, 2**63), "flt": (0, 1), "dbl": (0, 1)}

# Formats with a time for every sample. Lossy codecs are read from the beginning even there: their frames depend on
# earlier ones, so decoding that begins in the middle returns other values.
_SEEKABLE = ("flac", "wav", "mov,mp4,m4a,3gp,3g2,mj2")
_LOSSLESS = ("flac", "alac", "pcm_")

# In seconds; smaller gaps come from rounded times and drifting clocks. FFmpeg's resampler has the same limit.
_SHORTEST_PAUSE = Fraction(1, 10)

# The number of a decoded frame's first sample, counted from second 0, and its values.
_Part = tuple[int, Values]


def read_frames(
    data: bytes, start: float, end: float | None, *, stride: int, max_frames: int | None, max_bytes: int
) -> tuple[Pixels, list[float], float | None, float | None]:
    """Decodes a clip; returns its frames, their seconds, the file's rate, and the clip's end. No frame is an error."""
    # At 10 frames a second, start=1, stride=2 and max_frames=2 take the frames at 1.0 and 1.2, and the clip ends at
    # 1.3, the first one left out; so does its audio. A damaged frame is an error only if it affects one that is taken.
    with open_media(data) as container:
        rate = _video_of(container, max_bytes).average_rate
    pixels: list[Pixels] = []
    times: list[float] = []
    size, stop = 0, end
    with closing(_timed_frames(data, start, max_bytes)) as timed:
        for number, (time, frame, damage) in enumerate(timed):
            if end is not None and time >= end:
                break
            if len(pixels) == max_frames:
                stop = time
                break
            if number % stride:
                continue
            if damage is not None:
                raise ValueError(f"the frame at second {damage:g} is damaged")
            size += frame.width * frame.height * 3
            if size > max_bytes:
                raise ValueError(
                    f"its frames take more than max_bytes={max_bytes:,}, up to second {time:g}; decode less with "
                    "start, end, stride or max_frames, or raise max_bytes"
                )
            pixels.append(_to_pixels(frame))
            if pixels[-1].shape != pixels[0].shape:
                raise ValueError(
                    f"its frames change in size, from {pixels[0].shape[:2]} to {pixels[-1].shape[:2]} rows and columns "
                    f"at second {time:g}; decode one part with start and end"
                )
            times.append(time)
    if not pixels:
        before = "" if end is None else f" and before second {end:g}"
        raise ValueError(f"no frame is at or after second {start:g}{before}")
    stacked = np.empty((len(pixels), *pixels[0].shape), np.uint8)
    for number in reversed(range(len(pixels))):
        stacked[number] = pixels.pop()  # each frame is freed when it is copied: a clip is not in memory twice
    return stacked, times, float(rate) if rate else None, stop


def origin_of(container: Any) -> Fraction:
    """Returns the time of second 0: that of the stream that begins first, but at least 0."""
    # MPEG streams begin at any time; before 0 is the lead-in of an audio codec, which decoding drops
    streams = (*container.streams.video, *container.streams.audio)
    starts = [stream.start_time * stream.time_base for stream in streams if stream.start_time is not None]
    return max(Fraction(0), min(starts, default=Fraction(0)))


def _video_of(container: Any, max_bytes: int) -> Any:
    """Finds the first video stream that is not a cover picture, and limits its frames to `max_bytes`."""
    cover = import_av().stream.Disposition.attached_pic
    stream = next((stream for stream in container.streams.video if not stream.disposition & cover), None)
    if stream is None:
        kinds = ["cover" if stream.disposition & cover else stream.type for stream in container.streams]
        raise ValueError(f"it has no video stream, only {kinds}")
    if stream.codec_context is None:
        raise ValueError("its video codec is not known")
    size = stream.codec_context.width * stream.codec_context.height * 3
    if size > max_bytes:
        raise ValueError(f"each of its frames takes {size:,} bytes, more than max_bytes={max_bytes:,}")
    stream.codec_context.thread_count = 1  # workers share the cores already
    stream.codec_context.options = {"max_pixels": str(min(max_bytes // 3, 2**31 - 1))}
    return stream


def _timed_frames(data: bytes, start: float, max_bytes: int) -> Generator[_Timed, None, None]:
    """Yields the frames from a time on, after a seek to the keyframe before it if that works."""
    if start > 0:
        with open_media(data) as container:
            frames = _seek_frame(container, _video_of(container, max_bytes), start)
            if frames is not None:
                yield from frames
                return
    with open_media(data) as container:
        frames = _decode_video(container, _video_of(container, max_bytes))
        yield from (timed for timed in frames if start <= 0 or timed[0] >= start)


def _seek_frame(container: Any, stream: Any, start: float) -> Iterator[_Timed] | None:
    """Seeks a clip's first frame and returns the frames from there; None to read the file from its beginning."""
    # frames may have no times, or the seek may land in damage, or after the keyframe that the first frame needs
    if stream.start_time is None or container.format.name == "mpeg":
        return None
    keyed = False
    with suppress(import_av().FFmpegError, ValueError):
        container.seek(int((Fraction(start) + origin_of(container)) / stream.time_base), stream=stream)
        frames = _decode_video(container, stream)
        for timed in frames:
            keyed = keyed or (timed[1].key_frame and timed[0] <= start)
            if timed[0] >= start:
                return chain([timed], frames) if keyed else None
    return None


def _decode_video(container: Any, stream: Any) -> Iterator[_Timed]:
    """Yields frames in display order; raises for those that are lost."""
    # Packets come in decoding order, say with the times 0 3 1 2, and frames in display order: 0 1 2 3. Each packet's
    # time is due until a frame of that time or a later one is shown. If 1 and then 3 is shown, 2 is lost.
    origin = origin_of(container)
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    is_whole = container.format.name in _WHOLE_FORMATS and stream.codec_context.name in _WHOLE_CODECS
    due: set[int] = set()
    first: int | None = None
    damage: float | None = None
    number = 0
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise ValueError(f"it is damaged or cut off after frame {number}")
        if is_whole and packet.pts is not None and not packet.is_discard:
            due.add(packet.pts)
        for frame in packet.decode():
            first = frame.pts if first is None else first
            due = _without_shown(due, first, frame.pts) if due else due
            # 270,000 in units of 1/90,000 is second 2.5 of a file that begins at 0.5
            time = float(number / rate if frame.pts is None else frame.pts * frame.time_base - origin)
            if frame.is_corrupt or frame.key_frame:
                damage = time if frame.is_corrupt else None
            yield time, frame, damage
            number += 1
    if due:
        _without_shown(due, first, max(due) + 1)


def _without_shown(due: set[int], first: int | None, shown: int) -> set[int]:
    """Removes the times up to that of a shown frame; raises if there is an earlier one, whose frame is lost."""
    # FFmpeg drops frames that it cannot decode. Before the first shown one that is no damage: in a file cut from a
    # longer one they need a frame before the cut.
    lost = [time for time in due if time < shown and (first is None or time > first)]
    if lost:
        raise ValueError(f"it is damaged: {len(lost)} of its frames cannot be decoded")
    return {time for time in due if time > shown}


def _to_pixels(frame: Any) -> Pixels:
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    signs = np.sign(np.frombuffer(bytes(matrix), np.int32)[[0, 1, 3, 4]])
    return turn(pixels, _ORIENTATIONS.get(tuple(signs.tolist()), 1))


def read_samples(
    data: bytes, start: float, end: float | None, max_bytes: int, *, with_video: bool
) -> tuple[Values, int, float] | None:
    """Decodes a clip's audio: float32 (channels, n), its rate, and the second of its first sample; None: no audio."""
    # With video, seconds count as for the frames instead of from the first sample, and pauses are filled with silence.
    # At 8000 samples a second, 0.5 to 1.0 are samples 4000 to 8000: of a part with samples 3584 to 4608, [416:4416] is
    # kept, its last 608. If the audio begins later, at sample 4100, the result says so: 4100 / 8000 = 0.5125.
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
    with closing(_audio_parts(data, first, with_video)) as parts:
        for begin, values in parts:
            if last is not None and begin >= last:
                break
            values = values[:, max(0, first - begin) : None if last is None else last - begin]
            if not values.shape[1]:
                continue
            place = place if found else max(first, begin)
            size += values.size * 4
            if size > max_bytes:
                raise ValueError(f"its audio takes more than max_bytes={max_bytes:,}; set start and end, or raise it")
            found.append(values)
    values = np.concatenate(found, axis=1) if found else np.empty((channels, 0), np.float32)
    return values, rate, place / rate


def _audio_parts(data: bytes, first: int, with_video: bool) -> Generator[_Part, None, None]:
    """Yields a file's audio in order, beginning at or before a sample."""
    with open_media(data) as container:
        stream = container.streams.audio[0]
        zero = origin_of(container) if with_video else max(Fraction(0), (stream.start_time or 0) * stream.time_base)
        if _seek_sample(container, stream, first, zero):
            parts = _decode_audio(container, stream, zero, fills=with_video)
            head = next(parts, None)
            if head is not None and head[0] <= first:
                yield from chain([head], parts)
                return
    with open_media(data) as container:
        stream = container.streams.audio[0]
        count = 0
        for part in _decode_audio(container, stream, origin_of(container) if with_video else None, fills=with_video):
            yield part
            count += part[1].shape[1]
        announced = (stream.duration or 0) * stream.time_base * stream.codec_context.sample_rate
        check_count(data, container.format.name, count, announced)


def _seek_sample(container: Any, stream: Any, first: int, zero: Fraction) -> bool:
    """Seeks to or before a sample; returns False if the file must be read from its beginning, as most must."""
    rate = stream.codec_context.sample_rate
    is_exact = container.format.name in _SEEKABLE and stream.time_base * rate == 1
    if first > 0 and is_exact and stream.codec_context.name.startswith(_LOSSLESS):
        with suppress(import_av().FFmpegError):
            container.seek(int(first + zero * rate), stream=stream)
            return True
    return False


def _decode_audio(container: Any, stream: Any, zero: Fraction | None, *, fills: bool) -> Iterator[_Part]:
    """Decodes audio; `zero` is the time of sample 0, None for that of the first; `fills` fills pauses with silence."""
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
                # takes no memory until the caller knows how much of it is wanted and allowed
                yield place, np.broadcast_to(np.float32(0), (shape[0], time - place))
                place = time
            yield place, values
            place += values.shape[1]


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
