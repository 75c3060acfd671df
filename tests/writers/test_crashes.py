"""A writer that is killed leaves whole shards under final names, or none."""

import hashlib
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds import ShardIndex, ShardWriter, TarWriter, WebDataset
from torchdata_wds.format.index.sidecars import index_url


def samples(seed: int) -> Iterator[dict[str, Any]]:
    """Samples without end, from tiny to larger than what is written at once."""
    rng = random.Random(seed)
    number = 0
    while True:
        number += 1
        size = rng.choice((0, 10, 700, 30_000, 400_000))
        yield {"__key__": f"{number:06d}", "bin": rng.randbytes(size), "cls": b"%d" % size}


def write_shards(folder: Path, seed: int, told: int) -> None:
    """Writes small shards, each with its index, until it is killed, and tells of each sample."""
    with ShardWriter(
        f"{folder}/x-%06d.tar", max_bytes=600_000, encoder=False, index=True, start_shard="next"
    ) as writer:
        for sample in samples(seed):
            writer.write(sample)
            os.write(told, b".")


def rewrite_shard(folder: Path, seed: int, told: int) -> None:
    """Replaces one compressed shard again and again, until it is killed, and tells of each sample."""
    for turn in range(1 << 30):
        with TarWriter(folder / "x.tar.gz", encoder=False, index=True) as writer:
            for number, sample in zip(range(1 + (seed + turn) % 7), samples(seed), strict=False):
                writer.write(
                    {**sample, "turn": b"%d" % turn, "count": b"%d" % (1 + (seed + turn) % 7), "n": b"%d" % number}
                )
                os.write(told, b".")


def run_and_kill(work: Callable[[Path, int, int], None], folder: Path, seed: int) -> None:
    """Forks a process that writes, and kills it at a random moment: after some samples, however long they take."""
    rng = random.Random(seed)
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(folder, seed, told)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(told)
    start, count = time.monotonic(), rng.randrange(40)
    for _ in range(count):
        assert os.read(heard, 1), "the writer failed by itself"
    # anywhere in the next sample, or at the end of its shard
    time.sleep(rng.uniform(0, 2) * (time.monotonic() - start) / count if count else rng.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(heard)
    assert os.WIFSIGNALED(status), "the writer failed by itself"


def check(folder: Path) -> int:
    """Reads every file under a final name; returns how many there are."""
    shards = sorted(path for path in folder.iterdir() if path.name.endswith((".tar", ".tar.gz")))
    for shard in shards:
        read = list(WebDataset(str(shard), shardshuffle=False))
        assert read
        # it comes behind the shard
        if Path(index_url(shard)).exists():
            index = ShardIndex.load(index_url(shard))
            assert [row.key for row in index] == [sample["__key__"] for sample in read]
            assert index.header.sha256 == hashlib.sha256(shard.read_bytes()).hexdigest()
        if "count" in read[0]:
            assert len(read) == int(read[0]["count"])
            assert len({sample["turn"] for sample in read}) == 1
    others = {path.name for path in folder.rglob("*")} - {path.name for path in shards} - {".wds-index"}
    assert all(name.endswith((".partial", ".index")) for name in others)
    return len(shards)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 4), pytest.param(4, 34, marks=pytest.mark.slow)], ids=["4 times", "30 times"]
)
def test_shard_writer_leaves_only_whole_shards_when_it_is_killed(first: int, last: int, tmp_path: Path) -> None:
    """Kill -9 at random moments; each restart continues behind the finished shards in the same folder."""
    finished = 0
    for seed in range(first, last):
        run_and_kill(write_shards, tmp_path, seed)
        shards = check(tmp_path)
        finished += shards
        unfinished = [path for path in tmp_path.glob("*.tar.partial") if not path.with_suffix("").exists()]
        assert len(unfinished) <= 1
        for path in tmp_path.rglob("*"):
            if seed % 10 == 9 and path.is_file():
                path.unlink()
    assert finished


@pytest.mark.parametrize(
    ("first", "last"), [(0, 4), pytest.param(4, 34, marks=pytest.mark.slow)], ids=["4 times", "30 times"]
)
def test_tar_writer_leaves_the_old_shard_or_the_new_one_when_it_is_killed(
    first: int, last: int, tmp_path: Path
) -> None:
    """Kill -9 while a compressed shard is replaced over and over."""
    for seed in range(first, last):
        run_and_kill(rewrite_shard, tmp_path, seed)
        check(tmp_path)
    assert (tmp_path / "x.tar.gz").exists()
