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
from torchdata_wds.format.index import scan as sizes
from torchdata_wds.format.index.scan import read_sizes
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar.members import Mark, ShardMember, Unit


@pytest.fixture
def units_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Unit]]:
    """Reads the sizes of an archive by its headers alone."""
    monkeypatch.setattr(sizes, "_has_large_members", lambda _: True)

    def read(data: bytes, **options: Any) -> list[Unit]:
        path = tmp_path / "x.tar"
        path.write_bytes(data)
        return list(read_sizes(str(path), **options))

    return read


def sizes_in(units: list[Unit]) -> dict[str, Any]:
    """Name to size."""
    return {unit.name: unit.data for unit in units if isinstance(unit, ShardMember)}


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
def test_sizes_tell_damage_when_there_is_any(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that readers refuse is not listed as a whole one, whichever way it is read."""
    path = tmp_path / "x.tar"
    path.write_bytes(DAMAGES[name].data)
    for seeks in (True, False):
        monkeypatch.setattr(sizes, "_has_large_members", lambda _, seeks=seeks: seeks)
        raised = []

        def units(raised: list[str]) -> Iterator[Unit]:
            try:
                yield from read_sizes(str(path))
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


@pytest.mark.parametrize(
    ("members", "compressed", "seeks"),
    [
        ([("a.bin", bytes(1 << 20)), ("a.txt", b"")], False, True),
        ([("a.bin", bytes(1 << 20)), ("a.txt", b"")], True, False),
        ([("a.txt", b"small"), ("a.cls", b"1")], False, False),
        ([], False, False),
    ],
)
def test_shard_is_sought_through_when_its_members_are_large(
    members: list[tuple[str, bytes]], compressed: bool, seeks: bool, tmp_path: Path
) -> None:
    """Small ones are read faster than passed over, and compressed ones are read anyway."""
    path = tmp_path / "x.tar"
    data = tar_bytes(members)
    path.write_bytes(gzip.compress(data, 1) if compressed else data)
    found = {}
    for sample in group_members(read_sizes(str(path))):
        found |= {field: value for field, value in sample.items() if not field.startswith("__")}
    assert all(isinstance(value, int) == seeks for value in found.values())
    assert [value if isinstance(value, int) else len(value) for value in found.values()] == [
        len(data) for _, data in members
    ]


def test_hard_link_is_read_as_its_target_when_shards_are_small(tmp_path: Path) -> None:
    """By a second look."""
    path = tmp_path / "x.tar"
    path.write_bytes(linked("b.txt", "a.txt"))
    assert [len(sample["txt"]) for sample in group_members(read_sizes(str(path)))] == [3, 3]
