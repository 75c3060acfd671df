"""Local files, file: URLs and standard input."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kits.processes import in_child, in_worker, open_files
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.sources.local import LocalFile, StandardInput

DATA = bytes(range(256)) * 20


def read(url: str | Path, offset: int = 0) -> bytes:
    with open_shard(url, offset=offset) as stream:
        return stream.read(1 << 20)


@pytest.mark.parametrize(
    "name", ["a b.tar", "a?x=1.tar", "a#1.tar", "a&b.tar", "a%20b.tar", "a:b.tar", "a::b.tar", "{a}*[1].tar", "ü\n.tar"]
)
def test_open_shard_takes_a_path_verbatim_when_it_looks_like_something_else(name: str, tmp_path: Path) -> None:
    """No character of a path means anything."""
    (tmp_path / name).write_bytes(DATA)
    assert read(tmp_path / name) == read(f"{tmp_path}/{name}") == DATA


def test_open_shard_takes_a_path_verbatim_when_it_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with a colon, a drive letter or two colons are paths of the working directory too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "D:").mkdir()
    for name in ("D:/x.tar", "a:b.tar", "a::b.tar", "x.tar"):
        Path(name).write_bytes(DATA)
        assert read(name) == DATA


def test_open_shard_decodes_a_file_url(tmp_path: Path) -> None:
    """All three forms of file: URL are percent-decoded, and ? and # are part of the name."""
    path = tmp_path / "a b?c#d.tar"
    path.write_bytes(DATA)
    folder = str(tmp_path)
    for url in (
        f"file:{folder}/a%20b?c#d.tar",
        f"file://{folder}/a b%3Fc#d.tar",
        f"file://localhost{folder}/a%20b?c%23d.tar",
    ):
        assert read(url) == DATA


def test_open_shard_raises_when_a_file_url_names_a_host() -> None:
    """A file: URL with another host is an error that names the host."""
    with pytest.raises(ShardOpenError, match="not of host 'server'"):
        open_shard("file://server/x.tar")


def test_open_shard_raises_when_the_file_does_not_exist(tmp_path: Path) -> None:
    """A missing file says so and keeps the errno as its cause; a relative one names the working directory."""
    with pytest.raises(ShardOpenError, match="does not exist") as caught:
        open_shard(tmp_path / "x.tar")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.shard == str(tmp_path / "x.tar")
    with pytest.raises(ShardOpenError, match=f"does not exist in {Path.cwd()}"):
        open_shard("no-such-shard.tar")


@pytest.mark.parametrize("url", ["x-{000..010}.tar", "x-*.tar", "file:/tmp/no-such-x-{0..3}.tar"])
def test_open_shard_names_the_cure_when_a_pattern_was_not_expanded(url: str) -> None:
    """A range or glob that reaches the loader is answered with list_shards."""
    with pytest.raises(ShardOpenError, match=r"put \.list_shards\(\) before"):
        open_shard(url)


def test_open_shard_raises_when_it_is_a_folder(tmp_path: Path) -> None:
    """A folder is called a folder."""
    with pytest.raises(ShardOpenError, match="is a folder"):
        open_shard(tmp_path)


@pytest.mark.parametrize("url", ["a\0b.tar", "x" * 300])
def test_open_shard_raises_when_the_name_is_impossible(url: str) -> None:
    """Names that the system refuses are ShardOpenError too."""
    with pytest.raises(ShardOpenError, match="cannot open shard"):
        open_shard(url)


def test_open_shard_raises_when_the_file_may_not_be_read(tmp_path: Path) -> None:
    """A permission that is missing is named."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    path.chmod(0)

    def refused() -> None:
        os.chdir(tmp_path)  # whose parents may be closed to others
        if os.geteuid() == 0:  # who may read everything
            os.seteuid(65534)
        with pytest.raises(ShardOpenError, match="Permission denied"):
            open_shard("x.tar")

    assert in_child(refused) == 0


def test_open_shard_seeks_when_the_file_is_plain(tmp_path: Path) -> None:
    """Any offset up to the end gives the rest; one behind it is an error."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    for offset in (0, 1, 512, len(DATA)):
        assert read(path, offset) == DATA[offset:]
    with pytest.raises(ShardFormatError, match=r"ends at byte 5,120, before the offset 5,121"):
        open_shard(path, offset=len(DATA) + 1)


def test_open_shard_does_not_decompress_when_the_offset_meets_a_magic(tmp_path: Path) -> None:
    """A gzip file inside a plain tar is data, also where reading begins."""
    path = tmp_path / "x.tar"
    path.write_bytes(bytes(512) + b"\x1f\x8b\x08 no header" + bytes(500))
    assert read(path, 512).startswith(b"\x1f\x8b\x08 no")


def test_open_shard_is_a_buffer_over_the_file_when_plain(tmp_path: Path) -> None:
    """Nothing stands between the buffer and the file: small reads stay in C."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    with open_shard(path) as stream:
        assert type(stream) is io.BufferedReader
        assert isinstance(stream.raw, LocalFile)


@pytest.mark.parametrize("data", [b"", b"a", b"\x1f", DATA[:9]])
def test_open_shard_gives_short_files_as_they_are(data: bytes, tmp_path: Path) -> None:
    """A file shorter than any magic is read, unless it is the beginning of one."""
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    if data == b"\x1f":
        with pytest.raises(ShardFormatError, match="cut off"):
            read(path)
    else:
        assert read(path) == data


def test_open_shard_reads_a_named_pipe(tmp_path: Path) -> None:
    """A FIFO cannot seek; it is read past."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(DATA))
    writer.start()
    assert read(path, 100) == DATA[100:]
    writer.join()


def test_local_file_names_the_shard_when_reading_fails(tmp_path: Path) -> None:
    """An input error in the middle of a file is a ShardOpenError with the shard."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    with open_shard(path) as stream:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, stream.fileno())  # type: ignore[attr-defined]
        os.close(folder)
        with pytest.raises(ShardOpenError, match="Is a directory") as caught:
            stream.read(512)
    assert caught.value.shard == str(path)


def test_open_shard_leaves_no_file_open_when_closed_early(tmp_path: Path) -> None:
    """A thousand early closes leave no file descriptor."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    before = open_files()
    for _ in range(1000):
        with open_shard(path) as stream:
            stream.read(512)
    assert open_files() <= before


# ------------------------------------------------------------------------------------------------- standard input
@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandardInput, "taken", False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DATA)))


@pytest.mark.usefixtures("standard_input")
def test_open_shard_reads_standard_input_once() -> None:
    """The first time gives the bytes, the second an error that says why; the process's own stream stays open."""
    assert read("-", 7) == DATA[7:]
    assert not sys.stdin.closed
    with pytest.raises(ShardOpenError, match="opened before"):
        open_shard("-")


def test_open_shard_raises_when_there_is_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without standard input says so."""
    monkeypatch.setattr(StandardInput, "taken", False)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ShardOpenError, match="has none"):
        open_shard("-")


def _open_standard_input() -> str:
    with pytest.raises(ShardOpenError) as caught:
        open_shard("-")
    return str(caught.value)


def test_open_shard_raises_when_standard_input_is_read_in_a_worker() -> None:
    """A worker process has no standard input, and the error says what to do."""
    assert "num_workers=0" in in_worker(_open_standard_input)


@pytest.mark.slow
def test_open_shard_reads_a_real_standard_input() -> None:
    """A program that is fed by a pipe reads its shard."""
    code = (
        "from torchdata_wds.storage import open_shard\nwith open_shard('-') as s: print(len(s.read(9999)), s.read(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=DATA, capture_output=True, check=True, timeout=60)
    assert done.stdout == b"5120 b''\n"
