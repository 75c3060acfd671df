"""Caches on file systems without locks: copies are kept all the same, and nothing else is left."""

import errno
import fcntl
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cache_server import CacheServer, cache_server
from tests.kits.processes import in_child, open_files, wait_until
from tests.kits.shards import tar_bytes
from tests.kits.storage_kit import names
from torchdata_wds import handlers
from torchdata_wds.cli.cache import list_cache, remove_file
from torchdata_wds.pipes.shards.cache_shards import check_copy
from torchdata_wds.storage import locks
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.locked_files import OLD_SECONDS
from torchdata_wds.storage.cache.names import copy_name

SHARD = tar_bytes([(f"{number}.bin", os.urandom(300_000)) for number in range(4)])


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with cache_server() as running:
        yield running


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "ENOLCK", "EINVAL", "no fcntl"])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose ``flock`` fails so, or a Python without it."""

    def flock(*_: object) -> None:
        code = getattr(errno, request.param)
        raise OSError(code, os.strerror(code))

    handlers.said.clear()
    if request.param == "no fcntl":
        monkeypatch.setattr(locks, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", flock)


only_one = pytest.mark.parametrize("no_locks", ["ENOSYS"], indirect=True)


def read(cache: ShardCache, url: str) -> bytes:
    with cache.open(url, f"{cache.folder}/{copy_name(url)}") as stream:
        data: bytes = stream.read()
    return data


@pytest.mark.parametrize("while_reading", [True, False])
def test_cache_keeps_copies_when_there_are_no_locks(
    no_locks: None, tmp_path: Path, server: CacheServer, while_reading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning for all shards; the folder has the copies and nothing else."""
    cache = ShardCache(str(tmp_path), check=check_copy, while_reading=while_reading)
    urls = [server.put(f"{number}.tar", SHARD) for number in range(2)]
    before = open_files()
    for _ in range(3):
        assert [read(cache, url) for url in urls] == [SHARD] * 2
    assert open_files() <= before + 1  # a kept connection
    assert server.requests == {"/0.tar": 1, "/1.tar": 1}
    assert names(tmp_path) == sorted(map(copy_name, urls))
    assert caplog.text.count("has no locks (flock): copies are kept") == len(caplog.records) == 1


@only_one
def test_cache_removes_the_oldest_copies_when_there_are_no_locks(
    no_locks: None, tmp_path: Path, server: CacheServer
) -> None:
    """The limit holds, and counting leaves no file."""
    cache = ShardCache(str(tmp_path), check=check_copy, max_bytes=2.5 * len(SHARD))
    urls = [server.put(f"{number}.tar", SHARD) for number in range(4)]
    for url in urls:
        assert read(cache, url) == SHARD
    assert names(tmp_path) == sorted(map(copy_name, urls[2:]))


def read_all(folder: str, url: str) -> None:
    """Reads a shard in another process."""
    assert read(ShardCache(folder, check=check_copy), url) == SHARD


@only_one
def test_processes_read_the_whole_shard_when_there_are_no_locks(
    no_locks: None, tmp_path: Path, server: CacheServer
) -> None:
    """Each may download it; one whole copy is left."""
    url = server.put("x.tar", SHARD)
    server.gate.clear()
    context = multiprocessing.get_context("fork")
    running: list[Any] = [context.Process(target=read_all, args=(str(tmp_path), url)) for _ in range(3)]
    for process in running:
        process.start()
    assert wait_until(lambda: server.requests["/x.tar"] == 3, 30)
    server.gate.set()
    for process in running:
        process.join(30)
        assert process.exitcode == 0
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [SHARD]


@only_one
def test_cache_goes_on_when_a_process_was_killed_and_there_are_no_locks(
    no_locks: None, tmp_path: Path, server: CacheServer
) -> None:
    """What it has left might still be filled, by all that is known; it goes after a day."""
    url = server.put("x.tar", SHARD)
    server.gate.clear()
    cache = ShardCache(str(tmp_path), check=check_copy)

    def killed() -> None:
        with cache.open(url, f"{tmp_path}/{copy_name(url)}") as stream:
            assert stream.read(10)
            os._exit(0)

    assert in_child(killed) == 0
    server.gate.set()
    (part,) = tmp_path.iterdir()
    os.utime(part, (0, time.time() - 3600))
    assert [(file.state, file.kind) for file in list_cache(tmp_path)] == [("being made", "shard")]
    assert read(cache, url) == SHARD
    assert part.exists()
    os.utime(part, (0, time.time() - OLD_SECONDS - 10))
    assert [file.state for file in list_cache(tmp_path)] == ["whole", "left over"]
    assert remove_file(list_cache(tmp_path)[1]) == "removed"
    assert names(tmp_path) == [copy_name(url)]


@only_one
def test_cache_leaves_the_locks_of_machines_that_have_them(no_locks: None, tmp_path: Path, server: CacheServer) -> None:
    """Of another client of the same file system; empty ones, which nobody holds, are tidied up."""
    url, other = (server.put(f"{name}.tar", SHARD) for name in "xy")
    held, empty = (tmp_path / f"{copy_name(name)}.lock" for name in (url, other))
    held.write_text(f"{copy_name(url)}.17-0123abcd.part")
    empty.touch()
    assert [read(ShardCache(str(tmp_path)), name) for name in (url, other)] == [SHARD] * 2
    assert held.exists()
    assert not empty.exists()


def test_cache_removes_the_oldest_copies_when_locks_are_those_of_nfs(
    tmp_path: Path, server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are exclusive only for files that are open for writing."""
    real = fcntl.flock

    def flock(file: Any, how: int) -> None:
        if how & fcntl.LOCK_EX and not fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    cache = ShardCache(str(tmp_path), check=check_copy, max_bytes=2.5 * len(SHARD))
    urls = [server.put(f"{number}.tar", SHARD) for number in range(4)]
    for url in urls:
        assert read(cache, url) == SHARD
    assert set(names(tmp_path)) >= set(map(copy_name, urls[2:]))
    assert copy_name(urls[0]) not in names(tmp_path)


def test_lock_raises_when_locking_fails_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk is not a file system without locks."""

    def flock(*_: object) -> None:
        raise OSError(errno.EIO, "failed")

    file = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    assert locks.lock(file) is True
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="failed"):
        locks.lock(file)
    locks.unlock(file)
    os.close(file)
