"""What pipes tell of their way, and how each of them begins in the middle."""

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds  # registers the functional forms
from tests.kits.shards import text_samples, write_tar, write_text_shards
from torchdata_wds import ShardListError, index_shard
from torchdata_wds.pipes.resume_facts import (
    EpochEnded,
    Facts,
    PassBegun,
    PassEnded,
    ShardBegun,
    SkipNotice,
    Wanted,
    Watch,
    Way,
)

assert torchdata_wds.ShardLister


# -------------------------------------------------------------------------------------------------------- what is known
def facts_of(*told: Any) -> Facts:
    facts = Facts()
    facts.add(told)
    return facts


def test_facts_keep_what_was_told_when_it_comes_in_parts() -> None:
    """The order is kept, whatever messages it comes with."""
    told = [
        PassBegun(0, 0),
        ShardBegun(0, 0, 0, 5),
        ShardBegun(0, 3, 1, 6),
        SkipNotice("WdsMapper"),
        PassEnded(0, 9),
        PassBegun(1, 9),
        ShardBegun(1, 0, 0, 7),
        EpochEnded(1, 2),
    ]
    facts = Facts()
    for fact in told:
        facts.add([fact])
    assert facts.passes == [PassBegun(0, 0), PassBegun(1, 9)]
    assert facts.shards == [ShardBegun(0, 0, 0, 5), ShardBegun(0, 3, 1, 6), ShardBegun(1, 0, 0, 7)]
    assert (facts.lengths, facts.ended, facts.skipping) == ({0: 9}, EpochEnded(1, 2), {"WdsMapper"})


def test_facts_stay_when_a_resumed_stream_tells_them_again() -> None:
    """A stream that makes its items once more tells all again: nothing comes twice, and what is new is added."""
    told = [ShardBegun(0, 0, 0, 5), ShardBegun(0, 3, 1, 6), ShardBegun(0, 9, 2, 7)]
    facts = facts_of(PassBegun(0, 0), *told[:2])
    facts.add(told)
    facts.add([PassBegun(1, 12), *told])
    assert facts.shards == told
    assert facts.passes == [PassBegun(0, 0), PassBegun(1, 12)]


def test_facts_begin_anew_when_an_epoch_begins_in_a_pass() -> None:
    """Passes count items of the epoch; shards are known for the stream, on from epoch to epoch."""
    facts = facts_of(PassBegun(0, 0), ShardBegun(0, 0, 0, 5), PassBegun(1, 9), EpochEnded(1, 4))
    facts.add([PassBegun(1, -4)])
    assert (facts.passes, facts.ended) == ([PassBegun(1, -4)], None)
    assert facts.shards == [ShardBegun(0, 0, 0, 5)]


def wanted(first: int, *early: int) -> Wanted:
    return Wanted(early, first)


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (wanted(0), PassBegun(0, 0)),
        (wanted(9), PassBegun(0, 0)),
        (wanted(10), PassBegun(1, 10)),
        (wanted(24), PassBegun(1, 10)),
        (wanted(25), PassBegun(2, 25)),
        (wanted(99), PassBegun(2, 25)),
        (wanted(9, 3, 5), PassBegun(0, 0)),
        (
            wanted(10, 3, 5),
            PassBegun(0, 0),
        ),  # all from item 10 on are of the next pass, and none of them is needed first
        (wanted(11, 3, 5), None),
        (wanted(25, 10), PassBegun(1, 10)),
        (wanted(26, 24), None),
    ],
)
def test_pass_is_found_when_all_early_items_are_of_one(items: Wanted, found: PassBegun | None) -> None:
    """Items that a buffer holds may be of an earlier pass than those to come: then it begins there, or is not known."""
    facts = facts_of(PassBegun(0, 0), PassEnded(0, 10), PassBegun(1, 10), PassEnded(1, 15), PassBegun(2, 25))
    assert facts.pass_of(items) == found


def test_pass_is_not_found_when_its_length_or_the_next_was_left_out() -> None:
    """What is not known for sure is None: everything is then made once more."""
    facts = facts_of(PassBegun(0, 0), PassBegun(1, 10), PassBegun(3, 30))
    assert facts.pass_of(wanted(3)) is None  # how long pass 0 was has not been told
    assert facts.pass_of(wanted(12)) is None  # pass 2 may have begun before item 12
    assert facts.pass_of(wanted(30)) == PassBegun(3, 30)
    facts.passes_cut = True
    assert facts.pass_of(wanted(30)) is None


def test_pass_of_an_earlier_epoch_is_found_when_the_epoch_began_in_its_middle() -> None:
    """A negative number is that of an item before the epoch."""
    facts = facts_of(PassBegun(4, -7), PassEnded(4, 12), PassBegun(5, 5))
    assert facts.pass_of(wanted(0)) == PassBegun(4, -7)
    assert facts.pass_of(wanted(4)) == PassBegun(4, -7)
    assert facts.pass_of(wanted(5)) == PassBegun(5, 5)


def test_shard_is_found_when_samples_are_counted() -> None:
    """The last one that begins at the sample or before; of empty ones at the same place, the last."""
    begun = [ShardBegun(0, 0, 0, 1), ShardBegun(0, 4, 1, 2), ShardBegun(0, 4, 2, 3), ShardBegun(0, 9, 3, 4)]
    facts = facts_of(*begun, ShardBegun(1, 0, 0, 5))
    assert [facts.shard_of(0, sample) for sample in (0, 3, 4, 8, 9, 30)] == [
        (begun[place], place < 3) for place in (0, 0, 2, 2, 3, 3)
    ]
    assert facts.shard_of(1, 7) == (ShardBegun(1, 0, 0, 5), True)
    assert facts.shard_of(2, 0) == (None, False)


def test_shard_is_not_said_to_be_the_last_when_others_were_left_out() -> None:
    """Between two that are known there may have been more, and behind the last that is known too."""
    facts = facts_of(ShardBegun(0, 0, 0, 1), ShardBegun(0, 40, 9, 2))
    assert facts.shard_of(0, 20) == (ShardBegun(0, 0, 0, 1), False)
    assert facts.shard_of(0, 41) == (ShardBegun(0, 40, 9, 2), True)
    facts.shards_cut = True
    assert facts.shard_of(0, 41) == (ShardBegun(0, 40, 9, 2), False)
    facts.add([ShardBegun(0, 40, 9, 2)])
    assert facts.shard_of(0, 41) == (ShardBegun(0, 40, 9, 2), True)


def test_watch_belongs_to_no_stream_when_it_is_copied() -> None:
    """Pipes hold it: a copy of a graph tells its own way."""
    watch = Watch()
    watch.begin_shard(0, 1)
    watch.samples = 4
    copy = pickle.loads(pickle.dumps(watch))
    assert (copy.take(), copy.samples) == ([], 0)
    assert watch.take() == [ShardBegun(0, 0, 0, 1)]
    assert watch.take() == []


# -------------------------------------------------------------------------------------------------------- wds_shuffle
class Only(IterDataPipe):
    """Yields n numbers, in the first pass only the wanted ones, as a resumed source does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.wanted = Wanted((), 0)

    def __iter__(self) -> Iterator[int]:
        wanted, self.wanted = self.wanted, Wanted((), 0)
        yield from (item for item in range(self.count) if item >= wanted.first or item in wanted.early)


def way(length: int | None) -> Way:
    """A stream whose pass has so many items before the shuffle, where that is known."""
    return Way(Facts(), 0, 0, length)


def test_wds_shuffle_goes_on_when_it_was_stopped_anywhere() -> None:
    """Of any buffer, at any item, with any items wanted from before: they come, and the rest in its order."""
    draw = random.Random(0)
    for seed in range(200):
        count = draw.randrange(60)
        source = Only(count)
        pipe = source.wds_shuffle(draw.randrange(20), initial=draw.randrange(25)).set_seed(seed)
        whole = list(pipe)
        first = draw.randrange(count + 1)
        early = sorted(draw.sample(range(first), draw.randrange(first + 1) // 3))
        source.wanted = pipe.set_seed(seed).resume(Wanted(early, first), way(count))[0]
        assert len(source.wanted.early) <= len(early) + pipe.buffer_size
        assert list(pipe) == [whole[item] for item in early] + whole[first:]
        assert sorted(pipe) == list(range(count))  # the next epoch is whole


def test_wds_shuffle_needs_no_length_when_its_source_goes_on() -> None:
    """Before the source ends the order does not depend on where that will be."""
    for first in (0, 1, 20, 69):
        found = {
            repr(Only(100).wds_shuffle(30, initial=5).set_seed(1).resume(Wanted((), first), way(length))[0])
            for length in (None, 100, 101)
        }
        assert len(found) == 1


def test_wds_shuffle_wants_its_buffer_when_it_passes_over_many_items() -> None:
    """Numbers are passed over without an item, and only the buffer's are wanted."""
    wanted = Only(0).wds_shuffle(100).set_seed(1).resume(Wanted((), 100_000), way(None))[0]
    assert wanted.first == 100_000 + 99
    assert len(wanted.early) == 99


@pytest.mark.parametrize("first", [0, 4])
def test_wds_shuffle_wants_the_same_when_it_keeps_the_order(first: int) -> None:
    """Turned off, it passes items on as they are."""
    pipe = Only(9).wds_shuffle(4).set_shuffle(False)
    assert pipe.resume(Wanted((1,), first), way(9))[0] == Wanted((1,), first)


def stopped_shuffle() -> tuple[Only, Any, list[int]]:
    """A shuffle that is to begin at its item 20; with the whole order."""
    source = Only(40)
    pipe = source.wds_shuffle(8, initial=2).set_seed(3)
    whole = list(pipe)
    source.wanted = pipe.set_seed(3).resume(Wanted((), 20), way(40))[0]
    return source, pipe, whole


def test_wds_shuffle_begins_at_the_beginning_when_a_restart_is_taken_back_or_it_is_copied() -> None:
    """`undo` takes it back, after a new seed; and a copy belongs to no stopped stream."""
    source, pipe, whole = stopped_shuffle()
    list(source)  # it gives all of its items now
    copy = pickle.loads(pickle.dumps(pipe))
    pipe.undo()
    for begun in (pipe, copy):
        assert list(begun.set_seed(3)) == whole


def test_wds_shuffle_raises_when_its_source_has_become_shorter() -> None:
    """It says how many of the items came that its buffer had held."""
    source, pipe, _ = stopped_shuffle()
    source.count = source.wanted.early[2]
    with pytest.raises(ValueError, match="has 2 of the 7 items that it held when the state was made"):
        list(pipe)


# ------------------------------------------------------------------------------------------------------- group_by_key
def grouped(urls: list[str], watch: Watch, **options: Any) -> Any:
    pipe = IterableWrapper(urls).load_wds_shards().group_by_key(**options)
    pipe._watch = watch
    return pipe


def told_by(pipe: Any, watch: Watch) -> tuple[list[Any], Facts]:
    """The samples of a pass, and what was told."""
    return list(pipe), facts_of(*watch.take())


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"fields": "cls"}, {"handler": torchdata_wds.ignore_and_continue}],
    ids=["plain", "fields", "handler"],
)
def test_group_by_key_gives_what_is_wanted_when_it_begins_in_the_middle(
    indexed: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Any samples, from the last known shard before them; whether or not they can be counted within it."""
    urls = write_text_shards(tmp_path, (4, 0, 3, 6, 1))
    if indexed:
        for url in urls:
            index_shard(url)
    watch = Watch()
    pipe = grouped(urls, watch, **options)
    whole, facts = told_by(pipe, watch)
    draw = random.Random(4)
    for first in range(len(whole)):
        early = sorted(draw.sample(range(first), min(first, 2)))
        items = Wanted(early, first)
        begun, in_shard = facts.shard_of(0, items.least)
        for place in (begun, None)[: 1 + (first == 9)]:
            pipe.restart(items, place, in_shard and place is begun, is_over=False)
            assert list(pipe) == [whole[number] for number in early] + whole[first:]
            told = facts_of(*watch.take())
            assert (
                told.shards == facts.shards[len(facts.shards) - len(told.shards) :]
            )  # with the counts of a whole pass
            assert told.lengths == facts.lengths
    assert list(pipe) == whole


def test_group_by_key_counts_what_it_refuses_when_members_are_refused(tmp_path: Path) -> None:
    """Of a shard with samples that are skipped, counts are those of the samples that came."""
    members = text_samples("a", 4)
    members[5:5] = [(members[3][0], b"again")]  # a field of sample 1 a second time
    urls = [write_tar(tmp_path / "a.tar", members), *write_text_shards(tmp_path, (2,))]
    watch = Watch()
    pipe = grouped(urls, watch, handler=torchdata_wds.ignore_and_continue)
    whole, facts = told_by(pipe, watch)
    assert len(whole) == 5
    assert facts.shards[1].samples == 3
    for first in range(5):
        pipe.restart(Wanted((), first), *facts.shard_of(0, first), is_over=False)
        assert list(pipe) == whole[first:]


def test_group_by_key_gives_nothing_when_all_is_over(tmp_path: Path) -> None:
    """Nothing is opened then."""
    pipe = grouped([str(tmp_path / "missing.tar")], Watch())
    pipe.restart(Wanted((), 3), None, False, is_over=True)
    assert list(pipe) == []


def test_group_by_key_begins_at_the_beginning_when_it_is_copied(tmp_path: Path) -> None:
    """A copy belongs to no stopped stream."""
    pipe = grouped(write_text_shards(tmp_path, (3,)), Watch())
    pipe.restart(Wanted((), 2), None, False, is_over=False)
    assert len(list(pickle.loads(pickle.dumps(pipe)))) == 3
    assert len(list(pipe)) == 1


@pytest.mark.parametrize(
    ("change", "number"),
    [(lambda urls: urls[::-1], 3), (lambda urls: [urls[0], *urls], 3), (lambda urls: urls[:2], 2)],
    ids=["order", "one more", "less"],
)
def test_load_wds_shards_raises_when_shards_are_not_those_of_the_state(
    change: Any, number: int, tmp_path: Path
) -> None:
    """A checksum over all items up to the shard tells that another came, before anything is opened."""
    urls = write_text_shards(tmp_path, (4, 2, 3, 6))
    watch = Watch()
    whole, facts = told_by(grouped(urls, watch), watch)
    begun = facts.shards[2]
    other = grouped(change(urls), Watch())
    other.restart(Wanted((), 7), begun, True, is_over=False)
    with pytest.raises(ShardListError, match=f"differ among the first {number} that come here"):
        list(other)
    assert len(whole) == 15


# ---------------------------------------------------------------------------------------------------------- wds_epoch
def test_wds_epoch_tells_passes_when_a_stream_goes_on() -> None:
    """Each pass with the item of the epoch that it began at, negative where that was before the epoch; and the end."""
    pipe = IterableWrapper(range(5)).wds_epoch(7)
    watch = pipe._watch = Watch()
    told = []
    for _ in range(3):
        list(pipe)
        told.append(watch.take())
    assert told == [
        [PassBegun(0, 0), PassBegun(1, 5), EpochEnded(1, 2)],
        [PassBegun(1, -2), PassBegun(2, 3), EpochEnded(2, 4)],
        [PassBegun(2, -4), PassBegun(3, 1), PassBegun(4, 6), EpochEnded(4, 1)],
    ]


@pytest.mark.parametrize("begun", [PassBegun(0, 0), PassBegun(1, 6), PassBegun(1, -4), PassBegun(3, 11)])
def test_wds_epoch_gives_what_is_wanted_when_it_begins_in_a_pass(begun: PassBegun) -> None:
    """The source gives only what is wanted of the pass; later passes, and epochs, are whole."""
    source = Only(9)
    pipe = source.wds_shuffle(1).wds_epoch(14)
    for first in range(max(0, begun.item), min(14, begun.item + 9)):
        early = list(range(max(0, begun.item), first, 3))
        pipe.begin_stream()
        inside = pipe.restart(begun, Wanted(early, first))
        assert inside == Wanted([item - begun.item for item in early], first - begun.item)
        source.wanted = inside
        assert list(pipe) == [(item - begun.item) % 9 for item in (*early, *range(first, 14))]
        assert next(iter(pipe)) == (14 - begun.item) % 9


def test_wds_epoch_raises_when_the_pass_has_become_shorter() -> None:
    """Items that had been taken before are missing: the data is not the same."""
    pipe = IterableWrapper(range(5)).wds_epoch(4)
    pipe.begin_stream()
    assert pipe.restart(PassBegun(2, -7), None) is None
    with pytest.raises(ValueError, match="fewer than the 7 items that had been taken from it"):
        list(pipe)
