"""The resampler: its draws, its passes, what tells consumers apart."""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from tests.kits.shards import write_text_shards
from tests.kits.workers_kit import loader_of, time_limit
from torchdata_wds import ShardListError

URLS = [f"shard-{number:02d}.tar" for number in range(12)]

#: The first 1,000 draws of two epochs with seed 7, of the only consumer and of number 1 of 3, by replacement=.
DIGESTS = {
    (True, None): "1f3265ce6debc8d7",
    (True, (3, 1)): "1c4eba53a5f1d3ca",
    (False, None): "212f91788dae504e",
    (False, (3, 1)): "46fb8818896f820d",
}


def resampled(
    n: int | None = None, *, place: tuple[int, int] | None = None, seed: int | None = 7, **options: Any
) -> IterDataPipe[str]:
    """A resampler of twelve shards, seeded, in one of several places."""
    pipe = IterableWrapper(URLS).resample_shards(n, **options)
    if place is not None:
        apply_sharding(pipe, *place)
    return pipe if seed is None else pipe.set_seed(seed)


def digest(values: Iterable[Any]) -> str:
    return hashlib.blake2b(repr(list(values)).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("replacement", [True, False])
def test_resample_shards_goes_on_when_no_number_is_given(replacement: bool) -> None:
    """The stream is endless, and all of it comes from the list, every shard about as often."""
    counts = Counter(islice(resampled(replacement=replacement), 12_000))
    assert set(counts) == set(URLS)
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.values())


@pytest.mark.parametrize("n", [1, 5, 12, 40])
@pytest.mark.parametrize("replacement", [True, False])
def test_resample_shards_gives_n_shards_when_told(n: int, replacement: bool) -> None:
    """Fewer or more than there are, in every epoch, and the length is known."""
    pipe = resampled(n, replacement=replacement)
    for _ in range(2):
        found = list(pipe)
        assert len(found) == len(pipe) == n
        assert set(found) <= set(URLS)


def test_resample_shards_draws_each_shard_anew_when_it_replaces() -> None:
    """A draw does not depend on the one before: one in twelve is the same again."""
    draws = list(islice(resampled(), 12_000))
    assert abs(sum(map(str.__eq__, draws, draws[1:])) - 1000) < 200


def test_resample_shards_passes_over_the_list_when_it_does_not_replace() -> None:
    """Each run of twelve is the whole list in an order of its own; n may end in the middle of one."""
    found = list(resampled(12 * 20 + 5, replacement=False))
    passes = [tuple(found[start : start + 12]) for start in range(0, len(found), 12)]
    assert all(sorted(one) == URLS for one in passes[:-1])
    assert len(set(passes)) == 21
    assert len(set(passes[-1])) == 5


def test_resample_shards_raises_when_an_argument_is_wrong() -> None:
    """N is a whole number from 1, or None for a stream without length; replacement a flag, by its name only."""
    for n in (0, -1, 1.5, "3", True, math.inf):
        with pytest.raises(ValueError, match="whole number of shards"):
            IterableWrapper(URLS).resample_shards(n)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="endless"):
        len(resampled())
    with pytest.raises(TypeError, match="replacement must be True or False"):
        IterableWrapper(URLS).resample_shards(replacement=1)
    with pytest.raises(TypeError, match="positional"):
        IterableWrapper(URLS).resample_shards(5, False)


@pytest.mark.parametrize("replacement", [True, False])
def test_resample_shards_raises_when_there_is_no_shard(replacement: bool) -> None:
    """An endless stream of nothing would be a loop."""
    with pytest.raises(ShardListError, match="IterableWrapperIterDataPipe gave nothing"):
        next(iter(IterableWrapper([]).resample_shards(replacement=replacement)))


class Growing(IterDataPipe[str]):
    """A list of shards that has one more each epoch."""

    def __init__(self) -> None:
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        self.size += 1
        yield from URLS[: self.size]


def test_resample_shards_reads_its_list_once_an_epoch() -> None:
    """What is new among the shards is drawn in the next epoch."""
    pipe = Growing().resample_shards(100)
    assert [set(pipe) for _ in range(3)] == [set(URLS[:size]) for size in (1, 2, 3)]


@pytest.mark.parametrize(("replacement", "place"), DIGESTS)
def test_resample_shards_gives_the_stored_draws_when_seeded(replacement: bool, place: tuple[int, int] | None) -> None:
    """The draws of a seed are the same on every machine and Python version: these were written down."""
    pipe = resampled(1000, replacement=replacement, place=place)
    assert digest([list(pipe), list(pipe)]) == DIGESTS[replacement, place]


@pytest.mark.parametrize("replacement", [True, False])
def test_resample_shards_draws_differently_when_seeds_epochs_or_places_differ(replacement: bool) -> None:
    """Two seeds, three epochs, and the three consumers that have the same seed; the same seed draws the same again."""
    orders = []
    for place in ((3, 0), (3, 1), (3, 2), None):
        for seed in (0, 2**64 - 1):
            pipe = resampled(50, replacement=replacement, place=place, seed=seed)
            orders += [tuple(pipe) for _ in range(3)]
    assert len(set(orders)) == 24
    assert tuple(resampled(50, replacement=replacement, place=(3, 0), seed=0)) == orders[0]


def test_resample_shards_gives_every_consumer_the_whole_list() -> None:
    """Nothing is divided: a consumer among many draws from all shards."""
    for number in range(20):
        assert set(resampled(300, place=(20, number))) == set(URLS)


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def test_resample_shards_draws_differently_in_ranks_when_nobody_divides_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a reading service the filter knows of one consumer; torchrun's rank tells them apart."""
    orders = [tuple(resampled(50))]
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        orders.append(tuple(resampled(50)))
    assert len(set(orders)) == 3


def test_resample_shards_draws_differently_in_ranks_when_only_workers_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service that divides the work among the workers of one rank gives equal places to workers of two ranks."""
    orders = set()
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        for worker in range(3):
            pipe = IterableWrapper(URLS).resample_shards(50).set_seed(7)
            apply_sharding(pipe, 3, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            orders.add(tuple(pipe))
    assert len(orders) == 6


def test_resample_shards_draws_the_same_when_ranks_are_divided_by_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the graph's places are those of the processes, they alone count, however ranks are learned."""
    expected = list(resampled(50, place=(2, 1)))
    as_rank(monkeypatch, 1, 2)
    assert list(resampled(50, place=(2, 1))) == expected


@pytest.mark.parametrize(
    "above",
    [
        IterableWrapper(URLS).sharding_filter(),
        IterableWrapper(URLS).sharding_filter().shuffle(),
        IterableWrapper(URLS).resample_shards(5),
        IterableWrapper(URLS).zip(IterableWrapper(URLS).sharding_filter()),
    ],
    ids=["filter", "further up", "resampler", "one branch"],
)
def test_resample_shards_raises_when_the_shards_are_divided_already(above: IterDataPipe[Any]) -> None:
    """Each consumer would draw from its part only."""
    with pytest.raises(ValueError, match="ShardingFilterIterDataPipe upstream"):
        above.resample_shards()


def test_sharding_filter_is_refused_when_it_follows_the_resampler() -> None:
    """Torch says so as soon as the graph is divided: dividing the draws would thin them out."""
    pipe = resampled(5).sharding_filter()
    with pytest.raises(RuntimeError, match="Sharding twice"):
        apply_sharding(pipe, 2, 0)
    with pytest.raises(RuntimeError, match="Sharding twice"):
        list(DataLoader(pipe, batch_size=None))


def test_resample_shards_leaves_its_source_alone() -> None:
    """The form makes a new pipe; the source can be used elsewhere as before."""
    source = IterableWrapper(URLS)
    pipe = source.resample_shards(5)
    apply_sharding(pipe, 3, 1)
    assert list(source) == URLS
    assert len(list(pipe)) == 5


def test_resample_shards_reads_a_shard_as_often_as_it_is_drawn(tmp_path: Path) -> None:
    """The same shard twice in a row gives its samples twice, whole and in order."""
    (url,) = write_text_shards(tmp_path, [3])
    samples = list(IterableWrapper([url]).resample_shards(2).load_wds_shards().group_by_key())
    assert [sample["__key__"] for sample in samples] == ["s0-00000", "s0-00001", "s0-00002"] * 2
    assert all(len(sample) == 5 for sample in samples)


def with_worker(item: str) -> tuple[int, str]:
    info = get_worker_info()
    return (-1 if info is None else info.id), item


def by_worker(pairs: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    """The items of each worker in their order."""
    found: dict[int, list[str]] = {}
    for worker, item in pairs:
        found.setdefault(worker, []).append(item)
    return found


def test_resample_shards_draws_differently_in_workers_when_torch_seeds_them_alike() -> None:
    """Torch's DataLoader gives all pipes one seed; n is for each worker, and another draw comes each epoch."""
    pipe = IterableWrapper(URLS).shuffle().resample_shards(40).map(with_worker)
    loader = DataLoader(pipe, batch_size=None, num_workers=2, collate_fn=tuple)
    torch.manual_seed(0)
    epochs = [by_worker(loader) for _ in range(2)]
    assert all({worker: len(items) for worker, items in epoch.items()} == {0: 40, 1: 40} for epoch in epochs)
    assert len({tuple(items) for epoch in epochs for items in epoch.values()}) == 4
    torch.manual_seed(0)
    assert by_worker(loader) == epochs[0]


class Wrapped(IterableDataset[tuple[int, str]]):
    """A seeded resampler in somebody's own dataset, which torch neither divides nor seeds."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        yield from map(with_worker, resampled(30))


def test_resample_shards_draws_differently_in_workers_when_nobody_divides_the_graph() -> None:
    """The number of the worker process is mixed in where the graph knows of no place."""
    found = by_worker(DataLoader(Wrapped(), batch_size=None, num_workers=2, collate_fn=tuple))
    assert found[0] != found[1]
    assert list(resampled(30)) not in found.values()


def test_resample_shards_draws_alike_when_its_source_is_shuffled_alike() -> None:
    """A shuffle above is upstream of a filter, and has the same seed everywhere: the whole is a function of seeds."""
    pipe = IterableWrapper(URLS).shuffle().resample_shards(30)
    orders = []
    for _ in range(2):
        twin = copy.deepcopy(pipe)
        twin.source_datapipe.source_datapipe.set_seed(3)
        orders.append(list(twin.set_seed(5)))
    assert orders[0] == orders[1]


@pytest.mark.slow
def test_resample_shards_runs_in_workers_of_the_service() -> None:
    """More workers than shards are no trouble; workers and epochs differ, and the service's seed decides."""
    runs = []
    for _ in range(2):
        with time_limit(60):
            loader = loader_of(IterableWrapper(URLS[:2]).resample_shards(40).map(with_worker), 3, seed=11)
            runs.append([by_worker(loader) for _ in range(2)])
            loader.shutdown()
    assert runs[0] == runs[1]
    assert len({tuple(items) for epoch in runs[0] for items in epoch.values()}) == 6
    assert {len(items) for epoch in runs[0] for items in epoch.values()} == {40}


@pytest.mark.slow
def test_resample_shards_can_be_left_when_it_is_endless_in_workers() -> None:
    """An epoch of an endless stream ends when its reader stops; the next one begins."""
    with time_limit(60):
        loader = loader_of(IterableWrapper(URLS).resample_shards(), 2)
        for _ in range(3):
            assert set(islice(iter(loader), 200)) <= set(URLS)
        loader.shutdown()
