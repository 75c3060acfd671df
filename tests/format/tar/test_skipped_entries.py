"""Links, devices and odd names: what is skipped of a shard is said once, and no shard is silently empty."""

import io
import logging
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.kits.tar_blocks import END, block, member
from tests.kits.tool_kit import run_wds
from torchdata_wds import handlers
from torchdata_wds.format.index.scan import index_shard, read_sizes
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar import ReadOptions, read_marked_members, read_members

FOLDER = block(b"d/", kind=b"5")
LINKS = b"".join(block(b"d/%d.jpg" % number, kind=b"2", link=b"../blobs/%d" % number) for number in range(3))
FILE = member(b"a.txt", b"A")


@pytest.fixture(autouse=True)
def no_warnings_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are counted by process; each test begins anew."""
    monkeypatch.setattr(handlers, "_warned", Counter())


def warnings_of(archive: bytes, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged while an archive is read."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        list(read_members(io.BytesIO(archive), "x.tar"))
    return [record.getMessage() for record in caplog.records]


def test_read_members_warns_once_when_links_are_named_like_fields(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for a shard, with the number, the first one, and the cure."""
    (warning,) = warnings_of(FOLDER + LINKS + FILE + END, caplog)
    for part in ("shard x.tar: skipped 3 symbolic links", "d/0.jpg -> ../blobs/0", "tar --dereference"):
        assert part in warning
    assert "no other members" not in warning


def test_read_members_says_so_when_a_shard_has_only_links(caplog: pytest.LogCaptureFixture) -> None:
    """A shard that gives nothing is worse than one that lacks a field."""
    (warning,) = warnings_of(FOLDER + LINKS + END, caplog)
    assert "no other members" in warning


@pytest.mark.parametrize(
    ("kind", "word"), [(b"3", "character device"), (b"4", "block device"), (b"6", "FIFO"), (b"A", "'A'")]
)
def test_read_members_warns_when_devices_are_named_like_fields(
    kind: bytes, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no content either, and --dereference does not help."""
    (warning,) = warnings_of(FILE + block(b"b.jpg", kind=kind) + END, caplog)
    assert word in warning
    assert "--dereference" not in warning


def test_read_members_says_nothing_when_what_it_skips_is_no_field(caplog: pytest.LogCaptureFixture) -> None:
    """Folders, links to folders, and labels of volumes are no loss; nor is an empty shard."""
    odd = FOLDER + block(b"latest", kind=b"2", link=b"d") + block(b"backup.2024", kind=b"V")
    assert warnings_of(odd + FILE + END, caplog) == []
    assert warnings_of(END, caplog) == []


def test_read_members_says_nothing_when_select_leaves_the_links_out(caplog: pytest.LogCaptureFixture) -> None:
    """What the program does not want is no loss."""
    with caplog.at_level(logging.WARNING):
        list(read_members(io.BytesIO(LINKS + FILE + END), "x.tar", select="*.txt"))
        assert not caplog.records
        list(read_members(io.BytesIO(LINKS + FILE + END), "x.tar", select="*.jpg"))
    assert len(caplog.records) == 1


def test_read_members_warns_when_a_shard_has_only_folders(caplog: pytest.LogCaptureFixture) -> None:
    """It is a whole shard, and probably not what was meant."""
    (warning,) = warnings_of(FOLDER + block(b"e/", kind=b"5") + END, caplog)
    assert "shard x.tar gives no member: it only has 2 directories." in warning


def test_read_members_warns_when_reading_ends_early(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that is closed after the first member, or stopped by damage, has skipped what came before."""
    reading = read_members(io.BytesIO(LINKS + FILE + FILE + END), "x.tar")
    with caplog.at_level(logging.WARNING):
        next(reading)
        reading.close()  # type: ignore[attr-defined]
    (record,) = caplog.records
    assert "skipped 3 symbolic links" in record.getMessage()


def test_warnings_become_seldom_when_many_shards_have_links(caplog: pytest.LogCaptureFixture) -> None:
    """The first ten, and then the hundredth."""
    logged = [len(warnings_of(LINKS + FILE + END, caplog)) for _ in range(100)]
    assert logged == [1] * 10 + [0] * 89 + [1]


def test_group_members_warns_when_no_member_of_a_shard_has_a_key(caplog: pytest.LogCaptureFixture) -> None:
    """A shard of members that belong to no sample is said to give none, its neighbour is not."""
    odd = member(b".hidden.jpg", b"x") + member(b"README", b"x") + END
    options = ReadOptions(shard="x.tar")
    with caplog.at_level(logging.WARNING):
        for archive in (odd, member(b"README", b"x") + FILE + END):
            list(group_members(read_marked_members(io.BytesIO(archive), "x.tar", options, Counter())))
    (record,) = caplog.records
    assert "shard x.tar gives no sample" in record.getMessage()
    assert ".hidden.jpg (hidden file)" in record.getMessage()


def test_sizes_and_indexes_warn_as_loading_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever reads the headers of a shard says what its samples lack."""
    path = tmp_path / "x.tar"
    path.write_bytes(LINKS + FILE + END)
    with caplog.at_level(logging.WARNING):
        list(read_sizes(str(path)))
        index_shard(path)
    assert ["skipped 3 symbolic links" in record.getMessage() for record in caplog.records] == [True, True]


def test_wds_cat_says_what_is_lost_when_a_folder_of_links_was_packed(tmp_path: Path) -> None:
    """As a snapshot of a cache of Hugging Face is, with tar's defaults."""
    (tmp_path / "blob").write_text("1")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.cls").symlink_to("../blob")
    subprocess.run(["tar", "-cf", "x.tar", "-C", "links", "."], cwd=tmp_path, check=True)
    done = run_wds("cat", str(tmp_path / "x.tar"), "-o", str(tmp_path / "y.tar"))
    assert "skipped 1 symbolic link named like fields" in done.err
    assert "--dereference" in done.err
