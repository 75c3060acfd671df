"""Passes: random pipes seeded anew for each, so that all consumers agree however far each of them is."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from tests.kits.workers_kit import loader_of, time_limit
from tests.pipes.streams.test_epoch import PassTeller, check_passes
from torchdata_wds.pipes.seeds import Passes, above_filters

FORMS = ("shuffle", "wds_shuffle")


class HiddenSeed(IterDataPipe[Any]):
    """Somebody's shuffle of everything, which does not tell its seed."""

    def __init__(self, source_datapipe: IterDataPipe[Any]) -> None:
        self.source_datapipe = source_datapipe
        self._rng = random.Random()
        self.given: list[int] = []

    def set_seed(self, seed: int) -> HiddenSeed:
        self._rng.seed(seed)
        self.given.append(seed)
        return self

    def __iter__(self) -> Iterator[Any]:
        yield from shuffled(self.source_datapipe, self._rng)


class ToldSeed(IterDataPipe[Any]):
    """One that keeps its seed in an attribute that the native shuffle has too."""

    def __init__(self, source_datapipe: IterDataPipe[Any]) -> None:
        self.source_datapipe = source_datapipe
        self._seed: int | None = None

    def set_seed(self, seed: int) -> ToldSeed:
        self._seed = seed
        return self

    def __iter__(self) -> Iterator[Any]:
        yield from shuffled(self.source_datapipe, random.Random(self._seed))


def shuffled(items: Iterable[Any], rng: random.Random) -> list[Any]:
    found = list(items)
    rng.shuffle(found)
    return found


def seeded(pipe: IterDataPipe[Any], seed: int) -> IterDataPipe[Any]:
    """Seeds all pipes of a graph, each otherwise, as the service does in one process."""
    return apply_random_seed(pipe, torch.Generator().manual_seed(seed))


def consumers_of(pipe: IterDataPipe[Any], number: int, seed: int = 1) -> list[IterDataPipe[Any]]:
    """Copies of a graph, each with its place, seeded alike."""
    copies = [copy.deepcopy(pipe) for _ in range(number)]
    for instance, one in enumerate(copies):
        apply_sharding(one, number, instance)
        seeded(one, seed)
    return copies


def orders_of(pipe: IterDataPipe[Any], numbers: Iterable[int]) -> list[tuple[Any, ...]]:
    """What passes of these numbers give, other seeds coming in between as they do from services."""
    passes = Passes(pipe)
    passes.begin_stream()
    orders = []
    for number in numbers:
        passes.begin_pass(number)
        orders.append(tuple(pipe))
        seeded(pipe, 1000 + number)
    return orders


@pytest.mark.parametrize("form", [*FORMS, "told"])
def test_passes_begin_with_the_given_seeds(form: str) -> None:
    """The first pass is the epoch that the seeds were given for."""
    source = IterableWrapper(range(20))
    pipe = ToldSeed(source) if form == "told" else getattr(source, form)()
    expected = tuple(seeded(pipe, 5))
    assert orders_of(seeded(pipe, 5), [0]) == [expected]
    assert orders_of(seeded(pipe, 6), [0]) != [expected]


@pytest.mark.parametrize("form", [*FORMS, "hidden", "told"])
def test_passes_follow_from_their_numbers_when_begun_in_any_order(form: str) -> None:
    """Each has an order of its own, the same again whenever it is begun: resuming needs no other."""
    source = IterableWrapper(range(20))
    pipes = {"hidden": HiddenSeed, "told": ToldSeed}
    pipe = pipes[form](source) if form in pipes else getattr(source, form)()
    orders = orders_of(seeded(pipe, 5), [*range(6), 4, 0, 5])
    assert len(set(orders)) == 6
    assert orders[6:] == [orders[4], orders[0], orders[5]]


@pytest.mark.parametrize("form", [*FORMS, "hidden", "told"])
def test_passes_are_alike_in_all_consumers_when_pipes_stand_before_the_filter(form: str) -> None:
    """Each pass has every item once over all of them, also of a pipe that does not tell its seed."""
    source = IterableWrapper(range(20)).shuffle()
    pipes = {"hidden": HiddenSeed, "told": ToldSeed}
    pipe = pipes[form](source) if form in pipes else getattr(source, form)()
    shares = [orders_of(one, range(5)) for one in consumers_of(pipe.sharding_filter(), 3)]
    passes = [sorted(chain(*parts)) for parts in zip(*shares, strict=True)]
    assert passes == [list(range(20))] * 5
    assert all(len(set(share)) == 5 for share in shares)


@pytest.mark.parametrize("form", ["wds_shuffle", "hidden"])
def test_passes_differ_between_consumers_when_pipes_stand_behind_the_filter(form: str) -> None:
    """As in an epoch: samples are shuffled differently in each, even where torch gives all pipes one seed."""
    pipe = IterableWrapper(range(3)).sharding_filter().wds_compose(twenty)
    pipe = HiddenSeed(pipe) if form == "hidden" else pipe.wds_shuffle()
    orders = [orders_of(one, range(4)) for one in consumers_of(pipe, 3)]
    assert len(set(chain(*orders))) == 12


def twenty(stream: Iterator[Any]) -> range:
    assert len(list(stream)) == 1
    return range(20)


def test_passes_follow_from_the_other_seeds_when_a_pipe_does_not_tell_its_own() -> None:
    """What all consumers agree on decides for it as well."""
    given = []
    for seed in (1, 1, 2):
        hidden = HiddenSeed(IterableWrapper(range(20)).shuffle().set_seed(seed))
        passes = Passes(hidden.sharding_filter())
        passes.begin_stream()
        for number in range(3):
            passes.begin_pass(number)
        given.append(hidden.given)
    assert given[0] == given[1]
    assert len({*given[0], *given[2]}) == 6


def test_passes_are_alike_in_all_consumers_when_only_seeds_behind_the_filter_are_told() -> None:
    """Services give those to each consumer apart: nothing before the filter may follow from them."""
    given = []
    for seed in (1, 2):
        hidden = HiddenSeed(IterableWrapper(range(20))).set_seed(9)
        passes = Passes(hidden.sharding_filter().wds_shuffle().set_seed(seed))
        passes.begin_stream()
        for number in range(3):
            passes.begin_pass(number)
        given.append(hidden.given)
    assert given[0] == given[1]


@pytest.mark.parametrize("form", FORMS)
def test_passes_draw_from_torch_when_never_seeded(form: str) -> None:
    """Nothing seeds such a pipe: each pass has the next draw of torch's global generator."""
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pipe = getattr(IterableWrapper(range(20)), form)()
        passes = Passes(pipe)
        passes.begin_stream()
        for number in range(3):
            passes.begin_pass(number)
            orders.append(tuple(pipe))
    assert orders[:3] == orders[3:6]
    assert len(set(orders)) == 6


def test_passes_know_the_seeds_of_a_stream_when_others_came_before() -> None:
    """Each stream begins with what the pipes have then."""
    pipe = IterableWrapper(range(20)).shuffle()
    passes = Passes(pipe)
    orders = []
    for seed in (1, 2, 1):
        seeded(pipe, seed)
        passes.begin_stream()
        passes.begin_pass(3)
        orders.append(list(pipe))
    assert orders[0] == orders[2] != orders[1]


def test_passes_seed_a_pipe_once_when_two_paths_lead_to_it() -> None:
    """The graph is no tree: what stands above a fork counts once."""
    hidden = HiddenSeed(IterableWrapper(range(9)))
    left, right = hidden.fork(2)
    passes = Passes(left.zip(right))
    passes.begin_stream()
    passes.begin_pass(1)
    assert len(hidden.given) == 1


def test_passes_seed_every_source_when_streams_are_joined() -> None:
    """Sources of a zip have orders of their own in each pass."""
    pipe = IterableWrapper(range(20)).shuffle().zip(IterableWrapper(range(20)).shuffle())
    orders = orders_of(seeded(pipe, 3), range(4))
    assert len({tuple(items) for order in orders for items in zip(*order, strict=True)}) == 8


@pytest.mark.parametrize("form", FORMS)
def test_passes_agree_when_a_cycled_mix_is_counted_by_wds_epoch(form: str) -> None:
    """Passes within passes: the short source is begun six times in each pass of the whole, alike in both consumers."""
    long = IterableWrapper([f"a{number}" for number in range(24)])
    short = IterableWrapper([f"b{number}" for number in range(4)])
    sources = [getattr(source, form)().sharding_filter() for source in (long, short)]
    shares: list[list[str]] = [[], []]
    consumers = consumers_of(sources[0].wds_mix(sources[1], stop="cycle").wds_epoch(14), 2)
    for epoch in range(11):
        for share, one in zip(shares, consumers, strict=True):
            share += seeded(one, epoch)
    seen = []
    for start in range(0, 3 * 24, 24):
        both = [share[start : start + 24] for share in shares]
        assert len({item for items in both for item in items if item[0] == "a"}) == 24
        own = [[item for item in items if item[0] == "b"] for items in both]
        for place in range(0, 12, 2):
            seen.append((*own[0][place : place + 2], *own[1][place : place + 2]))
            assert len(set(seen[-1])) == 4
    assert len(seen) == 18
    assert len(set(seen)) > 8  # there are 24 orders of four


@pytest.mark.parametrize("even", [None, "drop", "pad"])
def test_passes_agree_when_shards_are_split_and_counted_by_wds_epoch(even: Any) -> None:
    """In each pass shares fit together, and another sample is left out."""
    sizes = {f"{number}.tar": size for number, size in enumerate((9, 6, 3, 0, 5, 7, 1))}
    pipe = PassTeller(IterableWrapper(list(sizes)).shuffle().split_shards(sizes, even=even)).wds_epoch(36)
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    consumers = consumers_of(pipe, 3)
    for epoch in range(8):
        for one in consumers:
            for number, (url, start, stop, _) in seeded(one, epoch):
                found[number] += [(url, sample) for sample in range(start, stop)]
    everything = {(url, sample) for url, size in sizes.items() for sample in range(size)}
    lengths = {None: 31, "drop": 30, "pad": 33}
    left_out = []
    for number in range(8):
        assert len(found[number]) == lengths[even]
        left_out.append(everything - set(found[number]))
        assert len(left_out[-1]) == (1 if even == "drop" else 0)
    assert even != "drop" or len(set().union(*left_out)) > 3


def test_above_filters_finds_what_all_consumers_agree_on() -> None:
    """The filters and what stands before them, on every path; nothing where there is no filter."""
    shuffle = IterableWrapper(range(3)).shuffle()
    first = shuffle.sharding_filter()
    second = IterableWrapper(range(3)).sharding_filter()
    behind = first.wds_shuffle()
    mixed = behind.wds_mix(second, stop="all")
    pipes = [mixed, behind, first, second, shuffle, shuffle.datapipe, second.source_datapipe]
    assert above_filters(pipes) == set(map(id, pipes[2:]))
    assert above_filters([shuffle, shuffle.datapipe]) == set()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_passes_follow_from_the_seed_of_the_service_when_no_pipe_tells_its_own(workers: int) -> None:
    """The only shuffle is somebody's: its passes are whole over all workers, and others for another seed."""
    streams = []
    for seed in (1, 1, 2):
        pipe = PassTeller(HiddenSeed(IterableWrapper(range(8))).sharding_filter()).wds_epoch(8)
        with time_limit(60), loader_of(pipe, workers, seed=seed, timeout=60) as loader:
            streams.append([item for _ in range(4) for item in loader])
        check_passes(streams[-1], range(8), 4)
    assert streams[0] == streams[1] != streams[2]
