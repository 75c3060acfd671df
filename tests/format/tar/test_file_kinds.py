"""Files that are not tar archives: the error says what they are, and what reads them."""

import gzip
import io
import json
import sqlite3
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds  # noqa: F401  (registers the forms)
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar.file_kinds import describe_file


def zip_bytes() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "x" * 600)
    return file.getvalue()


def npy_bytes() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(200))
    return file.getvalue()


def sqlite_bytes(folder: Path) -> bytes:
    with sqlite3.connect(folder / "made.db") as base:
        base.execute("create table t (x)")
    base.close()
    return (folder / "made.db").read_bytes()


REST = b"x" * 600
FILES = [
    ("x.zip", zip_bytes(), "zip archive"),
    ("x.tar", zip_bytes(), "zip archive"),
    ("x.parquet", b"PAR1" + REST, "Parquet"),
    ("x.arrow", b"ARROW1\0\0" + REST, "Arrow"),
    ("x.h5", b"\x89HDF\r\n\x1a\n" + REST, "HDF5"),
    ("x.npy", npy_bytes(), "numpy array"),
    ("x.pkl", b"\x80\x04\x95" + REST, "pickle"),
    ("x.jpg", b"\xff\xd8\xff\xe0" + REST, "JPEG"),
    ("x.lmdb", bytes(16) + b"\xde\xc0\xef\xbe" + bytes(600), "LMDB"),
    ("x.tfrecord", (100).to_bytes(8, "little") + REST, "TFRecord"),
    ("x.tar", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ("x.tar", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>' + b" " * 600, "message of a server"),
    ("x.tar", b"\n <!DOCTYPE HTML><html>" + b" " * 600, "message of a server"),
    ("x.json", json.dumps({"shardlist": list(range(300))}).encode(), r"load_dataset\(\)"),
    ("x.cbors", b"\x82\x01\x02" * 300, r"\.load_cbor_shards\(\)"),
    ("x.CBOR", b"\x82\x01\x02" * 300, r"\.load_cbor_shards\(\)"),
    ("x.cbors.gz", gzip.compress(b"\x82\x01\x02" * 300), r"\.load_cbor_shards\(\)"),
    ("x.tar", b"\xd9\xd9\xf7" + b"\x82\x01\x02" * 300, r"\.load_cbor_shards\(\)"),
    ("x.msgpack", b"\x92\x01\x02" * 300, r"\.load_msgpack_shards\(\)"),
    ("x.mp", b"\x92\x01", r"\.load_msgpack_shards\(\)"),
    ("x.tar", b"anything" * 100, "another file format"),
]


@pytest.mark.parametrize(("name", "data", "kind"), FILES, ids=[f"{name} {kind}" for name, _, kind in FILES])
def test_loader_says_what_a_file_is_when_it_is_no_tar_archive(
    tmp_path: Path, name: str, data: bytes, kind: str
) -> None:
    """By its first bytes, or else by its name; whole files and those shorter than a header."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ShardFormatError, match=rf"is not a tar archive.*{kind}"):
        list(IterableWrapper([str(path)]).load_wds_shards())


def test_loader_says_so_when_a_file_is_a_database(tmp_path: Path) -> None:
    """Such as .cache_samples() writes."""
    assert "cache_samples" in describe_file(sqlite_bytes(tmp_path)[:512], "x.db")


def test_file_names_are_read_without_their_query() -> None:
    """A URL may be signed."""
    assert "load_cbor_shards" in describe_file(b"\x82", "https://host/x.cbors?sig=a.b#c")


@pytest.mark.parametrize("form", ["load_cbor_shards", "load_msgpack_shards"])
def test_record_loaders_raise_when_a_shard_is_an_empty_tar(tmp_path: Path, form: str) -> None:
    """Its zeros would be read as ten thousand numbers."""
    (tmp_path / "x.tar").write_bytes(bytes(10_240))
    with pytest.raises(ShardFormatError, match="empty tar archive"):
        list(getattr(IterableWrapper([str(tmp_path / "x.tar")]), form)())


@pytest.mark.parametrize("form", ["load_cbor_shards", "load_msgpack_shards"])
@pytest.mark.parametrize(
    ("data", "kind"), [(data, kind) for name, data, kind in FILES if name in ("x.zip", "x.parquet")]
)
def test_record_loaders_raise_when_a_shard_is_another_file(tmp_path: Path, form: str, data: bytes, kind: str) -> None:
    """Its first bytes would be read as numbers."""
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(ShardFormatError, match=kind):
        list(getattr(IterableWrapper([str(tmp_path / "x.bin")]), form)())
