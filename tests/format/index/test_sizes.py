"""Sizes from headers: the same samples as reading gives, without reading."""

import gzip
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.damage import DAMAGES
from tests.kits.shards import tar_bytes, text_samples
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index.scan import read_sizes
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar.members import Mark, ShardMember, Unit, singles


@pytest.fixture
def units_of(tmp_path: Path) -> Callable[..., list[Unit]]:
    """Reads the sizes of an archive in a local file."""

    def read(data: bytes, **options: Any) -> list[Unit]:
        path = tmp_path / "x.tar"
        path.write_bytes(data)
        return list(read_sizes(str(path), **options))

    return read


def sizes_in(units: list[Unit]) -> dict[str, Any]:
    """Name to size."""
    members = [unit for unit in singles(units) if isinstance(unit, ShardMember)]
    return {member.name: member.data if isinstance(member.data, int) else len(member.data) for member in members}


def test_sizes_are_those_of_the_members_when_read(units_of: Callable[..., list[Unit]]) -> None:
    """One by one, in order; content that is larger than a buffer, and none."""
    members = [*text_samples("a", 5), ("b.bin", bytes(5 << 20)), ("c.bin", b"")]
    assert sizes_in(units_of(tar_bytes(members))) == {name: len(data) for name, data in members}


def linked(name: str, target: str, kind: bytes = tarfile.LNKTYPE) -> bytes:
    """A file a.txt of three bytes, and a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
        link = tarfile.TarInfo(name)
        link.type, link.linkname = kind, target
        tar.addfile(link)
    return out.getvalue()


def test_hard_link_has_the_size_of_its_target_when_listed(units_of: Callable[..., list[Unit]]) -> None:
    """It reads as its target's bytes; without a target the member and the cure are named."""
    assert sizes_in(units_of(linked("b.txt", "./a.txt"))) == {"a.txt": 3, "b.txt": 3}
    with pytest.raises(ShardFormatError, match=r"member b\.txt at byte .* hard link to no\.txt.*--hard-dereference"):
        units_of(linked("b.txt", "no.txt"))


def test_other_entries_are_counted_when_passed_over(units_of: Callable[..., list[Unit]]) -> None:
    """Symbolic links are not members."""
    skipped: Counter[str] = Counter()
    assert list(sizes_in(units_of(linked("b.txt", "a.txt", tarfile.SYMTYPE), skipped=skipped))) == ["a.txt"]
    assert skipped == {"symbolic link": 1}


@pytest.mark.parametrize("name", DAMAGES)
def test_sizes_tell_damage_when_there_is_any(name: str, tmp_path: Path) -> None:
    """A shard that readers refuse is not listed as a whole one, whether it can be sought through or not."""
    path = tmp_path / "x.tar"
    path.write_bytes(DAMAGES[name].data)
    for url in (str(path), f"pipe:cat {path}"):
        raised: list[str] = []

        def units(raised: list[str], url: str = url) -> Iterator[Unit]:
            try:
                yield from read_sizes(url)
            except ShardFormatError as error:
                yield Mark.BROKEN
                raised.append(str(error))

        found = [sample["__key__"] for sample in group_members(units(raised))]
        assert found == DAMAGES[name].complete
        assert len(raised) == 1
        assert DAMAGES[name].says in raised[0]


def test_options_hold_when_an_archive_has_no_end_or_follows_another(units_of: Callable[..., list[Unit]]) -> None:
    """They are those of reading."""
    members = text_samples("a", 1)
    assert len(sizes_in(units_of(tar_bytes(members, end=b""), require_end_marker=False))) == 3
    units = units_of(tar_bytes(members) + tar_bytes(text_samples("b", 1)), concatenated=True)
    assert (len(sizes_in(units)), units.count(Mark.END)) == (6, 3)


def test_shard_is_sought_through_where_its_members_are_large(tmp_path: Path) -> None:
    """A compressed one is read anyway; the sizes are the same."""
    path = tmp_path / "x.tar"
    members = [("a.bin", bytes(1 << 20)), ("a.txt", b""), ("b.bin", bytes(1 << 20)), ("c.txt", b"small")]
    data = tar_bytes(members)
    for content, seeks in ((data, True), (gzip.compress(data, 1), False)):
        path.write_bytes(content)
        samples = list(group_members(read_sizes(str(path))))
        assert isinstance(samples[0]["bin"], int) == seeks
        values = [value for sample in samples for field, value in sample.items() if not field.startswith("__")]
        sizes = [value if isinstance(value, int) else len(value) for value in values]
        assert sizes == [len(data) for _, data in members]


def test_hard_link_has_the_size_of_its_target_when_nothing_can_be_sought(tmp_path: Path) -> None:
    """A compressed shard is looked at twice, and of a command's output the last members are held."""
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(linked("b.txt", "a.txt")))
    for url in (str(path), f"pipe:zcat {path}"):
        assert sizes_in(list(read_sizes(url))) == {"a.txt": 3, "b.txt": 3}
