"""``wds sort``: every sample once, in order, whatever the memory."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kits.shards import sample_members, text_keys, write_tar, write_text_shards
from tests.kits.tool_kit import Result, read_samples, run_wds


def write(path: Path, values: Iterable[bytes], field: str = "cls") -> str:
    """A shard of samples with these values, whose keys are their numbers."""
    return write_tar(
        path,
        [
            member
            for number, value in enumerate(values)
            for member in sample_members(f"{number:04d}", txt=b"t", **{field: value})
        ],
    )


def keys(result: Result) -> list[str]:
    """The keys of what a command has written to standard output."""
    assert result.status == 0, result.err
    return [sample["__key__"] for sample in read_samples(result.out)]


def test_sort_orders_by_key_and_keeps_every_sample(tmp_path: Path) -> None:
    """By default as text, over all shards; nothing is said."""
    shards = write_text_shards(tmp_path / "in", (5, 0, 7))
    out = tmp_path / "out.tar"
    assert run_wds("sort", *reversed(shards), "-o", out) == (0, b"", "")
    assert read_samples(out) == [sample for shard in shards for sample in read_samples(shard)]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("text", [b"10", b"9", b"B", b"a", "é".encode()], [0, 1, 2, 3, 4]),
        ("int", [b"10", b"9", b"-2", b"9" * 40, b"0"], [2, 4, 1, 0, 3]),
        ("float", [b"1e3", b"2.5", b"-inf", b"inf", b"2.25"], [2, 4, 1, 0, 3]),
    ],
)
def test_sort_compares_values_by_type(kind: str, values: list[bytes], expected: list[int], tmp_path: Path) -> None:
    """And from the largest to the smallest when asked."""
    shard = write(tmp_path / "x.tar", values)
    names = [f"{number:04d}" for number in expected]
    assert keys(run_wds("sort", shard, "-k", "cls", "--type", kind)) == names
    assert keys(run_wds("sort", shard, "-k", "cls", "--type", kind, "--reverse")) == names[::-1]


@pytest.mark.parametrize("reverse", [[], ["--reverse"]])
def test_sort_keeps_equal_samples_in_order_when_memory_is_small(reverse: list[str], tmp_path: Path) -> None:
    """Ten times and more what may be kept in memory, three classes: nothing lost, stable, no file left."""
    values = [b"%d" % (number * 7 % 3) for number in range(250)]
    shard = write(tmp_path / "x.tar", values)
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = run_wds("sort", shard, "-k", "cls", "--type", "int", "--memory", "10kB", "--tmpdir", folder, *reverse)
    numbers = sorted(range(250), key=lambda number: values[number], reverse=bool(reverse))
    assert keys(done) == [f"{number:04d}" for number in numbers]
    assert not list(folder.iterdir())


def test_sort_shuffles_alike_for_a_seed(tmp_path: Path) -> None:
    """Also with little memory; nothing is lost, and a seed that was drawn is told."""
    shard = write_text_shards(tmp_path, (100,))[0]
    done = run_wds("sort", shard, "--type", "shuffle")
    assert sorted(keys(done)) == text_keys((100,))
    assert keys(done) != text_keys((100,))
    seed = done.err.strip().rpartition(" ")[2]
    assert done.err == f"wds: shuffling with --seed {seed}\n"
    assert run_wds("sort", shard, "--type", "shuffle", "--seed", seed, "--memory", "5kB").out == done.out
    assert run_wds("sort", shard, "--type", "shuffle", "--seed", f"{int(seed) + 1}").out != done.out


@pytest.mark.parametrize("bad", [b"seven", b"nan"])
def test_sort_refuses_a_value_that_is_no_number_and_names_the_place(bad: bytes, tmp_path: Path) -> None:
    """Nothing is written; skipping loses that one sample, with status 1."""
    arguments = ["sort", write(tmp_path / "x.tar", [b"3", bad, b"1"]), "-k", "cls", "--type", "float"]
    done = run_wds(*arguments, "-o", tmp_path / "out.tar")
    assert (done.status, done.out) == (1, b"")
    for part in ("'0001'", "x.tar", "'cls'", repr(bad)):
        assert part in done.err
    assert not (tmp_path / "out.tar").exists()
    skipped = run_wds(*arguments, "--errors", "skip")
    assert skipped.status == 1
    assert [sample["__key__"] for sample in read_samples(skipped.out)] == ["0002", "0000"]
    assert "skipped: sample '0001'" in skipped.err


@pytest.mark.parametrize(
    ("missing", "expected"), [("error", None), ("skip", ["2", "0"]), ("last", ["2", "0", "1", "3"])]
)
def test_sort_does_what_is_asked_about_a_missing_field(
    missing: str, expected: list[str] | None, tmp_path: Path
) -> None:
    """An error by default, since nothing is to be lost unless asked; what is left out is told."""
    members = [("0.cls", b"2"), ("1.txt", b""), ("2.cls", b"1"), ("3.txt", b"")]
    shard = write_tar(tmp_path / "x.tar", members)
    done = run_wds("sort", shard, "-k", "cls", "--type", "int", "--missing", missing)
    if expected is None:
        assert (done.status, done.out) == (1, b"")
        assert "sample '1'" in done.err
        assert "'cls'" in done.err
    else:
        assert keys(done) == expected
        assert ("left out 2 samples without cls" in done.err) is (missing == "skip")


@pytest.mark.parametrize("memory", ["1GiB", "2kB"])
def test_sort_of_a_cut_shard_writes_nothing(memory: str, tmp_path: Path) -> None:
    """Not a byte on standard output, and no file; with --errors skip all whole samples, and status 1."""
    first, second = write_text_shards(tmp_path / "in", (20, 5))
    data = Path(first).read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    arguments = ["sort", second, tmp_path / "cut.tar", "--memory", memory]
    done = run_wds(*arguments)
    assert (done.status, done.out) == (1, b"")
    assert "cut.tar is cut off" in done.err
    assert run_wds(*arguments, "-o", tmp_path / "out.tar").status == 1
    assert not (tmp_path / "out.tar").exists()
    skipped = run_wds(*arguments, "--errors", "skip")
    assert skipped.status == 1
    found = [sample["__key__"] for sample in read_samples(skipped.out)]
    assert found == text_keys((10, 5))


def test_sort_may_replace_its_own_input(tmp_path: Path) -> None:
    """It is read before it is replaced."""
    shard = write(tmp_path / "x.tar", [b"2", b"1"])
    assert run_wds("sort", shard, "-k", "cls", "-o", shard).status == 1
    assert run_wds("sort", shard, "-k", "cls", "-o", shard, "--force").status == 0
    assert [sample["cls"] for sample in read_samples(shard)] == [b"1", b"2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", "1"],
        ["--type", "number"],
        ["--memory", "0"],
        ["--memory", "much"],
        ["-k", ""],
        ["-k", "cls label"],
        ["--missing", "empty"],
    ],
)
def test_sort_refuses_wrong_arguments(arguments: list[str], tmp_path: Path) -> None:
    """With status 2, and without output."""
    done = run_wds("sort", write(tmp_path / "x.tar", [b"1"]), *arguments)
    assert (done.status, done.out) == (2, b"")
    assert "error" in done.err
