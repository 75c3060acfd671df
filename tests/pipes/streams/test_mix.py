"""The mix: whose turn it is, when it ends, what it counts, what it refuses."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding, get_all_graph_pipes

from tests.kits.processes import open_files
from tests.kits.shards import text_keys, write_text_shards
from tests.kits.workers_kit import consumers_of, loader_of, time_limit
from torchdata_wds import ShardListError

STOPS = ("first", "all", "cycle")

#: Two epochs of a mix by weights with seed 7, of the only consumer and of number 1 of 3.
DIGESTS = {None: "5ef70ce415e553fc", (3, 1): "d5cd98ee4c3a20ef"}


def numbers(size: int, name: str = "a") -> IterDataPipe[str]:
    """A source of as many names: a0, a1, ..."""
    return IterableWrapper([f"{name}{number}" for number in range(size)])


class Endless(IterDataPipe[str]):
    """Gives its name for ever."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self.name


class Watched(IterDataPipe[int]):
    """A source that notes when it is begun, asked and closed."""

    def __init__(self, size: int = 3, *, fails: bool = False) -> None:
        self.size = size
        self.fails = fails
        self.events: list[str] = []

    def __iter__(self) -> Iterator[int]:
        self.events.append("begun")
        try:
            for number in range(self.size):
                self.events.append(f"asked for {number}")
                if self.fails:
                    raise OSError("it fails")
                yield number
        finally:
            self.events.append("closed")


class Closable:
    """An iterator that is no generator, and has something to close."""

    def __init__(self, events: list[str], error: Exception | None) -> None:
        self.events = events
        self.error = error

    def __iter__(self) -> Closable:
        return self

    def __next__(self) -> int:
        return 1

    def close(self) -> None:
        self.events.append("closed")
        if self.error is not None:
            raise self.error


class GivesClosable(IterDataPipe[int]):
    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self.error = error

    def __iter__(self) -> Iterator[int]:
        return Closable(self.events, self.error)


class Shrinking(IterDataPipe[int]):
    """Gives 2 items in its first pass, then 1, then none."""

    def __init__(self) -> None:
        self.size = 3

    def __iter__(self) -> Iterator[int]:
        self.size -= 1
        yield from range(self.size)


def digest(values: Iterable[Any]) -> str:
    return hashlib.blake2b(repr(list(values)).encode(), digest_size=8).hexdigest()


# --- when it ends


@pytest.mark.parametrize(
    ("sizes", "stop", "counts"),
    [
        ((100, 10), "first", [11, 10]),
        ((10, 100), "first", [10, 10]),
        ((100, 10), "all", [100, 10]),
        ((10, 100), "all", [10, 100]),
        ((100, 10), "cycle", [100, 100]),
        ((10, 100), "cycle", [101, 100]),
    ],
)
def test_wds_mix_gives_the_documented_counts_when_sources_take_turns(
    sizes: tuple[int, int], stop: Any, counts: list[int]
) -> None:
    """100 and 10 samples: 21, 110 and 200; a source is known to be exhausted when it is asked again."""
    pipe = numbers(sizes[0], "a").wds_mix(numbers(sizes[1], "b"), stop=stop)
    for _ in range(2):
        found = Counter(item[0] for item in pipe)
        assert [found["a"], found["b"]] == pipe.counts == counts


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("first", "a0 b0 c0 a1"),
        ("all", "a0 b0 c0 a1 c1 a2 c2 c3"),
        ("cycle", "a0 b0 c0 a1 b0 c1 a2 b0 c2 a0 b0 c3 a1 b0"),
    ],
)
def test_wds_mix_takes_turns_when_there_are_no_weights(stop: Any, expected: str) -> None:
    """Always in the order of the sources, whoever has left or begun again."""
    pipe = numbers(3, "a").wds_mix(numbers(1, "b"), numbers(4, "c"), stop=stop)
    assert list(pipe) == list(pipe) == expected.split()


def test_wds_mix_gives_the_one_source_when_there_is_no_other() -> None:
    """However it is told to stop: a list of sources may have one entry."""
    for stop in STOPS:
        assert list(numbers(5).wds_mix(stop=stop)) == list(numbers(5))
        assert list(numbers(5).wds_mix(weights=[3], stop=stop)) == list(numbers(5))


@pytest.mark.parametrize("seed", range(20))
def test_wds_mix_keeps_its_stop_when_sources_are_drawn(seed: int) -> None:
    """Drawn by weights, whatever the draws: the first that is exhausted ends it; all once; or all at least once."""
    sizes = (8, 3, 5)
    found = {}
    for stop in STOPS:
        sources = [numbers(size, name) for size, name in zip(sizes, "abc", strict=True)]
        pipe = sources[0].wds_mix(*sources[1:], weights=(5, 1, 2), stop=stop).set_seed(seed)
        items = list(pipe)
        assert pipe.counts == [sum(item[0] == name for item in items) for name in "abc"]
        for name, size in zip("abc", sizes, strict=True):  # every source keeps its order
            own = [int(item[1:]) for item in items if item[0] == name]
            assert own == [number % size for number in range(len(own))]
        found[stop] = pipe.counts
    assert any(given == size for given, size in zip(found["first"], sizes, strict=True))
    assert all(given <= size for given, size in zip(found["first"], sizes, strict=True))
    assert found["all"] == list(sizes)
    assert all(given >= size for given, size in zip(found["cycle"], sizes, strict=True))
    # the last one to be exhausted for the first time ends it, before it begins again
    assert any(given == size for given, size in zip(found["cycle"], sizes, strict=True))


def test_wds_mix_ends_with_the_finite_source_when_another_is_endless() -> None:
    """What is endless is never exhausted: to stop at the "first" end suits it, "cycle" goes on for ever."""
    assert list(numbers(3).wds_mix(Endless("b"), stop="first")) == ["a0", "b", "a1", "b", "a2", "b"]
    assert len(list(islice(numbers(3).wds_mix(Endless("b"), stop="cycle"), 1000))) == 1000


# --- weights


def test_wds_mix_holds_its_weights_when_many_items_are_drawn() -> None:
    """Within 2% of each source's share, over 100,000 draws; weights need not add up to 1."""
    weights = {"a": 5.0, "b": 3, "c": 2}
    sources = [Endless(name) for name in weights]
    pipe = sources[0].wds_mix(*sources[1:], weights=list(weights.values()), stop="first").set_seed(0)
    found = Counter(islice(pipe, 100_000))
    for name, weight in weights.items():
        assert abs(found[name] - 10_000 * weight) < 0.02 * 10_000 * weight
    assert pipe.counts == [found[name] for name in weights]


def test_wds_mix_keeps_the_other_weights_when_a_source_has_left() -> None:
    """Of 8 : 1 : 3, one and three parts remain of four."""
    sources = Endless("b"), Endless("c")
    pipe = numbers(10).wds_mix(*sources, weights=(8, 1, 3), stop="all").set_seed(0)
    stream = iter(pipe)
    while pipe.counts[0] < 10:
        next(stream)
    found = Counter(islice(stream, 20_000))
    assert abs(found["b"] - 5000) < 250
    assert found["b"] + found["c"] == 20_000


def test_wds_mix_draws_every_source_when_the_sum_of_weights_overflows() -> None:
    """Weights count relative to one another only."""
    pipe = Endless("a").wds_mix(Endless("b"), weights=(1.5e308, 1.5e308), stop="all").set_seed(0)
    assert abs(Counter(islice(pipe, 1000))["a"] - 500) < 100


@pytest.mark.parametrize("weights", [(1, 2), [1.0, 2], np.array([1, 2], "f4"), (Fraction(1, 3), Fraction(2, 3))])
def test_wds_mix_takes_weights_in_every_form_when_they_are_numbers(weights: Any) -> None:
    """Lists, tuples and arrays."""
    pipe = Endless("a").wds_mix(Endless("b"), weights=weights, stop="all").set_seed(0)
    assert abs(Counter(islice(pipe, 3000))["a"] - 1000) < 100


# --- other arguments


def test_wds_mix_raises_when_a_pipe_is_given_twice() -> None:
    """Torch allows a pipe one reader at a time; the two would cut each other off."""
    source = numbers(3)
    for others in ((source,), (numbers(3), source)):
        with pytest.raises(ValueError, match="again as source"):
            source.wds_mix(*others, stop="all")


# --- empty sources


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("weights", [None, (1, 2)])
@pytest.mark.parametrize("position", [0, 1])
def test_wds_mix_raises_when_a_source_is_empty(position: int, weights: Any, stop: Any) -> None:
    """An error that names the source, no loop: as soon as it is asked."""
    sources = [numbers(1000), numbers(1000)]
    sources[position] = IterableWrapper([]).shuffle()
    pipe = sources[0].wds_mix(sources[1], weights=weights, stop=stop)
    with pytest.raises(ShardListError, match=f"source {position} .*ShufflerIterDataPipe, gave nothing in pass 0"):
        list(pipe)


def test_wds_mix_raises_when_all_sources_are_empty() -> None:
    """The first one is named."""
    with pytest.raises(ShardListError, match="source 0"):
        list(numbers(0).wds_mix(numbers(0), stop="cycle"))


def test_wds_mix_raises_when_a_source_is_empty_in_a_later_pass() -> None:
    """What gave something before might be asked for ever just as well."""
    pipe = numbers(100).wds_mix(Shrinking(), stop="cycle")
    with pytest.raises(ShardListError, match=r"source 1 .* a Shrinking, gave nothing in pass 2"):
        list(pipe)
    assert pipe.counts == [4, 3]


def divided(stop: Any, number: int) -> IterDataPipe[str]:
    """Twelve and two items, each source divided among three consumers."""
    pipe = numbers(12, "a").sharding_filter().wds_mix(numbers(2, "b").sharding_filter(), stop=stop)
    apply_sharding(pipe, 3, number)
    return pipe


def test_wds_mix_goes_on_when_a_share_is_empty_and_all_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    """With fewer shards than consumers some have none: every item comes once, and a warning says so once."""
    with caplog.at_level(logging.WARNING):
        found = [list(divided("all", number)) for number in (0, 1, 2, 2)]
    assert sorted(item for items in found[:3] for item in items) == sorted([*numbers(12, "a"), *numbers(2, "b")])
    assert [item[0] for item in found[2]] == ["a"] * 4
    (record,) = caplog.records
    assert "source 1 of wds_mix" in record.message
    assert "consumer 2 of 3" in record.message


@pytest.mark.parametrize("stop", ["first", "cycle"])
def test_wds_mix_raises_when_a_share_is_empty_and_the_end_depends_on_it(stop: Any) -> None:
    """This consumer would have no epoch, or one without end: the message tells what to do."""
    assert list(divided(stop, 1))
    with pytest.raises(ShardListError, match=r"consumer 2 of 3, .* fewer workers or \.resample_shards\(\), or stop='a"):
        list(divided(stop, 2))


# --- counts


def test_wds_mix_counts_what_came_from_where_while_it_runs() -> None:
    """The counts are those of the epoch so far; the next one begins at 0."""
    pipe = numbers(3).wds_mix(numbers(5), stop="all")
    assert pipe.counts == [0, 0]
    for _ in range(2):
        seen = []
        for _ in pipe:
            seen.append(list(pipe.counts))
        assert seen == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [3, 4], [3, 5]]
    assert pipe.counts == [3, 5]
    next(iter(pipe))
    assert pipe.counts == [1, 0]


# --- laziness and closing


def test_wds_mix_begins_and_reads_a_source_only_when_it_is_its_turn() -> None:
    """Nothing is opened or read ahead."""
    first, second = Watched(), Watched()
    stream = iter(first.wds_mix(second, stop="all"))
    assert first.events == []
    next(stream)
    assert (first.events, second.events) == (["begun", "asked for 0"], [])
    next(stream)
    assert second.events == ["begun", "asked for 0"]


def test_wds_mix_closes_its_sources_when_it_is_left_early() -> None:
    """At once, and those that were not begun need no closing."""
    sources = [Watched(), Watched(), Watched()]
    stream = iter(sources[0].wds_mix(*sources[1:], stop="cycle"))
    next(stream), next(stream)
    stream.close()
    assert [source.events[-1:] for source in sources] == [["closed"], ["closed"], []]


def test_wds_mix_closes_its_sources_when_one_fails() -> None:
    """Also while somebody holds on to the exception."""
    good = Watched()
    with pytest.raises(OSError, match="it fails") as caught:
        list(good.wds_mix(Watched(fails=True), stop="all"))
    assert good.events[-1] == "closed"
    assert caught.value


def test_wds_mix_closes_every_source_when_closing_one_fails() -> None:
    """Iterators that are no generators are closed as well, and an error does not keep the rest open."""
    sources = [GivesClosable(), GivesClosable(OSError("it will not close")), GivesClosable()]
    with pytest.raises(OSError, match="it will not close"):
        list(sources[0].wds_mix(*sources[1:], Watched(fails=True), stop="all"))
    assert [source.events for source in sources] == [["closed"]] * 3


def test_wds_mix_leaves_no_shard_open_when_it_is_left_early(tmp_path: Path) -> None:
    """Each source has a shard open while it waits for its turn."""
    pipe = mixed_shards(tmp_path, "cycle")
    before = open_files()
    for number, _ in enumerate(pipe):
        if number == 5:
            assert open_files(collect=False) == before + 2
            break
    assert open_files(collect=False) <= before


# --- length


def test_wds_mix_knows_its_length_when_all_are_wanted() -> None:
    """It is that of all sources together, where they know theirs."""
    assert len(numbers(3).wds_mix(numbers(5), stop="all")) == 8
    for stop in ("first", "cycle"):
        with pytest.raises(TypeError, match="does not know its length"):
            len(numbers(3).wds_mix(numbers(5), stop=stop))
    with pytest.raises(TypeError):
        len(numbers(3).wds_mix(Endless("b"), stop="all"))


# --- seeds and places


def stored(sharded: tuple[int, int] | None) -> list[list[str]]:
    """Two epochs of a mix by weights, with seed 7."""
    others = numbers(60, "b"), numbers(6, "c")
    pipe = numbers(60, "a").sharding_filter().wds_mix(*others, weights=(3, 2, 0.1), stop="all")
    if sharded is not None:
        apply_sharding(pipe, *sharded)
    pipe.set_seed(7)
    return [list(pipe), list(pipe)]


@pytest.mark.parametrize("sharded", DIGESTS)
def test_wds_mix_gives_the_stored_order_when_seeded(sharded: tuple[int, int] | None) -> None:
    """The order of a seed is the same on every machine and Python version: these were written down."""
    assert digest(stored(sharded)) == DIGESTS[sharded]


def draws(*, sharded: tuple[int, int] | None = None, seed: int = 7, above: bool = True) -> list[str]:
    """From which source 100 items came, of endless ones that are divided above the mix or nowhere."""
    first: IterDataPipe[str] = Endless("a")
    pipe = (first.sharding_filter() if above else first).wds_mix(Endless("b"), weights=(1, 1), stop="all")
    whole = pipe if above else pipe.sharding_filter()
    if sharded is not None:
        apply_sharding(whole, *sharded)
    return list(islice(pipe.set_seed(seed), 100))


def test_wds_mix_draws_differently_when_seeds_or_consumers_differ() -> None:
    """Behind a filter each consumer has an order of its own; before it all have the same, or items would be lost."""
    assert draws() == draws()
    own = {tuple(draws(sharded=(3, number), seed=seed)) for number in range(3) for seed in (0, 2**64 - 1)}
    assert len(own) == 6
    assert len({tuple(draws(sharded=(3, number), above=False)) for number in range(3)}) == 1


def test_wds_mix_shows_all_its_sources_when_the_graph_is_traversed() -> None:
    """Services find, divide and seed what is upstream of every source."""
    sources = [numbers(9, name).shuffle().sharding_filter() for name in "abc"]
    pipe = sources[0].wds_mix(*sources[1:], stop="all")
    ((_, above),) = traverse_dps(pipe).values()
    assert {id(source) for source, _ in above.values()} == set(map(id, sources))
    apply_sharding(pipe, 3, 1)
    assert [source.instance_id for source in sources] == [1, 1, 1]


# --- passes


def passes_of(items: list[str], share: int) -> list[list[str]]:
    """The passes of a consumer over the source b, of which it has so many items."""
    own = [item for item in items if item[0] == "b"]
    return [own[start : start + share] for start in range(0, len(own), share)]


@pytest.mark.parametrize("form", ["shuffle", "wds_shuffle"])
def test_wds_mix_shuffles_alike_in_all_consumers_when_a_source_begins_again(form: str) -> None:
    """Each pass has a new order, and together the consumers have every item once in each, in all epochs."""
    short = getattr(numbers(10, "b"), form)().sharding_filter()
    copies = consumers_of(numbers(120, "a").sharding_filter().wds_mix(short, stop="cycle"), 3, seed=5)
    seen = []
    for _ in range(2):  # the second epoch is not seeded anew
        epochs = [passes_of(list(one), share) for one, share in zip(copies, (4, 3, 3), strict=True)]
        for parts in list(zip(*epochs, strict=False))[:10]:
            items = [item for part in parts for item in part]
            assert sorted(items) == sorted(numbers(10, "b"))
            seen.append(tuple(items))
    assert len(seen) == len(set(seen)) == 20


def test_wds_mix_begins_every_source_with_the_seeds_of_its_stream_when_seeded_meanwhile() -> None:
    """Services seed the pipes of a stream that wds_epoch goes on with: all must agree on sources that begin late."""
    sources = [numbers(12, name).shuffle().sharding_filter() for name in "ab"]
    pipe = sources[0].wds_mix(sources[1], stop="all")
    apply_random_seed(pipe, torch.Generator().manual_seed(1))
    expected = list(pipe)
    apply_random_seed(pipe, torch.Generator().manual_seed(1))
    stream = iter(pipe)
    found = [next(stream)]
    apply_random_seed(pipe, torch.Generator().manual_seed(2))
    assert [*found, *stream] == expected


def test_wds_mix_draws_anew_when_a_resampled_source_begins_again() -> None:
    """In each pass as many shards are drawn, others each time."""
    pipe = numbers(200, "a").wds_mix(numbers(50, "b").resample_shards(20), stop="cycle")
    for found in get_all_graph_pipes(traverse_dps(pipe)):
        if hasattr(found, "set_seed"):
            found.set_seed(3)
    assert len(set(map(tuple, passes_of(list(pipe), 20)))) == 10


# --- in graphs


def mixed_shards(folder: Path, stop: Any, **options: Any) -> IterDataPipe[Any]:
    """Samples of five shards and of two, mixed."""
    first = write_text_shards(folder / "first", (4, 0, 9, 3, 5))
    second = write_text_shards(folder / "second", (6, 2))
    sources = [
        IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards().group_by_key() for urls in (first, second)
    ]
    return sources[0].wds_mix(sources[1], stop=stop, **options)


def places(pipe: Iterable[Any]) -> list[str]:
    return sorted(f"{Path(sample['__url__']).parent.name} {sample['__key__']}" for sample in pipe)


ALL = sorted([f"first {key}" for key in text_keys((4, 0, 9, 3, 5))] + [f"second {key}" for key in text_keys((6, 2))])


@pytest.mark.parametrize("weights", [None, (0.8, 0.2)])
def test_wds_mix_gives_every_sample_once_when_a_dataloader_has_two_workers(tmp_path: Path, weights: Any) -> None:
    """Each source is divided among the workers by its own filter."""
    loader = DataLoader(mixed_shards(tmp_path, "all", weights=weights), batch_size=None, num_workers=2, collate_fn=dict)
    for _ in range(2):
        assert places(loader) == ALL


def test_wds_mix_joins_lists_of_shards_when_it_stands_before_the_filter(tmp_path: Path) -> None:
    """URLs can be mixed too: all consumers must agree on their order."""
    urls = write_text_shards(tmp_path, (4, 0, 9, 3, 5))
    pipe = IterableWrapper(urls[:3]).shuffle().wds_mix(IterableWrapper(urls[3:]).shuffle(), weights=(1, 2), stop="all")
    pipe = pipe.sharding_filter().load_wds_shards().group_by_key()
    loader = DataLoader(pipe, batch_size=None, num_workers=2, collate_fn=dict)
    assert sorted(sample["__key__"] for sample in loader) == sorted(text_keys((4, 0, 9, 3, 5)))


def test_wds_mix_takes_mixes_when_they_are_sources() -> None:
    """Inside, weights are relative to the inner mix."""
    inner = Endless("b").wds_mix(Endless("c"), weights=(3, 1), stop="first")
    pipe = Endless("a").wds_mix(inner, weights=(1, 1), stop="first")
    apply_random_seed(pipe, torch.Generator().manual_seed(0))
    found = Counter(islice(pipe, 20_000))
    assert abs(found["a"] - 10_000) < 300
    assert abs(found["b"] - 7500) < 300


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_wds_mix_gives_every_sample_once_in_workers_of_the_service(tmp_path: Path, workers: int) -> None:
    """In turn and by weights; an epoch's order is a function of the service's seed, and differs from the last one's."""
    for weights in (None, (1, 3)):
        runs = []
        for _ in range(2):
            with time_limit(60):
                loader = loader_of(mixed_shards(tmp_path, "all", weights=weights), workers, seed=4)
                runs.append([[sample["__key__"] for sample in loader] for _ in range(2)])
                loader.shutdown()
        assert runs[0] == runs[1]
        assert runs[0][0] != runs[0][1]
        assert sorted(runs[0][0]) == sorted(runs[0][1]) == sorted(key.split()[1] for key in ALL)


@pytest.mark.slow
def test_wds_mix_cycles_in_workers_of_the_service(tmp_path: Path) -> None:
    """Every sample comes at least once an epoch, those of the longer source in each worker exactly once."""
    with time_limit(60):
        loader = loader_of(mixed_shards(tmp_path, "cycle"), 2)
        for _ in range(3):
            assert set(places(loader)) == set(ALL)
        loader.shutdown()


@pytest.mark.slow
def test_wds_mix_raises_in_the_service_when_a_worker_has_an_empty_share(tmp_path: Path) -> None:
    """Three workers and two shards, or an empty one of five: an error that says what to do, no hang."""
    with time_limit(60), pytest.raises(ShardListError, match=r"source [01] of wds_mix"):
        list(loader_of(mixed_shards(tmp_path, "cycle"), 3))


@pytest.mark.slow
def test_wds_mix_mixes_in_the_main_process_when_its_sources_are_joined() -> None:
    """Behind join_workers each source has workers of its own, and the counts are whole."""
    sources = [numbers(30, name).sharding_filter().join_workers() for name in "ab"]
    pipe = sources[0].wds_mix(sources[1], stop="all")
    with time_limit(60):
        loader = loader_of(pipe, 2)
        assert sorted(loader) == sorted([*numbers(30, "a"), *numbers(30, "b")])
        assert loader.datapipe.counts == [30, 30]
        loader.shutdown()


def test_wds_mix_says_what_each_stop_does_when_none_is_given() -> None:
    """A missing stop= is a TypeError, a wrong one a ValueError; both explain the three."""
    explained = "'first' ends when .*, 'all' yields every item .*, 'cycle' restarts sources that have ended"
    with pytest.raises(TypeError, match=f"wds_mix needs stop=: {explained}"):
        numbers(3).wds_mix(numbers(2))
    with pytest.raises(ValueError, match=f"not 'longest': {explained}"):
        numbers(3).wds_mix(numbers(2), stop="longest")
