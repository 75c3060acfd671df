"""Many processes and one cache: one download each, whoever stops or is killed, and nothing wrong is ever served."""

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cache_server import CacheServer, cache_server
from tests.kits.processes import wait_until
from tests.kits.shards import tar_bytes
from torchdata_wds.pipes.shards.cache_shards import check_copy
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.names import copy_name

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.slow)]


def shard(number: int, size: int = 400_000) -> bytes:
    """A shard that differs from all others everywhere."""
    generator = random.Random(number)
    return tar_bytes([(f"{number}-{part}.bin", generator.randbytes(size)) for part in range(4)])


SHARDS = [shard(number) for number in range(5)]


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with cache_server() as running:
        yield running


def read(folder: str, url: str, *, max_bytes: float | None = None, pause: float = 0.0) -> str:
    """The digest of a shard that is read through a cache in pieces."""
    cache = ShardCache(folder, check=check_copy, max_bytes=max_bytes)
    digest = hashlib.blake2b()
    with cache.open(url, f"{folder}/{copy_name(url)}") as stream:
        while piece := stream.read(100_000):
            digest.update(piece)
            time.sleep(pause)
    return digest.hexdigest()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def read_all(answers: Any, folder: str, urls: list[str], max_bytes: float | None = None, pause: float = 0.0) -> None:
    """Tells the digests of shards."""
    answers.put([read(folder, url, max_bytes=max_bytes, pause=pause) for url in urls])


def read_one_byte(ready: Any, folder: str, url: str) -> None:
    """Begins a shard, and does not go on."""
    cache = ShardCache(folder, check=check_copy)
    with cache.open(url, f"{folder}/{copy_name(url)}") as stream:
        assert stream.read(1)
        ready.put(os.getpid())
        time.sleep(60)


def start(method: str, target: Any, *args: Any) -> Any:
    """Starts a process, with a queue as its first argument; gives both."""
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process: Any = context.Process(target=target, args=(answers, *args), daemon=True)
    process.start()
    return process, answers


def ended(process: Any, answers: Any) -> Any:
    """What a process has answered."""
    answer = answers.get()
    process.join(30)
    assert process.exitcode == 0
    process.close()
    answers.close()
    return answer


def end(process: Any, answers: Any) -> None:
    """Kills a process."""
    process.kill()
    process.join(30)
    process.close()
    answers.close()


def finished(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.endswith((".part", ".lock"))]


def test_processes_download_each_shard_once_when_they_want_the_same(tmp_path: Path, server: CacheServer) -> None:
    """In whatever order they come."""
    urls = [server.put(f"{number}.tar", data) for number, data in enumerate(SHARDS)]
    orders = [random.Random(number).sample(range(5), 5) for number in range(6)]
    running = [start("fork", read_all, str(tmp_path), [urls[number] for number in order]) for order in orders]
    for order, one in zip(orders, running, strict=True):
        assert ended(*one) == [digest(SHARDS[number]) for number in order]
    assert server.requests == {f"/{number}.tar": 1 for number in range(5)}
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == sorted(SHARDS)


@pytest.mark.parametrize("method", METHODS)
def test_a_process_reads_everything_when_the_one_that_began_does_not_go_on(
    tmp_path: Path, server: CacheServer, method: str
) -> None:
    """No rank waits for another one's training."""
    url = server.put("x.tar", SHARDS[0])
    server.gate.clear()
    idle = start(method, read_one_byte, str(tmp_path), url)
    assert idle[1].get() == idle[0].pid
    server.gate.set()
    assert read(str(tmp_path), url) == digest(SHARDS[0])
    assert server.requests == {"/x.tar": 1}
    end(*idle)


@pytest.mark.parametrize("method", METHODS)
def test_others_take_over_when_the_process_that_began_is_killed(
    tmp_path: Path, server: CacheServer, method: str
) -> None:
    """One of them downloads again, and none gives a byte twice."""
    url = server.put("x.tar", SHARDS[0])
    server.gate.clear()
    first = start(method, read_one_byte, str(tmp_path), url)
    first[1].get()
    others = [start("fork", read_all, str(tmp_path), [url]) for _ in range(3)]
    time.sleep(0.1)
    end(*first)
    assert wait_until(lambda: server.requests["/x.tar"] == 2)
    server.gate.set()
    assert [ended(*other) for other in others] == [[digest(SHARDS[0])]] * len(others)
    assert server.requests == {"/x.tar": 2}
    assert [path.name for path in tmp_path.iterdir()] == [copy_name(url)]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_nothing_wrong_is_served_when_processes_are_killed_while_they_download(
    tmp_path: Path, server: CacheServer, kills: int
) -> None:
    """By kill -9, at any moment: what is finished is whole, and the next process reads all."""
    generator = random.Random(kills)
    for number in range(kills):
        data = SHARDS[number % 5]
        url = server.put(f"{number}.tar", data)
        process, answers = start("fork", read_all, str(tmp_path), [url])
        time.sleep(generator.uniform(0, 0.04))
        os.kill(process.pid, signal.SIGKILL)
        end(process, answers)
        path = tmp_path / copy_name(url)
        assert not path.exists() or path.read_bytes() == data
        assert read(str(tmp_path), url) == digest(data)
        assert server.requests[f"/{number}.tar"] <= 2
    # a process that dies when its copy is finished may leave the lock of it
    assert len([path for path in tmp_path.iterdir() if path.suffix != ".lock"]) == kills


@pytest.mark.slow
def test_readers_get_everything_when_others_are_killed_all_the_time(tmp_path: Path, server: CacheServer) -> None:
    """Followers of followers, each of which may be the next to download."""
    generator = random.Random(3)
    url = server.put("x.tar", SHARDS[0])
    server.gate.clear()
    staying = [start("fork", read_all, str(tmp_path), [url]) for _ in range(2)]
    for _ in range(5):
        going = [start("fork", read_all, str(tmp_path), [url]) for _ in range(2)]
        time.sleep(generator.uniform(0, 0.05))
        for one in going:
            end(*one)
    server.gate.set()
    assert [ended(*one) for one in staying] == [[digest(SHARDS[0])]] * 2
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [SHARDS[0]]


@pytest.mark.slow
def test_the_limit_is_kept_within_one_shard_when_four_readers_run(tmp_path: Path, server: CacheServer) -> None:
    """Finished copies, at every moment; every reader gets every shard all the same."""
    data = [shard(number, 50_000) for number in range(12)]
    size = len(data[0])
    urls = [server.put(f"{number}.tar", one) for number, one in enumerate(data)]
    orders = [random.Random(number).choices(range(12), k=14) for number in range(4)]
    read_some = partial(read_all, max_bytes=3.5 * size, pause=0.002)
    running = [start("fork", read_some, str(tmp_path), [urls[number] for number in order]) for order in orders]
    most = 0
    while any(process.is_alive() for process, _ in running):
        sizes = []
        for path in finished(tmp_path):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                break  # a moment at which one was removed: counted at the next
        else:
            most = max(most, sum(sizes))
        for process, answers in running:
            if not answers.empty():
                process.join()
    for order, (process, answers) in zip(orders, running, strict=True):
        assert ended(process, answers) == [digest(data[number]) for number in order]
    assert 2 * size < most <= 3.5 * size + size
    assert sum(path.stat().st_size for path in finished(tmp_path)) <= 3.5 * size + size
    assert all(path.name in map(copy_name, urls) for path in finished(tmp_path))
