"""Decoders of video and audio fields: ``torch_video`` and ``torch_audio``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, overload

from torchdata_wds.checks import check_choice, check_flags, checked_int, is_number
from torchdata_wds.codecs.media import streams, torchcodec
from torchdata_wds.codecs.plans import changed_options, shown_call
from torchdata_wds.codecs.table import ExtensionDecoder, matches, parse_extensions

VIDEO_FIELDS = "mp4 avi mov mkv webm mpg mjpeg ogv h264 wmv"
AUDIO_FIELDS = "flac wav mp3 ogg m4a sox wma opus aac"

#: The default limit on what the frames or the audio of a field may take: 4 GiB.
DEFAULT_MAX_BYTES = 2**32

#: What decodes -> the module with its functions.
BACKENDS: dict[str, Any] = {"pyav": streams, "torchcodec": torchcodec}


@dataclass(frozen=True, kw_only=True, repr=False)
class _MediaDecoder(ExtensionDecoder):
    """What both decoders share: a span of seconds, and a limit on its size."""

    name: ClassVar[str]
    start: float = 0.0
    end: float | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    backend: str = "pyav"

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.start if self.end is None else self.end)):
            if not is_number(value):
                raise TypeError(f"{name} must be a number of seconds, not {value!r}")
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a second from 0 on, not {value}")
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end must come after start={self.start}, not at {self.end}")
        checked_int("max_bytes", self.max_bytes, 1)
        check_choice("backend", self.backend, BACKENDS)

    def __call__(self, *field: Any, **options: Any) -> Any:
        """Decodes a field, or makes another decoder."""
        if not field:
            return replace(self, **options)
        key, data = field
        return self.decode(data) if matches(key, self.extensions) else None

    def decode(self, data: bytes) -> Any:
        """Decodes the bytes of a file, under any field name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return shown_call(self.name, self) if changed_options(self) else self.name


@dataclass(frozen=True, kw_only=True, repr=False)
class VideoDecoder(_MediaDecoder):
    """Decodes video fields into frames and audio, for ``.wds_decode(torch_video)``; ``torch_video`` is an instance.

    Called with options, as ``torch_video(start=2, max_frames=16)``, it returns a decoder that has them. The fields are
    ``mp4 avi mov mkv webm mpg mjpeg ogv h264 wmv``; for others, use ``handle_extension("m4v", torch_video.decode)``.
    The value is the tuple ``(frames, audio, info)`` of torchvision's ``read_video`` and webdataset's ``torch_video``:

    - ``frames``: uint8 tensor (T, H, W, 3), RGB in 0..255, in display order, turned upright;
    - ``audio``: float32 tensor (channels, n) in -1..1 from ``start`` on, with silence in gaps of more than 0.1 s
      between the file's times; (0, 0) if there is none;
    - ``info``: ``video_fps`` (float or None), ``video_pts`` (float64 tensor (T,), the second of each frame), and with
      audio ``audio_fps`` (int, samples per second) and ``audio_start`` (float, the second of the first sample).

    Seconds count from the beginning of the file, as in FFmpeg. A clip begins with the first frame at or after
    ``start``, wherever the keyframes are. If ``max_frames`` leaves frames out, the audio ends where the first of these
    begins. Files with a variable frame rate yield the frames that they have. The first stream of each kind is decoded.

    FFmpeg (PyAV, the ``[media]`` extra) decodes from memory, in one thread, and reads only the field's bytes:
    playlists and scripts that name other files are refused. Damage that FFmpeg notices raises, up to the next keyframe,
    as does an MP4, MOV, Matroska, WebM, AVI or Ogg file that is cut off. A cut in an MPEG, WMV or raw stream, changed
    values without checksums, a frame lost from WebM, or a wrong table in an MP4 header goes unnoticed.

    ``backend="torchcodec"`` (the ``[torchcodec]`` extra and FFmpeg's shared libraries) decodes faster to equal values;
    only the pixels of videos with more than 8 bits, or of another version of FFmpeg, differ a little. It notices less
    damage: not what FFmpeg conceals within a frame. It refuses raw H.264 and some MPEG streams, and audio with a pause;
    it rotates frames, but does not mirror them; and it decodes the stream of each kind that FFmpeg finds best.

    Args:
        start: The second at which the clip begins.
        end: The second before which it ends; None for the end of the file.
        stride: Take every n-th frame, beginning with the first of the clip.
        max_frames: The maximum number of frames; None for all.
        audio: Whether to decode the audio, too.
        max_bytes: The most that frames and audio may each take, in bytes; more is an error.
        backend: ``"pyav"`` or ``"torchcodec"``; ``wds_decode("torchcodec")`` is short for both decoders by the latter.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.
        ImportError: when decoding, if the backend is not installed or does not load.
        ValueError, av.FFmpegError: for no video, no frame in the clip, damage, or more than ``max_bytes``.

    Example:
        >>> decoder = torch_video(start=1.5, stride=2, max_frames=8)
        >>> decoder(".txt", b"not a video") is None
        True
    """

    name = "torch_video"
    extensions = parse_extensions("extensions", VIDEO_FIELDS)
    stride: int = 1
    max_frames: int | None = None
    audio: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(audio=self.audio)
        checked_int("stride", self.stride, 1)
        if self.max_frames is not None:
            checked_int("max_frames", self.max_frames, 1)

    @overload
    def __call__(self, key: str, data: bytes, /) -> Any: ...

    @overload
    def __call__(
        self,
        *,
        start: float = ...,
        end: float | None = ...,
        stride: int = ...,
        max_frames: int | None = ...,
        audio: bool = ...,
        max_bytes: int = ...,
        backend: str = ...,
    ) -> VideoDecoder: ...

    def __call__(self, *field: Any, **options: Any) -> Any:
        """Decodes a video field, or returns None for any other; called with options, returns a decoder with these."""
        return super().__call__(*field, **options)

    def decode(self, data: bytes) -> Any:
        """Decodes the bytes of a video file into ``(frames, audio, info)``, under any field name."""
        import torch

        backend = BACKENDS[self.backend]
        pixels, times, rate, end = backend.read_frames(
            data, self.start, self.end, stride=self.stride, max_frames=self.max_frames, max_bytes=self.max_bytes
        )
        info = {"video_fps": rate, "video_pts": torch.tensor(times, dtype=torch.float64)}
        found = backend.read_samples(data, self.start, end, self.max_bytes, with_video=True) if self.audio else None
        if found is None:
            return torch.from_numpy(pixels), torch.empty((0, 0), dtype=torch.float32), info
        info.update(audio_fps=found[1], audio_start=found[2])
        return torch.from_numpy(pixels), torch.from_numpy(found[0]), info


@dataclass(frozen=True, kw_only=True, repr=False)
class AudioDecoder(_MediaDecoder):
    r"""Decodes audio fields into samples, for ``.wds_decode(torch_audio)``; ``torch_audio`` is an instance.

    Called with options, as ``torch_audio(start=2, end=12)``, it returns a decoder that has them. The fields are ``flac
    wav mp3 ogg m4a sox wma opus aac``; for others, such as the audio of a video, use ``handle_extension("mp4",
    torch_audio.decode)``. The value is the tuple ``(samples, rate)`` of torchaudio's ``load`` and webdataset's
    ``torch_audio``: a float32 tensor (channels, n) in -1..1 (float files may exceed it), and samples per second (int).

    Integer samples are divided by their full scale, so 16 and 24 bits are exact. Seconds count from the first sample
    and are rounded to the nearest sample. Trust and damage are as with ``torch_video``; FLAC is also checked by its
    checksums, and MP3 by its length if the file states it.

    Args:
        start: The second at which to begin.
        end: The second before which to end; None for the end of the file.
        max_bytes: The most that the samples may take, in bytes; more is an error.
        backend: ``"pyav"``, or ``"torchcodec"``, which does not compare FLAC's checksums.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.
        ImportError: when decoding, if the backend is not installed or does not load.
        ValueError, av.FFmpegError: for no audio, no sample in the span, damage, or more than ``max_bytes``.

    Example:
        >>> import io, wave
        >>> file = io.BytesIO()
        >>> with wave.open(file, "wb") as wav:
        ...     wav.setparams((1, 2, 8000, 0, "NONE", ""))
        ...     wav.writeframes(b"\x00\x40\x00\xc0")
        >>> torch_audio(".wav", file.getvalue())
        (tensor([[ 0.5000, -0.5000]]), 8000)
    """

    name = "torch_audio"
    extensions = parse_extensions("extensions", AUDIO_FIELDS)

    @overload
    def __call__(self, key: str, data: bytes, /) -> Any: ...

    @overload
    def __call__(
        self, *, start: float = ..., end: float | None = ..., max_bytes: int = ..., backend: str = ...
    ) -> AudioDecoder: ...

    def __call__(self, *field: Any, **options: Any) -> Any:
        """Decodes an audio field, or returns None for any other; called with options, returns a decoder with these."""
        return super().__call__(*field, **options)

    def decode(self, data: bytes) -> Any:
        """Decodes the bytes of an audio file into ``(samples, rate)``, under any field name."""
        import torch

        found = BACKENDS[self.backend].read_samples(data, self.start, self.end, self.max_bytes, with_video=False)
        if found is None:
            raise ValueError("it has no audio stream")
        samples, rate, _ = found
        if not samples.shape[1]:
            before = "" if self.end is None else f" and before second {self.end:g}"
            raise ValueError(f"there is no sample from second {self.start:g} on{before}")
        return torch.from_numpy(samples), rate


torch_video, torch_audio = VideoDecoder(), AudioDecoder()
