"""Loaders of other packages that deal out a pipe's items among ranks, played by small classes that work alike."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from tests.kits.shards import text_keys, write_text_shards
from tests.kits.workers_kit import logged_in, run_script
from torchdata_wds import DivisionError, WebDataset, handlers
from torchdata_wds.pipes import foreign_loaders

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZES = (3, 2, 4, 1, 5, 2)
KEYS = sorted(text_keys(SIZES))
RANKS = 2


class DataLoaderDispatcher:
    """Reads in one process for all ranks, as the class of that name in accelerate does."""

    def __init__(self, loader: Any, ranks: int = RANKS) -> None:
        self.loader = loader
        self.state = SimpleNamespace(num_processes=ranks)

    def _fetch_batches(self, iterator: Iterator[Any]) -> list[Any]:
        return list(islice(iterator, self.state.num_processes))

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        while batches := self._fetch_batches(iterator):
            yield from batches


class IterableDatasetShard(IterableDataset):
    """Reads everything in each rank and keeps every n-th batch, as the class of that name in accelerate does."""

    def __init__(self, dataset: Any, rank: int, ranks: int = RANKS, epoch: int = 0) -> None:
        self.dataset, self.process_index, self.num_processes, self.epoch = dataset, rank, ranks, epoch

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.dataset):
            if number % self.num_processes == self.process_index:
                yield item


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "said", set())
    monkeypatch.setattr(foreign_loaders, "_inherited", None)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_text_shards(tmp_path_factory.mktemp("foreign"), SIZES)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process look like the first of two ranks."""
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda *_: RANKS)
    monkeypatch.setattr(distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr("torch.utils.data.dataloader._share_dist_seed", lambda *_: 1)
    monkeypatch.setattr("torch.utils.data.dataloader._get_distributed_settings", lambda: (RANKS, 0))
    monkeypatch.setattr(distributed, "new_group", lambda **_: None)


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """What has been logged, by forked workers too."""
    with logged_in(tmp_path / "said"):
        yield lambda: (tmp_path / "said").read_text().splitlines()


def key_of(sample: Any) -> str:
    return sample["__key__"]


def samples(urls: list[str]) -> Any:
    return IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards().group_by_key().map(key_of)


def shuffled(urls: list[str]) -> Any:
    return WebDataset(urls, shuffle=5).map(key_of).shuffle(buffer_size=3)


def split(urls: list[str]) -> Any:
    return IterableWrapper(urls).split_shards().load_wds_shards().group_by_key().map(key_of)


def late(urls: list[str]) -> Any:
    return IterableWrapper(urls).load_wds_shards().group_by_key().map(key_of).sharding_filter()


def prefetched(urls: list[str]) -> Any:
    return samples(urls).prefetch(3)


def mixed(urls: list[str]) -> Any:
    return samples(urls[:3]).wds_mix(samples(urls[3:]), weights=[1, 2], stop="all")


def joined(urls: list[str]) -> Any:
    return samples(urls[:3]).concat(samples(urls[3:]))


GRAPHS = [samples, shuffled, split, late, prefetched, mixed, joined]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_get_everything_when_one_rank_reads_for_all(
    graph: Any, workers: int, urls: list[str], said: Callable[[], list[str]]
) -> None:
    """Each epoch anew, although torch has divided the pipe among ranks."""
    loader = DataLoader(graph(urls), batch_size=None, num_workers=workers)
    for _ in range(2):
        assert sorted(DataLoaderDispatcher(loader)) == KEYS
    messages = said()
    assert messages[0].startswith("rank 0 reads for all 2 ranks")
    assert "WdsLoader" in messages[0]
    assert len({message for message in messages if "every worker reads" not in message}) == 1


@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_get_everything_when_workers_outlive_the_epoch(urls: list[str]) -> None:
    loader = DataLoader(samples(urls), batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert sorted(DataLoaderDispatcher(loader)) == KEYS
    assert loader._iterator is not None
    loader._iterator._shutdown_workers()


class Early(DataLoaderDispatcher):
    """Starts the workers while it is made, as the one around a StatefulDataLoader does."""

    def __init__(self, loader: Any) -> None:
        self.iterator = iter(loader)
        super().__init__(loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterator


Early.__name__ = "DataLoaderDispatcher"


@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_get_everything_when_workers_start_early(urls: list[str]) -> None:
    assert sorted(Early(DataLoader(samples(urls), batch_size=None, num_workers=2))) == KEYS


@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_get_a_full_epoch_when_one_rank_reads_for_all(urls: list[str]) -> None:
    """wds_epoch counts for all ranks, since what it yields is dealt out among them."""
    pipe = samples(urls).wds_epoch(8)
    loader = DataLoader(pipe, batch_size=None)
    assert len(list(DataLoaderDispatcher(loader))) == 8
    assert len(list(loader)) == 4


@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_read_a_sample_cache_alike_in_each_epoch(urls: list[str], tmp_path: Path) -> None:
    """It is written in the first epoch and read in the second, when no shard is opened."""
    pipe = samples(urls).cache_samples(tmp_path / "cache.db")
    for workers in (0, 2):
        for _ in range(2):
            found = list(DataLoaderDispatcher(DataLoader(pipe, batch_size=None, num_workers=workers)))
            assert sorted(found) == KEYS


@pytest.mark.parametrize(
    ("graph", "workers"),
    [
        *((graph, 0) for graph in GRAPHS),
        *(pytest.param(graph, 2, marks=pytest.mark.slow) for graph in GRAPHS),
        (mixed, 1),
    ],
)
@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_get_each_item_once_when_each_rank_reads_all(
    graph: Any, workers: int, urls: list[str], said: Callable[[], list[str]]
) -> None:
    """Ranks in different random states read in one order, and another in the next epoch."""
    orders = []
    for epoch in range(2):
        found: list[Any] = []
        for rank in range(RANKS):
            torch.manual_seed(rank)
            shard = IterableDatasetShard(graph(urls), rank, epoch=epoch)
            found.append(list(DataLoader(shard, batch_size=None, num_workers=workers)))
        assert sorted(chain(*found)) == KEYS
        orders.append(found)
    assert orders[0] != orders[1] or graph in (split, late)
    assert "each of 2 ranks reads all shards" in said()[0]


def test_foreign_loaders_keep_the_seeds_that_were_given(urls: list[str]) -> None:
    """A shuffle that the program has seeded keeps its order, also in a wrapper."""
    pipe = IterableWrapper(range(20)).wds_shuffle(20)
    pipe.set_seed(3)
    alone = list(pipe)
    pipe.set_seed(3)
    assert sorted(chain(*(list(IterableDatasetShard(pipe.set_seed(3), rank)) for rank in range(RANKS)))) == sorted(
        alone
    )
    assert list(IterableDatasetShard(pipe.set_seed(3), 0)) == alone[::2]


def test_foreign_loaders_are_an_error_when_each_rank_reads_its_part(urls: list[str]) -> None:
    """An IterableDatasetShard would keep only a part of them."""
    pipe = samples(urls)
    apply_sharding(pipe, RANKS, 0, SHARDING_PRIORITIES.DISTRIBUTED)
    with pytest.raises(DivisionError, match=r"keeps 1 item of 2.*WdsLoader.*ranks=\(0, 1\)"):
        next(iter(IterableDatasetShard(pipe, 0)))


class Sharder(IterDataPipe):
    """Divides the work in its own way."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def apply_sharding(self, count: int, number: int) -> None:
        self.place = count, number

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def test_foreign_loaders_are_an_error_when_a_pipe_divides_in_its_own_way(urls: list[str]) -> None:
    pipe = Sharder(IterableWrapper(urls)).load_wds_shards()
    with pytest.raises(DivisionError, match="Sharder divides the items"):
        next(iter(DataLoaderDispatcher(pipe)))


@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_are_an_error_when_a_filter_has_begun(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of a graph that pairs them with samples are taken first: here by the second worker."""
    pipe = IterableWrapper(range(100)).sharding_filter().zip(samples(urls))
    monkeypatch.setattr(
        torch_worker, "_worker_info", torch_worker.WorkerInfo(id=1, num_workers=2, seed=1, dataset=pipe)
    )
    apply_sharding(pipe, 2 * RANKS, RANKS)
    with pytest.raises(DivisionError, match="had already begun"):
        next(iter(DataLoaderDispatcher(pipe)))


@pytest.mark.parametrize("workers", [0, 2])
def test_foreign_loaders_change_nothing_when_there_is_one_rank(
    workers: int, urls: list[str], said: Callable[[], list[str]]
) -> None:
    """Accelerate then wraps nothing, or lets one process read everything."""
    loader = DataLoader(samples(urls), batch_size=None, num_workers=workers)
    assert sorted(DataLoaderDispatcher(loader, ranks=1)) == KEYS
    shard = IterableDatasetShard(samples(urls), 0, ranks=1)
    assert sorted(DataLoader(shard, batch_size=None)) == KEYS
    assert not said()


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_foreign_loaders_change_nothing_in_other_loaders_of_the_loop(
    urls: list[str], said: Callable[[], list[str]]
) -> None:
    """While the program holds an item of a foreign loader, its own loader is divided among ranks as before."""
    plain = DataLoader(samples(urls), batch_size=None, num_workers=2)
    for _ in DataLoaderDispatcher(DataLoader([1, 2, 3])):
        assert 0 < len(list(plain)) < len(KEYS)
    assert not said()


SPAWNED = """
import sys
import torch
from torch.utils.data import DataLoader
from tests.kits.ranks import run_ranks
from tests.pipes.test_foreign_loaders import DataLoaderDispatcher, samples

folder, context, *urls = sys.argv[1:]

def run(rank):
    loader = DataLoader(samples(urls), batch_size=None, num_workers=2, multiprocessing_context=context)
    if rank:
        iterator = iter(loader)  # as in accelerate
        return []
    return list(DataLoaderDispatcher(loader))

if __name__ == "__main__":
    run_ranks(run, folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_foreign_loaders_get_everything_when_workers_are_spawned(context: str, urls: list[str], tmp_path: Path) -> None:
    """Two gloo ranks; only one reads, and its workers do not have its stack."""
    done = run_script(SPAWNED, str(tmp_path), context, *urls, seconds=120)
    assert done.returncode == 0, done.stderr
    found = pickle.loads((tmp_path / "0.pickle").read_bytes())
    assert Counter(found) == dict.fromkeys(KEYS, 1)
    assert "rank 0 reads for all 2 ranks" in done.stderr
