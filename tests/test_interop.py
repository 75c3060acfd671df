"""Shards that other programs wrote, read as WebDataset reads them."""

import io
import json
import pickle
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import jpeg_bytes
from torchdata_wds import ShardFormatError, WebDataset

pytestmark = pytest.mark.usefixtures("each_reader")

#: File names as data sets have them, in the order of GNU tar's --sort=name.
FILES = {
    "000000000.jpg": b"\xff\xd8 one",
    "000000000.json": b"{}",
    "000000000.txt": b"caption",
    "A/Upper.CLS": b"3",
    "A/Upper.JPG": b"\xff\xd8 upper",
    "b/multi.seg.png": b"mask",
    "b/multi.left.rgb.PNG": b"image",
    "d.v1/22.0/1.txt": b"in folders with dots",
    "d.v1/22.0/1.cls": b"1",
    "e/zero.txt": b"",
    "f/äöü 日本.txt": "grüße".encode(),
    "g/exactly.bin": bytes(512),
    "g/one more.bin": bytes(513),
    "h/" + "long" * 20 + ".txt": b"a name of more than 80 bytes",
    "i/" + "folder/" * 12 + "x.txt": b"deep",
}
#: Longer than ustar and v7 can store.
LONG = {"j/" + "l" * 150 + ".txt": b"long", "k/" + "d" * 60 + "/" + "e" * 60 + "/" + "f" * 60 + "/y.cls": b"9"}
#: Read by nobody as a sample.
OTHERS = {"README": b"no extension", "d.v1/LICENSE": b"no extension"}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files whose names every tar format can store."""
    return write_files(tmp_path_factory.mktemp("tree"), {**FILES, **OTHERS})


def gnu_tar(*arguments: str) -> None:
    subprocess.run(["tar", "--sort=name", *arguments], check=True, capture_output=True, timeout=30)


needs_gnu_tar = pytest.mark.skipif(
    shutil.which("tar") is None
    or b"GNU tar" not in subprocess.run(["tar", "--version"], capture_output=True, check=False).stdout,
    reason="needs GNU tar",
)


def ours(path: Path, **options: Any) -> list[dict[str, Any]]:
    return list(IterableWrapper([str(path)]).load_wds_shards().group_by_key(**options))


def theirs(*paths: Path) -> list[dict[str, Any]]:
    """What webdataset reads; its own opener would leave the files open."""
    samples: list[dict[str, Any]] = []
    for path in paths:
        with path.open("rb") as stream:
            members = webdataset.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
            samples += webdataset.tariterators.group_by_keys(members)
    return samples


def expected(files: dict[str, bytes]) -> dict[tuple[str, str], bytes]:
    """(key, field) -> bytes of the files, by the rule of names written once more."""
    found = {}
    for name, data in files.items():
        folder, slash, base = name.rpartition("/")
        stem, _, field = base.partition(".")
        found[folder + slash + stem, field.lower()] = data
    return found


def flat(samples: list[dict[str, Any]]) -> dict[tuple[str, str], bytes]:
    """(key, field) -> bytes of samples."""
    return {
        (sample["__key__"], field): data for sample in samples for field, data in sample.items() if field[:2] != "__"
    }


@needs_gnu_tar
@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "pax", "posix"])
def test_shards_of_gnu_tar_read_as_webdataset_reads_them(tree: Path, tmp_path: Path, form: str) -> None:
    """Every format of `tar --sort=name -cf`: keys, fields, bytes and order; folders and files without extension go."""
    shard = tmp_path / "x.tar"
    names = [name for name in FILES if form != "v7" or len(name.encode()) < 100]
    gnu_tar(f"--format={form}", "-cf", str(shard), "-C", str(tree), *sorted(names), *OTHERS)
    samples = ours(shard)
    assert samples == theirs(shard)
    assert flat(samples) == expected({name: FILES[name] for name in names})


@needs_gnu_tar
@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_long_names_of_gnu_tar_read_as_webdataset_reads_them(tmp_path: Path, form: str) -> None:
    """Names that need a long-name entry or a pax record."""
    shard = tmp_path / "x.tar"
    gnu_tar(f"--format={form}", "-cf", str(shard), "-C", str(write_files(tmp_path / "tree", LONG)), ".")
    samples = ours(shard)
    assert flat(samples) == expected(LONG)
    assert [{**sample, "__key__": "./" + sample["__key__"]} for sample in samples] == theirs(shard)


@needs_gnu_tar
def test_a_whole_folder_reads_when_gnu_tar_starts_names_with_a_dot(tree: Path, tmp_path: Path) -> None:
    """`tar -cf x.tar .` writes ./a.jpg: keys are those of `tar -cf x.tar *`."""
    shard = tmp_path / "x.tar"
    gnu_tar("-cf", str(shard), "-C", str(tree), ".")
    assert flat(ours(shard)) == expected(FILES)


@needs_gnu_tar
@pytest.mark.parametrize("suffix", ["gz", "tgz", "bz2", "xz", "zst"])
def test_compressed_shards_of_gnu_tar_read_when_the_program_exists(tree: Path, tmp_path: Path, suffix: str) -> None:
    """`tar -caf x.tar.gz` and so on."""
    program = {"gz": "gzip", "tgz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}[suffix]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    shard = tmp_path / ("x.tgz" if suffix == "tgz" else f"x.tar.{suffix}")
    gnu_tar("-caf", str(shard), "-C", str(tree), *sorted(FILES))
    samples = ours(shard)
    assert flat(samples) == expected(FILES)
    if suffix != "zst":  # which tarfile of Python 3.11 does not know
        assert samples == theirs(shard)


@needs_gnu_tar
def test_links_of_gnu_tar_read_as_files_when_they_are_hard(tmp_path: Path) -> None:
    """A second name of a file is stored as a hard link; a symbolic link is no member."""
    tree = write_files(tmp_path / "tree", {"a.txt": b"text", "b.txt": b"other"})
    (tree / "a.copy").hardlink_to(tree / "a.txt")
    (tree / "a.link").symlink_to("a.txt")
    shard = tmp_path / "x.tar"
    gnu_tar("-cf", str(shard), "-C", str(tree), "a.copy", "a.link", "a.txt", "b.txt")
    assert flat(ours(shard)) == {("a", "copy"): b"text", ("a", "txt"): b"text", ("b", "txt"): b"other"}


@needs_gnu_tar
def test_sparse_files_of_gnu_tar_read_in_full(tmp_path: Path) -> None:
    """`tar -S` stores the parts that are not zero; a member is its whole content."""
    (tmp_path / "a.bin").write_bytes(b"")
    with (tmp_path / "a.bin").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"end")
    shard = tmp_path / "x.tar"
    for form in ("gnu", "pax"):
        gnu_tar(f"--format={form}", "-S", "-cf", str(shard), "-C", str(tmp_path), "a.bin")
        assert flat(ours(shard)) == {("a", "bin"): bytes(1_000_000) + b"end"}


@needs_gnu_tar
def test_appended_shards_of_gnu_tar_read_whole(tree: Path, tmp_path: Path) -> None:
    """`tar -rf` and `tar --concatenate` write behind the last member, before the end marker."""
    first, second = tmp_path / "x.tar", tmp_path / "y.tar"
    names = sorted(FILES)
    gnu_tar("-cf", str(first), "-C", str(tree), *names[:3])
    gnu_tar("-rf", str(first), "-C", str(tree), *names[3:8])
    gnu_tar("-cf", str(second), "-C", str(tree), *names[8:])
    gnu_tar("--concatenate", "--file", str(first), str(second))
    assert flat(ours(first)) == expected(FILES)


RECORDS: list[dict[str, Any]] = [
    {
        "__key__": f"train/{number:04d}",
        "cls": number,
        "txt": f"text {number} ä",
        "json": {"number": number},
        "npy": np.arange(number, dtype=np.float32),
        "png": np.full((3, 4, 3), number * 20, np.uint8),
        "seg.png": np.full((3, 4), number * 20, np.uint8),
        "mp": {"list": [number]},
        "ten": [np.full((2, 2), number, np.int32)],
        "bin": bytes([number]),
    }
    for number in range(7)
]


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz"])
def test_shards_of_tar_writer_read_as_webdataset_reads_them(tmp_path: Path, name: str) -> None:
    """Webdataset's TarWriter, compressed or not: the same bytes, and every value as it was written."""
    shard = tmp_path / name
    with webdataset.TarWriter(str(shard)) as writer:
        for record in RECORDS:
            writer.write(record)
    samples = ours(shard)
    assert samples == theirs(shard)
    for record, sample in zip(RECORDS, list(IterableWrapper(samples).wds_decode("rgb8")), strict=True):
        for field in ("__key__", "cls", "txt", "json", "mp", "bin"):
            assert sample[field] == record[field], field
        assert np.array_equal(sample["npy"], record["npy"])
        assert np.array_equal(sample["png"], record["png"])
        assert np.array_equal(sample["seg.png"], np.repeat(record["seg.png"][:, :, None], 3, axis=2))
        assert np.array_equal(sample["ten"][0], record["ten"][0])


def test_shards_of_shard_writer_read_as_webdataset_reads_them(tmp_path: Path) -> None:
    """A series of compressed shards, by a pattern."""
    with webdataset.ShardWriter(str(tmp_path / "d-%06d.tar.gz"), maxcount=3, verbose=0) as writer:
        for record in RECORDS:
            writer.write(record)
    samples = list(WebDataset(str(tmp_path / "d-{000000..000002}.tar.gz"), shardshuffle=False))
    assert samples == theirs(*(tmp_path / f"d-{number:06d}.tar.gz" for number in range(3)))
    assert [sample["__key__"] for sample in samples] == [record["__key__"] for record in RECORDS]


def test_decoded_samples_equal_webdatasets_when_everything_is_decoded(tmp_path: Path) -> None:
    """The same decoder names give the same values."""
    shard = tmp_path / "x.tar"
    with webdataset.TarWriter(str(shard)) as writer:
        for record in RECORDS:
            writer.write(record)
    mine = list(WebDataset(str(shard), extensions="__key__ cls;id json txt png seg.png", decoder="rgb"))
    other = webdataset.filters.decode("rgb")(iter(theirs(shard)))
    other = webdataset.filters.to_tuple("__key__ cls;id json txt png seg.png")(other)
    for row, expected_row in zip(mine, other, strict=True):
        assert row[:4] == expected_row[:4]
        for image, expected_image in zip(row[4:], expected_row[4:], strict=True):
            assert image.dtype == expected_image.dtype
            np.testing.assert_allclose(image, expected_image, atol=1e-6)


def write_img2dataset(folder: Path, shards: int, size: int, failed: int) -> None:
    """Shards as img2dataset writes them: 00000.tar, nine digits a key, with the tables and reports beside them."""
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(size):
                key = f"{shard:05d}{number:04d}"
                if number == failed:
                    continue
                record = {"key": key, "caption": f"caption {key}", "url": f"http://host/{key}", "width": 16}
                for field, data in (
                    ("jpg", jpeg_bytes(number)),
                    ("json", json.dumps(record).encode()),
                    ("txt", record["caption"].encode()),
                ):
                    info = tarfile.TarInfo(f"{key}.{field}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
        (folder / f"{shard:05d}_stats.json").write_bytes(b"{}")


def test_shards_of_img2dataset_read_as_webdataset_reads_them(tmp_path: Path) -> None:
    """A folder, a glob or a range: the tables beside the shards are left alone."""
    write_img2dataset(tmp_path, shards=3, size=5, failed=2)
    keys = [f"{shard:05d}{number:04d}" for shard in range(3) for number in (0, 1, 3, 4)]
    pattern = str(tmp_path / "{00000..00002}.tar")
    for urls in (tmp_path, str(tmp_path / "*.tar"), pattern):
        samples = list(WebDataset(urls, shardshuffle=False))
        assert samples == theirs(*(tmp_path / f"{number:05d}.tar" for number in range(3)))
        assert [sample["__key__"] for sample in samples] == keys
    for image, caption, record in WebDataset(pattern, extensions="jpg txt json", decoder="pil"):
        assert image.size == (16, 12)
        assert caption == record["caption"]


def test_fields_keep_their_case_when_lowercase_is_false(tmp_path: Path) -> None:
    """They are lower-cased by default, as webdataset does."""
    shard = tmp_path / "x.tar"
    with tarfile.open(shard, "w") as tar:
        for name in ("A.JPG", "A.Seg.PNG", "b.Txt"):
            tar.addfile(tarfile.TarInfo(name))
    assert list(flat(ours(shard))) == [("A", "jpg"), ("A", "seg.png"), ("b", "txt")]
    assert list(flat(ours(shard, lowercase=False))) == [("A", "JPG"), ("A", "Seg.PNG"), ("b", "Txt")]
    assert ours(shard) == theirs(shard)


def test_a_cut_shard_is_an_error_where_webdataset_reads_on(tmp_path: Path) -> None:
    """The one wanted difference: a shard cut between two samples is whole for webdataset."""
    shard = tmp_path / "x.tar"
    with webdataset.TarWriter(str(shard)) as writer:
        for record in RECORDS:
            writer.write({"__key__": record["__key__"], "cls": record["cls"]})
    shard.write_bytes(shard.read_bytes()[: 4 * 2048])
    assert len(theirs(shard)) == 4
    with pytest.raises(ShardFormatError, match="8,192"):
        ours(shard)


def test_samples_pickle_to_webdatasets_when_compared_byte_by_byte(tmp_path: Path) -> None:
    """A sample is a plain dict of str and bytes, as webdataset's."""
    shard = tmp_path / "x.tar"
    with webdataset.TarWriter(str(shard)) as writer:
        writer.write({"__key__": "a", "cls": 1, "txt": "x"})
    (mine,), (other,) = ours(shard), theirs(shard)
    assert type(mine) is type(other) is dict
    assert pickle.loads(pickle.dumps(mine)) == other
