"""Decodes media files by torchcodec: twins of the functions in `streams`, which use PyAV."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchdata_wds.codecs.images.pixels import Pixels
from torchdata_wds.codecs.media.files import check_count, find_cut, tag_size
from torchdata_wds.codecs.options import MissingPackageError, import_optional

Values = np.ndarray[Any, Any]

# torchcodec opens all that FFmpeg recognizes, also playlists and scripts, which name other files and addresses to read.
# Only files that begin like these are passed on. A script may begin so, too: FFmpeg finds those by words before the
# first zero byte, so none of them may be there.
_BEGINNINGS = re.compile(
    rb".{4}(?:ftyp|styp|moov|moof|sidx|mdat|free|skip|wide)|\x1a\x45\xdf\xa3|RIFF.{4}(?:AVI |WAVE)|OggS|fLaC"
    rb"|\x30\x26\xb2\x75\x8e\x66|\x00\x00\x00?\x01|\x47.{187}\x47|.{4}\x47.{191}\x47|\xff\xd8\xff|\xff[\xe0-\xff]",
    re.DOTALL,
)
_SCRIPTS = re.compile(rb"<MPD|<CompositionPlaylist|#EXTM3U|ffconcat|c=IN IP", re.IGNORECASE)
_PROBED = 2**20  # how far FFmpeg looks

# Before all times of a file, in seconds; the shortest pause of audio that counts, as in `streams`.
_BEFORE, _SHORTEST_PAUSE = -1e6, 0.1
_PLACE = re.compile(r"^\w+, \S+\.(?:cpp|h):\d+, ")


def read_frames(
    data: bytes, start: float, end: float | None, *, stride: int, max_frames: int | None, max_bytes: int
) -> tuple[Pixels, list[float], float | None, float | None]:
    """Decodes a clip; returns its frames, their seconds, the file's rate, and the clip's end. No frame is an error."""
    with _plain_errors():
        video = _Video(data, max_bytes)
        numbers = range(video.find(start) if start > 0 else 0, video.count, stride)
        taken = numbers[:max_frames]
        pixels: list[Pixels] = []
        times: list[float] = []
        for number in taken:
            time, frame = video.read(number)
            if end is not None and time >= end:
                break
            if (len(pixels) + 1) * frame.nbytes > max_bytes:
                raise ValueError(
                    f"its frames take more than max_bytes={max_bytes:,}, up to second {time:g}; decode less with "
                    "start, end, stride or max_frames, or raise max_bytes"
                )
            if pixels and frame.shape != pixels[0].shape:
                raise ValueError(
                    f"its frames change in size, from {pixels[0].shape[:2]} to {frame.shape[:2]} rows and columns "
                    f"at second {time:g}; decode one part with start and end"
                )
            if times and time <= times[-1]:
                raise ValueError(f"it is damaged: the frame after second {times[-1]:g} cannot be decoded")
            pixels.append(frame)
            times.append(time)
        if not pixels:
            before = "" if end is None else f" and before second {end:g}"
            raise ValueError(f"no frame is at or after second {start:g}{before}")
        stop = end
        if len(pixels) == max_frames and taken[-1] + 1 < video.count:
            left_out = video.read(taken[-1] + 1)[0]
            stop = left_out if end is None else min(end, left_out)
    stacked = np.empty((len(pixels), *pixels[0].shape), np.uint8)
    for index in reversed(range(len(pixels))):
        stacked[index] = pixels.pop()  # each frame is freed when it is copied: a clip is not in memory twice
    return stacked, times, video.rate, stop


def read_samples(
    data: bytes, start: float, end: float | None, max_bytes: int, *, with_video: bool
) -> tuple[Values, int, float] | None:
    """Decodes a clip's audio: float32 (channels, n), its rate, and the second of its first sample; None: no audio."""
    # torchcodec decodes from the beginning wherever a range begins, but guesses the number of the range's first sample
    # from times that may be rounded to milliseconds. So the samples are taken from the beginning, and counted here.
    with _plain_errors():
        audio = _open(data, "Audio")
        if audio is None:
            return None
        rate, channels = audio.metadata.sample_rate, audio.metadata.num_channels
        if not rate or not channels:
            raise ValueError("its audio codec is not known")
        begin = audio.metadata.begin_stream_seconds_from_header or 0.0
        zero = _origin(data, None, audio) if with_video else max(0.0, begin)
        longest = max_bytes // (4 * channels)
        stops = [max(0.0, begin) + longest / rate, math.inf if end is None else zero + end]
        # audio alone is counted from its first sample, and a file's header may be wrong about the second of that
        stop = min(stops) + (0.01 if with_video else 1)
        found = _samples(audio, _BEFORE, stop)
        first = round(start * rate)
        if found is None:
            return np.empty((channels, 0), np.float32), rate, first / rate
        count = found.data.shape[1]
        place = round((found.pts_seconds - zero) * rate) if with_video else 0
        if with_video and count < (stop - found.pts_seconds - _SHORTEST_PAUSE) * rate:
            after = found.pts_seconds + count / rate
            if _samples(audio, after + _SHORTEST_PAUSE, None) is not None:
                raise ValueError(
                    f"its audio pauses before second {after - zero:g}, and torchcodec does not say where; use "
                    "backend='pyav', which fills pauses with silence, or audio=False"
                )
        last = count if end is None else round(end * rate) - place
        if min(last, count) > longest:
            raise ValueError(f"its audio takes more than max_bytes={max_bytes:,} up to the end of the clip; raise it")
        if end is None or last > count:
            kind = "flac" if data.startswith(b"fLaC", tag_size(data)) else audio.metadata.codec
            check_count(data, kind, count, round((audio.metadata.duration_seconds_from_header or 0) * rate))
    skipped = max(0, first - place)
    values: Values = np.array(found.data[:, skipped : max(skipped, last)].numpy(), order="C")
    return values, rate, (place + skipped if values.shape[1] else first) / rate


class _Video:
    """The video of a file: its frames by number, with their seconds."""

    def __init__(self, data: bytes, max_bytes: int) -> None:
        decoder = _open(data, "Video", dimension_order="NHWC")
        if decoder is None:
            raise ValueError("it has no video stream")
        facts = decoder.metadata
        size = (facts.width or 0) * (facts.height or 0) * 3
        if size > max_bytes:
            raise ValueError(f"each of its frames takes {size:,} bytes, more than max_bytes={max_bytes:,}")
        if facts.codec in ("mjpeg", "png") and len(decoder) == 1 and _open(data, "Audio") is not None:
            raise ValueError("it has no video stream, only audio and a cover")
        self.count: int = len(decoder)
        rate = facts.average_fps_from_header  # an int if it is whole
        self.rate = float(rate) if rate else None
        self._origin = _origin(data, decoder, None)
        self._decoder = decoder
        self._last: tuple[int, float, Pixels] | None = None

    def read(self, number: int) -> tuple[float, Pixels]:
        """Decodes a frame; returns its second and its pixels."""
        if self._last is None or self._last[0] != number:
            frame = self._decoder.get_frame_at(number)
            # times of files that begin at 0 are not touched: they are what PyAV gives
            time = round(frame.pts_seconds - self._origin, 9) if self._origin else frame.pts_seconds
            self._last = number, time, frame.data.numpy()
        return self._last[1:]

    def find(self, start: float) -> int:
        """Finds the number of the first frame at or after a second; the number of frames if there is none."""
        # At a constant rate these are two frames: the one before, and the one that is found. The next guesses go 1, 2,
        # 4, ... frames on in the direction that is missing; from where the frame is enclosed, they halve the rest.
        low, high, step = 0, self.count, 1
        guess = math.ceil(start * (self._decoder.metadata.average_fps or 0)) - 1
        while low < high:
            guess = min(max(guess, low), high - 1)
            if self.read(guess)[0] < start:
                low, guess = guess + 1, guess + step
            else:
                high, guess = guess, guess - step
            if low > 0 and high < self.count:
                guess = (low + high) // 2
            step *= 2
        return low


def _samples(audio: Any, start: float, stop: float | None) -> Any:
    """Decodes a range of audio; None if it is empty."""
    try:
        found = audio.get_samples_played_in_range(start, None if stop is None or math.isinf(stop) else stop)
    except RuntimeError as error:
        if "No audio frames were decoded" in str(error):
            return None
        raise
    return found if found.data.shape[1] else None


def _origin(data: bytes, video: Any, audio: Any) -> float:
    """Returns the time of second 0: that of the stream that begins first, but at least 0."""
    starts = []
    for given, kind in ((video, "Video"), (audio, "Audio")):
        decoder = given if given is not None else _open(data, kind)
        start = None if decoder is None else decoder.metadata.begin_stream_seconds_from_header
        if start is not None:
            if start <= 0:
                return 0.0
            starts.append(start)
    return min(starts, default=0.0)


def _open(data: bytes, kind: str, **options: Any) -> Any:
    """Opens the video or the audio of a file that is whole and has a known format; None if there is none."""
    if cut := find_cut(data):
        raise ValueError(cut)
    if not _is_media(data):
        raise ValueError("it is not a file of the formats that are read here")
    decoders = import_torchcodec().decoders
    try:
        return getattr(decoders, f"{kind}Decoder")(data, **options)
    except ValueError as error:
        if f"best {kind.lower()} stream is unknown" in str(error):
            return None
        raise
    except RuntimeError as error:
        if "Could not load libtorchcodec" in str(error):  # torchcodec from 0.16 on loads FFmpeg when it is needed
            raise _not_loaded(error) from error
        raise


def _is_media(data: bytes) -> bool:
    """Returns whether a file begins like those of the accepted formats, and not like a script."""
    start = tag_size(data)
    has_padding = start > 0 and data[start : start + 1] == b"\0"
    texts = [data[place : place + _PROBED].partition(b"\0")[0] for place in (0, start)]
    return (has_padding or _BEGINNINGS.match(data, start) is not None) and not any(map(_SCRIPTS.search, texts))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turns torchcodec's exceptions into errors without the place in its sources."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        reason = _PLACE.sub("", str(error).partition("\n")[0])
        raise ValueError(f"torchcodec cannot decode it, it may be damaged: {reason}") from error


def import_torchcodec() -> Any:
    """Imports torchcodec, which is optional, and needs FFmpeg's libraries."""
    try:
        return import_optional("torchcodec", extra="torchcodec", fields='fields that wds_decode("torchcodec") decodes')
    except MissingPackageError:
        raise
    except (ImportError, RuntimeError, OSError) as error:
        raise _not_loaded(error) from error


def _not_loaded(error: Exception) -> MissingPackageError:
    import torch

    reason = str(error.__cause__ or error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return MissingPackageError(
        f"torchcodec is installed, but does not load ({reason}). It needs the shared libraries of FFmpeg (apt install "
        f"ffmpeg, or conda install ffmpeg), and a build for torch {torch.__version__}. torch_video and torch_audio by "
        "PyAV need neither: pip install 'torchdata_wds[media]'",
        name="torchcodec",
    )
