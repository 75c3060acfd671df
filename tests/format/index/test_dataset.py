"""The index of a data set: numbers to bytes, keys to numbers, and the packed file."""

import io
import json
import pickle
import subprocess
import tarfile
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


def test_a_copy_of_a_shard_may_have_another_date(index: DatasetIndex) -> None:
    """A shard that is found by its base name: of its version only the size counts, in files and pickles, too."""
    chosen = index.select(["d/c.tar", "elsewhere/a.tar"])
    versions = [StoredVersion(3072, "mtime-1"), StoredVersion(4096)]
    assert [shard.version for shard in chosen.shards] == versions
    assert [shard.version for shard in pickle.loads(pickle.dumps(chosen)).shards] == versions
    assert [shard.version for shard in chosen.select(["elsewhere/a.tar"]).shards] == versions[1:]
    assert [shard.version for shard in chosen.select(["d/a.tar"]).shards] == versions[1:]


def test_signed_urls_are_found_whoever_signed_them_and_are_not_written(tmp_path: Path) -> None:
    """A signature changes with each listing, and belongs into no file; the shards are read by the URLs as listed."""
    signed = [f"https://user:secret@host/{name}/x.tar?versionId=3&X-Amz-Signature=secret" for name in "ab"]
    index = DatasetIndex.of((url, made_index("x.tar", [key])) for url, key in zip(signed, "ab", strict=True))
    assert [shard.url for shard in index.shards] == signed
    index.save(tmp_path / "all")
    assert b"secret" not in (tmp_path / "all").read_bytes()
    loaded = DatasetIndex.load(tmp_path / "all")
    loaded.verify()
    assert loaded.digest == index.digest
    again = [url.replace("Signature=secret", "Signature=other") for url in reversed(signed)]
    for one in (index, loaded):
        chosen = one.select(again)
        assert [shard.url for shard in chosen.shards] == again
        assert chosen.find("a") == [1]
        assert {shard.version for shard in chosen.shards} == {StoredVersion(2048, "mtime-1")}
        with pytest.raises(ShardListError, match="has an entry for the base name") as caught:
            one.select([url.replace("versionId=3", "versionId=4") for url in signed])
        assert "secret" not in str(caught.value)


def test_shards_under_new_names_are_saved_so(index: DatasetIndex, tmp_path: Path) -> None:
    """Also where all are taken in order."""
    renamed = DatasetIndex(index._packed, urls=["e/a.tar", "e/b.tar", "e/c.tar"])
    renamed.save(tmp_path / "renamed")
    assert [shard.url for shard in DatasetIndex.load(tmp_path / "renamed").shards] == ["e/a.tar", "e/b.tar", "e/c.tar"]


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
    """Indexes made by different rules cannot be combined, nor one with a sample outside its archive."""
    one, other = made_index("a.tar", ["a"]), made_index("b.tar", ["b"], keys_rule="last_dot")
    with pytest.raises(ShardListError, match="same keys="):
        DatasetIndex.of([("a.tar", one), ("b.tar", other)])
    for start, stop in ((0, 1 << 70), (1024, 1024), (4096, 8192)):
        header = IndexHeader("x.tar", "first_dot", 1, 4096)
        with pytest.raises(ShardFormatError, match=r"index of shard x\.tar is damaged"):
            DatasetIndex.of([("x.tar", ShardIndex(header, [pack_row("a", start, stop, [("a.t", 1, 1)])]))])


def test_of_says_what_is_wrong_with_a_line() -> None:
    """A damaged line is shown; rows that are right one by one only are none."""
    header = IndexHeader("x.tar", "first_dot", 2, 8192)
    good = pack_row("a", 0, 1024, [("a.t", 512, 1)])
    lines = [
        "nothing",
        "[1]",
        '["b", 1024.0, 2048, [["b.t", 1536, 1]]]',
        '["b", 1024, 2048, []]',
        '["b", 1024, "x", 1]',
    ]
    for line in [*lines, '["b", true, 2048, [["b.t", 1536, 1]]]', f"{good},{good}"]:
        with pytest.raises(ShardFormatError, match="damaged line"):
            DatasetIndex.of([("x.tar", ShardIndex(header, [good, line]))])


def test_real_shards(tmp_path: Path) -> None:
    """Rows are where the samples of real shards lie."""
    urls = [write_tar(tmp_path / f"{name}.tar", text_samples(name, 5)) for name in "ab"]
    index = DatasetIndex.of((str(url), index_shard(url, to=False)) for url in urls)
    assert index.find(index_shard(urls[1], to=False)[3].key) == [8]


# ------------------------------------------------------------------------------------------------------- special shards
def special_tar(path: Path, kind: str) -> str:
    """A shard whose last sample has something that its bytes alone do not say."""
    pax = {"path": "d/b.txt"} if kind == "global_headers" else {"comment": "made by git archive"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=pax if kind != "hard_links" else {}) as tar:
        for name in ("d/a.txt", "d/b.txt")[: 1 if kind == "global_headers" else 2]:
            info = tarfile.TarInfo(name)
            if kind == "hard_links" and name == "d/b.txt":
                info.type, info.linkname = tarfile.LNKTYPE, "d/a.txt"
                tar.addfile(info)
            else:
                info.size = 3
                tar.addfile(info, io.BytesIO(b"abc"))
    return str(path)


@pytest.mark.parametrize(("kind", "words"), [("hard_links", ("hard_links",)), ("comment", ())])
def test_special_shards_are_found_when_they_are_indexed(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    """A hard link needs another place of the shard; a global comment says nothing about members."""
    shard = special_tar(tmp_path / "x.tar", kind)
    index = index_shard(shard)
    assert index.header.special == words
    assert ShardIndex.beside(shard).header.special == words
    assert DatasetIndex.of([(shard, index)]).shards[0].special == bool(words)


def test_global_headers_that_name_members_are_special(tmp_path: Path) -> None:
    """All members after one have its name, and a sample's own bytes do not say so."""
    shard = special_tar(tmp_path / "x.tar", "global_headers")
    index = index_shard(shard, to=False)
    assert index.header.special == ("global_headers",)
    assert DatasetIndex.of([(shard, index)]).shards[0].special


def test_sparse_members_are_told_and_read_by_their_bytes(tmp_path: Path) -> None:
    """Their maps are inside the sample."""
    with (tmp_path / "a.bin").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    shard = tmp_path / "x.tar"
    subprocess.run(["tar", "-S", "-cf", str(shard), "-C", str(tmp_path), "a.bin"], check=True)
    index = index_shard(shard, to=False)
    assert index.header.special == ("sparse",)
    assert not DatasetIndex.of([("x.tar", index)]).shards[0].special


def test_sidecars_without_the_field_are_read_as_before(tmp_path: Path) -> None:
    """Links are then known by their places: their content lies before their sample."""
    linked = index_shard(special_tar(tmp_path / "x.tar", "hard_links"))
    plain = index_shard(special_tar(tmp_path / "y.tar", "comment"))
    for index, special in ((linked, True), (plain, False)):
        header, rest = index.dump().split(b"\n", 1)
        old = {name: value for name, value in json.loads(header).items() if name not in ("special", "tag")}
        (tmp_path / "old.index").write_bytes(json.dumps(old).encode() + b"\n" + rest)
        loaded = ShardIndex.load(tmp_path / "old.index")
        assert loaded.header.special is None
        assert loaded.dump() == (tmp_path / "old.index").read_bytes()
        assert DatasetIndex.of([("x.tar", loaded)]).shards[0].special == special


@pytest.mark.parametrize("value", ["hard_links", [1], {}, True])
def test_a_damaged_field_is_refused(tmp_path: Path, value: object) -> None:
    """`special` is a list of words, of which later versions may have more."""
    header = {"format": "torchdata_wds index", "version": 1, "shard": "x", "keys": "first_dot", "samples": 0}
    header |= {"tar_bytes": 0, "compressed": False, "bytes": None, "sha256": None, "special": value}
    (tmp_path / "x.index").write_text(json.dumps(header) + "\n")
    with pytest.raises(ShardFormatError, match="special"):
        ShardIndex.load(tmp_path / "x.index")
    header["special"] = ["unheard_of"]
    (tmp_path / "x.index").write_text(json.dumps(header) + "\n")
    assert ShardIndex.load(tmp_path / "x.index").header.special == ("unheard_of",)
