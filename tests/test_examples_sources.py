"""What WebDataset users write about sources, caches, records, clips and documents, as they write it here."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import cbor2
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.s3_server import s3_server
from tests.kits.servers import QuietHandler, serve_folder
from tests.kits.shards import image_samples, jpeg_bytes, sample_members, write_tar
from torchdata_wds import ImageSegment, TextSegment, WebDataset, torch_audio, torch_video

KEYS = [f"i{shard}-{number:05d}" for shard in range(3) for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of images."""
    folder = tmp_path_factory.mktemp("sources")
    for shard in range(3):
        write_tar(folder / f"d-{shard}.tar", image_samples(f"i{shard}-", 4))
    return folder


def keys_of(samples: Any) -> list[str]:
    return sorted(sample["__key__"] for sample in samples)


class Counting(QuietHandler):
    """Counts what is asked for."""

    count = 0

    def do_GET(self) -> None:  # noqa: N802 - the name that the server calls
        type(self).count += 1
        super().do_GET()


@pytest.mark.parametrize("options", [{}, {"cache_name": "basename"}, {"cache_name": Path}, {"cache_size": 10**9}])
def test_cache_dir(options: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WebDataset(url, cache_dir="./cache")`, two passes: the second asks for nothing."""
    if options.get("cache_name") is Path:
        options = {"cache_name": lambda url: "mine-" + url.rpartition("/")[2]}
    monkeypatch.setattr(Counting, "count", 0)
    with serve_folder(folder, Counting) as server:
        dataset = WebDataset(f"{server}/d-{{0..2}}.tar", cache_dir=tmp_path / "cache", **options)
        for _ in range(2):
            samples = list(dataset)
            assert keys_of(samples) == KEYS
            assert Counting.count == 3
            assert all(Path(sample["__local_path__"]).is_file() for sample in samples)
        assert keys_of(WebDataset(f"{server}/d-{{0..2}}.tar", cache_dir=None)) == KEYS
        assert Counting.count == 6


def test_verbose_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`WDS_VERBOSE_CACHE=1` tells of downloads and hits."""
    monkeypatch.setenv("WDS_VERBOSE_CACHE", "1")
    with serve_folder(folder) as server:
        dataset = WebDataset(f"{server}/d-0.tar", cache_dir=tmp_path)
        list(dataset)
        list(dataset)
    shown = capsys.readouterr().err
    assert "downloaded" in shown
    assert "hit" in shown


class Numbers(IterableDataset[int]):
    """Any dataset of somebody else."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def test_db_cache(folder: Path, tmp_path: Path) -> None:
    """`.compose(DBCache, "./cache.db", 1000)`, two passes, before and after decoding; None turns it off."""
    source = IterableWrapper([str(folder / "d-{0..2}.tar")]).list_shards().load_wds_shards().group_by_key()
    for name, pipe in (("raw", source), ("decoded", source.wds_decode("rgb8"))):
        file = tmp_path / f"{name}.db"
        first, second = (list(pipe.cache_samples(file, max_samples=1000)) for _ in range(2))
        assert file.is_file()
        assert [sample["__key__"] for sample in first] == KEYS
        for one, other in zip(first, second, strict=True):
            np.testing.assert_equal(one, other)
    for name in ("raw", "decoded"):
        nothing = IterableWrapper([]).cache_samples(tmp_path / f"{name}.db", max_samples=1000)
        assert len(list(nothing)) == len(KEYS)  # the shards are not asked
    assert len(list(source.cache_samples(None))) == len(KEYS)
    assert list(IterableWrapper(Numbers()).cache_samples(tmp_path / "n.db")) == list(range(7))
    assert list(IterableWrapper([]).cache_samples(tmp_path / "n.db")) == list(range(7))


def test_stores(folder: Path) -> None:
    """`s3://`: listed, read and decoded, with keys from the program."""
    with s3_server() as server:
        for shard in range(3):
            server.put(f"bucket/train/d-{shard}.tar", (folder / f"d-{shard}.tar").read_bytes())
        for pattern in ("s3://bucket/train/", "s3://bucket/train/d-{0..2}.tar", "s3://bucket/train/d-*.tar"):
            shards = IterableWrapper([pattern]).list_shards(storage_options=server.options)
            samples = shards.load_wds_shards(storage_options=server.options).group_by_key().wds_decode("pil")
            assert keys_of(samples) == KEYS, pattern


@pytest.mark.parametrize("variable", ["WDS_REWRITE", "GOPEN_REWRITE"])
@pytest.mark.parametrize("to", ["{folder}/", "pipe:cat {folder}/"])
def test_rewriting(variable: str, to: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WDS_REWRITE="gs://bucket/=/shared/data/"` and `"gs://=pipe:ssh proxy gsutil cat "`: the name stays."""
    monkeypatch.setenv(variable, "s3://=/nowhere/;gs://bucket/=" + to.format(folder=folder))
    samples = list(WebDataset("gs://bucket/d-{0..2}.tar"))
    assert keys_of(samples) == KEYS
    assert {sample["__url__"] for sample in samples} == {f"gs://bucket/d-{shard}.tar" for shard in range(3)}
    monkeypatch.setenv("WDS_SECURE", "1")
    if to.startswith("pipe:"):
        with pytest.raises(torchdata_wds.UnsafeDataError):
            list(WebDataset("gs://bucket/d-0.tar"))


class Gateway(QuietHandler):
    """An AIStore whose buckets are folders."""

    def do_GET(self) -> None:  # noqa: N802 - the name that the server calls
        path, _, query = self.path.partition("?")
        assert path.startswith("/v1/objects/bucket/")
        assert query == "provider=gcp"
        self.path = path.removeprefix("/v1/objects/bucket")
        super().do_GET()


def test_aistore(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`AIS_ENDPOINT=... USE_AIS_FOR="gs"`: the same URLs come from there."""
    with serve_folder(folder, Gateway) as server:
        monkeypatch.setenv("AIS_ENDPOINT", server)
        monkeypatch.setenv("USE_AIS_FOR", "gs")
        assert keys_of(WebDataset("gs://bucket/d-{0..2}.tar")) == KEYS


def test_cbor_records(tmp_path: Path) -> None:
    """`cbors_to_samples()`: the records are the samples."""
    samples = [{"__key__": str(number), "txt": "ä" * number, "data": bytes(number)} for number in range(5)]
    (tmp_path / "x.cbor").write_bytes(b"".join(map(cbor2.dumps, samples)))
    pipe = IterableWrapper([str(tmp_path / "x.cbor")]).list_shards().sharding_filter().load_cbor_shards()
    assert list(pipe) == samples
    assert [len(text) for (text,) in pipe.wds_to_tuple("txt")] == [0, 1, 2, 3, 4]


def clip() -> bytes:
    """Six frames of one colour each, lossless."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "bgr0"
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), number * 40, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def sound() -> bytes:
    """A ramp in 16 bits."""
    out = io.BytesIO()
    with av.open(out, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.arange(800, dtype=np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def test_video_and_audio(tmp_path: Path) -> None:
    """`decode(my_png_decoder, torch_video, torch_audio)`."""
    url = write_tar(tmp_path / "x.tar", sample_members("a", mkv=clip(), wav=sound(), cls=b"3"))
    pipe = IterableWrapper([url]).load_wds_shards().group_by_key().wds_decode(torch_video, torch_audio)
    ((key, (frames, audio, info), (samples, rate), label),) = pipe.wds_to_tuple("__key__", "mkv", "wav", "cls")
    assert (key, label, rate) == ("a", 3, 8000)
    assert (frames.dtype, frames.shape) == (torch.uint8, (6, 16, 16, 3))
    assert frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160, 200]
    assert info["video_fps"] == 5
    assert audio.numel() == 0
    assert torch.equal(samples, torch.arange(800)[None] / 32768)
    part = IterableWrapper([url]).load_wds_shards().group_by_key().wds_decode(torch_video(start=0.4, stride=2))
    assert next(iter(part))["mkv"][0][:, 0, 0, 0].tolist() == [80, 160]


def test_documents_with_images(tmp_path: Path) -> None:
    """MMC4: texts, and images before the text that they belong to."""
    document = {
        "text_list": ["one", "two"],
        "image_info": [
            {"image_name": "cat.png", "matched_text_index": 1, "matched_sim": 0.3},
            {"image_name": "dog.jpg", "matched_text_index": 0, "matched_sim": 0.1},
        ],
        "similarity_matrix": [[0.1, 0.3], [0.1, 0.0]],
    }
    members = [
        ("doc.json", json.dumps(document).encode()),
        ("doc.cat.jpg", jpeg_bytes(1)),
        ("doc.dog.jpg", jpeg_bytes(2)),
    ]
    source = IterableWrapper([write_tar(tmp_path / "x.tar", members)]).load_wds_shards().group_by_key()
    (found,) = source.wds_decode("pil").wds_interleaved()
    kinds = [segment.text if isinstance(segment, TextSegment) else segment.name for segment in found["segments"]]
    assert kinds == ["dog.jpg", "one", "cat.png", "two"]
    images = [segment.image for segment in found["segments"] if isinstance(segment, ImageSegment)]
    assert {image.size for image in images} == {(16, 12)}
    (kept,) = source.wds_interleaved(images="pil", min_similarity=0.2)
    assert len(kept["segments"]) == 3
