"""Indexes of other programs: the same samples as by our own index, or an error."""

import gzip
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.servers import serve_folder
from tests.kits.shards import Members, tar_bytes, write_tar
from torchdata_wds import ShardFormatError, ShardListError, ShardOpenError, dali_index, index_shard
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.foreign import check_counts, foreign_urls, load_foreign
from torchdata_wds.format.index.samples import SampleReader
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.ranges import ShardRanges

PLAIN: Members = [
    (f"d/{number:04d}.{field}", bytes(size))
    for number in range(3)
    for field, size in (("jpg", 700 + 300 * number), ("cls", 1), ("seg.png", 512 * number))
]
LONG: Members = [(f"d/{'long' * 40}{number}.{field}", b"abc") for number in range(2) for field in ("txt", "cls")]
LETTERS: Members = [(f"d/\u00fc{number}.{field}", b"abc") for number in range(2) for field in ("txt", "cls")]
GAPS: Members = [("README", b"x"), *PLAIN[:3], ("NOTES", b"y"), *PLAIN[3:6], ("TAIL", b"z")]

# What energon 7.4 (`energon prepare`) and the wds2idx of DALI 2.4 wrote for these shards
ENERGON = {
    "plain": (PLAIN, tarfile.USTAR_FORMAT, [0, 3072, 6656, 11264]),
    "long": (LONG, tarfile.PAX_FORMAT, [0, 4096, 8192]),
    "gnu": (LONG, tarfile.GNU_FORMAT, [0, 4096, 8192]),
    "letters": (LETTERS, tarfile.PAX_FORMAT, [0, 4096, 8192]),
    "gaps": (GAPS, tarfile.USTAR_FORMAT, [1024, 5120, 9728]),
}
DALI_PLAIN = """v1.2 3
jpg 512 700 d/0000.jpg cls 2048 1 d/0000.cls seg.png 3072 0 d/0000.seg.png
jpg 3584 1000 d/0001.jpg cls 5120 1 d/0001.cls seg.png 6144 512 d/0001.seg.png
jpg 7168 1300 d/0002.jpg cls 9216 1 d/0002.cls seg.png 10240 1024 d/0002.seg.png
"""
DALI_LETTERS = """v1.2 2
txt 1536 3 d/\u00fc0.txt cls 3584 3 d/\u00fc0.cls
txt 5632 3 d/\u00fc1.txt cls 7680 3 d/\u00fc1.cls
"""
DALI_GNU = f"""v1.2 2
txt 512 3 {LONG[0][0]} cls 2560 3 {LONG[1][0]}
txt 4608 3 {LONG[2][0]} cls 6656 3 {LONG[3][0]}
"""
DALI_GAPS = """v1.2 5
README 512 1 README
jpg 1536 700 d/0000.jpg cls 3072 1 d/0000.cls seg.png 4096 0 d/0000.seg.png
NOTES 4608 1 NOTES
jpg 5632 1000 d/0001.jpg cls 7168 1 d/0001.cls seg.png 8192 512 d/0001.seg.png
TAIL 9216 1 TAIL
"""


def foreign(shard: str, content: str | bytes, **options: Any) -> DatasetIndex:
    """Loads an index with some content for a shard."""
    place = Path(foreign_urls(shard)[isinstance(content, str)])
    place.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
    version = StoredVersion.of_file(Path(shard).stat())
    return DatasetIndex.of([(shard, load_foreign(place, shard, version=version, **options))])


def ours(shard: str) -> DatasetIndex:
    """Our own index of a shard."""
    return DatasetIndex.of([(shard, index_shard(shard, to=False))])


def starts(index: DatasetIndex) -> list[int]:
    """Where the samples of one shard begin, and the last one ends."""
    offsets: list[int] = index.rows(0, 0, len(index))[0].tolist()
    return offsets


def samples(index: DatasetIndex) -> list[dict[str, Any]]:
    """All samples, read by an index."""
    return SampleReader(index, ShardRanges()).read(range(len(index)))


def test_samples_read_by_all_indexes_are_equal(tmp_path: Path) -> None:
    """And equal to those of the usual chain."""
    dali = {"plain": DALI_PLAIN, "letters": DALI_LETTERS, "gaps": DALI_GAPS}
    for name, (members, layout, offsets) in ENERGON.items():
        shard = write_tar(tmp_path / f"{name}.tar", members, tar_format=layout)
        expected = list(IterableWrapper([shard]).load_wds_shards().group_by_key())
        assert samples(ours(shard)) == expected
        assert samples(foreign(shard, struct.pack(f"<{len(offsets)}Q", *offsets))) == expected
        if name in dali:
            assert samples(foreign(shard, dali[name])) == expected
        if name in ("plain", "letters"):
            assert samples(foreign(shard, without_names(dali[name]))) == expected


def test_energon_index_has_our_samples(tmp_path: Path) -> None:
    """With long names and skipped members, too; it has no keys."""
    for name, (members, layout, offsets) in ENERGON.items():
        shard = write_tar(tmp_path / f"{name}.tar", members, tar_format=layout)
        index = foreign(shard, struct.pack(f"<{len(offsets)}Q", *offsets))
        mine = ours(shard)
        assert len(index) == len(mine)
        assert starts(index)[:-1] == starts(mine)[:-1]
        assert index.rows(0, 0, 1)[1] is None
        assert index.shards[0].version == StoredVersion.of_file(Path(shard).stat())
        with pytest.raises(ShardFormatError, match="has no keys"):
            index.find("d/0000")
        assert (starts(index) == starts(mine)) == (name != "gaps")  # there it counts TAIL to the last sample


@pytest.mark.parametrize(
    ("members", "layout", "text"),
    [(PLAIN, tarfile.USTAR_FORMAT, DALI_PLAIN), (LETTERS, tarfile.PAX_FORMAT, DALI_LETTERS)],
)
def test_dali_index_has_our_samples(tmp_path: Path, members: Members, layout: int, text: str) -> None:
    """Extended headers before members, which it does not tell of, go with them; with names, the digest is the same."""
    shard = write_tar(tmp_path / "x.tar", members, tar_format=layout)
    index = foreign(shard, text)
    assert index.digest == ours(shard).digest
    assert index.find(members[-1][0].partition(".")[0]) == [len(index) - 1]
    old = foreign(shard, without_names(text))
    assert starts(old) == starts(index)
    assert not old.has_keys
    assert foreign(shard, dali_index(index_shard(shard, to=False))).digest == index.digest


def without_names(text: str) -> str:
    """The same index of DALI as its version 1.1 has it."""
    head, *lines = text.split("\n")
    rows = [" ".join(word for place, word in enumerate(line.split()) if place % 4 != 3) for line in lines]
    return "\n".join((head.replace("v1.2", "v1.1"), *rows))


def test_dali_index_with_members_of_no_sample(tmp_path: Path) -> None:
    """Names without a dot are samples for DALI and none for us; their bytes go to the sample after them, or to none."""
    shard = write_tar(tmp_path / "x.tar", GAPS)
    index = foreign(shard, DALI_GAPS)
    assert starts(index) == [1024, 5120, 8704]
    assert starts(ours(shard)) == [1024, 5120, 8704]
    assert index.digest == ours(shard).digest


def test_dali_index_with_wrong_offsets_is_refused(tmp_path: Path) -> None:
    """DALI's tool takes GNU's header of a long name for the member, and the full size of a sparse one."""
    shard = write_tar(tmp_path / "x.tar", LONG, tar_format=tarfile.GNU_FORMAT)
    for text in (DALI_GNU, without_names(DALI_GNU)):
        with pytest.raises(ShardFormatError, match="wrong offsets for long names"):
            foreign(shard, text)
    plain = write_tar(tmp_path / "y.tar", PLAIN)
    with pytest.raises(ShardFormatError, match=r"byte 2,048 lies inside the one before, which may be sparse"):
        foreign(plain, DALI_PLAIN.replace("512 700", "512 70000"))


def test_dali_index_whose_names_are_shown_otherwise_has_no_keys(tmp_path: Path) -> None:
    r"""Tar writes \303\274 in place of a letter where no locale is set."""
    shard = write_tar(tmp_path / "x.tar", LETTERS, tar_format=tarfile.PAX_FORMAT)
    index = foreign(shard, DALI_LETTERS.replace("\u00fc", r"\303\274"))
    assert starts(index) == starts(ours(shard))
    assert not index.has_keys


def test_foreign_index_of_a_compressed_shard_says_so(tmp_path: Path) -> None:
    """Energon indexes those as well; offsets are of the decompressed archive."""
    shard = str(tmp_path / "x.tar.gz")
    Path(shard).write_bytes(gzip.compress(tar_bytes(PLAIN)))
    index = foreign(shard, struct.pack("<4Q", *ENERGON["plain"][2]))
    assert index.shards[0].compressed
    assert starts(index) == starts(ours(shard))


def test_foreign_index_over_http(tmp_path: Path) -> None:
    """Index and shard may lie on a server."""
    write_tar(tmp_path / "x.tar", PLAIN)
    (tmp_path / "x.idx").write_text(DALI_PLAIN)
    with serve_folder(tmp_path) as server:
        shard = f"{server}/x.tar"
        columns = load_foreign(foreign_urls(shard)[1], shard)
    assert DatasetIndex.of([(shard, columns)]).digest == ours(str(tmp_path / "x.tar")).digest


def test_empty_shard_has_an_energon_index_of_one_number(tmp_path: Path) -> None:
    """Of no sample, only the end is told."""
    index = foreign(write_tar(tmp_path / "x.tar", []), struct.pack("<Q", 0))
    assert len(index) == 0
    assert len(index.shards) == 1


DAMAGED: list[tuple[str | bytes, str]] = [
    (b"", "0 bytes"),
    (bytes(12), "12 bytes, no multiple of 8"),
    (struct.pack("<3Q", 0, 3072, 1024), "do not ascend"),
    (struct.pack("<3Q", 0, 3000, 4096), "multiples of 512"),
    (struct.pack("<3Q", 0, 3072, 1 << 20), "ends at byte 1,048,576, and the shard has"),
    (struct.pack(">3Q", 0, 3072, 6656), "multiples of 512|ends at byte"),
    ("v1.2 4\n" + DALI_PLAIN[7:], "3 lines after its first"),
    ("v1.3 3\n" + DALI_PLAIN[7:], "no multiple of 8|ascend"),
    (DALI_PLAIN.replace("d/0001.jpg", "d/00 01.jpg"), "line 3 is damaged, or has names with blanks"),
    (DALI_PLAIN.replace(" 700 ", " x "), "line 2 is damaged"),
    (DALI_PLAIN.replace(" 700 ", " -700 "), "line 2 is damaged"),
    (DALI_PLAIN.replace(" 700 ", " 7" + "0" * 30 + " "), "line 2 is damaged"),
    ("v1.2 1\n\n", "line 2 is damaged"),
    ("v1.2 0\n", "0 lines"),
    (DALI_PLAIN.replace("10240 1024", "10240 1024000"), "the shard has"),
]


def test_damaged_foreign_index_is_refused(tmp_path: Path) -> None:
    """Before a sample is read by it."""
    shard = write_tar(tmp_path / "x.tar", PLAIN)
    for content, message in DAMAGED:
        with pytest.raises(ShardFormatError, match=message) as caught:
            foreign(shard, content)
        assert "Make one with index_shard" in str(caught.value)


def test_missing_foreign_index_is_an_open_error(tmp_path: Path) -> None:
    """So that a caller can look elsewhere."""
    with pytest.raises(ShardOpenError):
        load_foreign(tmp_path / "x.tar.idx", str(tmp_path / "x.tar"))


def test_foreign_urls_are_where_the_tools_write() -> None:
    """Energon appends to the name, DALI replaces all after the first dot that does not begin it."""
    assert foreign_urls("s3://b/x.y.tar") == ("s3://b/x.y.tar.idx", "s3://b/x.idx")
    assert foreign_urls("https://host/x.tar?token=1")[0] == "https://host/x.tar.idx?token=1"
    assert foreign_urls("x") == ("x.idx", "x.idx")


def test_counts_of_a_list_are_compared(tmp_path: Path) -> None:
    """A wids list has nothing but counts."""
    index = ours(write_tar(tmp_path / "x.tar", PLAIN))
    check_counts(index, [("s3://elsewhere/x.tar", 3), ("s3://elsewhere/y.tar", 8)], "the list")
    with pytest.raises(ShardListError, match=r"gives shard .*x\.tar 4 samples, and it has 3"):
        check_counts(index, [("s3://elsewhere/x.tar", 4)], "the list")
    with pytest.raises(ShardListError, match="has no number of samples"):
        check_counts(index, [("s3://elsewhere/y.tar", 3)], "the list")
