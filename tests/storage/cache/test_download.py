"""Copies that a thread finishes while their readers go on: kept whole, few at a time, or given up with a warning."""

import errno
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import wait_until
from tests.kits.shards import keys_of, tar_bytes, text_samples
from tests.kits.workers_kit import time_limit
from torchdata_wds import handlers
from torchdata_wds.storage.cache import ShardCache, wait_for_copies
from torchdata_wds.storage.cache import download as downloading

SHARDS = [tar_bytes(text_samples(f"s{number}-", 3)) for number in range(5)]


class SlowDisk:
    """Lets `fsync` wait, and fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.waiting = 0
        self.error: OSError | None = None

    def fsync(self, file: int) -> None:
        self.waiting += 1
        assert self.gate.wait(20)
        self.waiting -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    """A disk that finishes nothing until its gate opens."""
    disk = SlowDisk()
    monkeypatch.setattr(downloading.os, "fsync", disk.fsync)
    handlers._warned.clear()
    yield disk
    disk.gate.set()
    wait_for_copies()


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Five shards in files."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number, data in enumerate(SHARDS):
        (folder / f"{number}.tar").write_bytes(data)
    return sorted(map(str, folder.iterdir()))


def chain_of(paths: list[str], folder: Path, **options: Any) -> Any:
    pipe = IterableWrapper(paths).cache_shards(folder, cache_local=True)
    return pipe.load_wds_shards(**options).group_by_key()


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith((".part", ".lock")))


def test_readers_go_on_to_the_next_shard_when_the_disk_is_slow(
    disk: SlowDisk, paths: list[str], tmp_path: Path
) -> None:
    """Two copies may wait for the disk; the epoch ends when all are kept."""
    cache = tmp_path / "cache"
    samples = iter(chain_of(paths, cache))
    got = [next(samples) for _ in range(9)]  # those of three shards
    assert wait_until(lambda: disk.waiting == 3)
    assert copies(cache) == []
    threading.Timer(0.05, disk.gate.set).start()
    got += samples
    assert keys_of(got) == [f"s{number}-{sample:05d}" for number in range(5) for sample in range(3)]
    assert len(copies(cache)) == len(list(cache.iterdir())) == 5
    assert not [thread for thread in threading.enumerate() if thread.name == "wds-cache" and disk.waiting]


@pytest.mark.parametrize("options", [{"read_ahead": 3}, {"interleave": 2}])
def test_all_copies_are_kept_when_an_epoch_ends(paths: list[str], tmp_path: Path, options: dict[str, int]) -> None:
    """Also where several shards are open at once."""
    for _ in range(2):
        assert len(list(chain_of(paths, tmp_path / "cache", **options))) == 15
        assert len(copies(tmp_path / "cache")) == 5


@pytest.mark.parametrize("options", [{}, {"read_ahead": 3}, {"interleave": 2}])
def test_nothing_is_left_when_an_epoch_ends_early(paths: list[str], tmp_path: Path, options: dict[str, int]) -> None:
    """What the threads still write is finished by then."""
    for _ in range(5):
        samples = iter(chain_of(paths, tmp_path / "cache", **options))
        for _ in range(9):
            next(samples)
        samples.close()
        assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix in (".part", ".lock")]


def test_a_reader_who_follows_gets_the_end_when_the_disk_is_slow(
    disk: SlowDisk, paths: list[str], tmp_path: Path
) -> None:
    """The size that is noted on the file shows that nothing is missing, so nobody waits for the disk."""
    cache, copy = ShardCache(str(tmp_path)), str(tmp_path / "copy")
    with cache.open(paths[0], copy, lingers=True) as first, cache.open(paths[0], copy, lingers=True) as second:
        assert first.read() == SHARDS[0]
        assert second.read() == SHARDS[0]
        assert wait_until(lambda: disk.waiting == 1)
    assert not Path(copy).exists()
    disk.gate.set()
    wait_for_copies()
    assert Path(copy).read_bytes() == SHARDS[0]


def test_a_reader_who_follows_does_not_need_the_one_who_has_gone_on(
    disk: SlowDisk, paths: list[str], tmp_path: Path
) -> None:
    """The download keeps its lock, so the file is not taken for one that was given up."""
    cache, copy = ShardCache(str(tmp_path)), str(tmp_path / "copy")
    with cache.open(paths[0], copy, lingers=True) as first, cache.open(paths[0], copy, lingers=True) as second:
        assert first.read() == SHARDS[0]
        first.close()
        threading.Timer(5, disk.gate.set).start()
        assert second.read() == SHARDS[0]
        assert wait_until(lambda: disk.waiting == 1)


def test_an_epoch_may_run_in_the_handler_of_a_stop_iteration(
    disk: SlowDisk, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``try: next(batches) except StopIteration: batches = iter(loader)``: its copies are kept too."""
    monkeypatch.setattr(downloading.Download.stop, "__defaults__", (0.01,))
    threading.Timer(0.2, disk.gate.set).start()
    try:
        next(iter([]))
    except StopIteration:
        assert len(list(chain_of(paths, tmp_path / "cache"))) == 15
        assert len(copies(tmp_path / "cache")) == 5


def test_a_download_never_waits_for_itself(paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may close an abandoned iterator in the thread of a download."""
    is_left = threading.Event()

    def fsync(_: int) -> None:
        assert is_left.wait(20)
        gc.collect()

    monkeypatch.setattr(downloading.os, "fsync", fsync)
    gc.disable()
    try:
        cycle: list[Any] = [iter(chain_of(paths, tmp_path / "cache"))]
        cycle.append(cycle)
        for _ in range(4):  # one more than the first shard has
            next(cycle[0])
        del cycle
        is_left.set()
        with time_limit(20):
            wait_for_copies()
    finally:
        gc.enable()
    assert not list((tmp_path / "cache").glob("*.lock"))


def test_copies_that_are_finished_together_keep_to_the_limit(
    disk: SlowDisk, paths: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each that nobody reads any more can be evicted as soon as it has its name."""
    for number in range(20):
        disk.gate.clear()
        folder = tmp_path / f"cache-{number}"
        cache = ShardCache(str(folder), max_bytes=len(SHARDS[0]) * 1.5)
        for path in paths[:2]:
            with cache.open(path, str(folder / Path(path).name), lingers=True) as stream:
                stream.read()
        assert wait_until(lambda: disk.waiting == 2)
        disk.gate.set()
        wait_for_copies()
        assert len(copies(folder)) == 1
    assert caplog.text == ""


def test_a_stream_that_does_not_linger_is_closed_when_its_copy_is_kept(
    disk: SlowDisk, paths: list[str], tmp_path: Path
) -> None:
    """Who opens a shard by itself finds the copy as soon as it has closed the stream."""
    with ShardCache(str(tmp_path)).open(paths[0], str(tmp_path / "copy")) as stream:
        assert stream.read() == SHARDS[0]
        threading.Timer(0.05, disk.gate.set).start()
    assert (tmp_path / "copy").read_bytes() == SHARDS[0]


def test_an_epoch_loses_nothing_when_the_disk_fails_at_last(
    disk: SlowDisk, paths: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The samples are there, the copies are not, and a warning says why."""
    disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    disk.gate.set()
    assert len(list(chain_of(paths, tmp_path / "cache"))) == 15
    assert list((tmp_path / "cache").iterdir()) == []
    assert "is read from its source, not from the cache folder" in caplog.text
    assert "Input/output error" in caplog.text


def read_and_end(paths: list[str], folder: Path, gate_seconds: float) -> None:
    """Reads three shards, and ends the process while their copies wait for the disk."""
    disk = SlowDisk()
    downloading.os.fsync = disk.fsync
    threading.Timer(gate_seconds, disk.gate.set).start()
    samples = iter(chain_of(paths, folder))
    globals()["left_open"] = [next(samples) for _ in range(9)], samples


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_copies_are_kept_when_their_process_ends(method: str, paths: list[str], tmp_path: Path) -> None:
    """The bytes are all there, and the disk takes them a moment later."""
    context = multiprocessing.get_context(method)
    process: Any = context.Process(target=read_and_end, args=(paths, tmp_path / "cache", 0.3))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert len(copies(tmp_path / "cache")) == len(list((tmp_path / "cache").iterdir())) >= 2


def test_a_copy_is_made_again_when_its_process_is_killed_before_the_disk_has_it(
    paths: list[str], tmp_path: Path
) -> None:
    """What is left then is never taken for a copy."""
    cache = tmp_path / "cache"
    process: Any = multiprocessing.get_context("fork").Process(target=read_and_end, args=(paths, cache, 60.0))
    process.start()
    assert wait_until(lambda: cache.is_dir() and len(list(cache.glob("*.part"))) == 3)
    process.kill()
    process.join(30)
    assert copies(cache) == []
    assert len(list(chain_of(paths, cache))) == 15
    assert len(copies(cache)) == len(list(cache.iterdir())) == 5
