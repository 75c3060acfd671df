"""torch_video and torch_audio, on clips that the tests encode with PyAV."""

import io
import itertools
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from torchdata_wds.codecs import Decoder
from torchdata_wds.codecs.media import VIDEO_FIELDS, AudioDecoder, VideoDecoder, torch_audio, torch_video
from torchdata_wds.codecs.media import files as media_files
from torchdata_wds.codecs.media.files import find_cut
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.errors import DecodingError

RATE = 10


def picture(number: int, size: tuple[int, int] = (16, 16)) -> np.ndarray[Any, Any]:
    """One frame of noise, HWC: each number its own."""
    return np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def write_video(
    frames: Sequence[np.ndarray[Any, Any]],
    *,
    container: str = "matroska",
    codec: str = "ffv1",
    pixels: str = "bgr0",
    gop: int = 4,
    times: Sequence[int] | None = None,
    turned: Mapping[str, Any] | None = None,
    options: dict[str, str] | None = None,
    muxing: dict[str, str] | None = None,
    sound: np.ndarray[Any, Any] | None = None,
    pause: int = 0,
) -> bytes:
    """A video file, lossless by default; with `sound`, int16 of shape (1, n), FLAC at 8,000 samples a second."""
    out = io.BytesIO()
    with av.open(out, "w", format=container, container_options=muxing or {}) as file:
        video = file.add_stream(codec, rate=RATE, options=options or {})
        video.height, video.width = frames[0].shape[:2]
        video.pix_fmt = pixels
        video.codec_context.gop_size = gop
        if turned is not None:
            video.set_display_rotation(**turned)
        audio = None if sound is None else add_audio(file, "flac", 8000, "s16", "mono")
        for number, values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts = number if times is None else times[number]
            frame.time_base = Fraction(1, RATE)
            file.mux(video.encode(frame))
        file.mux(video.encode(None))
        if audio is not None:
            write_samples(file, audio, sound, pause)
    return out.getvalue()


def png() -> bytes:
    """A picture."""
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, "PNG")
    return out.getvalue()


def add_audio(file: Any, codec: str, rate: int, kind: str, layout: str) -> Any:
    stream = file.add_stream(codec, rate=rate)
    stream.layout = layout
    stream.format = kind
    return stream


def write_samples(file: Any, stream: Any, values: Any, pause: int = 0) -> None:
    """Writes audio; with `pause`, that many samples are not there between the first half and the second."""
    half = values.shape[1] // 2
    step = stream.codec_context.frame_size or 1024
    for first in range(0, values.shape[1], step):
        part = values[:, first : first + step]
        plain = part if stream.format.is_planar else part.T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(plain), stream.format.name, stream.layout.name)
        frame.rate = stream.rate
        frame.pts = first + (pause if first >= half else 0)
        frame.time_base = Fraction(1, stream.rate)
        file.mux(stream.encode(frame))
    file.mux(stream.encode(None))


def write_audio(
    values: np.ndarray[Any, Any],
    *,
    container: str = "flac",
    codec: str = "flac",
    kind: str = "s16",
    rate: int = 8000,
    layout: str = "mono",
) -> bytes:
    """An audio file of samples (channels, n)."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        write_samples(file, add_audio(file, codec, rate, kind, layout), values)
    return out.getvalue()


def noise(count: int, kind: Any = np.int16, channels: int = 1) -> np.ndarray[Any, Any]:
    """Samples of full scale."""
    rng = np.random.default_rng(3)
    if np.issubdtype(kind, np.floating):
        return rng.uniform(-1, 1, (channels, count)).astype(kind)
    limits = np.iinfo(kind)
    return rng.integers(limits.min, limits.max, (channels, count), dtype=kind, endpoint=True)


PICTURES = [picture(number) for number in range(10)]
SOUND = noise(8000)
CLIP = write_video(PICTURES, sound=SOUND)


# --------------------------------------------------------------------------------------------------------- video
def test_torch_video_gives_the_very_frames_and_samples_when_the_codecs_are_lossless() -> None:
    """Frames (T, H, W, C) uint8, samples (channels, n) float32 with their rates, as webdataset's users unpack them."""
    frames, audio, info = torch_video(".mkv", CLIP)
    assert (frames.dtype, tuple(frames.shape)) == (torch.uint8, (10, 16, 16, 3))
    assert np.array_equal(frames.numpy(), np.stack(PICTURES))
    assert (audio.dtype, tuple(audio.shape)) == (torch.float32, (1, 8000))
    assert np.array_equal(audio.numpy(), SOUND / np.float32(2**15))
    assert (info["video_fps"], info["audio_fps"], info["audio_start"]) == (10.0, 8000, 0.0)
    assert [type(info[name]) for name in ("video_fps", "audio_fps", "audio_start")] == [float, int, float]
    assert info["video_pts"].tolist() == [number / 10 for number in range(10)]


def test_torch_video_gives_a_clip_when_it_has_options() -> None:
    """The start is in the clip, the end is not; the audio goes with the frames."""
    for options, numbers, samples in [
        ({"start": 0.3}, range(3, 10), (2400, 8000)),
        ({"start": 0.25}, range(3, 10), (2000, 8000)),
        ({"end": 0.3}, range(3), (0, 2400)),
        ({"start": 0.5, "end": 0.8}, range(5, 8), (4000, 6400)),
        ({"stride": 3}, (0, 3, 6, 9), (0, 8000)),
        ({"start": 0.1, "stride": 4}, (1, 5, 9), (800, 8000)),
        ({"max_frames": 4}, range(4), (0, 3200)),
        ({"max_frames": 10}, range(10), (0, 8000)),
        ({"start": 0.2, "end": 0.9, "stride": 2, "max_frames": 2}, (2, 4), (1600, 4000)),
    ]:
        frames, audio, info = torch_video(**options)(".mkv", CLIP)
        assert np.array_equal(frames.numpy(), np.stack([PICTURES[number] for number in numbers]))
        assert info["video_pts"].tolist() == [number / 10 for number in numbers]
        assert np.array_equal(audio.numpy(), SOUND[:, slice(*samples)] / np.float32(2**15))
        assert info["audio_start"] == samples[0] / 8000


B_FRAMES = {"bf": "2"}
OPEN = {"bf": "2", "x264-params": "open-gop=1:keyint=4:min-keyint=4:scenecut=0"}
CODED = [
    ("mkv", {}),
    ("mp4", {"container": "mp4", "codec": "libx264", "pixels": "yuv420p", "options": B_FRAMES}),
    ("mov", {"container": "mov", "codec": "libx264", "pixels": "yuv420p", "options": OPEN}),
    ("mp4", {"container": "mp4", "codec": "mpeg4", "pixels": "yuv420p", "options": B_FRAMES}),
    ("avi", {"container": "avi", "codec": "mpeg4", "pixels": "yuv420p"}),
    ("webm", {"container": "webm", "codec": "libvpx", "pixels": "yuv420p", "options": {"deadline": "realtime"}}),
    ("mpg", {"container": "mpeg", "codec": "mpeg2video", "pixels": "yuv420p", "options": B_FRAMES}),
    ("mpg", {"container": "mpegts", "codec": "mpeg2video", "pixels": "yuv420p"}),
    ("wmv", {"container": "asf", "codec": "wmv2", "pixels": "yuv420p"}),
    ("mjpeg", {"container": "mjpeg", "codec": "mjpeg", "pixels": "yuvj420p"}),
    ("h264", {"container": "h264", "codec": "libx264", "pixels": "yuv420p", "options": B_FRAMES}),
]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        pytest.param(*case, id=f"{case[0]}-{number}", marks=[] if number in (0, 2, 4, 7) else pytest.mark.slow)
        for number, case in enumerate(CODED)
    ],
)
def test_torch_video_begins_at_the_very_frame_when_it_seeks(field: str, options: dict[str, Any]) -> None:
    """With keyframes, frames that are decoded in another order, and no index: a clip is a slice of the whole."""
    data = write_video([np.full((16, 16, 3), number * 20, np.uint8) for number in range(12)], **options)
    whole, _, info = torch_video(field, data)
    shades = whole.float().mean(dim=(1, 2, 3))
    assert len(whole) == 12
    assert info["video_pts"][0] == 0  # whatever the file counts from
    assert bool((shades.diff() > 10).all())
    for number in (1, 3, 4, 5, 9, 11):
        clip, _, part = torch_video(start=info["video_pts"][number].item())(field, data)
        assert torch.equal(clip, whole[number:])
        assert torch.equal(part["video_pts"], info["video_pts"][number:])


def test_torch_video_begins_at_the_very_frame_when_times_are_guessed() -> None:
    """MPEG program streams need not say when each frame is shown: what FFmpeg guesses depends on where it began."""
    times = [9, 10, 13, 14, 16, 17, 19, 21, 28, 33, 38, 39, 41, 42, 46, 47, 51, 55, 58, 59, 60, 61, 64]
    frames = [np.full((64, 64, 3), number * 10, np.uint8) for number in range(len(times))]
    coded = {"container": "mpeg", "codec": "mpeg2video", "pixels": "yuv420p", "options": B_FRAMES}
    data = write_video(frames, **coded, times=times, gop=1)
    whole, _, info = torch_video(".mpg", data)
    for number in (2, 19):
        clip, _, part = torch_video(start=info["video_pts"][number].item() - 0.05)(".mpg", data)
        assert torch.equal(clip, whole[number:])
        assert torch.equal(part["video_pts"], info["video_pts"][number:])


def test_torch_video_keeps_sizes_and_times_when_they_are_odd() -> None:
    """No padding of FFmpeg's lines is in the frames; with a variable rate nothing is repeated or left out."""
    data = write_video(PICTURES[:4], times=[0, 1, 5, 6])
    frames, _, info = torch_video(".mkv", data)
    assert np.array_equal(frames.numpy(), np.stack(PICTURES[:4]))
    assert info["video_pts"].tolist() == [0, 0.1, 0.5, 0.6]
    assert torch_video(start=0.2, end=0.6)(".mkv", data)[2]["video_pts"].tolist() == [0.5]
    frames = [picture(number, (17, 13)) for number in range(2)]
    assert np.array_equal(torch_video(".mkv", write_video(frames))[0].numpy(), np.stack(frames))


def test_torch_video_turns_frames_upright_when_the_file_says_so() -> None:
    """Phones write what the sensor gives, and how to turn it."""
    for turned, expected in [
        ({"degrees": 0}, lambda image: image),
        ({"degrees": 90}, lambda image: np.rot90(image)),
        ({"degrees": 180}, lambda image: np.rot90(image, 2)),
        ({"degrees": 270}, lambda image: np.rot90(image, 3)),
        ({"degrees": 0, "hflip": True}, lambda image: image[:, ::-1]),
        ({"degrees": 0, "vflip": True}, lambda image: image[::-1]),
        ({"degrees": 90, "hflip": True}, lambda image: np.rot90(image)[:, ::-1]),
        ({"degrees": 270, "hflip": True}, lambda image: np.rot90(image, 3)[:, ::-1]),
    ]:
        frames = [picture(number, (16, 12)) for number in range(2)]
        values, _, _ = torch_video(
            ".mov", write_video(frames, container="mov", codec="qtrle", pixels="rgb24", turned=turned)
        )
        assert np.array_equal(values.numpy(), np.stack([expected(frame) for frame in frames]))


def test_torch_video_keeps_audio_with_the_frames_when_it_pauses() -> None:
    """Recorders leave out what is lost on the way: samples behind it stay at their time, silence fills it up."""
    for span in [(0, None), (0.9, None), (1.2, None), (1.4, 1.6), (0.2, 0.4), (0.4, 1.9), (1.0, 1.1)]:
        sound = noise(9216)
        data = write_video([picture(number) for number in range(20)], sound=sound, pause=4800)
        expected = np.concatenate([sound[:, :4608], np.zeros((1, 4800), np.int16), sound[:, 4608:]], axis=1)
        first, last = round(span[0] * 8000), None if span[1] is None else round(span[1] * 8000)
        _, audio, info = torch_video(start=span[0], end=span[1])(".mkv", data)
        assert info["audio_start"] == span[0]
        assert np.array_equal(audio.numpy(), expected[:, first:last] / np.float32(2**15))


def test_torch_video_fills_no_more_than_it_may_when_audio_pauses() -> None:
    """A time far away is no order to fill the memory."""
    data = write_video(PICTURES, sound=noise(9216), pause=10**9)
    with pytest.raises(ValueError, match="its audio takes more than max_bytes=1,000,000"):
        torch_video(max_bytes=10**6)(".mkv", data)


def test_torch_video_has_empty_audio_when_there_is_none() -> None:
    """The tuple has three parts all the same; audio=False leaves it out where there is some."""
    for audio, info in (torch_video(".mkv", write_video(PICTURES))[1:], torch_video(audio=False)(".mkv", CLIP)[1:]):
        assert tuple(audio.shape) == (0, 0)
        assert set(info) == {"video_fps", "video_pts"}


def test_torch_video_raises_when_there_is_no_video() -> None:
    """Audio under the name of a video; a song has a cover, and is not a video of one frame."""
    with pytest.raises(ValueError, match=r"no video stream, only \['audio'\]"):
        torch_video(".mp4", write_audio(SOUND))
    flac, cover = write_audio(SOUND), png()
    head = b"\0\0\0\x03\0\0\0\x09image/png\0\0\0\0" + b"".join(
        number.to_bytes(4) for number in (4, 4, 24, 0, len(cover))
    )
    block = b"\x06" + (len(head) + len(cover)).to_bytes(3) + head + cover
    song = flac[:4] + b"\0" + flac[5:42] + block + flac[42:]  # behind the first block, which is no longer the last
    assert torch.equal(torch_audio.decode(song)[0], torch_audio.decode(flac)[0])
    with pytest.raises(ValueError, match=r"no video stream, only \['audio', 'cover'\]"):
        torch_video.decode(song)


def test_torch_video_raises_when_frames_change_in_size() -> None:
    """They fit in no tensor; sizes that the stream tells later are bounded before memory is taken for them."""
    parts = [[picture(number, (size, size)) for number in range(4)] for size in (16, 64)]
    data = b"".join(write_video(part, container="h264", codec="libx264", pixels="yuv420p") for part in parts)
    with pytest.raises(ValueError, match=r"change in size, from \(16, 16\) to \(64, 64\) rows"):
        torch_video.decode(data)
    with pytest.raises(av.error.InvalidDataError):
        torch_video(max_bytes=16 * 16 * 3 * 10).decode(data)


def test_torch_video_raises_when_no_frame_is_in_the_clip() -> None:
    """An empty clip would fail in the model, where nobody knows the sample any more."""
    for options in [{"start": 1.0}, {"start": 500.0}, {"start": 0.31, "end": 0.39}]:
        with pytest.raises(ValueError, match="no frame is at or after second"):
            torch_video(**options)(".mkv", CLIP)


def test_torch_video_raises_when_the_frames_take_too_much_memory() -> None:
    """A small file can hold a long video: what it decodes to is bounded."""
    size = 16 * 16 * 3
    assert len(torch_video(max_bytes=10 * size, audio=False)(".mkv", CLIP)[0]) == 10
    with pytest.raises(ValueError, match=r"more than max_bytes=7,679.*second 0.9"):
        torch_video(max_bytes=10 * size - 1, audio=False)(".mkv", CLIP)
    with pytest.raises(ValueError, match="each of its frames takes 768 bytes, more than max_bytes=767"):
        torch_video(max_bytes=size - 1)(".mkv", CLIP)
    with pytest.raises(ValueError, match="its audio takes more than max_bytes=8,000"):
        torch_video(max_bytes=8000)(".mkv", CLIP)


# --------------------------------------------------------------------------------------------------------- audio
def test_torch_audio_gives_the_very_samples_when_the_codec_is_lossless() -> None:
    """Planar and packed, of all depths: float32 of shape (channels, n), integers divided by their full scale."""
    for field, kind, layout, options in [
        ("flac", np.int16, "stereo", {"kind": "s16"}),
        ("wav", np.uint8, "mono", {"container": "wav", "codec": "pcm_u8", "kind": "u8"}),
        ("wav", np.int16, "5.1", {"container": "wav", "codec": "pcm_s16le", "kind": "s16"}),
        ("wav", np.int32, "stereo", {"container": "wav", "codec": "pcm_s32le", "kind": "s32"}),
        ("wav", np.float32, "stereo", {"container": "wav", "codec": "pcm_f32le", "kind": "flt"}),
        ("wav", np.float64, "mono", {"container": "wav", "codec": "pcm_f64le", "kind": "dbl"}),
        ("ogg", np.int16, "mono", {"container": "ogg", "codec": "flac", "kind": "s16"}),
        ("m4a", np.int16, "stereo", {"container": "ipod", "codec": "alac", "kind": "s16p"}),
    ]:
        values = noise(3000, kind, len(av.AudioLayout(layout).channels))
        samples, rate = torch_audio(field, write_audio(values, layout=layout, **options))
        full = 1 if np.issubdtype(kind, np.floating) else float(2 ** (8 * values.itemsize - 1))
        expected = (values.astype(np.float64) - (128 if kind is np.uint8 else 0)) / full
        assert (samples.dtype, rate) == (torch.float32, 8000)
        assert np.array_equal(samples.numpy(), expected.astype(np.float32))
        assert samples.abs().max() <= 1


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("flac", {}),
        ("wav", {"container": "wav", "codec": "pcm_s16le"}),
        ("m4a", {"container": "ipod", "codec": "alac", "kind": "s16p"}),
        ("m4a", {"container": "ipod", "codec": "aac", "kind": "fltp"}),
        ("mp3", {"container": "mp3", "codec": "libmp3lame", "kind": "fltp"}),
        ("opus", {"container": "ogg", "codec": "libopus", "kind": "flt"}),
        pytest.param("aac", {"container": "adts", "codec": "aac", "kind": "fltp"}, marks=pytest.mark.slow),
    ],
)
def test_torch_audio_gives_a_slice_of_the_whole_when_it_has_options(field: str, options: dict[str, Any]) -> None:
    """To the sample, whatever the codec takes over from one frame to the next."""
    kind = np.float32 if "flt" in options.get("kind", "") else np.int16
    data = write_audio(noise(20000, kind), **options)
    whole, rate = torch_audio(field, data)
    for start, end in ((0.5, None), (1.23, 1.4), (0, 0.1), (2.0, 2.1)):
        part, _ = torch_audio(start=start, end=end)(field, data)
        assert torch.equal(part, whole[:, round(start * rate) : None if end is None else round(end * rate)])


def test_torch_audio_takes_the_audio_of_a_video_and_raises_when_there_is_none() -> None:
    """`decode` does not look at the name; no stream, and no sample in the span, are errors."""
    samples, rate = torch_audio.decode(CLIP)
    assert (tuple(samples.shape), rate) == ((1, 8000), 8000)
    with pytest.raises(ValueError, match="it has no audio stream"):
        torch_audio(".wav", write_video(PICTURES))
    with pytest.raises(ValueError, match="no sample from second 1 on and before second 2"):
        torch_audio(start=1.0, end=2)(".flac", write_audio(SOUND))


# --------------------------------------------------------------------------------------------- as decoders of a stage
def test_torch_audio_reads_a_file_when_its_title_is_no_text() -> None:
    """Old tags have other encodings, and are not needed."""
    out = io.BytesIO()
    with av.open(out, "w", format="wav") as file:
        file.metadata["title"] = "12345678"
        write_samples(file, add_audio(file, "pcm_s16le", 8000, "s16", "mono"), SOUND)
    data = out.getvalue()
    assert data.count(b"12345678") == 1
    samples, _ = torch_audio("wav", data.replace(b"12345678", "Grüße àé".encode("latin-1")))
    assert np.array_equal(samples.numpy(), SOUND / np.float32(2**15))


def test_decoders_take_fields_of_their_kind() -> None:
    """By the last part, in any case, with a leading dot; both stand in one stage, and leave the rest."""
    for name in [*VIDEO_FIELDS.split(), "MP4", "left.mp4"]:
        assert torch_video("." + name, CLIP) is not None
    decoder = Decoder(torch_video, torch_audio)
    sample = decoder({"__key__": "a", "mkv": CLIP, "flac": write_audio(SOUND), "cls": b"3", "bin": b"x"})
    assert (len(sample["mkv"]), len(sample["flac"]), sample["cls"], sample["bin"]) == (3, 2, 3, b"x")


def test_decoders_pickle_when_they_have_options() -> None:
    """They go to worker processes; their repr is how they are written."""
    video = torch_video(start=1, max_frames=3)
    copy = pickle.loads(pickle.dumps(video))
    assert isinstance(copy, VideoDecoder)
    assert (copy.start, copy.max_frames) == (1, 3)
    assert repr(copy) == repr(video) == "torch_video(start=1, max_frames=3)"
    assert repr(pickle.loads(pickle.dumps(torch_audio(end=2.5)))) == "torch_audio(end=2.5)"
    assert repr(torch_video(stride=2)(end=4)) == "torch_video(end=4, stride=2)"
    assert isinstance(torch_audio(end=1), AudioDecoder)
    assert repr(Decoder(torch_video, torch_audio)) == "Decoder(torch_video, torch_audio)"


def test_torch_video_refuses_an_option_when_it_makes_no_sense() -> None:
    """When the decoder is made, not at the first sample."""
    for options, error, words in [
        ({"start": -1}, ValueError, "start must be a second from 0 on"),
        ({"start": float("nan")}, ValueError, "start must be a second from 0 on"),
        ({"start": "1"}, TypeError, "start must be a number of seconds"),
        ({"start": 2, "end": 2}, ValueError, "end must come after start=2"),
        ({"end": 0}, ValueError, "end must come after"),
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"stride": 1.5}, TypeError, "stride must be a whole number"),
        ({"max_frames": 0}, ValueError, "max_frames must be at least 1"),
        ({"max_bytes": True}, TypeError, "max_bytes must be a whole number"),
        ({"audio": None}, TypeError, "audio must be True or False"),
        ({"step": 2}, TypeError, "step"),
    ]:
        with pytest.raises(error, match=words):
            torch_video(**options)
        if set(options) & {"start", "end"}:
            with pytest.raises(error, match=words):
                torch_audio(**options)


def test_decoders_name_the_extra_when_av_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a DecodingError, which a handler would skip for every sample."""
    monkeypatch.setitem(sys.modules, "av", None)
    for decoder, field in ((torch_video, "mp4"), (torch_audio, "wav")):
        with pytest.raises(MissingPackageError, match=r"pip install 'torchdata_wds\[media\]'"):
            Decoder(decoder)({field: CLIP})


# --------------------------------------------------------------------------------------------------- damage and trust
FRAGMENTED = {"container": "mp4", "codec": "libx264", "pixels": "yuv420p", "muxing": {"movflags": "empty_moov"}}
WHOLE: dict[str, tuple[str, bytes]] = {
    "mkv": ("mkv", CLIP),
    "mp4": ("mp4", write_video(PICTURES, container="mp4", codec="libx264", pixels="yuv420p")),
    "fragmented mp4": ("mp4", write_video(PICTURES, **FRAGMENTED)),
    "avi": ("avi", write_video(PICTURES, container="avi", codec="mpeg4", pixels="yuv420p")),
    "wav": ("wav", write_audio(SOUND, container="wav", codec="pcm_s16le")),
    "flac": ("flac", write_audio(SOUND)),
    "ogg": ("ogg", write_audio(SOUND, container="ogg")),
    "mp3": ("mp3", write_audio(noise(30000, np.float32), container="mp3", codec="libmp3lame", kind="fltp")),
    "m4a": ("m4a", write_audio(SOUND, container="ipod", codec="alac", kind="s16p")),
}


def test_decoders_raise_when_a_file_is_cut_off() -> None:
    """Wherever it is cut: with key and field, and never with the frames before the cut alone."""
    for name in WHOLE:
        field, data = WHOLE[name]
        assert find_cut(data) is None
        for part in (0.05, 0.4, 0.6, 0.8):
            with pytest.raises(DecodingError) as caught:
                Decoder(torch_video, torch_audio)({"__key__": "a", field: data[: int(len(data) * part)]})
            assert (caught.value.key, caught.value.field) == ("a", field)


def box(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """A box of an MP4 file."""
    return (len(content) + 8 if size is None else size).to_bytes(4) + name + content


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """A chunk of a RIFF file."""
    return name + (len(content) if size is None else size).to_bytes(4, "little") + content


HEAD = box(b"ftyp", b"isom")
FORMS = {
    "a box to the end": (HEAD + box(b"mdat", b"x" * 9, 0), None),
    "a long box": (HEAD + box(b"mdat", (20).to_bytes(8) + b"x" * 4, 1), None),
    "a long box that is cut": (HEAD + box(b"mdat", (21).to_bytes(8) + b"x" * 4, 1), "mdat box goes on to byte 33"),
    "something behind the boxes": (HEAD + box(b"moov", b"") + b"TAG" + b"x" * 125, None),
    "a cut box that may be missing": (HEAD + box(b"free", b"", 99), None),
    "a cut box": (HEAD + box(b"moof", b"", 99), "moof box goes on to byte 111"),
    "a streamed wave": (chunk(b"RIFF", b"WAVE" + chunk(b"data", b"x", 2**32 - 1), 2**32 - 1), None),
    "a wave of wrong size": (chunk(b"RIFF", b"WAVE" + chunk(b"LIST", b"odd") + b"\0" + chunk(b"data", b"x"), 99), None),
    "a wave that is cut": (chunk(b"RIFF", b"WAVE" + chunk(b"data", b"x", 5)), "data chunk goes on to byte 25"),
    "two chunks": (chunk(b"RIFF", b"AVI ") + chunk(b"RIFF", b"AVIX"), None),
    "two chunks that are cut": (chunk(b"RIFF", b"AVI ") + chunk(b"RIFF", b"AVIX", 50), "RIFF chunk goes on to byte 70"),
    "a live stream": (b"\x1a\x45\xdf\xa3\x81x\x18\x53\x80\x67\x01" + b"\xff" * 7 + b"x", None),
    "a segment": (b"\x1a\x45\xdf\xa3\x81x\x18\x53\x80\x67\x82xx", None),
    "a segment that is cut": (b"\x1a\x45\xdf\xa3\x81x\x18\x53\x80\x67\x40\x05xx", "Segment goes on to byte 17"),
    "a page": (b"OggS" + bytes(22) + b"\x02\x03\x01xxxx", None),
    "a page that is cut": (b"OggS" + bytes(22) + b"\x02\x03\x01xxx", "last page goes on to byte 33"),
    "nothing": (b"", None),
    "heads alone": (b"\x1a\x45\xdf\xa3", None),
}


def test_find_cut_tells_only_what_the_file_itself_says() -> None:
    """Sizes that writers leave open are no damage."""
    for form in FORMS:
        data, expected = FORMS[form]
        found = find_cut(data)
        assert found is None if expected is None else found is not None and found.endswith(expected)


def test_decoders_raise_when_a_field_is_no_media_file() -> None:
    """Empty fields and error pages, under a good name."""
    for data in [b"", b"\0" * 500, b"<html>not found</html>", bytes(range(256)) * 20]:
        for field in ("mp4", "mp3"):
            with pytest.raises(DecodingError, match=f"field '{field}' of sample 'a'"):
                Decoder(torch_video, torch_audio)({"__key__": "a", field: data})


def packets(data: bytes) -> list[tuple[int, int]]:
    """Where the packets of a file's first stream lie: their positions and sizes."""
    with av.open(io.BytesIO(data)) as file:
        return [(packet.pos, packet.size) for packet in file.demux(file.streams[0]) if packet.size]


def test_torch_video_raises_when_the_damage_is_in_a_frame() -> None:
    """FFmpeg conceals or leaves out what it cannot decode: such a frame is an error; one behind the clip is not."""
    for name in ["mp4", "fragmented mp4", "avi"]:
        field, data = WHOLE[name]
        start, size = packets(data)[7]
        broken = data[:start] + b"\x5a" * size + data[start + size :]
        with pytest.raises(DecodingError, match=r"damaged|cannot be decoded|Invalid data"):
            Decoder(torch_video)({"__key__": "a", field: broken})
        assert torch.equal(torch_video(max_frames=3)(field, broken)[0], torch_video(max_frames=3)(field, data)[0])


def test_torch_video_is_whole_when_its_first_frames_need_one_that_was_cut_away() -> None:
    """Copied out of a longer file at a keyframe: what is shown before it was never to be seen; that is no damage."""
    frames = [np.full((16, 16, 3), number * 20, np.uint8) for number in range(12)]
    longer = write_video(frames, codec="libx264", pixels="yuv420p", options=OPEN)
    out = io.BytesIO()
    with av.open(io.BytesIO(longer)) as source, av.open(out, "w", format="matroska") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        found = [packet for packet in source.demux(video=0) if packet.size]
        for packet in found[[number for number, packet in enumerate(found) if packet.is_keyframe][1] :]:
            packet.stream = stream
            target.mux(packet)
    with av.open(io.BytesIO(out.getvalue())) as file:
        assert [packet.is_keyframe for packet in file.demux(video=0)][:2] == [True, False]
    assert torch.equal(torch_video.decode(out.getvalue())[0], torch_video.decode(longer)[0][4:])


@pytest.mark.parametrize("codec", ["mpeg4", pytest.param("libx264", marks=pytest.mark.slow)])
def test_torch_video_raises_when_a_frame_needs_one_that_is_damaged(codec: str) -> None:
    """Damage goes on up to the next keyframe, also where the damaged frame itself is not in the clip."""
    frames = [np.roll(picture(0, (64, 64)) // 4 + number * 3, number, 1) for number in range(12)]
    data = write_video(frames, codec=codec, pixels="yuv420p", gop=4)
    start, size = packets(data)[4]
    place = start + size // 2
    broken = data[:place] + b"\xff\x5a\x00\x81\x33\xee" + data[place + 6 :]
    for options in ({"start": 0.6}, {"start": 0.5, "end": 0.7, "stride": 2}):
        with pytest.raises(ValueError, match="damaged"):
            torch_video(**options)("mkv", broken)
    for options in ({"end": 0.4}, {"start": 0.9}):
        assert torch.equal(torch_video(**options)("mkv", broken)[0], torch_video(**options)("mkv", data)[0])


def test_torch_audio_raises_when_a_checksum_is_wrong() -> None:
    """FLAC has one for each frame."""
    whole = write_audio(noise(30000))
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    with pytest.raises(DecodingError, match=r"damaged|Invalid data"):
        Decoder(torch_audio)({"__key__": "a", "flac": bytes(data)})
    assert torch.equal(torch_audio(end=0.1)("flac", bytes(data))[0], torch_audio(end=0.1)("flac", whole)[0])


SCRIPTS = {
    "m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{target}'\n",
    "dash": '<?xml version="1.0"?><MPD type="static" mediaPresentationDuration="PT1S"><Period><AdaptationSet>'
    '<Representation id="1" bandwidth="1"><BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>',
    "asx": '<asx version="3.0"><entry><ref href="{target}"/></entry></asx>',
}


def test_decoders_open_nothing_when_a_field_names_something_else(tmp_path: Path) -> None:
    """A playlist under the name of a video: neither the file nor the server that it names is asked."""
    for script, field in itertools.product(SCRIPTS, ["mp4", "wav"]):
        path = tmp_path / "secret.mkv"
        path.write_bytes(CLIP)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            url = f"http://127.0.0.1:{server.getsockname()[1]}/secret.mkv"
            for target in (path, f"file:{path}", url):
                data = SCRIPTS[script].format(target=target).encode()
                with pytest.raises(DecodingError, match=r"not a file of the formats that are read here|Invalid data"):
                    Decoder(torch_video, torch_audio)({"__key__": "a", field: data})
            with pytest.raises(BlockingIOError):
                server.accept()


def test_open_media_reads_no_file_when_a_format_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the list of formats there is one of protocols: with the concat format let in, the file is refused."""
    path = tmp_path / "a.mkv"
    path.write_bytes(CLIP)
    script = f"ffconcat version 1.0\nfile 'file:{path}'\n".encode()
    lenient = {**media_files._OPTIONS, "format_whitelist": "concat,matroska,webm", "safe": "0"}
    monkeypatch.setattr(media_files, "_OPTIONS", {**lenient, "protocol_whitelist": "file"})
    assert len(torch_video.decode(script)[0]) == 10  # so the script is one that works
    monkeypatch.setattr(media_files, "_OPTIONS", lenient)
    with pytest.raises(ValueError, match="not a file of the formats that are read here"):
        torch_video.decode(script)


def test_decoders_leave_nothing_open_when_they_fail_and_when_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers are closed at once, also where a clip ends early."""
    opened: list[Any] = []
    plain = av.open
    monkeypatch.setattr(av, "open", lambda *args, **options: opened.append(plain(*args, **options)) or opened[-1])
    for data in (CLIP, WHOLE["mp4"][1][::-1], write_video(PICTURES[:1]), write_audio(SOUND)):
        for decoder in (
            torch_video(max_frames=1),
            torch_video(start=0.5),
            torch_audio(end=0.1),
            torch_audio(start=0.5),
        ):
            try:
                decoder.decode(data)
            except Exception:
                continue
    read = [container for container in opened if isinstance(container, av.container.InputContainer)]
    assert len(read) > 20
    for container in read:
        with pytest.raises(AssertionError, match="not open"):
            container.seek(0)
