"""The tar reader: every kind of entry, every damage."""

import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.damage import DAMAGES, GOOD, MEMBERS
from tests.kits.shards import tar_bytes
from tests.kits.tar_blocks import END, block, member
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.headers import HeaderError, parse_records
from torchdata_wds.format.tar import name_filter, read_members

pytestmark = pytest.mark.usefixtures("each_reader")

PLAIN_DAMAGES = {name: damage for name, damage in DAMAGES.items() if "stream" not in name}


def read(archive: bytes, **options: Any) -> list[tuple[str, bytes]]:
    """The names and data of an archive, hard links resolved in the same bytes."""
    options.setdefault("reopen", lambda offset: io.BytesIO(archive[offset:]))
    return [(member.name, member.data) for member in read_members(io.BytesIO(archive), "x.tar", **options)]


def test_read_members_gives_all_when_the_archive_is_whole() -> None:
    """Members come in their order with their bytes."""
    assert read(GOOD) == MEMBERS


@pytest.mark.parametrize("name", PLAIN_DAMAGES)
def test_read_members_raises_with_shard_and_offset_when_damaged(name: str) -> None:
    """Every damage is an error that names the shard and the byte."""
    damage = PLAIN_DAMAGES[name]
    got = []
    with pytest.raises(ShardFormatError) as caught:
        for found in read_members(io.BytesIO(damage.data), "x.tar"):
            got.append((found.name, found.data))
    assert damage.says in str(caught.value)
    assert "shard x.tar" in str(caught.value)
    assert caught.value.shard == "x.tar"
    assert got == MEMBERS[: len(got)]
    assert {name[0] for name, _ in got} >= set(damage.complete)


def test_read_members_accepts_a_single_zero_block_when_it_ends_the_archive() -> None:
    """One zero block suffices as end marker."""
    assert read(tar_bytes(MEMBERS, end=bytes(512))) == MEMBERS


def test_read_members_gives_nothing_when_all_blocks_are_zero() -> None:
    """A tar of only zero blocks is a valid empty shard."""
    assert read(bytes(10240)) == []


def test_read_members_goes_without_end_marker_when_allowed() -> None:
    """require_end_marker=False accepts an archive that just stops, but no cut elsewhere and no empty file."""
    assert read(tar_bytes(MEMBERS, end=b""), require_end_marker=False) == MEMBERS
    for bad in (GOOD[:100], GOOD[:700], b""):
        with pytest.raises(ShardFormatError):
            read(bad, require_end_marker=False)


def test_read_members_reads_on_when_archives_are_concatenated() -> None:
    """concatenated=True reads all archives of a joined file, and still sees a cut in the last."""
    assert read(GOOD + bytes(512 * 7) + GOOD, concatenated=True) == MEMBERS * 2
    with pytest.raises(ShardFormatError, match="cut off"):
        read(GOOD + GOOD[:700], concatenated=True)
    with pytest.raises(ShardFormatError, match="byte"):
        read(GOOD + b"garbage", concatenated=True)


@pytest.mark.parametrize("changes", [(0x01, 0x80), pytest.param(range(1, 256, 48), marks=pytest.mark.slow)])
def test_read_members_sees_damage_when_any_header_byte_changes(changes: Iterable[int]) -> None:
    """Each single-byte change in a header is an error or changes nothing that is read; never fewer members."""
    archive = tar_bytes([("a.txt", b"A"), ("b.txt", b"B")])
    good = read(archive)
    for place in [*range(512), *range(1024, 1536)]:
        for change in changes:
            damaged = archive[:place] + bytes([archive[place] ^ change]) + archive[place + 1 :]
            try:
                assert read(damaged) == good, f"byte {place} changed by {change:#x}"
            except ShardFormatError as error:
                assert "byte" in str(error)


@pytest.mark.parametrize(
    "tar_format",
    [
        tarfile.PAX_FORMAT,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT)),
    ],
)
def test_read_members_sees_every_truncation_when_an_archive_is_cut(tar_format: int) -> None:
    """Cut at any byte a shard is an error, or identical once its end marker is whole."""
    name = "ü" * 60 + ".txt" if tar_format != tarfile.USTAR_FORMAT else "long.txt"
    archive = tar_bytes([(name, b"A" * 10), ("b.txt", b"")], tar_format=tar_format)
    good = read(archive)
    for cut in range(len(archive)):
        try:
            assert read(archive[:cut]) == good
            assert cut >= len(archive) - 512
        except ShardFormatError:
            assert cut < len(archive) - 512


class Dribbling(io.BytesIO):
    """A stream that gives less than it is asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 100))


def test_read_members_reads_on_when_a_stream_gives_less_than_asked() -> None:
    """Short reads are no end."""
    assert [(member.name, member.data) for member in read_members(Dribbling(GOOD), "x.tar")] == MEMBERS


def test_read_members_selects_and_renames_when_asked() -> None:
    """Names are changed first, then chosen; payloads of others are read past."""
    options = {"rename": str.upper, "select": "*.TXT"}
    assert [name for name, _ in read(GOOD, **options)] == ["A.TXT", "B.TXT", "C.TXT"]
    assert [name for name, _ in read(GOOD, select=lambda name: name > "b.txt")] == ["c.txt", "c.cls"]
    with pytest.raises(ShardFormatError, match="cut off inside member"):
        read(GOOD[:700], select="*.cls")


def test_read_members_takes_no_memory_when_a_size_lies() -> None:
    """A header that claims gigabytes is a cut member, and one that claims an exabyte is too large."""
    for size, says in (
        (4 << 30, r"cut off inside member a\.txt at byte 1,536"),
        (1 << 60, r"a\.txt of 1,152,921,504,606,846,976 bytes, more than the limit"),
    ):
        with pytest.raises(ShardFormatError, match=says):
            read(block(b"a.txt", size_field=b"\x80" + size.to_bytes(11, "big")) + END)


def test_read_members_skips_and_counts_when_entries_are_no_files() -> None:
    """Folders, symbolic links, devices and FIFOs; an entry of an unknown kind is skipped with its payload."""
    kinds = {b"5": "directory", b"2": "symbolic link", b"3": "character device", b"4": "block device", b"6": "FIFO"}
    archive = b"".join(block(b"x" + kind, kind=kind, link=b"y") for kind in kinds) + member(b"v", bytes(600), b"V")
    skipped: Counter[str] = Counter()
    assert read(archive + member(b"a.txt", b"A") + END, skipped=skipped) == [("a.txt", b"A")]
    assert skipped == {**dict.fromkeys(kinds.values(), 1), "entry of type 'V'": 1}


def test_read_members_fills_holes_when_gnu_tar_wrote_members_as_sparse(tmp_path: Path) -> None:
    """In its old format and the three of PAX; a map of more pieces than fit into the header goes on after it."""
    for places, most in ((range(70_000, 270_006, 200_000), 50_000), (range(0, 2_400_000, 40_000), 500_000)):
        with (tmp_path / "s.bin").open("wb") as file:
            for place in places:
                file.seek(place)
                file.write(b"%06d" % place)
        (tmp_path / "t.txt").write_bytes(b"after")
        data = (tmp_path / "s.bin").read_bytes()
        for form in ("gnu", "pax --sparse-version=0.0", "pax --sparse-version=0.1", "pax --sparse-version=1.0"):
            command = ["tar", "-S", *f"--format={form}".split(), "-cf", "-", "s.bin", "t.txt"]
            archive = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
            assert len(archive) < most, "the archive holds the holes"
            assert read(archive) == [("s.bin", data), ("t.txt", b"after")], form


def test_parse_records_refuses_when_a_record_is_malformed() -> None:
    """Lengths that do not fit, and records without keyword, are errors."""
    for records in (b"nonsense", b"5 a=b\n", b"99 path=a.txt\n", b"-9 path=a\n", b"13 path=a.txt\n", b"10 =a.txt\n"):
        with pytest.raises(HeaderError, match="malformed PAX record"):
            parse_records(records)


def test_name_filter_matches_whole_names_when_given_globs() -> None:
    """With case, a leading ./ aside; anything but globs or a callable is refused."""
    for select, name, chosen in (
        ("*.jpg *.png", "d/a.png", True),
        ("*.jpg;*.png", "./a.jpg", True),
        ("a.*", "./a.jpg", True),
        (["a b.jpg"], "a b.jpg", True),
        ("*.jpg", "a.JPG", False),
        ("*.jpg", "a.jpgx", False),
    ):
        assert name_filter(select)(name) is chosen, select
    for wrong in (3, [], "", [1], None):
        with pytest.raises(TypeError, match="select must be"):
            name_filter(wrong)  # type: ignore[arg-type]
