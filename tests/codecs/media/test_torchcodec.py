"""The backend "torchcodec" of torch_video and torch_audio, compared with PyAV.

torchcodec loads FFmpeg's libraries by their usual names. Where they are not installed, a slow test runs this file again
with those that PyAV bundles.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from tests.codecs.media import test_media as media
from tests.codecs.media.test_media import CLIP, CODED, PICTURES, SOUND, WHOLE, noise, write_audio, write_video
from torchdata_wds.codecs import Decoder
from torchdata_wds.codecs.media import torch_audio, torch_video
from torchdata_wds.codecs.media import torchcodec as backend
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.errors import DecodingError

VIDEO, AUDIO = torch_video(backend="torchcodec"), torch_audio(backend="torchcodec")


@functools.cache
def loads() -> bool:
    """Whether torchcodec is installed and finds FFmpeg; it takes time, so only the process that runs tests looks."""
    try:
        return hasattr(backend.import_torchcodec(), "decoders")
    except MissingPackageError:
        return False


@pytest.fixture
def _torchcodec() -> None:
    """Skips a test where torchcodec does not load."""
    if not loads():
        pytest.skip("torchcodec is not installed, or finds no FFmpeg")


needs_torchcodec = pytest.mark.usefixtures("_torchcodec")


@pytest.mark.slow
def test_backend_passes_its_tests_when_it_finds_ffmpeg(tmp_path: Path) -> None:
    """With links of the usual names to PyAV's libraries."""
    if loads() or importlib.util.find_spec("torchcodec") is None:
        pytest.skip("torchcodec loads, or is not installed")
    bundled = [*Path(av.__file__).parents[1].glob("av.libs/*.so*")]
    if not bundled:
        pytest.skip("PyAV is built without FFmpeg of its own")
    for library in bundled:
        (tmp_path / library.name).symlink_to(library)
        if named := re.fullmatch(r"(lib(?:av|sw)[a-z]+)-[0-9a-f]+(\.so\.\d+)\..*", library.name):
            (tmp_path / "".join(named.groups())).symlink_to(library)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "addopts=", __file__]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout, done.stdout  # this test alone


SHARED = [
    (media.test_torch_video_gives_the_very_frames_and_samples_when_the_codecs_are_lossless, ()),
    (media.test_torch_video_gives_a_clip_when_it_has_options, ()),
    *((media.test_torch_video_begins_at_the_very_frame_when_it_seeks, case) for case in (*CODED[:6], CODED[8])),
    (media.test_torch_video_keeps_sizes_and_times_when_they_are_odd, ()),
    (media.test_torch_video_has_empty_audio_when_there_is_none, ()),
    (media.test_torch_video_raises_when_no_frame_is_in_the_clip, ()),
    (media.test_torch_video_raises_when_the_frames_take_too_much_memory, ()),
    (media.test_torch_audio_gives_the_very_samples_when_the_codec_is_lossless, ()),
    (media.test_torch_audio_gives_a_slice_of_the_whole_when_it_has_options, ("flac", {})),
    (media.test_torch_audio_takes_the_audio_of_a_video_and_raises_when_there_is_none, ()),
    (media.test_torch_audio_reads_a_file_when_its_title_is_no_text, ()),
    (media.test_decoders_take_fields_of_their_kind, ()),
    (media.test_decoders_raise_when_a_file_is_cut_off, ()),
    (media.test_decoders_raise_when_a_field_is_no_media_file, ()),
    (media.test_torch_video_raises_when_the_damage_is_in_a_frame, ()),
]


@needs_torchcodec
@pytest.mark.parametrize(("test", "case"), [pytest.param(*row, id=row[0].__name__) for row in SHARED])
def test_backend_passes_the_tests_of_pyav(
    test: Callable[..., None], case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames, times, samples, clips, limits and errors are the same."""
    monkeypatch.setattr(media, "torch_video", VIDEO)
    monkeypatch.setattr(media, "torch_audio", AUDIO)
    test(*case)


LOSSY = [
    ("m4a", {"container": "ipod", "codec": "aac", "kind": "fltp"}),
    ("mp3", {"container": "mp3", "codec": "libmp3lame", "kind": "fltp"}),
    ("opus", {"container": "ogg", "codec": "libopus", "kind": "flt"}),
    ("aac", {"container": "adts", "codec": "aac", "kind": "fltp"}),
]


@needs_torchcodec
@pytest.mark.parametrize(("field", "options"), LOSSY)
def test_backend_gives_the_samples_of_pyav_when_the_codec_is_lossy(field: str, options: dict[str, Any]) -> None:
    """As many, at the same place, whatever the codec has in front of its first sample."""
    data = write_audio(noise(20000, np.float32), **options)
    for span in ({}, {"start": 0.5}, {"start": 1.23, "end": 1.4}, {"end": 0.1}, {"start": 2.0, "end": 2.1}):
        expected, rate = torch_audio(**span)(field, data)
        samples, own_rate = AUDIO(**span)(field, data)
        assert (samples.dtype, own_rate) == (torch.float32, rate)
        torch.testing.assert_close(samples, expected, rtol=0, atol=1e-6)


@needs_torchcodec
def test_backend_gives_the_audio_of_pyav_when_frames_are_left_out() -> None:
    """It ends where the first of them begins, and counts from the second of its first sample."""
    late = write_video(PICTURES, times=range(5, 15), sound=SOUND)
    for data in (CLIP, late):
        for options in (
            {},
            {"start": 0.3},
            {"end": 0.55},
            {"start": 0.2, "stride": 2, "max_frames": 2},
            {"start": 0.9},
        ):
            expected, audio, info = torch_video(**options)(".mkv", data)
            frames, own_audio, own_info = VIDEO(**options)(".mkv", data)
            assert torch.equal(frames, expected)
            assert torch.equal(own_audio, audio)
            assert own_info.keys() == info.keys()
            for name in info:
                assert torch.equal(torch.as_tensor(own_info[name]), torch.as_tensor(info[name])), name


@needs_torchcodec
def test_backend_finds_the_frame_when_the_rate_varies() -> None:
    """Wherever a clip begins, with guesses that are far off."""
    times = [0, 1, 2, 3, 50, 51, 52, 53, 54, 90, 91, 300, 301, 302, 303, 304, 305, 306, 307, 900]
    data = write_video([np.full((16, 16, 3), number * 12, np.uint8) for number in range(20)], times=times, gop=6)
    for number in range(20):
        for start in (times[number] / 10, times[number] / 10 - 0.01):
            frames, _, info = VIDEO(start=max(0.0, start), max_frames=2)(".mkv", data)
            assert info["video_pts"].tolist() == [time / 10 for time in times[number : number + 2]]
            assert frames[0, 0, 0, 0] == number * 12


@needs_torchcodec
@pytest.mark.parametrize(("pixels", "most"), [("yuv420p", 0), ("yuv444p", 0), ("yuvj420p", 0), ("yuv420p10le", 4)])
def test_backend_gives_the_pixels_of_pyav(pixels: str, most: int) -> None:
    """Equal with 8 bits, and near with 10, which PyAV reduces otherwise."""
    rows, columns = np.mgrid[0:50, 0:62]
    waves = [127 + 120 * np.sin(columns / 9), 127 + 120 * np.cos(rows / 7), 127 + 120 * np.sin((rows + columns) / 13)]
    picture = np.stack(waves, -1).astype(np.uint8)
    codec = "mjpeg" if pixels == "yuvj420p" else "libx264"
    data = write_video([np.roll(picture, number, 1) for number in range(4)], codec=codec, pixels=pixels)
    difference = VIDEO(".mkv", data)[0].int() - torch_video(".mkv", data)[0].int()
    assert difference.abs().float().mean() <= most


@needs_torchcodec
def test_backend_turns_frames_upright_when_the_file_says_so() -> None:
    """Phones write what the sensor gives, and how to turn it."""
    for degrees in (0, 90, 180, 270):
        pictures = [media.picture(number, (16, 12)) for number in range(2)]
        data = write_video(pictures, container="mov", codec="qtrle", pixels="rgb24", turned={"degrees": degrees})
        assert torch.equal(VIDEO(".mov", data)[0], torch_video(".mov", data)[0])


@needs_torchcodec
def test_backend_raises_when_audio_pauses() -> None:
    """It gives no times of samples, so all those after the pause would be early."""
    data = write_video([media.picture(number) for number in range(20)], sound=noise(9216), pause=4800)
    with pytest.raises(ValueError, match=r"its audio pauses before second .* backend='pyav'"):
        VIDEO(".mkv", data)
    assert torch.equal(VIDEO(end=0.5)(".mkv", data)[1], torch_video(end=0.5)(".mkv", data)[1])
    assert len(VIDEO(audio=False)(".mkv", data)[0]) == 20


@needs_torchcodec
def test_backend_calls_no_file_damaged_when_its_audio_takes_too_much_memory() -> None:
    """FLAC and MP3 have the number of their samples in the header; only a part of them is decoded."""
    mp3 = write_audio(noise(40_000, np.float32), container="mp3", codec="libmp3lame", kind="fltp")
    for data in (write_audio(noise(40_000)), mp3):
        with pytest.raises(ValueError, match="its audio takes more than max_bytes=4,000 up to the end of the clip"):
            AUDIO(max_bytes=4000).decode(data)
        assert AUDIO(max_bytes=4000, end=0.1).decode(data)[0].shape == (1, 800)


@needs_torchcodec
def test_backend_raises_when_there_is_no_video() -> None:
    """The decoder of a field's kind says so; damage has its own words."""
    with pytest.raises(ValueError, match="it has no video stream"):
        VIDEO(".mp4", write_audio(SOUND))
    with pytest.raises(ValueError, match="torchcodec cannot decode it, it may be damaged: Could not seek"):
        VIDEO.decode(write_video(PICTURES, **CODED[10][1]))


@needs_torchcodec
def test_spec_stands_for_both_decoders() -> None:
    """Beside an image spec, and with the errors of all decoders."""
    decoder = Decoder("torchcodec", "torchrgb8")
    sample = decoder({"__key__": "a", "mkv": CLIP, "wav": WHOLE["wav"][1], "png": media.png(), "cls": b"3"})
    assert sample["mkv"][0].shape == (10, 16, 16, 3)
    assert (sample["wav"][0].shape, sample["png"].shape, sample["cls"]) == ((1, 8000), (3, 4, 4), 3)
    with pytest.raises(
        DecodingError, match=r"field 'mkv' of sample 'a' does not decode as torch_video\(backend='torchco"
    ):
        decoder({"__key__": "a", "mkv": CLIP[:500]})


# ------------------------------------------------------------------------------------------- without torchcodec, too
def test_spec_names_the_extra_when_torchcodec_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a DecodingError, which a handler would skip for every sample."""
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    for field, data in (("mkv", CLIP), ("wav", WHOLE["wav"][1])):
        with pytest.raises(MissingPackageError, match=r"pip install 'torchdata_wds\[torchcodec\]'"):
            Decoder("torchcodec")({field: data})


@pytest.mark.parametrize("is_lazy", [False, True])
def test_spec_says_what_is_missing_when_ffmpeg_does_not_load(monkeypatch: pytest.MonkeyPatch, is_lazy: bool) -> None:
    """Old versions fail when they are imported, new ones when a decoder is made."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not load libtorchcodec. Likely causes:\n  1. FFmpeg is not properly installed")

    if is_lazy:
        decoders = SimpleNamespace(VideoDecoder=fail, AudioDecoder=fail)
        monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(decoders=decoders))
    else:
        monkeypatch.setattr(backend, "import_optional", fail)
    for field, data in (("mkv", CLIP), ("wav", WHOLE["wav"][1])):
        with pytest.raises(
            MissingPackageError, match=r"torchcodec is installed, but does not load .*apt install ffmpeg"
        ):
            Decoder("torchcodec")({field: data})


def test_backend_must_be_known() -> None:
    """When the decoder is made."""
    for decoder in (torch_video, torch_audio):
        with pytest.raises(ValueError, match="backend must be one of 'pyav', 'torchcodec', not 'ffmpeg'"):
            decoder(backend="ffmpeg")
    assert repr(VIDEO) == "torch_video(backend='torchcodec')"


def tag(size: int) -> bytes:
    """The head of an ID3 tag."""
    return b"ID3\4\0\0" + bytes(size >> 7 * place & 127 for place in (3, 2, 1, 0))


def test_backend_opens_no_script_when_it_looks_like_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FFmpeg would take for a playlist never gets to torchcodec, which follows it."""
    monkeypatch.setattr(backend, "import_torchcodec", lambda: pytest.fail("it was opened"))
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1,\nhttp://example.com/a.ts\n#EXT-X-ENDLIST\n"
    manifest = b'<MPD profiles="urn:mpeg:dash:profile:isoff-main:2011"></MPD>'
    scripts = (playlist, b"ffconcat version 1.0\nfile a.mkv\n", manifest, b"v=0\nc=IN IP4 10.0.0.1\n")
    heads = (b"", tag(20) + b"x" * 20, tag(20) + bytes(20), tag(200), b"OggS", b"\xff\xfb")
    for data in (b"", bytes(50), b"<html>", *(head + script for head in heads for script in scripts)):
        for decoder in (VIDEO, AUDIO):
            with pytest.raises(ValueError, match=r"it is not a file of the formats that are read here|cut off"):
                decoder.decode(data)


def test_backend_knows_the_formats_that_pyav_reads() -> None:
    """By their first bytes, also after a tag."""
    coded = [write_video(PICTURES, **options) for _, options in CODED]
    sounds = [write_audio(noise(3000, np.float32), **options) for _, options in LOSSY]
    for data in (*coded, *sounds, *(data for _, data in WHOLE.values())):
        assert backend._is_media(data)
    flac = write_audio(SOUND)
    for data in (tag(20) + b"x" * 20 + flac, tag(20) + b"x" * 20 + bytes(30) + flac):
        assert backend._is_media(data)
