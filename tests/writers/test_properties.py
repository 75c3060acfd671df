"""Whole shards: what is written reads back equal, here and in the programs that others have (Hypothesis)."""

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.codecs.test_roundtrip import STRATEGIES, check
from tests.test_interop import needs_gnu_tar
from tests.test_interop import theirs as webdataset_samples
from torchdata_wds import EncodingError, ShardIndex, TarWriter, WebDataset, dali_index, index_shard
from torchdata_wds.codecs import Decoder
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar import read_members
from torchdata_wds.storage import open_shard

# no line ends: webdataset's own rule for names, and the list that tar prints, take them for the end of a name
LETTERS = st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"), exclude_characters="./\\")
PARTS = st.text(LETTERS, min_size=1, max_size=60).filter(lambda part: part.strip())
FOLDERS = st.lists(
    st.text(LETTERS | st.just("."), min_size=1, max_size=60).filter(lambda part: part.strip(".")), max_size=3
)
KEYS = st.tuples(FOLDERS, PARTS).map(lambda parts: "/".join((*parts[0], parts[1]))).filter(lambda key: key[:2] != "__")
FIELDS = st.sampled_from(sorted(STRATEGIES)) | st.sampled_from(sorted(STRATEGIES)).map("left.{}".format)
SUFFIXES = st.sampled_from(["", "", "", ".gz", ".zst"])


@st.composite
def samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A few samples with different keys and any fields."""
    found = []
    for key in draw(st.lists(KEYS, max_size=4, unique=True)):
        fields = draw(st.lists(FIELDS, min_size=1, max_size=4, unique=True))
        values = {field + draw(SUFFIXES): draw(STRATEGIES[field.rpartition(".")[2]]) for field in fields}
        found.append({"__key__": key, "__url__": "elsewhere.tar", **values})
    return found


def write(path: Path, given_samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Writes the samples that can be written, and returns them; only surrogates in pairs may be refused."""
    written = []
    with TarWriter(path, index=True) as writer:
        for sample in given_samples:
            try:
                writer.write(sample)
            except EncodingError:
                assert "\\ud" in ascii(sample)
            else:
                written.append(sample)
    return written


def raw_samples(path: Path) -> list[dict[str, Any]]:
    """The samples as bytes."""
    with open_shard(path) as stream:
        return list(group_members(read_members(stream, str(path))))


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(given_samples=samples(), suffix=st.sampled_from(["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"]))
def test_samples_read_back_equal(
    given_samples: list[dict[str, Any]], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keys, fields in sorted order, values; the same bytes each time; an index that fits."""
    folder = tmp_path_factory.mktemp("shards")
    path = folder / f"x.{suffix}"
    written = write(path, given_samples)
    read = list(map(Decoder("rgba", allow_pickle=True), raw_samples(path)))
    assert [sample["__key__"] for sample in read] == [sample["__key__"] for sample in written]
    for one, other in zip(written, read, strict=True):
        fields = sorted(field for field in one if field[:2] != "__")
        assert [field for field in other if field[:2] != "__"] == fields
        for field in fields:
            extension = next(part for part in reversed(field.split(".")) if part in STRATEGIES)
            assert check(extension)(one[field], other[field]), field
    again = folder / f"again.{suffix}"
    write(again, given_samples)
    assert again.read_bytes() == path.read_bytes()
    assert list(ShardIndex.beside(path)) == list(index_shard(path, to=False))


@needs_gnu_tar
@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(given_samples=samples())
@pytest.mark.slow
def test_shards_read_in_gnu_tar_and_webdataset(
    given_samples: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """GNU tar lists the names and unpacks the bytes, webdataset groups the same samples."""
    path = tmp_path_factory.mktemp("shards") / "x.tar"
    write(path, given_samples)
    ours = raw_samples(path)
    names = [f"{sample['__key__']}.{field}" for sample in ours for field in sample if field[:2] != "__"]
    tar = ["tar", "--quoting-style=literal", "--no-unquote"]
    listed = subprocess.run([*tar, "-tf", path], capture_output=True, check=True, timeout=30).stdout
    assert listed.decode().split("\n")[:-1] == names
    content = subprocess.run([*tar, "-xOf", path], capture_output=True, check=True, timeout=30).stdout
    assert content == b"".join(data for sample in ours for field, data in sample.items() if field[:2] != "__")
    assert (webdataset_samples(path) if ours else []) == ours


def test_fields_decode_in_webdataset_as_they_were_written(tmp_path: Path) -> None:
    """What both packages know has the same value there."""
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    sample = {
        "cls": 7,
        "txt": "grüße",
        "json": {"a": [1, 2.5, None, "ü"]},
        "npy": np.arange(12, dtype=np.float32).reshape(3, 4),
        "png": image,
        "ten": [np.arange(3), np.zeros((2, 2), np.float16)],
        "mp": {"a": [1, "x"]},
        "json.gz": [1],
        "ppm": image,
    }
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", **sample})
    (raw,) = webdataset_samples(tmp_path / "x.tar")
    theirs = webdataset.autodecode.Decoder([webdataset.autodecode.imagehandler("rgb8")])(raw)
    for field in ("cls", "txt", "json", "mp"):
        assert theirs[field] == sample[field]
    for field in ("npy", "png", "ppm"):
        assert np.array_equal(theirs[field], sample[field])
    assert all(map(np.array_equal, theirs["ten"], sample["ten"]))


def test_shards_of_webdataset_can_be_written_again(tmp_path: Path) -> None:
    """Undecoded samples pass through untouched, whoever wrote them."""
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(jpeg, "JPEG")
    with webdataset.TarWriter(str(tmp_path / "theirs.tar")) as writer:
        for number in range(5):
            writer.write({"__key__": f"{number}", "jpg": jpeg.getvalue(), "cls": number, "json": {"n": number}})
    with TarWriter(tmp_path / "ours.tar") as ours:
        for sample in WebDataset(str(tmp_path / "theirs.tar"), shardshuffle=False):
            ours.write(sample)

    def content(name: str) -> list[tuple[str, bytes]]:
        with tarfile.open(tmp_path / name) as tar:
            return [(entry.name, tar.extractfile(entry).read()) for entry in tar]  # type: ignore[union-attr]

    assert content("ours.tar") == content("theirs.tar")
    assert (tmp_path / "ours.tar").stat().st_size < (tmp_path / "theirs.tar").stat().st_size


def test_dali_index_equals_the_places_that_tarfile_finds(tmp_path: Path) -> None:
    """Offsets and sizes are those of the content, also behind extended headers."""
    with TarWriter(tmp_path / "x.tar", encoder=False) as writer:
        for number in range(4):
            writer.write({"__key__": f"d{'n' * 60 * number}/{number}", "cls": b"1", "bin": bytes(number * 400)})
    with tarfile.open(tmp_path / "x.tar") as tar:
        places = [(entry.name, entry.offset_data, entry.size) for entry in tar]
    words = dali_index(index_shard(tmp_path / "x.tar", to=False)).split()[2:]
    assert list(zip(words[3::4], map(int, words[1::4]), map(int, words[2::4]), strict=True)) == places
