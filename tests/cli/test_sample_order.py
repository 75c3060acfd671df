"""``--order`` of ``wds cat`` and ``wds split``: a shuffle of the whole data set, read by an index."""

import gzip
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.fault_server import Site, serve_site
from tests.kits.processes import open_files
from tests.kits.shards import tar_bytes, text_keys, text_samples, write_tar, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds
from torchdata_wds.cli.sample_order import ChosenNumbers, fetched
from torchdata_wds.pipes.order.permutation import Order

SIZES = (5, 0, 7, 3)
KEYS = text_keys(SIZES)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shards with indexes beside them; what a scan would keep goes to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    urls = write_text_shards(tmp_path / "in", SIZES)
    assert run_wds("index", *urls, "-p", "1").status == 0
    return urls


def keys(done: Result) -> list[str]:
    """The keys of the archive that a command has written, which succeeded."""
    assert done.status == 0, done.err
    return [sample["__key__"] for sample in read_samples(done.out)]


def ordered(seed: int, run: int = 1, among: list[str] = KEYS) -> list[str]:
    """The keys in the library's order."""
    return [among[number] for number in Order(len(among), run=run, seed=seed).numbers(0, len(among))]


def test_order_writes_each_sample_once_in_the_order_of_the_seed(shards: list[str]) -> None:
    """With whole content, the same each time, and another for another seed; no file stays open."""
    before = open_files()
    done = run_wds("cat", *shards, "--order", "7")
    assert keys(done) == ordered(7)
    assert sorted(read_samples(done.out), key=str) == sorted(read_samples(run_wds("cat", *shards).out), key=str)
    assert run_wds("cat", *shards, "--order", "7", "-p", "3").out == done.out
    assert keys(run_wds("cat", *shards, "--order", "8")) == ordered(8) != ordered(7)
    assert open_files() <= before


def test_order_keeps_runs_of_neighbours_together(shards: list[str]) -> None:
    """Also where a run crosses the end of a shard."""
    assert keys(run_wds("cat", *shards, "--order", "1", "--run", "4")) == ordered(1, 4)


def test_order_is_that_of_the_samples_that_slices_choose(shards: list[str]) -> None:
    """As they lie in the shards; --skip and -c count in the order."""
    found = keys(run_wds("cat", *shards, "--order", "3", "--shard-slice", "0:4:2", "--slice", "1:"))
    assert found == ordered(3, 1, [*KEYS[0:4:2], *KEYS[5:9:2], *KEYS[12:15:2]][1:])
    assert keys(run_wds("cat", *shards, "--order", "3", "--skip", "2", "-c", "4")) == ordered(3)[2:6]


def test_order_has_parts_that_make_it_up(shards: list[str]) -> None:
    """The jobs of an array write one order of all samples, not orders of some shards."""
    parts = [keys(run_wds("cat", *shards, "--order", "3", "--part", f"{number}/4")) for number in range(4)]
    assert [key for part in parts for key in part] == ordered(3)
    assert [len(part) for part in parts] == [3, 4, 4, 4]


def test_order_needs_no_index(shards: list[str], tmp_path: Path) -> None:
    """The headers are scanned, and nothing is written beside the shards."""
    urls = write_text_shards(tmp_path / "bare", SIZES)
    assert keys(run_wds("cat", *urls, "--order", "7")) == ordered(7)
    assert sorted(map(str, (tmp_path / "bare").iterdir())) == urls


def test_order_reads_by_a_packed_index(shards: list[str], tmp_path: Path) -> None:
    """With the shards named, or all of those in it."""
    pack = tmp_path / "all.wdsindex"
    assert run_wds("index", *shards, "--pack", pack, "-p", "1").status == 0
    assert keys(run_wds("cat", *shards[2:], "--order", "7", "--pack", pack)) == ordered(7, 1, KEYS[5:])
    assert keys(run_wds("cat", "--order", "7", "--pack", pack)) == ordered(7)


def test_order_reads_from_a_server(shards: list[str]) -> None:
    """By range requests, several at once."""
    site = Site({f"/{Path(url).name}": Path(url).read_bytes() for url in shards})
    with serve_site(site) as server:
        urls = [f"{server}/{Path(url).name}" for url in shards]
        assert keys(run_wds("cat", *urls, "--order", "7", "-p", "3")) == ordered(7)


def test_order_copies_shards_of_a_server_that_has_no_parts(shards: list[str], tmp_path: Path) -> None:
    """Each once, into a folder; without one, the error names it."""
    site = Site({f"/{Path(url).name}": Path(url).read_bytes() for url in shards}, ranges=False)
    pack = tmp_path / "all.pack"
    assert run_wds("index", *shards, "--pack", pack, "-p", "1").status == 0
    with serve_site(site) as server:
        urls = [f"{server}/{Path(url).name}" for url in shards]
        refused = run_wds("cat", *urls, "--order", "7", "--pack", pack)
        assert (refused.status, "pass --cache FOLDER" in refused.err) == (1, True)
        assert keys(run_wds("cat", *urls, "--order", "7", "--pack", pack, "--cache", tmp_path / "copies")) == ordered(7)


def test_order_refuses_keys_that_come_in_several_shards(shards: list[str], tmp_path: Path) -> None:
    """As every command that writes one archive, with the option that helps; numbered shards may share a key."""
    for number in range(2):
        write_tar(tmp_path / f"same-{number}.tar", text_samples("s", 2))
    same = tmp_path / "same-*.tar"
    done = run_wds("cat", same, "--order", "1", "-o", tmp_path / "out.tar")
    assert done.status == 1
    assert "--rekey" in done.err
    assert not (tmp_path / "out.tar").exists()
    found = keys(run_wds("cat", same, "--order", "1", "--rekey", "{shard}/{key}"))
    assert sorted(found) == [f"same-{shard}/s0000{number}" for shard in range(2) for number in range(2)]


def test_split_writes_shards_in_the_order(shards: list[str], tmp_path: Path) -> None:
    """With fields, sizes and indexes as it does otherwise."""
    done = run_wds("split", *shards, "--order", "7", "-n", "6", "--index", "-o", tmp_path / "out")
    assert done.status == 0, done.err
    found = [[sample["__key__"] for sample in read_samples(line)] for line in done.text.splitlines()]
    assert found == [ordered(7)[start : start + 6] for start in (0, 6, 12)]


def test_order_reports_shards_that_cannot_be_read(shards: list[str], tmp_path: Path) -> None:
    """It stops, or skips and counts them: the order is that of the others."""
    Path(shards[2]).unlink()
    stopped = run_wds("cat", *shards, "--order", "7")
    assert stopped.status == 1
    assert "shard-000002.tar" in stopped.err
    packed = tmp_path / "z.tar.gz"
    packed.write_bytes(gzip.compress(tar_bytes(text_samples("z", 4))))
    skipped = run_wds("cat", *shards, packed, "--order", "7", "--errors", "skip")
    assert skipped.status == 1
    assert [sample["__key__"] for sample in read_samples(skipped.out)] == ordered(7, 1, [*KEYS[:5], *KEYS[12:]])
    assert "skipped: cannot open shard" in skipped.err
    assert "z.tar.gz is compressed" in skipped.err
    assert "lost: 2 shards or samples were" in skipped.err


def test_order_skips_samples_that_are_damaged(shards: list[str], tmp_path: Path) -> None:
    """A header that is wrong loses one sample, which is named."""
    pack = tmp_path / "all.pack"
    assert run_wds("index", *shards, "--pack", pack, "-p", "1").status == 0
    path = Path(shards[0])
    data = bytearray(path.read_bytes())
    stat = path.stat()
    data[:512] = b"x" * 512
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    done = run_wds("cat", *shards, "--order", "7", "--pack", pack, "--errors", "skip")
    assert done.status == 1
    assert [sample["__key__"] for sample in read_samples(done.out)] == [key for key in ordered(7) if key != KEYS[0]]
    assert "lost: 1 shard or sample" in done.err


def test_order_refuses_wrong_arguments(shards: list[str], tmp_path: Path) -> None:
    """With status 2, or 1 for a shard that cannot be read at random; without output."""
    packed = tmp_path / "z.tar.gz"
    packed.write_bytes(gzip.compress(tar_bytes(text_samples("z", 4))))
    for arguments, says, status in (
        ([shards[0], "--run", "2"], "--order", 2),
        ([shards[0], "--pack", "x"], "--order", 2),
        ([shards[0], "--cache", "x"], "--order", 2),
        ([shards[0], "--order", "x"], "whole number", 2),
        ([shards[0], "--order", "1", "--run", "0"], "--run", 2),
        ([shards[0], "--order", "1", "--shuffle", "2"], "--shuffle", 2),
        ([shards[0], "--order", "1", "--mix", "2"], "--mix", 2),
        ([shards[0], "--order", "1", "--concatenated"], "--concatenated", 2),
        ([shards[0], "--order", "1", "--keys", "(.*)[.](.*)"], "--keys", 2),
        (["--order", "1"], "-", 2),
        (["--order", "1", packed], "is compressed", 1),
    ):
        done = run_wds("cat", *arguments)
        assert (done.status, done.out) == (status, b""), arguments
        assert says in done.err
    done = run_wds("split", shards[0], "--order", "1", "--max-shards", "2", "-o", tmp_path / "out")
    assert (done.status, "--max-shards" in done.err) == (2, True)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=6), st.integers(0, 4), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3)
)
def test_chosen_numbers_are_those_of_slices(sizes: list[int], first: int, step: int, start: int, stride: int) -> None:
    """Of each shard, then of all that is left."""
    bounds = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    chosen = ChosenNumbers(bounds, slice(first, None, step), slice(start, None, stride))
    rows = [range(int(low), int(high))[first::step] for low, high in pairwise(bounds)]
    expected = [number for row in rows for number in row][start::stride]
    assert len(chosen) == len(expected)
    assert chosen.at(np.arange(len(chosen))).tolist() == expected


@pytest.mark.parametrize("parallel", [1, 2, 20])
def test_fetched_keeps_the_order_and_reads_no_further_than_asked(parallel: int) -> None:
    """No thread is left running after an early end."""
    taken = []
    items = (taken.append(number) or number for number in range(10))
    results = fetched(lambda number: number * 2, items, parallel)
    assert [next(results) for _ in range(3)] == [(0, 0), (1, 2), (2, 4)]
    assert len(taken) <= 3 + parallel
    results.close()
    assert list(fetched(abs, range(5), parallel)) == [(number, number) for number in range(5)]
