"""Local copies of shards: one download, read while it comes, and never half a shard."""

import bz2
import contextlib
import errno
import fcntl
import gzip
import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from tests.kits.cache_server import CacheServer, cache_server
from tests.kits.processes import in_child, is_alive, open_files, wait_until
from tests.kits.shards import tar_bytes
from torchdata_wds import handlers
from torchdata_wds.errors import CacheError, ShardFormatError, ShardOpenError, UnsafeDataError
from torchdata_wds.pipes.shards.cache_shards import check_copy
from torchdata_wds.storage import StorageOptions
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache import download as downloading
from torchdata_wds.storage.cache.locked_files import CopyLock
from torchdata_wds.storage.cache.names import copy_name

SHARD = tar_bytes([(f"{number}.bin", os.urandom(300_000)) for number in range(10)])
ZIPPED = gzip.compress(SHARD, 1)


@pytest.fixture(scope="module")
def one_server() -> Iterator[CacheServer]:
    with cache_server() as server:
        yield server


@pytest.fixture
def server(one_server: CacheServer) -> Iterator[CacheServer]:
    """A server that starts afresh."""
    one_server.gate.set()
    one_server.cut.clear()
    one_server.requests.clear()
    one_server.objects.clear()
    handlers._warned.clear()
    yield one_server
    one_server.gate.set()


class Caching:
    """A cache, and a server with a shard for it, which is meant where no other is named."""

    def __init__(self, folder: Path, server: CacheServer, **settings: Any) -> None:
        self.folder = folder
        self.server = server
        self.url = server.put("x.tar", SHARD)
        self.cache = ShardCache(str(folder), **{"check": check_copy, **settings})

    def path(self, url: str = "") -> Path:
        return self.folder / copy_name(url or self.url)

    def open(self, url: str = "", offset: int = 0, **options: Any) -> Any:
        return self.cache.open(url or self.url, str(self.path(url)), offset, **options)

    def read(self, url: str = "", offset: int = 0) -> bytes:
        with self.open(url, offset) as stream:
            data: bytes = stream.read()
        return data

    def fetch(self, url: str = "") -> Path:
        return self.cache.fetch(url or self.url, str(self.path(url)))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def caching(tmp_path: Path, server: CacheServer) -> Caching:
    """A cache in a folder that is not there yet."""
    return Caching(tmp_path / "deep" / "cache", server)


def marks_are_kept(folder: Path) -> bool:
    """Whether the file system keeps extended attributes."""
    (folder / "probe").write_bytes(b"")
    try:
        os.setxattr(folder / "probe", "user.probe", b"1")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Afterwards no thread runs and no file is open that was not before."""
    threads = {thread for thread in threading.enumerate() if thread.name == "wds-cache"}
    files = open_files()
    yield
    assert {thread for thread in threading.enumerate() if thread.name == "wds-cache"} == threads
    assert open_files() <= files + 1  # a kept connection


# -------------------------------------------------------------------------------------------------- copies in a folder
@pytest.mark.parametrize("while_reading", [True, False])
def test_cache_asks_once_when_a_shard_is_read_again(tmp_path: Path, server: CacheServer, while_reading: bool) -> None:
    """The folder is made, the copy has the shard's bytes, and nothing else is left."""
    caching = Caching(tmp_path / "deep" / "cache", server, while_reading=while_reading)
    with nothing_left():
        with caching.open() as stream:
            assert while_reading or caching.path().read_bytes() == SHARD
            assert stream.read() == SHARD
        assert [caching.read() for _ in range(2)] == [SHARD] * 2
    assert server.requests == {"/x.tar": 1}
    assert caching.names() == [caching.path().name]
    assert caching.path().read_bytes() == SHARD


@pytest.mark.parametrize("compress", [partial(gzip.compress, compresslevel=1), bz2.compress])
def test_cache_keeps_shards_as_they_are_when_they_are_compressed(caching: Caching, compress: Any) -> None:
    """The copy equals the object, what is read is decompressed, from any byte."""
    shard = tar_bytes([("x.txt", b"text" * 50_000)])
    data = compress(shard)
    url = caching.server.put("x.tar.gz", data)
    for _ in range(2):
        assert caching.read(url, 1000) == shard[1000:]
    assert caching.path(url).read_bytes() == data
    assert caching.server.requests == {"/x.tar.gz": 1}


@pytest.mark.parametrize("offset", [1, 512, 1_000_000, len(SHARD)])
def test_cache_begins_at_an_offset_when_asked_to(caching: Caching, offset: int) -> None:
    """Whether there is a copy or not; behind the end is an error."""
    assert [caching.read(offset=offset) for _ in range(2)] == [SHARD[offset:]] * 2
    other = caching.server.put("y.tar", SHARD)
    for _ in range(2):
        with pytest.raises(ShardFormatError, match="ends at byte"):
            caching.read(other, len(SHARD) + 1)
    with pytest.raises(ValueError, match="must not be negative"):
        caching.open(offset=-1)


def test_cache_reads_any_source_when_it_has_a_backend(caching: Caching, tmp_path: Path) -> None:
    """Stores of fsspec, files, and rewritten URLs, whose copies are compressed as well."""
    import fsspec

    memory = fsspec.filesystem("memory")
    data = ZIPPED
    memory.pipe("/shard_cache/x.tar.gz", data)
    (tmp_path / "x.tar.gz").write_bytes(data)
    assert caching.read("memory://shard_cache/x.tar.gz") == SHARD
    memory.rm("/shard_cache", recursive=True)
    assert caching.read(str(tmp_path / "x.tar.gz")) == SHARD
    options = StorageOptions(rewrite={"s3://b": str(tmp_path)})
    rewriting = Caching(tmp_path / "rewritten", caching.server, storage_options=options)
    assert rewriting.read("s3://b/x.tar.gz") == SHARD
    for path in (*caching.folder.iterdir(), *rewriting.folder.iterdir()):
        assert path.read_bytes() == data


def test_cache_keeps_the_output_of_a_command_when_it_succeeds(caching: Caching, tmp_path: Path) -> None:
    """Two commands are two shards; one that fails leaves nothing."""
    (tmp_path / "x.tar").write_bytes(SHARD)
    url = f"pipe:echo >> {tmp_path}/ran; cat {tmp_path}/x.tar"
    assert [caching.read(url) for _ in range(2)] == [SHARD] * 2
    assert (tmp_path / "ran").read_text() == "\n"
    assert caching.read(f"pipe:cat < {tmp_path}/x.tar") == SHARD
    assert len(caching.names()) == 2
    with pytest.raises(ShardOpenError, match="exit status 3"):
        caching.read(f"pipe:cat {tmp_path}/x.tar; exit 3")
    assert len(caching.names()) == 2


def test_cache_kills_a_command_when_the_reader_stops_early(caching: Caching, tmp_path: Path) -> None:
    """At once, however long the command would have gone on."""
    url = f"pipe:echo $$ > {tmp_path}/pid; head -c 2000000 /dev/zero; sleep 60"
    start = time.monotonic()
    with nothing_left(), caching.open(url) as stream:
        assert stream.read(10) == bytes(10)
        stream.close()
        assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert caching.names() == []
    assert time.monotonic() - start < 30


def test_cache_refuses_commands_when_the_environment_forbids_them(
    caching: Caching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a cache."""
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError):
        caching.read("pipe:cat x.tar")
    assert caching.names() == []


def test_cache_gives_the_path_when_a_copy_is_fetched(caching: Caching) -> None:
    """It is there then; a source that fails raises, and so does a shard that is not whole."""
    with nothing_left():
        assert {caching.fetch() for _ in range(2)} == {caching.path()}
    assert caching.path().read_bytes() == SHARD
    with pytest.raises(ShardOpenError, match="404"):
        caching.fetch(caching.url.replace("x.tar", "missing.tar"))
    with pytest.raises(CacheError, match=r"cannot be kept in the cache folder .* no end-of-archive marker"):
        caching.fetch(caching.server.put("cut.tar", SHARD[:-1024]))
    assert caching.names() == [caching.path().name]


def test_cache_needs_no_writing_when_the_copy_is_there(caching: Caching) -> None:
    """Not even a lock: the folder may be read-only, and the source gone."""
    url = "http://127.0.0.1:9/x.tar"
    caching.folder.mkdir(parents=True)
    caching.path(url).write_bytes(SHARD)
    caching.folder.chmod(0o500)
    try:
        assert caching.read(url) == SHARD
        assert caching.fetch(url) == caching.path(url)
    finally:
        caching.folder.chmod(0o700)
    assert caching.names() == [copy_name(url)]


def test_cache_settings_pickle_and_show_no_secret() -> None:
    """They travel to workers with every item."""
    cache = ShardCache(
        "/cache", check=check_copy, storage_options=StorageOptions({"https": {"headers": {"A": "secret"}}})
    )
    assert pickle.loads(pickle.dumps(cache)) == cache
    assert "secret" not in repr(cache)


# ------------------------------------------------------------------------------------------------------ while it comes
def test_cache_gives_the_first_bytes_when_the_rest_is_still_to_come(caching: Caching) -> None:
    """The copy appears with the end, and a second reader needs no second download."""
    caching.server.gate.clear()
    with nothing_left():
        first, second = caching.open(), caching.open()
        with first, second:
            assert second.read(1_000_000) == first.read(1_000_000) == SHARD[:1_000_000]
            assert not caching.path().exists()
            assert {name.rpartition(".")[2] for name in caching.names()} == {"part", "lock"}
            caching.server.gate.set()
            assert second.read() == SHARD[1_000_000:]  # although the first reader, who has begun it, does not go on
            assert first.read() == SHARD[1_000_000:]
    assert caching.server.requests == {"/x.tar": 1}
    assert caching.names() == [caching.path().name]


def test_cache_leaves_nothing_when_the_reader_stops_early(caching: Caching) -> None:
    """No thread, no part, no lock; the next reader begins anew."""
    caching.server.gate.clear()
    with nothing_left():
        with caching.open() as stream:
            assert stream.read(1000) == SHARD[:1000]
            caching.server.gate.set()
        assert caching.names() in ([], [caching.path().name])
        stream.close()
    assert caching.read() == SHARD


def test_cache_does_not_wait_for_a_stalled_source_when_the_reader_stops(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends when the source answers, and harms nobody: neither the next reader nor that one's copy."""
    monkeypatch.setattr(downloading.Download.stop, "__defaults__", (0.05,))
    caching.server.gate.clear()
    with nothing_left():
        with caching.open() as stream:
            assert stream.read(1000) == SHARD[:1000]
        assert caching.names() == []
        with caching.open() as stream:
            assert stream.read(1000) == SHARD[:1000]
            caching.server.gate.set()
            assert stream.read() == SHARD[1000:]
        assert wait_until(lambda: not [one for one in threading.enumerate() if one.name == "wds-cache"])
    assert caching.path().read_bytes() == SHARD
    assert caching.names() == [caching.path().name]


def test_cache_reads_the_source_when_the_process_that_downloads_is_suspended(
    caching: Caching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock stays, and nothing comes: whatever was read before goes on, whoever waits does not wait for ever."""
    monkeypatch.setattr("torchdata_wds.storage.cache.settings._LONGEST_WAIT", 0.05)
    path = str(caching.path())
    caching.folder.mkdir(parents=True)
    lock = CopyLock.acquire(path)
    assert lock is not None
    with nothing_left():
        assert caching.read() == SHARD
        _, part = lock.create_part()
        with part:
            Path(f"/proc/self/fd/{part.fileno()}").write_bytes(SHARD[:1_200_000])
            assert caching.read() == SHARD
            with pytest.raises(CacheError, match="has made no progress"):
                caching.fetch()
    lock.release()
    assert "has made no progress" in caplog.text


@pytest.mark.parametrize("follows", [False, True])
def test_cache_ends_a_read_soon_when_another_thread_interrupts_it(caching: Caching, follows: bool) -> None:
    """It raises, and does not ask again; a slice's copy is not waited for."""
    caching.server.gate.clear()
    with nothing_left(), contextlib.ExitStack() as stack:
        if follows:
            assert stack.enter_context(caching.open()).read(10)
        with caching.open(finish=True) as stream:
            assert stream.read(1_000_000) == SHARD[:1_000_000]
            threading.Timer(0.05, stream.raw.interrupt).start()
            with pytest.raises(ShardOpenError):
                stream.read()
    assert caching.server.requests == {"/x.tar": 1}
    assert caching.names() == []


def test_cache_closes_when_the_end_of_the_program_has_frozen_its_thread(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lock that nobody gives up any more."""
    monkeypatch.setattr(downloading.Download.stop, "__defaults__", (0.05,))
    frozen, thawed, unlink = threading.Event(), threading.Event(), os.unlink

    def freeze(path: str) -> None:
        frozen.set()
        thawed.wait(20)
        unlink(path)

    monkeypatch.setattr("torchdata_wds.storage.cache.download.os.unlink", freeze)
    stream = caching.open(caching.server.put("x.tar", SHARD[:-1024]))
    assert frozen.wait(10)
    start = time.monotonic()
    stream.close()
    thawed.set()
    assert time.monotonic() - start < 10
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name == "wds-cache"])


def test_cache_begins_no_download_when_the_program_ends(caching: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would end it."""
    monkeypatch.setattr("torchdata_wds.storage.cache.download._is_ending", True)
    assert caching.read(caching.server.put("x.tar", SHARD)) == SHARD
    assert caching.names() == []


def test_cache_completes_the_copy_when_only_a_part_is_wanted(caching: Caching) -> None:
    """Slices of one shard need one download."""
    with nothing_left(), caching.open(finish=True) as stream:
        assert stream.read(1000) == SHARD[:1000]
    assert caching.names() == [caching.path().name]


def test_cache_does_not_wait_for_the_copy_when_the_reader_is_interrupted(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slice, too: Ctrl-C and an early break are to end soon."""
    monkeypatch.setattr(downloading.Download.stop, "__defaults__", (0.05,))
    caching.server.gate.clear()
    with pytest.raises(KeyboardInterrupt), caching.open(finish=True) as stream:
        assert stream.read(1000) == SHARD[:1000]
        raise KeyboardInterrupt
    assert caching.names() == []


def test_cache_hands_over_when_the_reader_who_began_stops(caching: Caching) -> None:
    """Who reads along begins anew, delivers nothing twice, and keeps the copy."""
    caching.server.gate.clear()
    with nothing_left():
        first, second, third = caching.open(), caching.open(), caching.open()
        with second, third:
            with first:
                begun = [stream.read(size) for stream, size in ((first, 10), (second, 1_200_000), (third, 500_000))]
                assert begun == [SHARD[:10], SHARD[:1_200_000], SHARD[:500_000]]
                threading.Timer(0.1, caching.server.gate.set).start()
            assert second.read() == SHARD[1_200_000:]
            assert third.read() == SHARD[500_000:]
    assert caching.server.requests["/x.tar"] in (1, 2)
    assert caching.names() == [caching.path().name]


def test_cache_raises_when_the_shard_has_changed_before_it_is_asked_for_again(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the one and half of the other would be worse than an error."""
    monkeypatch.setattr(downloading.Download.stop, "__defaults__", (0.05,))
    caching.server.gate.clear()
    first, second = caching.open(), caching.open()
    with second:
        with first:
            assert second.read(1_200_000) == SHARD[:1_200_000]
        caching.server.put("x.tar", SHARD[:5000] + b"?" + SHARD[5001:])
        caching.server.gate.set()
        for _ in range(2):
            with pytest.raises(ShardOpenError, match="changed while it was read"):
                second.read()


def test_cache_gives_what_came_when_the_source_fails(caching: Caching) -> None:
    """Then its error, to each reader; nothing is kept."""
    caching.server.cut.add("/x.tar")
    options = StorageOptions({"http": {"retries": 0}})
    caching.cache = ShardCache(caching.cache.folder, check=check_copy, storage_options=options)
    with nothing_left():
        for stream in (caching.open(), caching.open()):
            with stream:
                half = len(SHARD) // 2
                assert stream.read(half) == SHARD[:half]
                with pytest.raises(ShardOpenError, match=r"x\.tar"):
                    stream.read(1)
    assert caching.names() == []
    with pytest.raises(ShardOpenError, match="404"):
        caching.read(caching.url.replace("x.tar", "missing.tar"))
    assert caching.names() == []


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.tar", SHARD[:-1024]),
        ("x.tar", SHARD[:700_000]),
        ("x.tar", b""),
        ("x.tar", b"<html>not found</html>" * 100),
        ("x.tar.gz", gzip.compress(SHARD[:-1024], 1)),
        ("x", SHARD[:700_000]),
    ],
)
def test_cache_keeps_nothing_when_a_shard_is_not_whole(
    tmp_path: Path, server: CacheServer, name: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reader gets what came, and finds the damage as ever; verify=False keeps it."""
    plain = gzip.decompress(data) if name.endswith("gz") else data
    strict, lax = Caching(tmp_path / "strict", server), Caching(tmp_path / "lax", server, check=None)
    url = server.put(name, data)
    assert [strict.read(url) for _ in range(2)] == [plain] * 2
    assert strict.names() == []
    assert "verify=False" in caplog.text
    assert [lax.read(url) for _ in range(2)] == [plain] * 2
    assert lax.names() == [copy_name(url)]
    assert server.requests == {f"/{name}": 3}


def test_cache_keeps_nothing_when_compressed_data_is_damaged(caching: Caching) -> None:
    """The reader gets the decoder's error."""
    data = bytearray(ZIPPED)
    data[-6] ^= 1
    url = caching.server.put("x.tar.gz", bytes(data))
    with pytest.raises(ShardFormatError, match="expected CRC"):
        caching.read(url)
    assert caching.names() == []


@pytest.mark.parametrize("name", ["x.cbor", "x.mp.gz", "x"])
def test_cache_keeps_records_when_they_are_no_archive(caching: Caching, name: str) -> None:
    """Only what is called a tar archive, or begins as one, must end as one."""
    data = b"\x81\x01" * 100_000
    url = caching.server.put(name, gzip.compress(data) if name.endswith("gz") else data)
    assert [caching.read(url) for _ in range(2)] == [data] * 2
    assert caching.server.requests == {f"/{name}": 1}


# --------------------------------------------------------------------------------------- where no copy can be had
@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk that takes so many bytes of a shard."""
    room = [500_000]
    write = os.write

    def limited(file: int, data: Any) -> int:
        if not str(Path(f"/proc/self/fd/{file}").readlink()).split(" ")[0].endswith(".part"):
            return write(file, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, memoryview(data)[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr("torchdata_wds.storage.cache.download.os.write", limited)
    return room


@pytest.mark.parametrize("while_reading", [True, False])
def test_cache_reads_the_source_when_the_disk_is_full(
    tmp_path: Path, server: CacheServer, full_disk: list[int], caplog: pytest.LogCaptureFixture, while_reading: bool
) -> None:
    """What has come is not asked for again; a warning says what to look at, and nothing is left."""
    caching = Caching(tmp_path, server, while_reading=while_reading)
    url = server.put("x.tar", SHARD) + "?token=secret"
    server.objects["/x.tar?token=secret"] = SHARD
    with nothing_left():
        assert caching.read(url) == SHARD
    assert sum(server.requests.values()) == (1 if while_reading else 2)
    assert caching.names() == []
    assert "No space left on device" in caplog.text
    assert str(tmp_path) in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(CacheError, match="No space left"):
        caching.fetch(url)


def test_cache_gives_every_reader_all_when_the_disk_is_full(caching: Caching, full_disk: list[int]) -> None:
    """Who reads along asks the source by itself; who stops early leaves nothing open."""
    with nothing_left(), caching.open() as first, caching.open() as second, caching.open() as third:
        assert third.read(1_000_000) == SHARD[:1_000_000]
        assert second.read() == SHARD
        assert first.read() == SHARD
    assert caching.names() == []


@pytest.mark.parametrize("kind", ["a file", "a lock that is a folder", "locks that fail", "a copy that is a folder"])
def test_cache_reads_the_source_when_the_folder_cannot_be_used(
    tmp_path: Path, server: CacheServer, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it, training goes on."""
    caching = Caching(tmp_path / "cache", server)
    if kind == "a file":
        caching.folder.write_bytes(b"")
    elif kind == "a lock that is a folder":
        Path(f"{caching.path()}.lock").mkdir(parents=True)
    elif kind == "a copy that is a folder":
        caching.path().mkdir(parents=True)
    else:

        def failing(*_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(fcntl, "flock", failing)
    with nothing_left():
        assert [caching.read() for _ in range(2)] == [SHARD] * 2
    assert server.requests == {"/x.tar": 2}
    assert "not cached" in caplog.text


@pytest.mark.parametrize("while_reading", [True, False])
def test_cache_passes_a_shard_through_when_it_is_larger_than_all_copies_may_be(
    tmp_path: Path, server: CacheServer, while_reading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read, not kept, and nothing goes for it."""
    caching = Caching(tmp_path, server, max_bytes=len(SHARD) - 1, while_reading=while_reading)
    small = server.put("small.tar", SHARD[:600_000] and tar_bytes([("a", bytes(2_000_000))]))
    caching.read(small)
    with nothing_left():
        assert caching.read() == SHARD
    assert [name for name in caching.names() if not name.endswith(".lock")] == [copy_name(small)]
    assert "larger than max_bytes" in caplog.text


# ------------------------------------------------------------------------------------------ copies that are damaged
def test_cache_downloads_again_when_its_copy_is_cut(caching: Caching, caplog: pytest.LogCaptureFixture) -> None:
    """A tar archive that does not end as one is not served."""
    for size in (0, 700_000, 1_024_000, len(SHARD) - 1024):
        caching.read()
        os.truncate(caching.path(), size)
        assert caching.read() == SHARD
        assert caching.path().read_bytes() == SHARD
    assert caching.server.requests == {"/x.tar": 5}
    assert f"its copy {caching.path()} is cut" in caplog.text


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Damages a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_cache_raises_when_its_copy_turns_out_to_be_damaged(caching: Caching) -> None:
    """The checksum comes last: what was delivered is wrong, and the source's end must not be put behind it."""
    url = caching.server.put("x.tar.gz", ZIPPED)
    caching.read(url)
    overwrite(caching.path(url), 1_500_000, b"?" * 9)
    with nothing_left(), caching.open(url, 1000) as stream:
        for _ in range(2):
            with pytest.raises(ShardFormatError, match="was removed: read the shard again"):
                stream.read()
    assert caching.names() == []
    assert caching.read(url) == SHARD
    assert caching.names() == [copy_name(url)]


def test_cache_reads_the_source_when_nothing_can_be_read_of_its_copy(
    caching: Caching, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was delivered then, and nothing can be wrong."""
    url = caching.server.put("x.tar.gz", ZIPPED)
    caching.read(url)
    overwrite(caching.path(url), 10, b"\xff" * 4)  # no such kind of block
    with nothing_left():
        assert caching.read(url, 1000) == SHARD[1000:]
    assert caching.names() == []
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("has_notes", [True, False])
def test_cache_downloads_again_when_its_copy_has_another_length(
    tmp_path: Path, server: CacheServer, monkeypatch: pytest.MonkeyPatch, has_notes: bool
) -> None:
    """Of compressed and other shards, too, where the file system keeps extended attributes; else that is found late."""
    if has_notes and not marks_are_kept(tmp_path):
        pytest.skip("the file system keeps no extended attributes")
    if not has_notes:
        monkeypatch.delattr(os, "getxattr")
    caching = Caching(tmp_path / "cache", server)
    for name, data in (("x.tar.gz", ZIPPED), ("x.cbor", b"\x01" * 2_000_000))[: 1 + has_notes]:
        url = server.put(name, data)
        whole = caching.read(url)
        os.truncate(caching.path(url), 1_500_000)
        if not has_notes:
            with pytest.raises(ShardFormatError, match="was removed"):
                caching.read(url)
        assert caching.read(url) == whole


def test_cache_goes_on_from_the_source_when_its_copy_is_cut_while_it_is_read(caching: Caching) -> None:
    """Its end is not taken for that of the shard."""
    url = caching.server.put("x.cbor", b"\x01" * 1_000_000)
    caching.read(url)
    with nothing_left(), caching.open(url, 1000) as stream:
        begun = stream.read(10)
        os.truncate(caching.path(url), 500_000)
        assert begun + stream.read() == b"\x01" * 999_000
    assert caching.names() == []


def test_cache_uses_the_copy_when_zeros_follow_its_end_marker(caching: Caching) -> None:
    """Also if they are no whole block."""
    url = caching.server.put("x.tar", SHARD + bytes(7))
    assert [caching.read(url) for _ in range(2)] == [SHARD + bytes(7)] * 2
    assert caching.server.requests == {"/x.tar": 1}


def test_cache_keeps_the_copy_when_a_package_is_missing_to_read_it(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not damaged."""
    url = caching.server.put("x.tar.zst", zstandard.compress(SHARD))
    assert caching.read(url) == SHARD
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ShardOpenError, match="zstandard is not installed"):
        caching.read(url)
    assert caching.names() == [copy_name(url)]
    assert caching.server.requests == {"/x.tar.zst": 1}


def test_cache_does_not_touch_files_when_they_were_put_there_by_hand(tmp_path: Path, server: CacheServer) -> None:
    """They are read as they are; one that is cut stays, and the source is read."""
    caching = Caching(tmp_path, server, is_named_by_digest=False, max_bytes=1)
    other = tar_bytes([("other", b"1")])
    caching.path().write_bytes(other)
    os.utime(caching.path(), (1, 1))
    assert caching.read() == other
    assert not server.requests
    assert caching.path().stat().st_mtime == 1
    os.truncate(caching.path(), 700)
    assert caching.read() == SHARD
    assert caching.path().stat().st_size == 700


def test_cache_reads_on_when_the_copy_vanishes_meanwhile(caching: Caching) -> None:
    """What is open can be read; the next reader makes a new one."""
    caching.read()
    with caching.open() as stream:
        caching.path().unlink()
        assert stream.read() == SHARD
    assert caching.read() == SHARD
    assert caching.server.requests == {"/x.tar": 2}


def test_cache_delivers_and_keeps_only_what_came_when_somebody_cuts_the_part(caching: Caching) -> None:
    """Zeros would stand in its place, which a tar archive may end with."""
    caching.server.gate.clear()
    with nothing_left(), caching.open() as first, caching.open() as second:
        assert first.read(10) == second.read(10) == SHARD[:10]
        (part,) = caching.folder.glob("*.part")
        assert wait_until(lambda: part.stat().st_size == len(SHARD) // 2)
        os.truncate(part, 0)
        caching.server.gate.set()
        for stream in (first, second):
            with contextlib.suppress(ShardOpenError):
                assert stream.read() == SHARD[10:]
    assert caching.read() == SHARD


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_cache_delivers_and_keeps_only_what_came_when_somebody_cuts_the_part_just_before_a_write(
    caching: Caching, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The write must neither leave zeros before it, nor move what it has to another place unnoticed."""
    write, cuts = os.write, []

    def cut_and_write(file: int, data: memoryview) -> int:
        if not cuts and os.fstat(file).st_size > 2_000_000:
            cuts.append(os.fstat(file).st_size)
            os.truncate(file, size)
        return write(file, data)

    caching.server.gate.clear()
    with nothing_left(), caching.open() as first, caching.open() as second:
        assert first.read(10) == second.read(1_200_000)[:10] == SHARD[:10]
        monkeypatch.setattr("torchdata_wds.storage.cache.download.os.write", cut_and_write)
        caching.server.gate.set()
        for stream, start in ((first, 10), (second, 1_200_000)):
            with contextlib.suppress(ShardOpenError):
                assert stream.read() == SHARD[start:]
    assert len(cuts) == 1
    assert caching.read() == caching.path().read_bytes() == SHARD


def test_cache_lock_does_not_remove_another_when_the_folder_was_cleared(tmp_path: Path) -> None:
    """The next maker's lock has the same name."""
    path = str(tmp_path / "x.tar")
    one = CopyLock.acquire(path)
    assert one is not None
    (tmp_path / "x.tar.lock").unlink()
    two = CopyLock.acquire(path)
    assert two is not None
    one.release()
    assert CopyLock.acquire(path) is None
    two.release()
    assert list(tmp_path.iterdir()) == []


def test_cache_reads_on_when_the_whole_folder_vanishes_meanwhile(caching: Caching) -> None:
    """In the middle of a download, too."""
    caching.server.gate.clear()
    with nothing_left(), caching.open() as first, caching.open() as second:
        assert first.read(10) == second.read(10) == SHARD[:10]
        for path in caching.folder.iterdir():
            path.unlink()
        caching.folder.rmdir()
        caching.server.gate.set()
        assert first.read() == SHARD[10:]
        assert second.read() == SHARD[10:]


def test_cache_raises_when_its_copy_is_that_of_another_shard(tmp_path: Path, server: CacheServer) -> None:
    """Two URLs with one name, in two processes say: the second gets no byte of the first, while it comes or later."""
    if not marks_are_kept(tmp_path):
        pytest.skip("the file system keeps no extended attributes")
    cache = Caching(tmp_path, server, is_named_by_digest=False).cache
    one, two = server.put("a/x.tar", SHARD), server.put("b/x.tar", SHARD)
    path = str(tmp_path / "x.tar")
    server.gate.clear()
    with nothing_left(), cache.open(one, path) as stream:
        assert stream.read(10) == SHARD[:10]
        with pytest.raises(CacheError, match="same name in the cache folder as another URL"):
            cache.open(two, path)
        server.gate.set()
        assert stream.read() == SHARD[10:]
    for use in (cache.open, cache.fetch):
        with pytest.raises(CacheError, match="same name in the cache folder as another URL"):
            use(two, path)
    assert cache.open(one, path).read() == SHARD


# --------------------------------------------------------------------------------------------------------- max_bytes
def test_cache_removes_what_was_not_used_for_longest_when_it_is_full(tmp_path: Path, server: CacheServer) -> None:
    """Nothing that somebody reads, and nothing that somebody else has put there."""
    size = len(SHARD)
    caching = Caching(tmp_path, server, max_bytes=3 * size)
    urls = [server.put(f"{number}.tar", SHARD) for number in range(5)]
    (tmp_path / "by-hand.tar").write_bytes(bytes(10 * size))
    (tmp_path / "folder.tar").mkdir()

    def kept() -> list[int]:
        return [number for number, url in enumerate(urls) if caching.path(url).exists()]

    for url in urls[:3]:
        caching.read(url)
    caching.read(urls[0])
    assert kept() == [0, 1, 2]
    caching.read(urls[3])
    assert kept() == [0, 2, 3]
    with caching.open(urls[2]) as stream:
        caching.read(urls[4])
        assert kept() == [2, 3, 4]
        assert stream.read() == SHARD
    assert server.requests == {f"/{number}.tar": 1 for number in range(5)}
    assert (tmp_path / "by-hand.tar").stat().st_size == 10 * size


def test_cache_keeps_no_more_when_all_copies_are_being_read(
    tmp_path: Path, server: CacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One shard above the limit at most; who reads along is not sent to the source for that."""
    caching = Caching(tmp_path, server, max_bytes=1.5 * len(SHARD))
    urls = [server.put(f"{number}.tar", SHARD) for number in range(3)]
    with nothing_left(), contextlib.ExitStack() as streams:
        for url in urls[:2]:
            streams.enter_context(caching.open(url)).read(1)
            wait_until(caching.path(url).exists)
        first, second = caching.open(urls[2]), caching.open(urls[2])
        with first, second:
            assert first.read() == second.read() == SHARD
    assert server.requests == {f"/{number}.tar": 1 for number in range(3)}
    assert [caching.path(url).exists() for url in urls] == [True, True, False]
    assert "being read" in caplog.text


# ----------------------------------------------------------------------------------------------- leftovers and forks
def test_cache_begins_anew_when_a_download_was_left_by_a_process_that_is_gone(caching: Caching) -> None:
    """Its lock is nobody's, its part is not read, and both are removed; so are parts of others that are old."""
    caching.folder.mkdir(parents=True)
    path = caching.path()
    lefts = [Path(f"{path}.{number}-0123abcd.part") for number in (1, 2)]
    for left in lefts:
        left.write_bytes(b"old" * 1000)
    Path(f"{path}.lock").write_bytes(lefts[0].name.encode())
    of_others = [caching.folder / f"{path.name}.{name}.3-0123abcd.part" for name in ("new", "old", "old-and-filled")]
    for other in of_others:
        other.write_bytes(b"")
    for other in of_others[1:]:
        os.utime(other, (1, 1))
    with of_others[2].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert caching.read() == SHARD
    assert caching.names() == sorted([path.name, of_others[0].name, of_others[2].name])


def test_cache_does_not_read_a_part_when_nobody_fills_it(caching: Caching) -> None:
    """Not even while the next maker is just about to begin."""
    caching.folder.mkdir(parents=True)
    path = caching.path()
    left = Path(f"{path}.1-0123abcd.part")
    left.write_bytes(b"old" * 1000)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    os.write(lock, left.name.encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(0.1, os.close, (lock,))
    timer.start()
    assert caching.read() == SHARD
    timer.join()


def test_cache_is_not_disturbed_when_a_child_is_forked_meanwhile(caching: Caching) -> None:
    """The child lets go of what it inherits, and goes on with the same shard by itself."""
    caching.server.gate.clear()
    with nothing_left(), caching.open() as stream:
        assert stream.read(1000) == SHARD[:1000]

        def child() -> None:
            stream.close()
            with caching.open() as own:
                assert own.read(1000) == SHARD[:1000]

        assert in_child(child) == 0
        assert len(caching.names()) == 2
        caching.server.gate.set()
        assert stream.read() == SHARD[1000:]
    assert caching.names() == [caching.path().name]
    assert caching.server.requests == {"/x.tar": 1}


def test_cache_is_free_when_its_maker_is_gone_and_a_forked_child_lives_on(caching: Caching) -> None:
    """Locks do not stay with children that were forked while a shard was downloaded."""
    caching.server.gate.clear()
    reader, writer = os.pipe()

    def maker() -> None:
        with caching.open() as stream:
            stream.read(1000)
            child = os.fork()
            if not child:
                os.close(writer)
                os.read(reader, 1)
            os._exit(0)

    assert in_child(maker) == 0
    caching.server.gate.set()
    assert caching.read() == SHARD
    os.close(writer)
    os.close(reader)
    assert caching.server.requests == {"/x.tar": 2}


def begin(folder: str, url: str, path: str) -> None:
    """Reads the beginning of a shard, and leaves it open."""
    stream = ShardCache(folder).open(url, path)
    assert stream.read(10)
    globals()["left_open"] = stream


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_cache_leaves_no_part_when_a_process_ends_in_the_middle(caching: Caching, method: str) -> None:
    """And does not keep it from ending while the source stalls."""
    caching.server.gate.clear()
    context = multiprocessing.get_context(method)
    process: Any = context.Process(target=begin, args=(str(caching.folder), caching.url, str(caching.path())))
    process.start()
    process.join(25)
    assert process.exitcode == 0
    assert caching.names() == []


# ------------------------------------------------------------------------------------------------------------- reports
def test_cache_tells_what_it_does_when_asked_to(
    tmp_path: Path, server: CacheServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error where nobody has configured logging, with secrets masked; on request only."""
    monkeypatch.setattr("torchdata_wds.storage.cache.settings.logger.hasHandlers", lambda: False)
    caching = Caching(tmp_path, server, max_bytes=len(SHARD))
    for name in ("a.tar?token=secret", "b.tar"):
        server.objects[f"/{name}"] = SHARD
    base = server.put("c.tar", SHARD).removesuffix("c.tar")
    caching.read(base + "b.tar")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WDS_VERBOSE_CACHE", "1")
    for _ in range(2):
        caching.read(base + "a.tar?token=secret")
    text = capsys.readouterr().err
    for line in (f"miss {base}a.tar", f"downloaded {base}a.tar?token=***: {len(SHARD):,} bytes in", "evicted", "hit"):
        assert line in text
    assert "secret" not in text
    monkeypatch.delenv("WDS_VERBOSE_CACHE")
    Caching(tmp_path / "own", server, verbose=True).read(base + "b.tar")
    assert "miss" in capsys.readouterr().err


def test_cache_logs_what_it_does_when_logging_is_configured(caching: Caching, caplog: pytest.LogCaptureFixture) -> None:
    """At the level INFO."""
    with caplog.at_level(logging.INFO):
        caching.read(caching.server.put("x.tar", SHARD))
    assert [record.levelname for record in caplog.records if "downloaded" in record.message] == ["INFO"]


def test_cache_shows_progress_when_tqdm_is_installed(caching: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    """On request, by masked names; without tqdm there is none."""
    shown: list[Any] = []

    @contextlib.contextmanager
    def bar(**options: Any) -> Iterator[Any]:
        shown.append(options["desc"])
        yield SimpleNamespace(update=shown.append)

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bar))
    caching.cache = ShardCache(caching.cache.folder, verbose=True)
    caching.read()
    assert caching.url.endswith(shown[0])
    assert sum(shown[1:]) == len(SHARD)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    caching.path().unlink()
    assert caching.read() == SHARD
    assert sum(shown[1:]) == len(SHARD)


@pytest.mark.slow
def test_cache_reads_the_source_when_a_disk_is_really_full(tmp_path: Path, server: CacheServer) -> None:
    """A file system of two megabytes."""
    caching = Caching(tmp_path / "tiny", server)
    caching.folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(caching.folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        small = tar_bytes([("a", bytes(500_000))])
        assert caching.read(server.put("small.tar", small)) == small
        with nothing_left():
            assert [caching.read() for _ in range(2)] == [SHARD] * 2
        assert server.requests == {"/small.tar": 1, "/x.tar": 2}
        assert len(caching.names()) == 1
    finally:
        subprocess.run(["umount", str(caching.folder)], check=True)


def test_copy_is_kept_when_its_reader_leaves_after_the_last_byte(tmp_path: Path) -> None:
    """What the source has given whole is not thrown away because nobody waits for it any longer."""
    shard = tmp_path / "x.tar"
    shard.write_bytes(tar_bytes([("a.bin", bytes(60_000))]))
    cache = ShardCache(tmp_path / "cache")
    for number in range(20):
        copy = str(tmp_path / "cache" / f"{number}.tar")
        with cache.open(str(shard), copy) as stream:
            assert stream.read(shard.stat().st_size)
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 20
