"""Streams: exact reads, verified ends, failures that stay."""

import gc
import gzip
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchdata_wds.storage as storage
from torchdata_wds.errors import ShardFormatError, ShardOpenError

FOLDER = Path(storage.__file__).parent


class Trickle(io.RawIOBase):
    """Gives `data` in pieces of at most `step` bytes, then raises `failure`, if there is one."""

    def __init__(self, data: bytes, step: int = 7, failure: Exception | None = None) -> None:
        self.rest = data
        self.step = step
        self.failure = failure
        self.closings = 0

    def read(self, size: int = -1) -> bytes:
        if not self.rest and self.failure is not None:
            raise self.failure
        size = min(size, self.step)
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    def close(self) -> None:
        self.closings += 1
        super().close()


class OnlyRead:
    """A stream with read(n) and close() and nothing else."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self, size: int) -> Any:
        return self.value

    def close(self) -> None:
        raise RuntimeError("closing failed")


def test_wrap_stream_reads_exactly_when_the_stream_gives_short_reads() -> None:
    """Each read gives exactly what was asked for, whatever pieces the stream comes in."""
    data = bytes(range(256)) * 10
    with storage.wrap_stream(Trickle(data), "x.tar") as stream:
        assert [len(stream.read(512)) for _ in range(6)] == [512] * 5 + [0]


def test_wrap_stream_fills_a_buffer_when_readinto_is_used() -> None:
    """Filling takes the whole buffer, and less only at the end."""
    with storage.wrap_stream(Trickle(b"abcdefghij"), "x.tar") as stream:
        buffer = bytearray(8)
        assert (stream.readinto(buffer), bytes(buffer)) == (8, b"abcdefgh")
        assert (stream.readinto(buffer), bytes(buffer[:2])) == (2, b"ij")


def test_wrap_stream_delivers_all_data_before_the_error_when_the_stream_fails() -> None:
    """Whole reads before the failure are served; the read that meets it raises, and so does every later one."""
    broken = Trickle(bytes(1024), failure=ConnectionResetError("gone"))
    with storage.wrap_stream(broken, "https://u:secret@h/x.tar") as stream:
        assert stream.read(512) + stream.read(512) == bytes(1024)
        for _ in range(3):
            with pytest.raises(ShardOpenError, match="after 1,024 bytes: ConnectionResetError: gone") as caught:
                stream.read(512)
            assert caught.value.shard == "https://u:***@h/x.tar"
            assert isinstance(caught.value.__cause__, ConnectionResetError)


def test_wrap_stream_delivers_compressed_data_before_the_error_when_the_stream_fails() -> None:
    """The failure of the source is reported as such, and not as a cut stream, after the data before it."""
    data = bytes(range(256)) * 400
    packed = gzip.compress(data)
    with storage.wrap_stream(Trickle(packed[:-8], failure=OSError("gone")), "x.tar.gz") as stream:
        assert stream.read(len(data)) == data
        with pytest.raises(ShardOpenError, match="gone"):
            stream.read(1)


def test_wrap_stream_closes_the_stream_when_closed() -> None:
    """Closing closes the foreign stream, once, and a second close is fine."""
    foreign = Trickle(b"abc")
    stream = storage.wrap_stream(foreign, "x.tar")
    stream.close()
    stream.close()
    assert foreign.closings == 1
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)


def test_wrap_stream_closes_quietly_when_the_foreign_close_fails() -> None:
    """An error of the foreign close() is nobody's business any more."""
    storage.wrap_stream(OnlyRead(b""), "x.tar").close()


@pytest.mark.parametrize("value", ["text", None, 3, bytes(1 << 21)])
def test_wrap_stream_raises_when_the_stream_is_not_binary(value: Any) -> None:
    """A text stream, a non-blocking one, or one that gives too much is an error that says so."""
    with (
        storage.wrap_stream(OnlyRead(value), "x.tar") as stream,
        pytest.raises(ShardOpenError, match=r"returned .* for read\("),
    ):
        stream.read(512)


def test_wrap_stream_raises_when_there_is_no_read() -> None:
    """Something without read() is a TypeError that names its type."""
    with pytest.raises(TypeError, match="dict without read"):
        storage.wrap_stream({}, "x.tar")


def test_wrap_stream_gives_nothing_when_the_stream_is_empty() -> None:
    """A zero-byte shard is the reader's to complain about."""
    with storage.wrap_stream(io.BytesIO(), "x.tar") as stream:
        assert stream.read(512) == b""


def test_wrap_stream_is_collected_when_dropped_after_an_error() -> None:
    """A stream that failed and was closed is in no reference cycle."""
    stream = storage.wrap_stream(Trickle(b"", failure=OSError("gone")), "x.tar")
    raw = stream.raw  # type: ignore[attr-defined]
    with pytest.raises(ShardOpenError):
        stream.read(1)
    stream.close()
    assert raw._failure is None


def test_open_shard_raises_when_the_offset_is_negative(tmp_path: Path) -> None:
    """A negative offset is a mistake of the caller."""
    with pytest.raises(ValueError, match="negative"):
        storage.open_shard(tmp_path / "x.tar", offset=-1)


@pytest.mark.parametrize("url", [b"x.tar", 3, None, ["x.tar"]])
def test_open_shard_raises_when_the_url_is_no_str_or_path(url: Any) -> None:
    """What is no str or path is a TypeError that names its type."""
    with pytest.raises(TypeError, match=f"not {type(url).__name__}"):
        storage.open_shard(url)


def test_wrap_stream_raises_when_the_offset_lies_behind_the_end(tmp_path: Path) -> None:
    """Reading past more than there is names both numbers."""
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    with (
        storage.open_shard(path, offset=1001) as stream,
        pytest.raises(ShardFormatError, match=r"ends at byte 1,000, before the offset 1,001"),
    ):
        stream.read(1)
    with storage.open_shard(path, offset=1000) as stream:
        assert stream.read(1) == b""


def test_storage_import_is_cheap_and_needs_no_torch() -> None:
    """Without the package's own __init__, importing the floor imports neither torch nor any client library."""
    code = f"""
import sys, types
package = types.ModuleType("torchdata_wds")
package.__path__ = [{str(FOLDER.parent)!r}]
sys.modules["torchdata_wds"] = package
import torchdata_wds.storage
clients = {{"fsspec", "urllib3", "braceexpand", "zstandard", "isal"}}
print(sorted(({{"torch", "torchdata", "numpy"}} | clients) & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_streams_warn_of_nothing_when_dropped_unclosed() -> None:
    """A wrapped stream that is dropped closes what it holds without a word."""
    foreign = Trickle(b"abc")
    storage.wrap_stream(foreign, "x.tar")
    gc.collect()
    assert foreign.closings == 1
