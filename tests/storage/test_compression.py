"""Compressors: reproducible, named by suffixes, and read back or found to be cut."""

import io
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.storage import compression_for, open_compressor, open_shard, wrap_stream

KINDS = ["gz", "zst", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bz2", "xz"))]

random.seed(5)
TEXT = bytes(random.choices(b"abcdefgh", k=3000)) + bytes(2000) + random.randbytes(500)
LARGE = b"".join(random.choice([random.randbytes(700), TEXT, bytes(512)]) for _ in range(400))


def pack(kind: str, *pieces: bytes) -> bytes:
    compressor = open_compressor(kind)
    return b"".join([compressor.compress(piece) for piece in pieces] + [compressor.flush()])


def cut(data: bytes, sizes: random.Random) -> list[bytes]:
    """The data in pieces of many sizes."""
    pieces = []
    while data:
        size = sizes.choice([1, 7, 512, 10_240, 131_072, 500_000])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"", b"a", TEXT, LARGE], ids=["empty", "byte", "text", "large"])
def test_compressor_writes_what_open_shard_reads(kind: str, data: bytes, tmp_path: Path) -> None:
    """Each compressor's shard is found by its first bytes and reads back."""
    (tmp_path / "x.tar").write_bytes(pack(kind, data))
    with open_shard(tmp_path / "x.tar") as stream:
        assert stream.read(len(data) + 1) == data
        assert stream.read(1) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_compressor_cannot_be_cut_unnoticed(kind: str) -> None:
    """Every cut of a shard is an error, also where all data is there but the checksum."""
    packed = pack(kind, TEXT)
    for size in range(1, len(packed)):
        with wrap_stream(io.BytesIO(packed[:size]), "x.tar") as stream, pytest.raises(ShardFormatError, match="cut"):
            stream.read(1 << 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_compressor_cannot_be_damaged_unnoticed(kind: str) -> None:
    """A byte that is wrong behind the header is an error, or changes no data."""
    packed = pack(kind, TEXT)
    for position in range(16, len(packed), 3):
        damaged = packed[:position] + bytes([packed[position] ^ 0x10]) + packed[position + 1 :]
        with wrap_stream(io.BytesIO(damaged), "x.tar") as stream:
            try:
                assert stream.read(1 << 20) == TEXT, position
            except ShardFormatError:
                continue


@pytest.mark.parametrize("kind", KINDS)
def test_compressor_gives_the_same_bytes_when_the_pieces_differ(kind: str) -> None:
    """The sizes of the pieces leave no trace."""
    once = pack(kind, LARGE)
    for seed in range(2):
        assert pack(kind, *cut(LARGE, random.Random(seed))) == once
    assert pack(kind, bytearray(LARGE)) == pack(kind, memoryview(LARGE)) == once  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_compressor_gives_the_same_bytes_when_time_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is written."""
    now = pack(kind, TEXT)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert pack(kind, TEXT) == now


def test_gzip_writes_neither_time_nor_name() -> None:
    """The header is the barest there is."""
    assert pack("gz", TEXT)[:8] == b"\x1f\x8b\x08\0\0\0\0\0"


def test_compression_for_decides() -> None:
    """What was asked for counts, and the name where nothing was; commands and streams have no name."""
    by_name: dict[str, str | None] = {
        "x.tar": None, "x.tar.gz": "gz", "X.TGZ": "gz", "x.tar.bz2": "bz2", "x.tbz2": "bz2", "x.tbz": "bz2",
        "x.tar.xz": "xz", "x.txz": "xz", "x.tar.zst": "zst", "x.tzst": "zst", "x.tar.zstd": "zst", "x.gz/y.tar": None,
        "a::b.tar.gz": "gz", "file:///x.tar.gz": "gz", "s3://b/x.tar.zst": "zst", "simplecache::s3://b/x.tar.gz": "gz",
        "zip://in/a.tar::file://x.tar.gz": None, "-": None, "": None, "pipe:cat > x.tar.gz": None,
    }  # fmt: skip
    assert {url: compression_for(url, None) for url in by_name} == by_name
    asked: dict[tuple[str, bool | str], str | None] = {
        ("x.tar.gz", False): None, ("x.tar", True): "gz", ("pipe:cat > x", True): "gz", ("-", "zst"): "zst",
        ("x.tar.gz", "xz"): "xz", ("x.tar", "bz2"): "bz2",
    }  # fmt: skip
    assert {given: compression_for(*given) for given in asked} == asked


def test_compressions_are_named_when_one_is_unknown() -> None:
    """A wrong word is answered with the valid ones."""
    words: tuple[Any, ...] = ("gzip", "", ".gz", 1, 9.5)
    for word in words:
        with pytest.raises(ValueError, match=rf"'gz', 'bz2', 'xz', 'zst'; found {re.escape(repr(word))}"):
            compression_for("x.tar", word)
    with pytest.raises(ValueError, match="'gz', 'bz2', 'xz', 'zst'; found 'lz4'"):
        open_compressor("lz4")


def test_zstd_raises_with_the_extra_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error says what to install."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"pip install 'torchdata_wds\[zstd\]'"):
        open_compressor("zst")
