"""``wds cat``: every sample once, in the order that was asked for."""

import gzip
import tarfile
from pathlib import Path

import pytest

from tests.kits.processes import open_files
from tests.kits.shards import tar_bytes, text_keys, text_samples, write_tar, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds

SIZES = (5, 0, 7, 3)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Some shards, one of them empty."""
    return write_text_shards(tmp_path / "in", SIZES)


def keys(result: Result) -> list[str]:
    """The keys of what a command has written to standard output."""
    assert result.status == 0, result.err
    return [sample["__key__"] for sample in read_samples(result.out)]


def test_cat_joins_shards_in_the_order_given(shards: list[str], tmp_path: Path) -> None:
    """All samples, all fields, one end marker; nothing on standard output but data."""
    out = tmp_path / "all.tar"
    assert run_wds("cat", *reversed(shards), "-o", out) == (0, b"", "")
    assert read_samples(out) == [sample for shard in reversed(shards) for sample in read_samples(shard)]
    assert not list(tmp_path.glob("*.partial"))


def test_cat_writes_the_same_bytes_again(shards: list[str], tmp_path: Path) -> None:
    """Whatever the order of fields and the headers were in the input."""
    first = run_wds("cat", *shards).out
    members = text_samples("s0-", 5)
    turned = [members[number + 2 - 2 * (number % 3)] for number in range(len(members))]
    other = write_tar(tmp_path / "pax.tar", turned, tar_format=tarfile.PAX_FORMAT)
    assert run_wds("cat", other, *shards[1:]).out == first


def test_cat_takes_the_samples_that_are_asked_for(shards: list[str]) -> None:
    """Numbers are those of the whole stream; a stream with fewer samples is not an error."""
    for arguments, expected in (
        (["-c", "4"], slice(0, 4)),
        (["-c", "0"], slice(0, 0)),
        (["-c", "99"], slice(None)),
        (["--skip", "6"], slice(6, None)),
        (["--skip", "99"], slice(99, None)),
        (["--skip", "1", "-c", "9" * 18], slice(1, None)),
        (["--skip", "3", "-c", "5"], slice(3, 8)),
        (["--slice", "2:12:3"], slice(2, 12, 3)),
        (["--slice", "2:12", "--skip", "1", "-c", "20"], slice(3, 12)),
    ):
        assert keys(run_wds("cat", *shards, *arguments)) == text_keys(SIZES)[expected]


def test_cat_stops_reading_when_it_has_enough(shards: list[str], tmp_path: Path) -> None:
    """Damage that lies behind the last sample is not looked at, and no file stays open."""
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(Path(shards[2]).read_bytes()[:-5000])
    before = open_files()
    assert keys(run_wds("cat", shards[0], damaged, "-c", "6")) == text_keys((5, 0, 1))
    assert run_wds("cat", shards[0], damaged).status == 1
    assert open_files() <= before


@pytest.mark.parametrize("parallel", ["1", "2", "9"])
def test_cat_reads_every_input_exactly_once_in_parallel(parallel: str, shards: list[str], tmp_path: Path) -> None:
    """However many readers there are for however many shards, in their order."""
    packed = tmp_path / "z.tar.gz"
    packed.write_bytes(gzip.compress(tar_bytes(text_samples("z", 4))))
    before = open_files()
    found = keys(run_wds("cat", *shards, packed, "-p", parallel))
    assert found == [*text_keys(SIZES), *(f"z{number:05d}" for number in range(4))]
    assert open_files() <= before


@pytest.mark.parametrize("parallel", ["1", "3"])
def test_cat_mixes_shards_in_turn(parallel: str, shards: list[str]) -> None:
    """Three are open; where one ends the next comes in its place."""
    found = keys(run_wds("cat", *shards, "--mix", "3", "-p", parallel))
    assert found[:6] == ["s0-00000", "s2-00000", "s3-00000", "s0-00001", "s2-00001", "s3-00001"]
    assert sorted(found) == sorted(text_keys(SIZES))


def test_cat_shuffles_alike_for_a_seed(shards: list[str]) -> None:
    """Nothing is lost, another seed gives another order, and a small buffer shuffles the order of shards at least."""
    first = keys(run_wds("cat", *shards, "--shuffle", "100", "--seed", "7"))
    assert sorted(first) == sorted(text_keys(SIZES))
    assert keys(run_wds("cat", *shards, "--shuffle", "100", "--seed", "7", "-p", "3")) == first
    others = {tuple(keys(run_wds("cat", *shards, "--shuffle", "100", "--seed", str(seed)))) for seed in range(2)}
    assert len(others) == 2
    orders = {tuple(keys(run_wds("cat", *shards, "--shuffle", "1", "--seed", str(seed)))) for seed in range(3)}
    assert len(orders) > 1
    assert all(
        [key for key in order if key.startswith(start)] == [key for key in text_keys(SIZES) if key.startswith(start)]
        for order in orders
        for start in ("s0", "s2", "s3")
    )


def test_cat_tells_the_seed_that_it_has_drawn(shards: list[str]) -> None:
    """With it, the order can be had again."""
    done = run_wds("cat", *shards, "--shuffle", "100", "-c", "5")
    seed = done.err.strip().rpartition(" ")[2]
    assert done.err == f"wds: shuffling with --seed {seed}\n"
    assert run_wds("cat", *shards, "--shuffle", "100", "--seed", seed, "-c", "5").out == done.out


def test_slice_counts_samples_as_they_lie_in_the_shards_also_where_they_are_shuffled(shards: list[str]) -> None:
    """It says which samples, and --shuffle in which order."""
    found = keys(run_wds("cat", *shards, "--shuffle", "100", "--seed", "1", "--slice", "4:11"))
    assert sorted(found) == sorted(text_keys(SIZES)[4:11])
    assert found != sorted(found)


def test_cat_refuses_wrong_arguments(shards: list[str]) -> None:
    """With status 2, and without output."""
    for arguments in (
        ["--seed", "1"],
        ["--shuffle", "0"],
        ["-c", "-1"],
        ["--mix", "0"],
        ["-p", "0"],
        ["--missing", "skip"],
        ["-f", "a=b=*"],
        ["--rekey", "same"],
    ):
        done = run_wds("cat", shards[0], *arguments)
        assert (done.status, done.out) == (2, b"")
        assert "error" in done.err
