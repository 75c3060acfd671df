"""The index of a shard, made while writing or from its headers, and what other programs get of it."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import open_files
from tests.kits.servers import serve_folder
from tests.kits.shards import END, tar_bytes, text_samples, write_tar
from torchdata_wds import (
    DuplicateFieldError,
    ReappearingKeyError,
    ShardFormatError,
    ShardIndex,
    ShardListError,
    ShardOpenError,
    TarWriter,
    dali_index,
    index_shard,
    wids_index,
)
from torchdata_wds.format.index import IndexHeader, index_url, pack_row
from torchdata_wds.storage import open_shard

MEMBERS = [
    ("README", b"of no sample"),
    ("d/a.CLS", b"1"),
    ("d/a.seg.png", bytes(700)),
    ("__meta__/x.json", b"{}"),
    ("d/b.bin", bytes(200_000)),
    ("d/" + "long" * 40 + ".txt", b"text"),
]


def check(index: ShardIndex, shard: Path, **options: Any) -> None:
    """An index agrees with what the loader reads, and its places with the bytes of the archive."""
    samples = list(IterableWrapper([str(shard)]).load_wds_shards().group_by_key(**options))
    assert [sample.key for sample in index] == [sample["__key__"] for sample in samples]
    with open_shard(shard) as stream:
        archive = stream.read()
    assert index.header.tar_bytes == len(archive)
    assert index.header.bytes == shard.stat().st_size
    for row, sample in zip(index, samples, strict=True):
        values = [value for field, value in sample.items() if not field.startswith("__")]
        assert [archive[member.offset : member.offset + member.size] for member in row.members] == values  # type: ignore[operator]
        assert row.start % 512 == row.stop % 512 == 0
        own = archive[row.start : row.stop] + END
        again = IterableWrapper([(str(shard), io.BytesIO(own))]).load_wds_shards().group_by_key(**options)
        assert list(again) == [sample]


def test_index_shard_finds_what_the_loader_reads(tmp_path: Path) -> None:
    """Skipped members, long names and folders do not confuse it; it is written beside the shard."""
    shard = tmp_path / "x.tar"
    write_tar(shard, MEMBERS, tar_format=tarfile.PAX_FORMAT)
    index = index_shard(shard)
    check(index, shard)
    assert ShardIndex.load(tmp_path / ".wds-index" / "x.tar.index") == ShardIndex.beside(shard) == index
    size = shard.stat().st_size
    tag = f"mtime-{shard.stat().st_mtime_ns}"
    assert index.header == IndexHeader("x.tar", "first_dot", 3, size, False, size, tag=tag, special=())
    assert [[member.name for member in sample.members] for sample in index[:2]] == [
        ["d/a.CLS", "d/a.seg.png"],
        ["d/b.bin"],
    ]


@pytest.mark.parametrize("compress", [None, "gz", "bz2", "xz", "zst"])
def test_writer_and_scan_make_the_same_index(compress: str | None, tmp_path: Path) -> None:
    """What is noted while writing is what the headers say; the digest is known to the writer only."""
    shard = tmp_path / "x.tar"
    with TarWriter(shard, index=True, compress=compress) as writer:
        for number in range(7):
            writer.write({"__key__": f"d/{number}", "bin": bytes(number * 50_000), "cls": number})
    written = ShardIndex.load(index_url(shard))
    assert written.header.tag == f"mtime-{shard.stat().st_mtime_ns}"
    scanned = index_shard(shard, to=False)
    check(written, shard)
    assert list(written) == list(scanned)
    assert written.header._replace(sha256=None) == scanned.header


def test_index_shard_splits_names_as_it_is_told(tmp_path: Path) -> None:
    """keys= is that of grouping, and the index names it."""
    shard = tmp_path / "x.tar"
    write_tar(shard, [("a.b.jpg", b"1"), ("a.c.jpg", b"2")])
    assert len(index_shard(shard, to=False)) == 1
    index = index_shard(shard, keys="last_dot", to=tmp_path / "other.index")
    check(index, shard, keys="last_dot")
    assert ShardIndex.load(tmp_path / "other.index").header.keys == "last_dot"
    with pytest.raises(ValueError, match="'first_dot' or 'last_dot'"):
        index_shard(shard, keys=str.split)  # type: ignore[arg-type]


def test_index_shard_gives_links_the_place_of_their_content(tmp_path: Path) -> None:
    """A hard link, also one to a link, lies where its content lies; a sparse member has no one place."""
    shard = tmp_path / "x.tar"
    with tarfile.open(shard, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, link, data in (("a.txt", "", b"content"), ("b.txt", "a.txt", b""), ("c.txt", "./b.txt", b"")):
            info = tarfile.TarInfo(name)
            info.size, info.linkname, info.type = len(data), link, tarfile.LNKTYPE if link else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(data))
    index = index_shard(shard, to=False)
    assert {(sample.members[0].offset, sample.members[0].size) for sample in index} == {(512, 7)}
    assert [sample.start for sample in index] == [0, 1024, 1536]
    write_tar(shard, [])
    with tarfile.open(shard, "w") as tar:
        info = tarfile.TarInfo("b.txt")
        info.linkname, info.type = "a.txt", tarfile.LNKTYPE
        tar.addfile(info)
    with pytest.raises(ShardFormatError, match=r"b\.txt.*hard link to a\.txt.*no such member"):
        index_shard(shard, to=False)


@pytest.mark.parametrize("cut", [100, 700, 1100, 150_000, 203_000, -1025])
@pytest.mark.parametrize("compressed", [False, True])
def test_index_shard_refuses_cut_shards(cut: int, compressed: bool, tmp_path: Path) -> None:
    """A cut is an error although payloads are not read, and no index is left."""
    data = tar_bytes([("a.cls", b"1"), ("b.bin", bytes(200_000)), ("c.cls", b"2")])
    path = tmp_path / "x.tar"
    path.write_bytes(gzip.compress(data[:cut]) if compressed else data[:cut])
    before = open_files()
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        index_shard(path)
    assert open_files() <= before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tar"]


def test_index_shard_refuses_what_grouping_refuses(tmp_path: Path) -> None:
    """A doubled field or a key that comes back would make the index differ from what is read."""
    shard = tmp_path / "x.tar"
    write_tar(shard, [("a.cls", b"1"), ("a.CLS", b"2")])
    with pytest.raises(DuplicateFieldError):
        index_shard(shard)
    write_tar(shard, [("a.cls", b"1"), ("b.cls", b"2"), ("a.txt", b"3")])
    with pytest.raises(ReappearingKeyError):
        index_shard(shard)


def test_index_shard_reads_from_servers_and_needs_a_place_for_the_index(tmp_path: Path) -> None:
    """Over HTTP the shard is read past; nothing can be written there."""
    write_tar(tmp_path / "x.tar", text_samples("s", 5))
    with serve_folder(tmp_path) as url:
        index = index_shard(f"{url}/x.tar", to=tmp_path / "x.index")
        assert len(index) == 5
        assert index.header.bytes == (tmp_path / "x.tar").stat().st_size
        with pytest.raises(ShardOpenError, match="http"):
            index_shard(f"{url}/x.tar")
    assert len(index_shard(f"pipe:cat {tmp_path}/x.tar", to=False)) == 5
    with pytest.raises(ValueError, match="no place beside"):
        index_shard(f"pipe:cat {tmp_path}/x.tar")


def test_index_shard_seeks_over_large_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local shard's payloads are not read."""
    shard = tmp_path / "x.tar"
    write_tar(shard, [(f"{number}.bin", bytes(5_000_000)) for number in range(4)])
    index_shard(shard, to=False)
    stat = Path("/proc/self/io")
    before = int(stat.read_text().split()[1])
    index_shard(shard, to=False)
    assert int(stat.read_text().split()[1]) - before < 2_000_000


# --------------------------------------------------------------------------------------------------------- its file
@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", -1), ("samples", "3"), ("samples", 3.0), ("samples", True), ("bytes", -1), ("sha256", 7)],
)
def test_load_raises_when_a_header_holds_what_no_index_says(name: str, value: object, tmp_path: Path) -> None:
    """A count that is none is an error about the index, wherever it is read, not one of arithmetic later."""
    shard = tmp_path / "x.tar"
    write_tar(shard, text_samples("s", 3))
    head, rows = index_shard(shard).dump().split(b"\n", 1)
    path = Path(index_url(shard))
    path.write_bytes(json.dumps({**json.loads(head), name: value}).encode() + b"\n" + rows)
    with pytest.raises(ShardFormatError, match=f"not an index of a shard: .*its {name} is"):
        ShardIndex.load(path)
    with pytest.raises(ShardListError, match=f"the index beside shard .* cannot be used: .*its {name} is"):
        list(IterableWrapper([str(shard)]).split_shards(index=True))


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "row", [b'["a",-512,1024,[["a.txt",512,1]]]', b'["a",0.5,1024,[["a.txt",512,1]]]', b'["a",0,1024,[]]', DEEP]
)
def test_index_raises_when_a_row_cannot_be_one(row: bytes, tmp_path: Path) -> None:
    """Places before the shard, samples without members, and lists nested without end are damage of the index."""
    path = tmp_path / "x.index"
    path.write_bytes(ShardIndex(IndexHeader("x.tar", "first_dot", 1, 10240), [row]).dump())
    with pytest.raises(ShardFormatError, match="damaged line"):
        ShardIndex.load(path)[0]


def test_load_raises_when_a_header_is_nested_without_end(tmp_path: Path) -> None:
    """That no parser follows is an error about the file, for lists of counts too."""
    (tmp_path / "x.tar.index").write_bytes(DEEP)
    with pytest.raises(ShardFormatError, match="not an index of a shard"):
        ShardIndex.load(tmp_path / "x.tar.index")
    with pytest.raises(ShardListError, match="is not JSON"):
        list(IterableWrapper(["x.tar"]).split_shards(index=str(tmp_path / "x.tar.index")))


def test_load_refuses_what_is_no_index_or_not_whole(tmp_path: Path) -> None:
    """Other files, other versions, cuts and damaged lines are errors that say so."""
    shard = tmp_path / "x.tar"
    write_tar(shard, text_samples("s", 3))
    good = index_shard(shard, to=False).dump()
    path = tmp_path / "bad.index"
    lines = good.splitlines(keepends=True)
    cases = {
        b"": "not an index",
        b"v1.2 3\n": "not an index",
        b"[1]\n": "not an index",
        b"{}\n": "not an index",
        good.replace(b'"version": 1', b'"version": 2'): "version",
        good.replace(b"torchdata_wds index", b"another"): "format",
        good[:-1]: "cut off",
        b"".join(lines[:-1]): "promises 3 samples and has 2",
        good + b"[]\n": "promises 3 samples and has 4",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(ShardFormatError, match=message):
            ShardIndex.load(path)
    for row in (b'{"a":1,"b":2,"c":3,"d":[]}\n', b"\xff\n", b"7\n"):
        path.write_bytes(lines[0] + row + b"".join(lines[2:]))
        with pytest.raises(ShardFormatError, match="damaged line"):
            ShardIndex.load(path)[0]
    path.write_bytes(lines[0] + b'["a",0]\n' + b"".join(lines[2:]))
    index = ShardIndex.load(path)
    assert index[1].key == "s00001"
    with pytest.raises(ShardFormatError, match="damaged line"):
        index[0]
    with pytest.raises(ShardOpenError, match="does not exist"):
        ShardIndex.load(tmp_path / "missing.index")


def test_index_is_a_sequence() -> None:
    """It has a length, places from both ends, and equality."""
    rows = [pack_row(key, 0, 1024, [(f"{key}.txt", 512, 1)]) for key in "abc"]
    index = ShardIndex(IndexHeader("x.tar", "first_dot", 3, 10240), rows)
    assert len(index) == 3
    assert index[-1].key == "c"
    assert [sample.key for sample in reversed(index)] == ["c", "b", "a"]
    assert index == ShardIndex(index.header, rows)
    assert index != rows
    assert repr(index) == "ShardIndex('x.tar', 3 samples)"
    with pytest.raises(IndexError):
        index[3]
    with pytest.raises(ShardFormatError, match="promises 3 samples and has 2"):
        ShardIndex(index.header, rows[:2])


# -------------------------------------------------------------------------------------------------- other programs'
def test_dali_index_is_the_documented_layout_byte_for_byte(tmp_path: Path) -> None:
    """A line v1.2 and the number of samples, then extension, offset, size and name of each member."""
    shard = tmp_path / "x.tar"
    with TarWriter(shard, encoder=False) as writer:
        writer.write({"__key__": "d.v1/0", "cls": b"7", "seg.png": bytes(513)})
        writer.write({"__key__": "d.v1/1", "cls": b"10", "seg.png": b""})
    expected = (
        "v1.2 2\n"
        "cls 512 1 d.v1/0.cls seg.png 1536 513 d.v1/0.seg.png\n"
        "cls 3072 2 d.v1/1.cls seg.png 4096 0 d.v1/1.seg.png\n"
    )
    assert dali_index(index_shard(shard, to=False)) == expected


@pytest.mark.parametrize(
    ("members", "change", "message"),
    [
        ([], lambda data: data, "has no sample"),
        ([("a.txt", b"1")], gzip.compress, "is compressed"),
        ([("a b.txt", b"1")], lambda data: data, "blanks in the name 'a b.txt'"),
        ([("a.x y", b"1")], lambda data: data, "blanks in the name"),
    ],
)
def test_dali_index_refuses_shards_that_dali_cannot_read(
    members: list[tuple[str, bytes]], change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    """Better no index than one that DALI takes apart wrongly."""
    shard = tmp_path / "x.tar"
    shard.write_bytes(change(tar_bytes(members)))
    with pytest.raises(ShardFormatError, match=message):
        dali_index(index_shard(shard, to=False))


def test_exports_refuse_what_is_no_index() -> None:
    """The path of a shard is none, and the message says where to get one."""
    with pytest.raises(TypeError, match=r"index_shard\(\).*not 'x.tar'"):
        dali_index("x.tar")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"index_shard\(\).*not 'x.tar'"):
        wids_index({"x.tar": "x.tar"})  # type: ignore[dict-item]


def test_exports_refuse_compressed_shards_wherever_they_are(tmp_path: Path) -> None:
    """Also where the size of what is stored is not known."""
    with TarWriter("memory://packed/x.tar.gz", index=True) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    for index in (index_shard("memory://packed/x.tar.gz", to=False), ShardIndex.beside("memory://packed/x.tar.gz")):
        assert index.header.compressed
        with pytest.raises(ShardFormatError, match="compressed"):
            dali_index(index)
        with pytest.raises(ShardFormatError, match="compressed"):
            wids_index([("x", index)])


def test_wids_index_lists_shards_as_wids_reads_them(tmp_path: Path) -> None:
    """The documented keys, counts and sizes."""
    indexes = {}
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", text_samples("s", number + 1))
        indexes[f"{number}.tar"] = index_shard(tmp_path / f"{number}.tar", to=False)
    content = json.loads(wids_index(indexes, name="two"))
    assert content == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "two",
        "shardlist": [
            {"url": f"{number}.tar", "nsamples": number + 1, "filesize": (tmp_path / f"{number}.tar").stat().st_size}
            for number in range(2)
        ],
    }
    (tmp_path / "c.tar").write_bytes(gzip.compress(tar_bytes(text_samples("s", 9))))
    with pytest.raises(ShardFormatError, match="compressed"):
        wids_index([("c.tar", index_shard(tmp_path / "c.tar", to=False))])
