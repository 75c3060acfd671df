"""IndexedShards over all kinds of archives, whole and changed: the samples of the pipes, or an error."""

import gzip
import os
import tarfile
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import END, keys_of, sample_members, tar_bytes, text_samples, write_tar
from tests.kits.tar_blocks import GNU, block, filled, long_name, member, pax
from tests.kits.tar_kinds import by_gnu_tar, by_tarfile, hand_made
from torchdata_wds import IndexedShards, SampleError, ShardFormatError, ShardOpenError, index_shard
from torchdata_wds.errors import WdsError
from torchdata_wds.format.index import samples
from torchdata_wds.format.index.dataset import DatasetIndex


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps indexes that are made here away from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "indexes"))


def streamed(urls: list[str]) -> list[dict[str, Any]] | type[WdsError]:
    """The samples as the pipes read them, or the error that they raise."""
    try:
        return list(IterableWrapper(urls).load_wds_shards().group_by_key())
    except WdsError as error:
        return type(error)


def at_random(urls: list[str], random: Random) -> list[dict[str, Any]] | type[WdsError]:
    """The samples one by one in any order, in batches, or the error."""
    try:
        data = IndexedShards(urls)
        order = random.sample(range(len(data)), len(data))
        by_number = {number: data[number] for number in order}
        shuffled = data.__getitems__(order)
        assert shuffled == [by_number[number] for number in order]
        assert list(data) == [by_number[number] for number in range(len(data))]
        assert [data[sample["__key__"]] for sample in shuffled if len(data.find(sample["__key__"])) == 1] == [
            sample for sample in shuffled if len(data.find(sample["__key__"])) == 1
        ]
        return [by_number[number] for number in range(len(data))]
    except WdsError as error:
        return type(error)


def index_of(path: Path) -> DatasetIndex:
    """The index of a shard as it is now."""
    return DatasetIndex.of([(str(path), index_shard(path, to=False))])


# --------------------------------------------------------------------------------------------------- kinds of archives
KINDS: dict[str, bytes] = {
    "pax names": pax(("path", "dir/é.txt")) + member(b"x", b"A") + member(b"b.txt", b"B"),
    "pax sizes": pax(("size", "3")) + block(b"a.txt") + filled(b"AAA") + member(b"b.txt", b"B"),
    "long names": long_name(b"long/" * 40 + b"a.txt") + member(b"x", b"A", magic=GNU) + member(b"b.txt", b"B"),
    "hard links": member(b"a.txt", b"A") + block(b"b.txt", kind=b"1", link=b"a.txt") + member(b"c.txt", b"C"),
    "directories between": block(b"d/", kind=b"5") + member(b"d/a.txt", b"A") + block(b"e/", kind=b"5")
    + member(b"d/a.cls", b"1") + member(b"e/b.txt", b"B") + block(b"f/", kind=b"5"),
    "global headers": pax(("comment", "x"), kind=b"g") + member(b"a.txt", b"A") + member(b"b.txt", b"B"),
    "global names": pax(("path", "all.txt"), kind=b"g") + member(b"a.txt", b"A"),
    "members without a key": member(b"README", b"R") + member(b"a.txt", b"A") + member(b".hidden", b"H")
    + member(b"a.cls", b"1") + member(b"NOTES", b"N") + member(b"b.txt", b"B") + member(b"END", b"E"),
    "empty members": member(b"a.txt", b"") + member(b"b.txt", b"") + member(b"b.cls", b""),
    "names that are not UTF-8": member(b"\xff\xfe.txt", b"A") + member(b"b.\xff", b"B"),
    "no samples": member(b"README", b"R"),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_member_reads_as_in_the_pipes(kind: str, tmp_path: Path) -> None:
    """Alone, and between other shards."""
    (tmp_path / "odd.tar").write_bytes(KINDS[kind] + END)
    urls = [write_tar(tmp_path / f"{name}.tar", text_samples(name, 3)) for name in "xy"]
    urls.insert(1, str(tmp_path / "odd.tar"))
    expected = streamed(urls)
    assert isinstance(expected, list)
    assert at_random(urls, Random(1)) == expected
    assert at_random(urls[1:2], Random(1)) == expected[3:-3]


def test_shards_with_hard_links_are_read_once_for_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link's content is anywhere before it, so that each read begins at the shard's start."""
    path = tmp_path / "x.tar"
    links = [block(b"%d.txt" % number, kind=b"1", link=b"a.txt") for number in range(9)]
    path.write_bytes(b"".join([member(b"README", b"R"), member(b"a.txt", b"A"), *links, END]))
    data = IndexedShards(str(path), index=index_of(path))
    starts: list[int] = []
    open_shard = samples.open_shard

    def noted(url: str, *, offset: int, **rest: Any) -> Any:
        starts.append(offset)
        return open_shard(url, offset=offset, **rest)

    monkeypatch.setattr(samples, "open_shard", noted)
    assert [sample["txt"] for sample in data.__getitems__([3, 5, 4, 2, 6])] == [b"A"] * 5
    assert len(starts) == 3  # once for the members, and twice for the content of all links
    path.write_bytes(path.read_bytes().replace(b"A" + bytes(511), b"B" + bytes(511)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        data[3]


def test_sparse_members_read_as_in_the_pipes(tmp_path: Path) -> None:
    """Holes are filled."""
    path = tmp_path / "sparse.tar"
    seed = next(seed for seed in range(200) if b"GNU.sparse" in by_gnu_tar(Random(seed), tmp_path / str(seed)))
    path.write_bytes(by_gnu_tar(Random(seed), tmp_path / "again"))
    expected = streamed([str(path)])
    assert isinstance(expected, list)
    assert at_random([str(path)], Random(0)) == expected


def made(kind: str, random: Random, folder: Path) -> bytes:
    """An archive of a kind."""
    if kind == "GNU tar":
        return by_gnu_tar(random, folder)
    return hand_made(random, None) if kind == "by hand" else by_tarfile(random)


@pytest.mark.parametrize("kind", ["by hand", "tarfile", "GNU tar"])
def test_random_archives_read_as_in_the_pipes(kind: str, tmp_path: Path) -> None:
    """Or raise the same error."""
    found = []
    for seed in range(15 if kind != "GNU tar" else 5):
        random = Random(seed)
        urls = [str(tmp_path / f"{seed}-{number}.tar") for number in range(2)]
        for url in urls:
            Path(url).write_bytes(made(kind, random, Path(url[:-4])))
        expected = streamed(urls)
        found.append(isinstance(expected, list))
        assert at_random(urls, random) == expected, seed
    assert sum(found) >= len(found) // 3


def test_compressed_shards_raise_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """The other shards of the set can be read."""
    urls = [write_tar(tmp_path / "x.tar", text_samples("x", 2)), str(tmp_path / "y.tar.gz")]
    Path(urls[1]).write_bytes(gzip.compress(tar_bytes(text_samples("y", 2))))
    data = IndexedShards(urls)
    assert (len(data), data.key_of(1)) == (4, "x00001")
    for read in (lambda: data[2], lambda: data.__getitems__([0, 3]), lambda: list(data), lambda: data["y00000"]):
        with pytest.raises(ShardFormatError, match=r"y\.tar\.gz is compressed.*Decompress it"):
            read()


# ------------------------------------------------------------------------------------------------------ changed shards
OLD = [
    *sample_members("a", txt=b"one", cls=b"1"),
    *sample_members("b", txt=b"two"),
    *sample_members("c", txt=b"3" * 99),
]
CHANGES: dict[str, tuple[bytes, int]] = {
    "other keys": (tar_bytes([(name.replace("b", "x"), data) for name, data in OLD]), 1),
    "other sizes": (tar_bytes([(name, data * 700 if name == "a.txt" else data) for name, data in OLD]), 1),
    "another order": (tar_bytes([*OLD[2:3], *OLD[:2], *OLD[3:]]), 0),
    "cut off": (tar_bytes(OLD)[:3600], 2),
    "empty": (b"", 0),
    "another kind of file": (os.urandom(len(tar_bytes(OLD))), 1),
    "fewer samples": (tar_bytes(OLD[:2]), 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keeps_date", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_changed_shard_raises_at_the_sample(change: str, keeps_date: bool, is_open: bool, tmp_path: Path) -> None:
    """Whether it is rewritten in place while it is open or before, and even if its date does not tell."""
    path = Path(write_tar(tmp_path / "x.tar", OLD))
    date = path.stat().st_mtime_ns
    data = IndexedShards(str(path), index=index_of(path))
    assert len(data) == 3
    if is_open:
        assert data[1]["txt"] == b"two"
    new, number = CHANGES[change]
    with path.open("r+b") as file:
        file.write(new)
        file.truncate()
    if keeps_date:
        os.utime(path, ns=(date, date))
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        data[number]
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        data.__getitems__([number, number])
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        list(data)


def test_a_shard_that_is_replaced_raises_at_the_sample(tmp_path: Path) -> None:
    """Where the open file is the old one, no bytes of the two are mixed."""
    path = Path(write_tar(tmp_path / "x.tar", OLD))
    data = IndexedShards(str(path), index=index_of(path))
    assert data[0]["txt"] == b"one"
    Path(write_tar(tmp_path / "new.tar", OLD[2:])).replace(path)
    (tmp_path / "old").mkdir()
    try:
        assert [data[number]["txt"] for number in range(3)] == [b"one", b"two", b"3" * 99]
    except ShardFormatError as error:
        assert "x.tar" in str(error)
    with pytest.raises(ShardFormatError):
        list(IndexedShards(str(path), index=index_of(Path(write_tar(tmp_path / "old" / "x.tar", OLD)))))


def test_a_removed_shard_raises_at_the_sample(tmp_path: Path) -> None:
    """A file that was never opened is named; neighbours in other shards are read."""
    urls = [write_tar(tmp_path / f"{name}.tar", text_samples(name, 2)) for name in "xy"]
    data = IndexedShards(urls)
    len(data)
    Path(urls[1]).unlink()
    assert keys_of(data[:2]) == ["x00000", "x00001"]
    with pytest.raises(ShardOpenError, match=r"y\.tar"):
        data[2]


# ------------------------------------------------------------------------------------------------------- wrong samples
def test_a_field_twice_is_the_error_of_grouping(tmp_path: Path) -> None:
    """As in group_by_key, when the shard is scanned."""
    url = write_tar(tmp_path / "x.tar", [("a.txt", b"A"), ("a.txt", b"B"), ("b.txt", b"B")])
    with pytest.raises(SampleError, match="txt"):
        IndexedShards(url)[0]


def test_archives_of_tarfile_in_pax_format(tmp_path: Path) -> None:
    """Dates with fractions and long names have headers of their own."""
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(20):
            info = tarfile.TarInfo(f"{'folder/' * 20}{number:02d}.txt")
            info.size, info.mtime = number, 1.5
            tar.addfile(info, BytesIO(bytes(number)))
    path = tmp_path / "x.tar"
    path.write_bytes(out.getvalue())
    expected = streamed([str(path)])
    assert isinstance(expected, list)
    assert at_random([str(path)], Random(3)) == expected


def test_other_content_alone_raises_by_the_date(tmp_path: Path) -> None:
    """The keys and sizes are the same."""
    path = Path(write_tar(tmp_path / "x.tar", OLD))
    data = IndexedShards(str(path), index=index_of(path))
    assert data[1]["txt"] == b"two"
    date = path.stat().st_mtime_ns
    write_tar(path, [(name, data.swapcase()) for name, data in OLD])
    os.utime(path, ns=(date + 1, date + 1))
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        data[1]


def test_auto_makes_another_index_of_a_changed_shard(tmp_path: Path) -> None:
    """The next data set is that of the new shard."""
    path = Path(write_tar(tmp_path / "x.tar", OLD))
    assert keys_of(IndexedShards(str(path))) == ["a", "b", "c"]
    write_tar(path, OLD[2:])
    assert keys_of(IndexedShards(str(path))) == ["b", "c"]
