"""The tar reader: every kind of entry, every damage."""

import io
import os
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.damage import DAMAGES, GOOD, MEMBERS
from tests.kits.shards import END, tar_bytes
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format import read_members
from torchdata_wds.format.tar import links, name_filter
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.format.tar.headers import HeaderError, parse_header, parse_number, parse_records

pytestmark = pytest.mark.usefixtures("each_reader")

PLAIN_DAMAGES = {name: damage for name, damage in DAMAGES.items() if "stream" not in name}


def read(archive: bytes, **options: Any) -> list[tuple[str, bytes]]:
    """The names and data of an archive, hard links resolved in the same bytes."""
    options.setdefault("reopen", lambda offset: io.BytesIO(archive[offset:]))
    return [(member.name, member.data) for member in read_members(io.BytesIO(archive), "x.tar", **options)]


def header(name: bytes, size: int, kind: bytes = b"0", **fields: bytes) -> bytes:
    """A header block made by hand: old V7 unless a magic is given."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = fields.get("raw_size", b"%011o\0" % size)
    block[156:157] = kind
    link = fields.get("link", b"")
    block[157 : 157 + len(link)] = link
    magic = fields.get("magic", b"")
    block[257 : 257 + len(magic)] = magic
    prefix = fields.get("prefix", b"")
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_read_members_gives_all_when_the_archive_is_whole() -> None:
    """Members come in their order with their bytes."""
    assert read(GOOD) == MEMBERS


@pytest.mark.parametrize("name", PLAIN_DAMAGES)
def test_read_members_raises_with_shard_and_offset_when_damaged(name: str) -> None:
    """Every damage is an error that names the shard and the byte."""
    damage = PLAIN_DAMAGES[name]
    got = []
    with pytest.raises(ShardFormatError) as caught:
        for member in read_members(io.BytesIO(damage.data), "x.tar"):
            got.append((member.name, member.data))
    assert damage.says in str(caught.value)
    assert "shard x.tar" in str(caught.value)
    assert caught.value.shard == "x.tar"
    assert got == MEMBERS[: len(got)]
    assert {member[0][0] for member in got} >= set(damage.complete)


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


@pytest.mark.parametrize("changes", [(0x01, 0x80), pytest.param(range(1, 256, 16), marks=pytest.mark.slow)])
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


def test_read_members_reads_v7_when_there_is_no_magic() -> None:
    """Old V7 headers have no magic, and write a folder as an empty file with a slash."""
    archive = header(b"d/", 0, b"\0") + header(b"d/a.txt", 1, b"\0") + b"A".ljust(512, b"\0") + END
    assert read(archive) == [("d/a.txt", b"A")]


def test_read_members_joins_the_prefix_when_the_magic_is_ustar() -> None:
    """The ustar prefix belongs to the name; in GNU headers that place means something else."""
    ustar = header(b"a.txt", 0, magic=b"ustar\x0000", prefix=b"some/folder") + END
    gnu = header(b"a.txt", 0, magic=b"ustar  \0", prefix=b"12345670123") + END
    assert [name for name, _ in read(ustar)] == ["some/folder/a.txt"]
    assert [name for name, _ in read(gnu)] == ["a.txt"]


def test_read_members_reads_base_256_when_a_size_is_written_so() -> None:
    """GNU writes large sizes as big-endian numbers behind a 0x80 byte."""
    size = b"\x80" + (3).to_bytes(11, "big")
    assert read(header(b"a.txt", 3, raw_size=size) + b"abc".ljust(512, b"\0") + END) == [("a.txt", b"abc")]


@pytest.mark.parametrize("size", [b"\xff" * 12, b"-0000000001\0", b"12x45678901\0", b"1_000000000\0", b"99999999999\0"])
def test_read_members_refuses_when_a_size_is_no_number(size: bytes) -> None:
    """Negative and non-octal sizes are damage, whatever int() would make of them."""
    with pytest.raises(ShardFormatError, match="byte 0"):
        read(header(b"a.txt", 0, raw_size=size) + END)


def test_read_members_takes_no_memory_when_a_size_lies() -> None:
    """A header that claims gigabytes is a cut member, and one that claims an exabyte is too large."""
    size = b"\x80" + (1 << 60).to_bytes(11, "big")
    with pytest.raises(ShardFormatError, match=r"cut off inside member a\.txt at byte 1,536"):
        read(header(b"a.txt", 4 << 30, raw_size=b"\x80" + (4 << 30).to_bytes(11, "big")) + END)
    with pytest.raises(ShardFormatError, match=r"a\.txt of 1,152,921,504,606,846,976 bytes, more than the limit"):
        read(header(b"a.txt", 0, raw_size=size) + END)


def test_read_members_accepts_a_signed_checksum_when_an_old_tar_wrote_it() -> None:
    """Some old tars summed signed chars."""
    block = bytearray(header(b"caf\xe9.txt", 0))
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 256 - 256)
    assert read(bytes(block) + END) == [("caf\\xe9.txt", b"")]


def archive_of(*entries: tuple[str, bytes, bytes, str]) -> bytes:
    """An archive of (name, type, data, link) by tarfile."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, data, link in entries:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), link
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_read_members_resolves_hard_links_when_the_shard_opens_again() -> None:
    """A hard link gives the bytes of the latest earlier member of that name, through other links too."""
    archive = archive_of(
        ("a.txt", tarfile.REGTYPE, b"old", ""),
        ("a.txt", tarfile.REGTYPE, b"A" * 700, ""),
        ("./d/b.txt", tarfile.LNKTYPE, b"", "./a.txt"),
        ("c.txt", tarfile.LNKTYPE, b"", "d/b.txt"),
        ("a.txt", tarfile.REGTYPE, b"new", ""),
        ("e.txt", tarfile.LNKTYPE, b"", "a.txt"),
    )
    assert dict(read(archive)) == {"a.txt": b"new", "./d/b.txt": b"A" * 700, "c.txt": b"A" * 700, "e.txt": b"new"}


def test_read_members_names_the_cure_when_a_hard_link_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once only, as from a pipe, a link to a member far back is an error that says how to write the shard."""
    monkeypatch.setattr(links, "RECENT_BYTES", 1000)
    archive = archive_of(
        ("a.txt", tarfile.REGTYPE, b"A", ""),
        *((f"{number}.bin", tarfile.REGTYPE, bytes(2000), "") for number in range(40)),
        ("b.txt", tarfile.LNKTYPE, b"", "a.txt"),
    )
    with pytest.raises(ShardFormatError, match=r"--hard-dereference.*cp -r") as caught:
        read(archive, reopen=None)
    assert caught.value.member == "b.txt"


def test_read_members_opens_the_url_again_when_a_hard_link_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a reopen= the URL itself is opened for a second look; a FIFO is not, it would wait for ever."""
    path = tmp_path / "1.tar"
    path.write_bytes(archive_of(("a.txt", tarfile.REGTYPE, b"A", ""), ("b.txt", tarfile.LNKTYPE, b"", "a.txt")))
    with path.open("rb") as stream:
        assert [member.data for member in read_members(stream, str(path))] == [b"A", b"A"]
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(links.RecentMembers, "find", lambda self, name: None)
    with path.open("rb") as stream, pytest.raises(ShardFormatError, match="--hard-dereference"):
        list(read_members(stream, str(tmp_path / "fifo")))


class Dribbling(io.BytesIO):
    """A stream that gives less than it is asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 100))


def test_read_members_reads_on_when_a_stream_gives_less_than_asked() -> None:
    """Short reads are no end."""
    assert [(member.name, member.data) for member in read_members(Dribbling(GOOD), "x.tar")] == MEMBERS


def test_read_members_names_the_shard_when_a_pax_number_is_absurd() -> None:
    """A size of thousands of digits is damage, not Python's limit on int()."""
    record = pax_record("size", "9" * 5000)
    archive = header(b"x", len(record), b"x") + record.ljust(5120, b"\0") + header(b"a.txt", 0) + END
    with pytest.raises(ShardFormatError, match="is not a size"):
        read(archive)


def test_read_members_refuses_when_a_hard_link_points_nowhere() -> None:
    """A link to a member that is not before it is damage."""
    archive = archive_of(("b.txt", tarfile.LNKTYPE, b"", "a.txt"), ("a.txt", tarfile.REGTYPE, b"A", ""))
    with pytest.raises(ShardFormatError, match=r"no such member before it"):
        read(archive)


def test_read_members_skips_and_counts_when_entries_are_no_files() -> None:
    """Folders, symbolic links, devices and FIFOs are skipped and counted."""
    kinds = {
        tarfile.DIRTYPE: "directory",
        tarfile.SYMTYPE: "symbolic link",
        tarfile.CHRTYPE: "character device",
        tarfile.BLKTYPE: "block device",
        tarfile.FIFOTYPE: "FIFO",
    }
    archive = archive_of(*((f"x{kind!r}", kind, b"", "y") for kind in kinds), ("a.txt", tarfile.REGTYPE, b"A", ""))
    skipped: Counter[str] = Counter()
    assert read(archive, skipped=skipped) == [("a.txt", b"A")]
    assert skipped == dict.fromkeys(kinds.values(), 1)


def test_read_members_skips_the_payload_when_a_type_is_unknown() -> None:
    """An entry of an unknown type is skipped with its payload, and counted."""
    archive = header(b"v", 600, b"V") + bytes(1024) + header(b"a.txt", 0) + END
    skipped: Counter[str] = Counter()
    assert read(archive, skipped=skipped) == [("a.txt", b"")]
    assert skipped == {"entry of type 'V'": 1}


def test_read_members_refuses_when_a_volume_continues_another() -> None:
    """The rest of a member that began in another volume is not a member."""
    with pytest.raises(ShardFormatError, match="another volume"):
        read(header(b"a.txt", 5, b"M") + bytes(512) + END)


def test_read_members_fills_holes_when_members_are_sparse(tmp_path: Path) -> None:
    """Sparse files that GNU tar wrote, in its old format and the three of PAX, read as their full content."""
    data = bytes(70_000) + b"island" + bytes(200_000) + b"shore"
    with (tmp_path / "s.bin").open("wb") as file:
        for place, part in ((70_000, b"island"), (270_006, b"shore")):
            file.seek(place)
            file.write(part)
    (tmp_path / "t.txt").write_bytes(b"after")
    for form in ("--format=gnu", "--format=pax --sparse-version=0.0", "--format=pax --sparse-version=0.1",
                 "--format=pax --sparse-version=1.0"):  # fmt: skip
        command = ["tar", "-S", *form.split(), "-cf", "-", "s.bin", "t.txt"]
        archive = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
        assert len(archive) < 50_000, "the archive holds the holes"
        assert read(archive) == [("s.bin", data), ("t.txt", b"after")], form


def test_read_members_reads_many_islands_when_the_sparse_map_goes_on(tmp_path: Path) -> None:
    """A sparse map of more pieces than fit into the header continues in further blocks."""
    with (tmp_path / "s.bin").open("wb") as file:
        for number in range(60):
            file.seek(number * 40_000)
            file.write(b"%03d" % number)
    data = (tmp_path / "s.bin").read_bytes()
    for form in ("gnu", "pax"):
        command = ["tar", "-S", f"--format={form}", "-cf", "-", "s.bin"]
        archive = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
        assert read(archive) == [("s.bin", data)]


def test_read_members_refuses_when_a_sparse_member_claims_too_much() -> None:
    """A few bytes that claim to be a file of terabytes are refused."""
    records = b"".join(
        pax_record(key, value)
        for key, value in (("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.name", "a.bin"),
                           ("GNU.sparse.realsize", str(DEFAULT_MAX_MEMBER_BYTES + 1)))
    )  # fmt: skip
    archive = header(b"x", len(records), b"x") + records.ljust(512, b"\0") + header(b"a.bin", 512)
    with pytest.raises(ShardFormatError, match="more than the limit"):
        read(archive + b"0\n".ljust(512, b"\0") + END)


def pax_record(key: str, value: str) -> bytes:
    """One PAX record, its own length counted in."""
    rest = f" {key}={value}\n".encode()
    size = len(rest) + 1
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


def test_read_members_applies_pax_records_when_path_and_size_are_there() -> None:
    """PAX records override the header; global ones hold for all members, an empty value cancels."""
    own = pax_record("path", "long/näme.txt") + pax_record("size", "3")
    shared = pax_record("path", "shared.txt")
    cancel = pax_record("path", "")
    archive = (
        header(b"x", len(own), b"x") + own.ljust(512, b"\0") + header(b"short", 0) + b"abc".ljust(512, b"\0")
        + header(b"g", len(shared), b"g") + shared.ljust(512, b"\0") + header(b"b.txt", 0)
        + header(b"x", len(cancel), b"x") + cancel.ljust(512, b"\0") + header(b"c.txt", 0) + END
    )  # fmt: skip
    assert read(archive) == [("long/näme.txt", b"abc"), ("shared.txt", b""), ("c.txt", b"")]


@pytest.mark.parametrize(
    "records", [b"nonsense", b"5 a=b\n", b"99 path=a.txt\n", b"-9 path=a\n", b"13 path=a.txt\n", b"10 =a.txt\n"]
)
def test_parse_records_refuses_when_a_record_is_malformed(records: bytes) -> None:
    """Lengths that do not fit, and records without keyword, are errors."""
    with pytest.raises(HeaderError, match="malformed PAX record"):
        parse_records(records)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_read_members_refuses_when_an_extended_header_is_absurd(kind: bytes) -> None:
    """Extended headers are read into memory, so that their size is limited; one with no member behind it is a cut."""
    with pytest.raises(ShardFormatError, match="extended header"):
        read(header(b"x", 1 << 30, kind) + END)


def test_read_members_refuses_when_the_archive_ends_behind_an_extended_header() -> None:
    """A long name whose member is missing is a cut, end marker or not."""
    name = header(b"x", 6, b"L") + b"a.txt\0".ljust(512, b"\0")
    for rest in (END, b""):
        with pytest.raises(ShardFormatError, match="byte 1,"):
            read(name + rest, require_end_marker=False)


def test_read_members_selects_and_renames_when_asked() -> None:
    """Names are changed first, then chosen; payloads of others are read past."""
    options = {"rename": str.upper, "select": "*.TXT"}
    assert [name for name, _ in read(GOOD, **options)] == ["A.TXT", "B.TXT", "C.TXT"]
    assert [name for name, _ in read(GOOD, select=lambda name: name > "b.txt")] == ["c.txt", "c.cls"]
    with pytest.raises(ShardFormatError, match="cut off inside member"):
        read(GOOD[:700], select="*.cls")


@pytest.mark.parametrize(
    ("select", "name", "chosen"),
    [
        ("*.jpg *.png", "d/a.png", True),
        ("*.jpg;*.png", "./a.jpg", True),
        ("a.*", "./a.jpg", True),
        (["a b.jpg"], "a b.jpg", True),
        ("*.jpg", "a.JPG", False),
        ("*.jpg", "a.jpgx", False),
    ],
)
def test_name_filter_matches_whole_names_when_given_globs(select: Any, name: str, chosen: bool) -> None:
    """Globs match the whole name, with case, a leading ./ aside."""
    assert name_filter(select)(name) is chosen


@pytest.mark.parametrize("select", [3, [], "", [1], None])
def test_name_filter_says_what_is_valid_when_given_something_else(select: Any) -> None:
    """Anything but globs or a callable is refused."""
    with pytest.raises(TypeError, match="select must be"):
        name_filter(select)


def test_parse_number_reads_what_tars_write() -> None:
    """Octal with blanks or NULs around it, NULs alone, and base 256 with both signs."""
    assert [parse_number(raw) for raw in (b"0000017\0", b"   17 \0 ", b"\0\0\0")] == [15, 15, 0]
    assert parse_number(b"\xff" * 12) == -1
    assert parse_number(b"\x80" + bytes(9) + b"\x01\x00") == 256


def test_parse_header_refuses_when_the_checksum_is_wrong() -> None:
    """The error says what the header holds and what its bytes give."""
    block = header(b"a.txt", 0)
    assert parse_header(block).name == b"a.txt"
    with pytest.raises(HeaderError, match="checksum"):
        parse_header(b"b" + block[1:])
