"""What an archive may cost to read: sizes that are claimed, headers without end, members larger than the limit."""

import io
import tarfile
import tracemalloc
from typing import Any

import pytest

from tests.kits.shards import END, tar_bytes
from tests.kits.tar_blocks import block, filled, record
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import read_members
from torchdata_wds.format.tar.entries import TarEntries

pytestmark = pytest.mark.usefixtures("each_reader")

MEMBERS = [("a.txt", b"a"), ("b.bin", bytes(3000)), ("c.txt", b"c")]


def names(archive: bytes, **options: Any) -> list[str]:
    return [member.name for member in read_members(io.BytesIO(archive), "x.tar", **options)]


def entry(name: str, data: bytes = b"", *, kind: bytes = b"0", size: int | None = None) -> bytes:
    """A member, or an extended header; its header may claim another size than its data has."""
    return block(name.encode(), len(data) if size is None else size, kind) + filled(data)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_read_members_refuses_a_member_when_it_is_larger_than_the_limit(tar_format: int) -> None:
    """The members before it are given, and the error names it, its size and the option."""
    archive = tar_bytes(MEMBERS, tar_format=tar_format)
    reading = read_members(io.BytesIO(archive), "x.tar", max_member_bytes=2999)
    assert next(reading).name == "a.txt"
    with pytest.raises(ShardFormatError, match=r"b\.bin of 3,000 bytes, more than the limit of 2,999") as raised:
        next(reading)
    assert raised.value.member == "b.bin"


def test_read_members_reads_on_when_the_limit_is_met_or_select_leaves_out_what_is_larger() -> None:
    assert names(tar_bytes(MEMBERS), max_member_bytes=3000) == ["a.txt", "b.bin", "c.txt"]
    assert names(tar_bytes(MEMBERS), max_member_bytes=2999, select="*.txt") == ["a.txt", "c.txt"]


def test_read_members_refuses_a_hard_link_when_its_target_is_larger_than_the_limit() -> None:
    """The shard may have been cut into slices, so that nobody has read the target."""
    archive = entry("a.bin", bytes(3000)) + block(b"b.bin", kind=b"1", link=b"a.bin") + END
    options = {"reopen": lambda offset: io.BytesIO(archive[offset:]), "max_member_bytes": 2999}
    with pytest.raises(ShardFormatError, match=r"a\.bin of 3,000 bytes"):
        names(archive, select="b.bin", **options)


@pytest.mark.parametrize("size", [100, 20 << 20, 3 << 30])
def test_read_members_names_the_member_when_memory_runs_out(size: int) -> None:
    """The memory error itself says nothing; it stays as the cause, by which handlers know it."""

    class Exhausted(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            if self.tell():
                raise MemoryError
            return super().read(count)

        read1 = read

    with pytest.raises(ShardFormatError, match=rf"a\.bin of {size:,} bytes, more than this process has") as raised:
        list(read_members(Exhausted(entry("a.bin", size=size)), "x.tar"))
    assert isinstance(raised.value.__cause__, MemoryError)


def test_take_needs_memory_once_when_a_member_is_large() -> None:
    """Pieces that are joined in the end would need it twice."""
    entries = TarEntries(io.BytesIO(entry("a.bin", bytes(64 << 20))), "x.tar")
    first = next(iter(entries))
    assert first is not None
    tracemalloc.start()
    try:
        assert len(entries.take(first)) == 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_read_members_refuses_an_extended_header_when_it_claims_a_gigabyte(kind: bytes) -> None:
    archive = entry("x", kind=kind, size=1 << 30) + entry("a.txt")
    with pytest.raises(
        ShardFormatError, match=r"extended header of 1,073,741,824 bytes, more than the limit of 16 MiB"
    ):
        names(archive)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_read_members_refuses_headers_when_they_go_on_before_one_member(kind: bytes) -> None:
    """Each is below the limit; a compressed shard of a megabyte could hold a gigabyte of them."""
    data = record("path", "x" * (1 << 20)) if kind == tarfile.XHDTYPE else b"x" * (1 << 20)
    few, many = entry("x", data, kind=kind) * 3, entry("x", data, kind=kind) * 40
    assert len(names(few + entry("a.txt") + few + entry("b.txt") + END)) == 2
    with pytest.raises(ShardFormatError, match="more than 32 MiB of headers before one member's content, at byte 0"):
        names(many + entry("a.txt") + END)


@pytest.mark.parametrize("kind", [tarfile.XGLTYPE, tarfile.XHDTYPE])
def test_entries_keep_nothing_of_records_when_they_say_nothing_about_content(kind: bytes) -> None:
    """Else each entry would cost as much as all keywords before it."""
    headers = b"".join(entry("x", record(f"comment.{number}", "x"), kind=kind) for number in range(50))
    entries = TarEntries(io.BytesIO(headers + entry("a.txt") + END), "x.tar")
    assert [found.name for found in entries if found is not None] == ["a.txt"]
    assert not entries._global
    assert not entries._own


def test_read_members_refuses_when_the_archive_ends_after_a_header_that_says_nothing_about_content() -> None:
    """A cut between an extended header and its member is a cut, whatever the header says."""
    archive = entry("a.txt") + entry("x", record("mtime", "1"), kind=tarfile.XHDTYPE)
    with pytest.raises(ShardFormatError, match="ends after an extended header"):
        names(archive + END)
    with pytest.raises(ShardFormatError, match="cut off between two members"):
        names(archive, require_end_marker=False)


def test_read_members_refuses_the_end_when_zeros_follow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdata_wds.format.tar.entries._LONGEST_END", 1 << 20)
    assert names(entry("a.txt") + bytes(1 << 20)) == ["a.txt"]
    with pytest.raises(ShardFormatError, match="zeros after its end-of-archive marker, at byte 1,024"):
        names(entry("a.txt") + bytes(4 << 20))
    with pytest.raises(ShardFormatError, match="zeros after its end-of-archive marker"):
        names(entry("a.txt") + bytes(4 << 20), concatenated=True)


@pytest.mark.parametrize("zeros", [1024, 20 * 512, 60_000 // 512 * 512, 3 << 20])
def test_read_members_tells_the_place_when_bytes_follow_the_end_marker(zeros: int) -> None:
    """However far behind it they lie, the offset is that of their block."""
    where = f"{512 + zeros + 1024:,}"
    with pytest.raises(ShardFormatError, match=rf"bytes after its end-of-archive marker, b'more', at byte {where}\."):
        names(entry("a.txt") + bytes(zeros) + bytes(1024) + bytes(100) + b"more")
