"""Indexes made by windows: equal to those made entry by entry, and as sparing."""

import gzip
import logging
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kits.odd_archives import odd_archive
from tests.kits.readers import READERS, reading_with
from tests.kits.shards import sample_members, tar_bytes
from tests.kits.tar_blocks import END, block, member
from torchdata_wds import WdsError, index_shard


def outcome(path: Path, keys: Any) -> list[str]:
    """The index file of a shard, or the error raised instead."""
    try:
        return index_shard(path, keys=keys, to=False).dump().decode().split("\n")
    except WdsError as error:
        return [type(error).__name__, str(error)]


def differences(seeds: range, folder: Path) -> list[int]:
    """The seeds of archives whose index differs between the readers."""
    different = []
    for seed in seeds:
        random = Random(seed)
        archive, keys = odd_archive(random), random.choice(["first_dot", "last_dot"])
        path = folder / random.choice(["x.tar", "x.tar", "x.tar.gz"])
        path.write_bytes(gzip.compress(archive, 1) if path.suffix == ".gz" else archive)
        found = []
        for sizes in READERS.values():
            with reading_with(sizes):
                found.append(outcome(path, keys))
        if found.count(found[0]) < len(found):
            different.append(seed)
    return different


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of odd archives have much to warn about."""
    caplog.set_level(logging.ERROR, "torchdata_wds")


@pytest.mark.slow
def test_index_is_the_same_by_windows_and_one_by_one(tmp_path: Path) -> None:
    """Rows, header and errors, of whole and damaged archives."""
    assert not differences(range(150), tmp_path)


@pytest.mark.slow
def test_index_is_the_same_by_windows_and_one_by_one_in_a_long_campaign(tmp_path: Path) -> None:
    """As above, with ten thousand archives."""
    assert not differences(range(1000, 11_000), tmp_path)


def test_index_finds_links_to_members_that_no_sample_has(tmp_path: Path) -> None:
    """Hard links to members of windows, before and after the first link, and to names written otherwise."""

    def link(name: bytes, target: bytes) -> bytes:
        return block(name, kind=b"1", link=target)

    plain = member(b"README", b"words") + member(b"a.txt", b"A") + member(b"b.txt", b"BB")
    later = link(b"c.txt", b"README") + link(b"d.txt", b"./a.txt") + member(b"e.txt", b"EEE") + link(b"f.txt", b"e.txt")
    path = tmp_path / "x.tar"
    path.write_bytes(plain + later + link(b"g.txt", b"c.txt") + END)
    index = index_shard(path, to=False)
    assert index.header.special == ("hard_links",)
    assert {sample.key: sample.members[0][1:] for sample in index} == {
        **{"a": (1536, 1), "b": (2560, 2), "c": (512, 5), "d": (1536, 1)},
        **{"e": (4608, 3), "f": (4608, 3), "g": (512, 5)},
    }


@pytest.mark.slow
def test_index_of_many_members_takes_little_memory(tmp_path: Path) -> None:
    """What is kept for links that may come is a name and two numbers a member, not an object."""
    path = tmp_path / "x.tar"
    members = [member for number in range(5000) for member in sample_members(f"{number:06d}", a=b"1", b=b"2", c=b"3")]
    path.write_bytes(tar_bytes(members))
    index_shard(path, to=False)
    tracemalloc.start()
    index = index_shard(path, to=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index) == 5000
    assert (peak - (6 << 20)) / 15_000 < 280
