"""Hard links: looked up in linear time, and out of memory where a shard is read only once."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.processes import open_files
from torchdata_wds.cli.validate.findings import Finding
from torchdata_wds.cli.validate.shard_validation import ShardValidation
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import links, read_members
from torchdata_wds.format.tar.members import MemberRun, ShardMember
from torchdata_wds.storage import open_shard

pytestmark = pytest.mark.usefixtures("each_reader")


def archive_of(*entries: tuple[str, bytes | str]) -> bytes:
    """Members by name and bytes, links by name and target."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname, content = tarfile.LNKTYPE, content, b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Opener:
    """Opens an archive again, and counts."""

    def __init__(self, archive: bytes) -> None:
        self.archive = archive
        self.offsets: list[int] = []

    def __call__(self, offset: int) -> io.BytesIO:
        self.offsets.append(offset)
        return io.BytesIO(self.archive[offset:])


def read(archive: bytes, **options: Any) -> list[tuple[str, bytes]]:
    return [(member.name, member.data) for member in read_members(io.BytesIO(archive), "x.tar", **options)]


def test_links_give_the_latest_member_before_them() -> None:
    """Through other links too; one to a member that is not before it is damage."""
    old_and_new = (("a.txt", b"old"), ("a.txt", b"A" * 700), ("./d/b.txt", "./a.txt"), ("c.txt", "d/b.txt"))
    archive = archive_of(*old_and_new, ("a.txt", b"new"), ("e.txt", "a.txt"))
    expected = {"a.txt": b"new", "./d/b.txt": b"A" * 700, "c.txt": b"A" * 700, "e.txt": b"new"}
    assert dict(read(archive, reopen=Opener(archive))) == expected
    archive = archive_of(("b.txt", "a.txt"), ("a.txt", b"A"))
    with pytest.raises(ShardFormatError, match="no such member before it"):
        read(archive, reopen=Opener(archive))


def test_links_name_the_cure_when_they_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once only, as from a pipe, a link to a member far back is an error that says how to write the shard."""
    monkeypatch.setattr(links, "RECENT_BYTES", 1000)
    archive = archive_of(("a.txt", b"A"), *((f"{n}.bin", bytes(2000)) for n in range(40)), ("b.txt", "a.txt"))
    with pytest.raises(ShardFormatError, match=r"--hard-dereference.*cp -r") as caught:
        read(archive)
    assert caught.value.member == "b.txt"


def test_links_open_the_url_again_when_they_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reopen= the URL itself is opened for a second look; a FIFO is not, it would wait for ever."""
    path = tmp_path / "1.tar"
    path.write_bytes(archive_of(("a.txt", b"A"), ("b.txt", "a.txt")))
    monkeypatch.setattr(links.RecentMembers, "find", lambda self, name: None)
    with path.open("rb") as stream:
        assert [member.data for member in read_members(stream, str(path))] == [b"A", b"A"]
    os.mkfifo(tmp_path / "fifo")
    with path.open("rb") as stream, pytest.raises(ShardFormatError, match="--hard-dereference"):
        list(read_members(stream, str(tmp_path / "fifo")))


def test_links_open_the_shard_once_for_a_target_when_many_point_at_it() -> None:
    """Thousands of links to one large member give the same bytes, which are in memory once."""
    archive = archive_of(("a.txt", bytes(100_000)), *((f"{number}.txt", "a.txt") for number in range(3000)))
    opener = Opener(archive)
    found = read(archive, reopen=opener)
    assert len(found) == 3001
    assert opener.offsets == [0, 0]
    assert len({id(content) for _, content in found[1:]}) == 1


def test_links_open_the_shard_once_for_each_target_when_they_take_turns() -> None:
    targets = [(f"t{number}.bin", bytes([number]) * 1000) for number in range(20)]
    turns = [(f"{number}.txt", f"t{number % 20}.bin") for number in range(400)]
    archive = archive_of(*targets, *turns)
    opener = Opener(archive)
    assert dict(read(archive, reopen=opener))["399.txt"] == bytes([19]) * 1000
    assert len(opener.offsets) == 1 + 20


@pytest.fixture
def decompressed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how many bytes were read of streams that were opened again."""
    total = 0

    class Counted:
        def __init__(self, stream: Any) -> None:
            self.stream = stream
            self.raw = stream.raw

        def read(self, size: int) -> bytes:
            nonlocal total
            data = bytes(self.stream.read(size))
            total += len(data)
            return data

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *error: object) -> None:
            self.stream.close()

    def opened(url: str, offset: int) -> Any:
        nonlocal total
        total += offset
        return Counted(open_shard(url, offset=offset))

    monkeypatch.setattr(links, "_open_at", opened)
    return lambda: total


def read_file(path: Path) -> list[tuple[str, bytes]]:
    """Reads a shard of which the last members are not held."""
    reopen = lambda offset: links._open_at(str(path), offset)  # noqa: E731
    with open_shard(path) as stream:
        return [(member.name, member.data) for member in read_members(stream, str(path), reopen=reopen)]


def test_links_read_on_where_they_are_when_a_shard_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decompressed: Callable[[], int]
) -> None:
    """Links to one member after the other do not begin at the shard's start each time."""
    monkeypatch.setattr(links, "KEPT_BYTES", 0)
    targets = [(f"t{number}.bin", bytes([number]) * 20_000) for number in range(100)]
    archive = archive_of(*targets, *((f"{number}.txt", f"t{number}.bin") for number in range(100)))
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(archive))
    before = open_files()
    assert [data for _, data in read_file(path)] == 2 * [data for _, data in targets]
    assert open_files() <= before
    assert decompressed() < 3 * len(archive)


def test_links_refuse_to_go_back_and_forth_when_a_shard_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file could ask for hours of decompression; where it can be sought the same archive is read."""
    monkeypatch.setattr(links, "KEPT_BYTES", 0)
    targets = [(f"t{number}.bin", bytes(20_000)) for number in range(10)]
    turns = [(f"{number}.txt", f"t{-number % 10}.bin") for number in range(1000)]
    archive = archive_of(*targets, *turns)
    path = tmp_path / "x.tar"
    path.write_bytes(gzip.compress(archive))
    with pytest.raises(ShardFormatError, match=r"decompressed 32 times for its links.*Decompress it"):
        read_file(path)
    path.write_bytes(archive)
    assert len(read_file(path)) == 1010


def test_recent_members_give_the_last_of_a_name_when_it_came_twice() -> None:
    recent = links.RecentMembers()
    recent.note(MemberRun("x.tar", b"abcd", ["./a", "b"], [0, 1], [1, 3], 1))
    assert (recent.find("a"), recent.find("./b"), recent.find("c")) == (b"a", b"bc", None)
    recent.note(ShardMember("x.tar", "a", b"new"))
    assert recent.find("a") == b"new"
    recent.forget("a")
    assert recent.find("a") is None
    assert recent.find("b") == b"bc"


def test_recent_members_hold_little_when_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones are held, however large the very last is."""
    monkeypatch.setattr(links, "RECENT_BYTES", 10_000)
    recent = links.RecentMembers()
    for number in range(100):
        window = bytes(1000)
        for row in range(3):
            recent.note(MemberRun("x.tar", window, [f"{number}.{row}"], [row], [row + 1], 1))
    assert len(recent._units) < 30
    assert recent.find("0.0") is None
    assert recent.find("99.2") == b"\0"
    recent.note(ShardMember("x.tar", "large", bytes(50_000)))
    assert recent.find("large") == bytes(50_000)
    assert recent.find("99.2") is None


def test_links_give_what_the_name_stands_for_when_its_last_member_is_left_out(tmp_path: Path) -> None:
    """Read once only, a member that select leaves out, and that is too large to be held, hides those before it."""
    archive = archive_of(("l.bin", b"x"), ("k.txt", "l.bin"), ("l.bin", bytes(2 << 20)), ("m.txt", "l.bin"))
    reading = read_members(io.BytesIO(archive), "pipe:x", select="*.txt")
    assert next(reading)[1:3] == ("k.txt", b"x")
    with pytest.raises(ShardFormatError, match="only the last 4 MiB"):
        next(reading)


def test_validate_reads_hard_links_when_a_shard_comes_from_a_command(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(archive_of(("a.txt", b"a"), ("b.txt", "a.txt")))
    assert [item for item in ShardValidation(f"pipe:cat {path}") if isinstance(item, Finding)] == []
