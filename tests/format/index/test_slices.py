"""Slices of shards: which members are kept, and where reading begins."""

import io
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kits.damage import GOOD, KEYS, SAMPLE
from tests.kits.shards import sample_members, tar_bytes, text_samples, write_tar
from torchdata_wds import ShardFormatError, handlers, index_shard
from torchdata_wds.format.index.slices import (
    OpenSlice,
    PaddingSlice,
    ShardSlice,
    TailSlice,
    find_sample,
    slice_members,
)
from torchdata_wds.format.samples.grouping import group_members, release_whole_samples
from torchdata_wds.format.samples.names import key_splitter, split_name
from torchdata_wds.format.tar import ReadOptions, read_marked_members
from torchdata_wds.format.tar.members import Mark, MemberRun, PassedMember, ShardMember, Unit
from torchdata_wds.option_types import KeyRule
from torchdata_wds.storage import StorageOptions

pytestmark = pytest.mark.usefixtures("each_reader")

NONE = StorageOptions()


def units_of(archive: bytes, select: Any = None) -> Iterator[Unit]:
    """What a reader gives of an archive, in windows where it can."""
    options = ReadOptions(select, visit=1, shard="x.tar")
    stream = io.BufferedReader(io.BytesIO(archive))  # type: ignore[arg-type]  # as open_shard gives it
    return read_marked_members(stream, "x.tar", options, Counter())


def samples_of(units: Any, **options: Any) -> list[dict[str, Any]]:
    """The samples that units make; a key may come back."""
    return list(group_members(units, on_reappearing="allow", on_duplicate="last", **options))


def by_first_letter(name: str) -> tuple[str, str] | None:
    """A rule of the user's."""
    return None if name.startswith("R") else (name[0], name)


def random_members(rng: random.Random) -> list[tuple[str, bytes]]:
    """Members of few keys, so that runs, returns and strays are frequent; some are too large for a small window."""
    names = [f"{key}.{field}" for key in ("a", "b", "b.c", "d/a") for field in ("x", "y")] + ["README", "._a.x"]
    return [(rng.choice(names), bytes(rng.choice((0, 5, 600, 6000)))) for _ in range(rng.randrange(14))]


@pytest.mark.parametrize("keys", ["first_dot", "last_dot", by_first_letter])
def test_slices_have_the_samples_that_slices_of_a_list_have(keys: KeyRule) -> None:
    """Grouping a slice of the members gives that slice of the samples, whatever members there are."""
    rng = random.Random(str(keys)[:9])
    split = key_splitter(keys)
    for _ in range(60):
        archive = tar_bytes(random_members(rng))
        expected = samples_of(units_of(archive), keys=keys)
        start, step = rng.randrange(len(expected) + 2), rng.randrange(1, 4)
        stop = rng.choice([None, rng.randrange(len(expected) + 1)])
        kept = slice_members(units_of(archive), split, ShardSlice("x.tar", start, stop, step))
        assert samples_of(kept, keys=keys) == expected[start:stop:step]


def random_units(rng: random.Random) -> list[Unit]:
    """Members of few keys, in runs and one by one, with the ends of joined archives and what is of no sample."""
    units: list[Unit] = []
    for _ in range(rng.randrange(9)):
        names = [f"{rng.choice('abc')}.{rng.choice('xy')}" for _ in range(rng.randrange(1, 7))]
        places = list(range(len(names)))
        run = MemberRun("x.tar", bytes(range(9)), names, places, [place + 1 for place in places], 1)
        kind = rng.randrange(4)
        units += [run] if kind < 2 else [*run.members()] if kind == 2 else [Mark.END]
        if rng.random() < 0.2:
            units.append(ShardMember("x.tar", "README", b"", 1))
    return [*units, Mark.END]


def test_slices_have_the_samples_of_a_list_however_members_come() -> None:
    """Samples may begin and end anywhere in runs, or go on from one unit to the next."""
    rng = random.Random(1)
    for _ in range(500):
        units = random_units(rng)
        expected = samples_of(units)
        start, stop, step = rng.randrange(4), rng.choice([None, rng.randrange(len(expected) + 1)]), rng.randrange(1, 4)
        kept = [*slice_members(units, split_name, ShardSlice("x.tar", start, stop, step))]
        assert samples_of(kept) == expected[start:stop:step]
        # what has begun to be left out shows that the sample before is whole, whatever comes then
        if expected[start:stop:step] and kept[-1] is Mark.END:
            assert samples_of([*kept, Mark.BROKEN]) == expected[start:stop:step]


def test_slices_hold_no_strays_of_other_slices() -> None:
    """A member of no sample goes with the sample before it, and is counted once over all slices."""
    names = ("README", "a.x", "NOTES", "b.x", "TODO")
    units = [*(ShardMember("x.tar", name, b"") for name in names), Mark.END]
    found = [
        [unit.name for unit in slice_members(units, split_name, part) if isinstance(unit, ShardMember)]
        for part in (ShardSlice("x.tar", 0, 1), ShardSlice("x.tar", 1, 2))
    ]
    assert found == [["README", "a.x", "NOTES"], ["b.x", "TODO"]]


def test_slices_hold_every_sample_once_when_they_are_strides() -> None:
    """Members that are chosen away count: with any select= the strides together are the whole."""
    rng = random.Random(3)
    for _ in range(25):
        archive = tar_bytes([(f"{number // 3}.{number % 3}", b"x" * number) for number in range(rng.randrange(40))])
        select = rng.choice(["*.0", "*[02468].*", "1*"])
        expected = samples_of(units_of(archive, select))
        steps = rng.randrange(1, 5)
        found = [
            sample
            for start in range(steps)
            for sample in samples_of(
                slice_members(units_of(archive, select), split_name, ShardSlice("x.tar", start, None, steps))
            )
        ]
        assert sorted(found, key=lambda sample: int(sample["__key__"])) == expected


def test_slices_are_released_whole_when_members_go_out_one_by_one() -> None:
    """Without grouping behind the loader the same members come."""
    kept = slice_members(units_of(tar_bytes(text_samples("s", 9))), split_name, ShardSlice("x.tar", 1, 8, 3))
    names = [member.name for member in release_whole_samples(kept, split_name)]
    assert names == [f"s0000{number}.{field}" for number in (1, 4, 7) for field in ("txt", "json", "cls")]


def test_slices_keep_runs_together() -> None:
    """A run that is whole in a slice is passed on as it is, and another is cut down without copying its bytes."""
    run = MemberRun("x.tar", bytes(9), [f"{key}.x" for key in "abcdef"], list(range(6)), list(range(1, 7)), 1)
    assert [*slice_members([run], split_name, ShardSlice("x.tar"))] == [run]
    (cut, end) = slice_members([run, Mark.END], split_name, ShardSlice("x.tar", 1, 3))
    assert (cut.names, cut.starts, cut.ends, end) == (["b.x", "c.x"], [1, 2], [2, 3], Mark.END)
    assert cut.data is run.data


def test_slices_end_reading_at_their_end() -> None:
    """Nothing is asked for behind the first member that is too much."""
    units = iter([ShardMember("x.tar", f"{key}.x", b"") for key in "abcdef"])
    assert [*slice_members(units, split_name, ShardSlice("x.tar", 1, 3))][-1] is Mark.END
    assert next(units).name == "e.x"


def test_slices_give_a_sample_as_soon_as_it_is_whole_when_damage_follows() -> None:
    """A sample of a slice is whole when the next one begins, though that one is left out and broken."""
    archive = GOOD[: 2 * SAMPLE + 700]
    found = []
    with pytest.raises(ShardFormatError):
        for unit in slice_members(units_of(archive), split_name, ShardSlice("x.tar", 1, None, 2)):
            found.append(unit)
    assert [sample["__key__"] for sample in group_members([*found, Mark.BROKEN])] == [KEYS[1]]


def test_slices_count_members_that_are_chosen_away() -> None:
    """A sample that nothing is read of still has its number."""
    units = [PassedMember("a.x"), ShardMember("x.tar", "b.y", b""), PassedMember("c.x"), Mark.END]
    assert [sample["__key__"] for sample in samples_of(slice_members(units, split_name, ShardSlice("", 1, 2)))] == ["b"]
    assert samples_of(slice_members(units, split_name, ShardSlice("", 2, 3))) == []


@pytest.mark.parametrize("expected", [0, 2, 4])
def test_slices_raise_when_a_shard_is_not_as_long_as_its_index_says(expected: int) -> None:
    """The consumer that has the shard's end counts its samples; the error names both numbers."""
    part = TailSlice("x.tar", 0, expected)
    found = []
    with pytest.raises(ShardFormatError, match=rf"has 3 samples, and {expected} were expected") as caught:
        for unit in slice_members(units_of(GOOD), split_name, part, shard="x.tar"):
            found.append(unit)
    assert caught.value.shard == "x.tar"
    assert [sample["__key__"] for sample in samples_of(found)] == KEYS[:expected]
    assert len(samples_of(slice_members(units_of(GOOD), split_name, TailSlice("x.tar", 1, 3)))) == 2


def test_slices_raise_when_a_shard_ends_before_them() -> None:
    """A slice that cannot be filled is an error, one that reads to the end is not."""
    with pytest.raises(ShardFormatError, match="has 3 samples, and 5 were expected"):
        samples_of(slice_members(units_of(GOOD), split_name, ShardSlice("x.tar", 1, 5), shard="x.tar"))
    assert samples_of(slice_members(units_of(GOOD), split_name, ShardSlice("x.tar", 5, None, 7))) == []


def test_open_slices_end_with_the_shard_when_it_ends_before_them() -> None:
    """They have whatever is there of them."""
    kept = samples_of(slice_members(units_of(GOOD), split_name, OpenSlice("x.tar", 1, 5)))
    assert [sample["__key__"] for sample in kept] == KEYS[1:]
    assert samples_of(slice_members(units_of(GOOD), split_name, OpenSlice("x.tar", 3, 5))) == []


def test_slices_count_from_where_reading_began() -> None:
    """Units may begin inside the shard, at the beginning of a sample."""
    kept = slice_members(units_of(GOOD[SAMPLE:]), split_name, TailSlice("x.tar", 1, 3), first=1)
    assert [sample["__key__"] for sample in samples_of(kept)] == KEYS[1:]


def test_slices_leave_names_to_grouping_when_the_rule_fails() -> None:
    """Where keys= raises, whoever groups asks its handler."""

    def rule(name: str) -> tuple[str, str]:
        return ("a", "x") if name == "a.x" else (name[10], "y")

    members = [ShardMember("x.tar", "a.x", b""), ShardMember("x.tar", "b.x", b"")]
    assert [*slice_members(members, rule, ShardSlice("x.tar"))] == members


@pytest.mark.parametrize("kind", [ShardSlice, OpenSlice, TailSlice, PaddingSlice])
def test_slices_stay_what_they_are_when_copied(kind: type[ShardSlice]) -> None:
    """They are tuples of four that survive pickling, replacing and being built anew from their values."""
    part = kind("x.tar", 1, 5)
    assert part == ("x.tar", 1, 5, 1)
    for copy in (pickle.loads(pickle.dumps(part)), part._replace(), type(part)(*part)):
        assert type(copy) is kind
        assert copy == part
    assert ShardSlice("x.tar") == ("x.tar", 0, None, 1)


# ------------------------------------------------------------------------------------------------ where samples begin
def test_find_sample_finds_only_what_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of another rule, a damaged one and none are no index; only damage is worth a warning."""
    monkeypatch.setattr(handlers, "_warned", Counter())
    url = write_tar(tmp_path / "x.tar", sample_members("a", txt=b"1"))
    assert find_sample(url, 0, "first_dot", NONE) is None
    assert find_sample("pipe:cat x.tar", 0, "first_dot", NONE) is None
    index_shard(url)
    found = find_sample(url, 0, "first_dot", NONE)
    assert found is not None
    assert (found[0].samples, found[1].key) == (1, "a")
    assert find_sample(url, 0, "last_dot", NONE) is None
    assert find_sample(url, 0, by_first_letter, NONE) is None
    assert not caplog.records
    path = tmp_path / ".wds-index" / "x.tar.index"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert find_sample(url, 0, "first_dot", NONE) is None
    assert "is cut off" in caplog.text
    for row in (b"[", b"5", b"[1, 2]"):
        path.write_bytes(whole.partition(b"\n")[0] + b"\n" + row + b"\n")
        assert find_sample(url, 0, "first_dot", NONE) is None
    assert caplog.text.count("has a damaged line") == 3


def test_find_sample_gives_its_place_in_the_shard(tmp_path: Path) -> None:
    """It is where the sample's first header begins; there is none behind the last sample."""
    url = write_tar(tmp_path / "x.tar", text_samples("s", 4))
    index_shard(url)
    places = [found and found[1] for found in (find_sample(url, number, "first_dot", NONE) for number in range(5))]
    assert [place.key if place else None for place in places] == [f"s0000{number}" for number in range(4)] + [None]
    assert all(one.stop == two.start for one, two in pairwise(places[:-1]) if one and two)
