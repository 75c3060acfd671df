"""The index of a data set: numbers to bytes, keys to numbers, and the packed file."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.kits.shards import text_samples, write_tar
from torchdata_wds import ShardFormatError, ShardIndex, ShardListError, index_shard
from torchdata_wds.format.index import IndexHeader, pack_row
from torchdata_wds.format.index.dataset import DatasetIndex, ShardEntry, key_check
from torchdata_wds.storage.byte_streams import StoredVersion


def made_index(name: str, keys: list[str], *, start: int = 0, keys_rule: str = "first_dot") -> ShardIndex:
    """An index of samples of 1 KiB each."""
    rows = [
        pack_row(key, start + 1024 * at, start + 1024 * (at + 1), [(f"{key}.txt", start + 1024 * at + 512, 3)])
        for at, key in enumerate(keys)
    ]
    size = start + 1024 * len(keys) + 1024
    return ShardIndex(IndexHeader(name, keys_rule, len(rows), size, False, size, tag="mtime-1", special=()), rows)


def three_shards() -> DatasetIndex:
    """Two shards with an empty one between them, and one key in both."""
    shards = {"d/a.tar": ["a0", "a1", "x"], "d/b.tar": [], "d/c.tar": ["c0", "x"]}
    return DatasetIndex.of((url, made_index(url[2:], keys)) for url, keys in shards.items())


@pytest.fixture(params=["memory", "file", "remote"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> DatasetIndex:
    """The same index wherever it is read from."""
    made = three_shards()
    if request.param == "memory":
        return made
    made.save(tmp_path / "all.wdsindex")
    url = str(tmp_path / "all.wdsindex")
    return DatasetIndex.load(url if request.param == "file" else f"pipe:cat {url}")


def test_it_numbers_samples_through_the_shards(index: DatasetIndex) -> None:
    """Bounds, shards, rows and length agree with the indexes it was made of."""
    assert len(index) == 5
    assert index.bounds.tolist() == [0, 3, 3, 5]
    assert index.bounds.dtype == np.int64
    assert index.keys == "first_dot"
    assert list(index.shards) == [
        ShardEntry("d/a.tar", 3, 4096, StoredVersion(4096, "mtime-1")),
        ShardEntry("d/b.tar", 0, 1024, StoredVersion(1024, "mtime-1")),
        ShardEntry("d/c.tar", 2, 3072, StoredVersion(3072, "mtime-1")),
    ]
    offsets, checks = index.rows(0, 1, 3)
    assert offsets.tolist() == [1024, 2048, 3072]
    assert checks is not None
    assert checks.tolist() == [key_check("a1") & 0xFFFFFFFF, key_check("x") & 0xFFFFFFFF]
    assert offsets.dtype == np.uint64
    assert checks.dtype == np.uint32
    assert index.rows(2, 0, 2)[0].tolist() == [0, 1024, 2048]
    assert [part.tolist() for part in index.rows(1, 0, 0) if part is not None] == [[0], []]


def test_find_returns_the_numbers_of_a_key(index: DatasetIndex) -> None:
    """A key of several shards has several numbers."""
    assert index.find("a1") == [1]
    assert index.find("x") == [2, 4]
    assert index.find("y") == []


def test_select_reorders_and_repeats_shards(index: DatasetIndex) -> None:
    """Shards are found by URL, else by base name; the selection is an index like any other."""
    chosen = index.select(["d/c.tar", "elsewhere/a.tar", "d/c.tar"])
    assert chosen.bounds.tolist() == [0, 2, 5, 7]
    assert [shard.url for shard in chosen.shards] == ["d/c.tar", "elsewhere/a.tar", "d/c.tar"]
    assert chosen.find("x") == [1, 4, 6]
    assert chosen.rows(1, 2, 3)[0].tolist() == [2048, 3072]
    again = chosen.select(["elsewhere/a.tar"])
    assert again.find("x") == [2]
    assert len(chosen.select([])) == 0
    assert index.select(["d/a.tar", "d/b.tar", "d/c.tar"]).digest == index.digest != chosen.digest


def test_a_selection_is_saved_as_what_was_selected(index: DatasetIndex, tmp_path: Path) -> None:
    """Its file has the chosen shards alone, under their new URLs."""
    chosen = index.select(["d/c.tar", "elsewhere/a.tar", "d/c.tar"])
    chosen.save(tmp_path / "chosen")
    loaded = DatasetIndex.load(tmp_path / "chosen")
    assert loaded == chosen
    assert loaded.find("x") == [1, 4, 6]
    assert loaded.rows(1, 0, 3)[0].tolist() == index.rows(0, 0, 3)[0].tolist()


def test_pickled_it_is_the_same(index: DatasetIndex) -> None:
    """With a selection, too."""
    for one in (index, index.select(["a.tar", "d/c.tar"])):
        again = pickle.loads(pickle.dumps(one))
        assert again == one
        assert again.find("x") == one.find("x")


def test_digest_ignores_folders_and_versions_and_nothing_else() -> None:
    """The digest says whether two indexes number the same samples."""
    one = three_shards().digest
    assert len(one) == 16
    moved = {"e/a.tar": ["a0", "a1", "x"], "f/b.tar": [], "d/c.tar": ["c0", "x"]}
    assert DatasetIndex.of((url, made_index(url[2:], keys)) for url, keys in moved.items()).digest == one
    others = [
        {"d/c.tar": ["c0", "x"], "d/b.tar": [], "d/a.tar": ["a0", "a1", "x"]},
        {"d/a.tar": ["a0", "a2", "x"], "d/b.tar": [], "d/c.tar": ["c0", "x"]},
        {"d/a.tar": ["a0", "a1", "x"], "d/c.tar": ["c0", "x"]},
        {"d/z.tar": ["a0", "a1", "x"], "d/b.tar": [], "d/c.tar": ["c0", "x"]},
        {"d/a.tar": ["a0", "a1"], "d/b.tar": ["x"], "d/c.tar": ["c0", "x"]},
    ]
    digests = {
        DatasetIndex.of((url, made_index(url[2:], keys)) for url, keys in other.items()).digest for other in others
    }
    assert len(digests | {one}) == len(others) + 1


def test_rows_refuses_samples_that_are_not_there(index: DatasetIndex) -> None:
    """A number beyond a shard is an IndexError, as in a list."""
    for first, stop in ((0, 4), (-1, 1), (2, 1)):
        with pytest.raises(IndexError, match=r"a\.tar has 3 samples"):
            index.rows(0, first, stop)


def test_select_refuses_shards_it_cannot_tell() -> None:
    """A shard that is missing, and a base name that several have."""
    index = three_shards()
    with pytest.raises(ShardListError, match=r"has no entry for shard d/z\.tar"):
        index.select(["d/a.tar", "d/z.tar"])
    with pytest.raises(ShardListError, match="has an entry for the base name"):
        index.select(["e/a.tar", "f/a.tar"])


def test_of_refuses_indexes_of_different_rules_and_senseless_ones() -> None:
    """Two rules give two meanings of a sample; and one that lies outside its archive is none."""
    one, other = made_index("a.tar", ["a"]), made_index("b.tar", ["b"], keys_rule="last_dot")
    with pytest.raises(ShardListError, match="same keys="):
        DatasetIndex.of([("a.tar", one), ("b.tar", other)])
    for start, stop in ((0, 1 << 70), (1024, 1024), (4096, 8192)):
        header = IndexHeader("x.tar", "first_dot", 1, 4096)
        with pytest.raises(ShardFormatError, match=r"index of shard x\.tar is damaged"):
            DatasetIndex.of([("x.tar", ShardIndex(header, [pack_row("a", start, stop, [("a.t", 1, 1)])]))])


def test_real_shards(tmp_path: Path) -> None:
    """Rows are where the samples of real shards lie."""
    urls = [write_tar(tmp_path / f"{name}.tar", text_samples(name, 5)) for name in "ab"]
    index = DatasetIndex.of((str(url), index_shard(url, to=False)) for url in urls)
    assert index.find(index_shard(urls[1], to=False)[3].key) == [8]
