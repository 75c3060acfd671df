"""Sorting in bounded memory: equal to sorted(), whatever fits."""

import errno
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.processes import open_files
from torchdata_wds.cli import sort as sorting
from torchdata_wds.errors import ShardOpenError

Sample = dict[str, Any]


def sort_samples(samples: Iterable[Sample], key: Callable[[Sample], Any], **options: Any) -> Generator[Any, None, None]:
    """The samples in the order of their values."""
    return sorting.sort_samples(((key(sample), sample) for sample in samples), **options)


def value_of(sample: Sample) -> bytes:
    """What these tests sort by."""
    value: bytes = sample["v"]
    return value


def make(values: list[bytes], sizes: list[int] | None = None) -> list[Sample]:
    """Samples with these values and sizes, numbered by their keys."""
    sizes = sizes or [10]
    return [
        {
            "__key__": f"{number}",
            "__url__": "x.tar",
            "v": value,
            "bin": bytes([number % 256]) * sizes[number % len(sizes)],
        }
        for number, value in enumerate(values)
    ]


def many(count: int = 1000, distinct: int = 7, size: int = 10) -> list[Sample]:
    """Samples in no order, with few values."""
    return make([b"%d" % (number * 7919 % distinct) for number in range(count)], [size])


# few values, so that many are equal; sizes below and above those of blocks
VALUES = st.lists(st.sampled_from([b"", b"a", b"b", b"aa", b"\xff", b"c" * 3000]), max_size=60)
SIZES = st.lists(st.sampled_from([0, 1, 300, 900, 5000]), min_size=1, max_size=5)


@given(VALUES, SIZES, st.sampled_from([1, 3000, 12_000, 60_000, 1e9]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_sort_samples_equals_sorted_for_any_memory(
    values: list[bytes], sizes: list[int], memory: float, reverse: bool
) -> None:
    """The same samples in the same order, equal ones as they came."""
    samples = make(values, sizes)
    found = list(sort_samples(iter(samples), value_of, memory=memory, reverse=reverse))
    assert found == sorted(samples, key=value_of, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_equal_values_keep_their_order_through_several_passes(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are merged with their neighbours, an earlier one first."""
    passes = []
    merge = sorting._Runs._merge_groups

    def count(runs: sorting._Runs) -> None:
        passes.append(len(runs.runs))
        merge(runs)

    monkeypatch.setattr(sorting._Runs, "_merge_groups", count)
    samples = many()
    found = list(sort_samples(samples, value_of, memory=20_000, reverse=reverse))
    assert found == sorted(samples, key=value_of, reverse=reverse)
    assert len(passes) > 1
    assert passes[0] < 50  # a run has as many samples as fit
    assert passes == sorted(passes, reverse=True)


def test_values_of_other_types_are_kept_as_they_are() -> None:
    """Numbers beyond 64 bits, infinities and tuples go through files unchanged."""
    samples = make([b"%d" % (number - 50) for number in range(100)])

    def value(sample: Sample) -> tuple[float, int]:
        number = int(sample["v"])
        return (float("-inf") if number % 3 else 1.5, -(number * 10**40))

    assert list(sort_samples(samples, value, memory=5000)) == sorted(samples, key=value)


def test_sample_larger_than_the_memory_is_sorted() -> None:
    """Also several of them, between small ones."""
    samples = make([b"%03d" % (number * 37 % 100) for number in range(100)], [10, 10, 200_000])
    assert list(sort_samples(samples, value_of, memory=50_000)) == sorted(samples, key=value_of)


@pytest.mark.parametrize(("count", "size"), [(1500, 200), (30, 50_000)])
def test_memory_is_bounded_while_runs_are_made_and_merged(count: int, size: int) -> None:
    """Many small samples, and large ones, of which one from each run would not fit."""
    memory = 200_000
    samples = (
        {"__key__": f"{number}", "v": b"%d" % (number * 7919 % 100), "bin": bytes(size)} for number in range(count)
    )
    tracemalloc.start()
    try:
        assert sum(1 for _ in sort_samples(samples, value_of, memory=memory)) == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * memory + 3 * size


@pytest.mark.parametrize("kind", ["bytes in a tuple", "integer"])
def test_memory_is_bounded_where_values_are_large(kind: str) -> None:
    """They stay with the samples' places, of which a block of each run is in memory."""
    memory, size = 100_000, 5000

    def value(sample: Sample) -> Any:
        return (0, sample["v"]) if kind != "integer" else int.from_bytes(sample["v"], "big")

    samples = ({"__key__": f"{number}", "v": b"%03d" % (number * 37 % 100) + bytes(size)} for number in range(100))
    tracemalloc.start()
    try:
        assert sum(1 for _ in sort_samples(samples, value, memory=memory)) == 100
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * memory


def test_files_have_no_name_and_are_few_while_samples_are_sorted(tmp_path: Path) -> None:
    """Nothing is left even of a process that is killed; the number of runs does not matter."""
    before = open_files()
    ordered = sort_samples(many(500, 200, 400), value_of, memory=20_000, folder=tmp_path)
    seen = [(len(list(tmp_path.iterdir())), open_files(collect=False) - before) for _ in ordered]
    assert len(seen) == 500
    assert {names for names, _ in seen} == {0}
    assert 0 < max(files for _, files in seen) <= 3
    assert open_files() <= before


def test_files_are_closed_when_nobody_takes_the_rest() -> None:
    """A reader that has enough closes the iterator."""
    before = open_files()
    ordered = sort_samples(many(), value_of, memory=20_000)
    next(ordered)
    assert open_files(collect=False) > before
    ordered.close()
    assert open_files() <= before


def test_nothing_is_given_before_all_is_read() -> None:
    """Where the source is cut, no sample comes out."""
    before = open_files()

    def cut() -> Iterator[Sample]:
        yield from many()
        raise ShardOpenError("cut here")

    ordered = sort_samples(cut(), value_of, memory=20_000)
    with pytest.raises(ShardOpenError, match=r"^cut here$"):
        next(ordered)
    assert open_files() <= before


def test_what_fits_into_memory_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files is not even looked at."""

    def refuse(**_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    samples = many()
    assert list(sort_samples(samples, value_of, folder="/no/such/folder")) == sorted(samples, key=value_of)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk is simulated by /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("size", [10, 100_000])
def test_full_disk_is_an_error_that_says_where(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the folder and the cure, is the system's error, and leaves no file open."""
    before = open_files()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: open("/dev/full", "w+b", buffering=1 << 16))  # noqa: PTH123, SIM115
    with pytest.raises(OSError, match="more room, or allow more memory") as caught:
        list(sort_samples(many(size=size), value_of, memory=300_000, folder=tmp_path))
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).count("temporary file") == 1
    assert open_files() <= before


def test_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    """It is told when the first file is needed."""
    with pytest.raises(FileNotFoundError, match="no-folder"):
        list(sort_samples(many(), value_of, memory=1000, folder=tmp_path / "no-folder"))


def test_no_samples_give_none() -> None:
    """An empty stream is sorted."""
    assert list(sort_samples([], value_of)) == []
