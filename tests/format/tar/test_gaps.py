"""Members that nobody wants: sought past in local files, with the same results and errors as when they are read."""

import io
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import tar_bytes, write_tar
from torchdata_wds import index_shard
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import read_members
from torchdata_wds.format.tar.members import gap_seeker
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.sources.local import LocalFile

pytestmark = pytest.mark.usefixtures("each_reader")


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Returns how many bytes of local shards were read since the last call."""
    total = 0
    readinto = LocalFile.readinto

    def counted(self: LocalFile, buffer: Any) -> int:
        nonlocal total
        count = readinto(self, buffer)
        total += count
        return count

    def taken() -> int:
        nonlocal total
        count, total = total, 0
        return count

    monkeypatch.setattr(LocalFile, "readinto", counted)
    return taken


def videos(count: int, size: int = 1 << 20) -> list[tuple[str, bytes]]:
    return [
        member
        for number in range(count)
        for member in ((f"{number}.mp4", bytes(size)), (f"{number}.txt", str(number).encode()))
    ]


@pytest.mark.parametrize(
    ("options", "tar_format"),
    [
        ({"select": "*.txt"}, tarfile.USTAR_FORMAT),
        ({"select": "*.txt"}, tarfile.GNU_FORMAT),
        ({"select": lambda name: name.endswith("T"), "rename": str.upper}, tarfile.PAX_FORMAT),
    ],
)
def test_select_reads_little_of_a_file_when_it_leaves_out_most(
    options: dict[str, Any], tar_format: int, tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    """Captions are read out of a shard of videos without the videos."""
    members = videos(20)
    path = write_tar(tmp_path / "1.tar", members, tar_format=tar_format)
    found = list(IterableWrapper([path]).load_wds_shards(**options))
    assert [member.data for member in found] == [str(number).encode() for number in range(20)]
    assert bytes_read() < 4 << 20


def test_select_reads_little_of_a_file_when_slices_begin_by_an_index(
    tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    path = write_tar(tmp_path / "1.tar", videos(20))
    index_shard(path)
    bytes_read()
    pipe = IterableWrapper([path]).split_shards(index=True).load_wds_shards(select="*.txt").group_by_key()
    assert [sample["txt"] for sample in pipe] == [str(number).encode() for number in range(20)]
    assert bytes_read() < 4 << 20


def test_select_asks_about_each_name_once_when_members_are_sought_past(tmp_path: Path) -> None:
    """A function may count or draw."""
    path = write_tar(tmp_path / "1.tar", videos(5))
    for target in (path, io.BytesIO(Path(path).read_bytes())):
        asked: list[str] = []

        def choose(name: str, asked: list[str] = asked) -> bool:
            asked.append(name)
            return name.endswith(".txt")

        with open_shard(target) if isinstance(target, str) else target as stream:
            assert len(list(read_members(stream, path, select=choose))) == 5
        assert asked == [name for name, _ in videos(5)]


def outcome(stream: Any, **options: Any) -> tuple[list[tuple[str, bytes]], str]:
    """The members, and the error if there is one."""
    members = []
    try:
        for member in read_members(stream, "x.tar", **options):
            members.append((member.name, member.data))
    except ShardFormatError as error:
        return members, str(error)
    return members, ""


def test_select_gives_the_same_when_a_file_is_cut_anywhere(tmp_path: Path) -> None:
    """A seek past the end of a file would succeed: each cut is the same error as where all is read."""
    sizes = random.Random(3)
    members = [
        (f"{n}.{'bin' if n % 3 else 'txt'}", sizes.randbytes(sizes.choice((0, 9, 70_000, 200_000)))) for n in range(20)
    ]
    path = tmp_path / "x.tar"
    for tar_format in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT):
        archive = tar_bytes(members, tar_format=tar_format)
        cuts = {*range(0, len(archive), 100_021), *range(512, len(archive), 132_096), len(archive) - 1024, len(archive)}
        for cut in sorted(cuts):
            path.write_bytes(archive[:cut])
            for select in ("*.txt", "*.bin", "nothing"):
                with open_shard(path) as stream:
                    assert outcome(stream, select=select) == outcome(io.BytesIO(archive[:cut]), select=select), cut


def test_select_gives_the_same_when_a_file_is_damaged(tmp_path: Path) -> None:
    """A header after a gap is checked as any other."""
    archive = bytearray(tar_bytes(videos(4, 100_000)))
    path = tmp_path / "x.tar"
    for place in (512 + 100_000 + 352 + 100, 2 * (512 + 100_352) + 1024 + 130):
        damaged = bytes(archive[:place]) + b"\xff" + bytes(archive[place + 1 :])
        path.write_bytes(damaged)
        with open_shard(path) as stream:
            found = outcome(stream, select="*.txt")
        assert found == outcome(io.BytesIO(damaged), select="*.txt")
        assert "header" in found[1]


def test_gap_seeker_passes_over_nothing_when_it_cannot_know(tmp_path: Path) -> None:
    """What is not a regular file, is compressed, is short, or ends before: then the bytes are read."""
    path = tmp_path / "x"
    path.write_bytes(bytes(300_000))
    with open_shard(path) as stream:
        pass_over = gap_seeker(stream)
        assert pass_over is not None
        assert [pass_over(size) for size in (1000, 200_000, 200_000)] == [False, True, False]
        assert len(stream.read(1 << 20)) == 100_000
    reading, writing = os.pipe()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert gap_seeker(pipe) is None
    assert gap_seeker(io.BytesIO(bytes(100))) is None
