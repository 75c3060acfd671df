"""An order under loaders that know nothing of it, and without any: each sample once an epoch, in a new order."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from tests.kits import order_kit
from tests.kits.order_kit import Shards, by_position, flat, key_of, marked_key, share_of
from tests.kits.ranks import ranks_of
from tests.kits.torchdata import DataLoader2, MultiProcessingReadingService
from tests.kits.workers_kit import time_limit
from tests.pipes import test_foreign_loaders as foreign
from torchdata_wds import DivisionError

SIZES = (9, 0, 14, 3, 6)
EPOCHS = 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return order_kit.shards_in(tmp_path_factory.mktemp("order"), SIZES)


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    with time_limit(300):
        yield


def keys(shards: Shards, **options: Any) -> Any:
    return shards.pipe(run=2, **options).map(key_of)


def check_epochs(shards: Shards, epochs: list[list[str]]) -> None:
    """Each has every sample once, in an order of its own, with its runs together."""
    for epoch in epochs:
        assert sorted(epoch) == sorted(shards.keys)
    assert len(set(map(tuple, [*epochs, shards.keys]))) == len(epochs) + 1


# ------------------------------------------------------------------------------------------------------ without loaders
def test_plain_iteration_has_a_new_order_each_epoch(shards: Shards) -> None:
    """Which follows torch's seed, or seed=."""
    for options in ({}, {"seed": 3}):
        torch.manual_seed(1)
        pipe = keys(shards, **options)
        epochs = [list(pipe) for _ in range(EPOCHS)]
        check_epochs(shards, epochs)
        torch.manual_seed(1)
        pipe = keys(shards, **options)
        assert [list(pipe) for _ in range(EPOCHS)] == epochs
    assert epochs == [shards.order(run=2, seed=3, epoch=epoch) for epoch in range(EPOCHS)]
    assert len(pipe) == len(shards.keys)


def test_plain_iteration_can_be_left_and_begun_again(shards: Shards) -> None:
    """Each time with another epoch."""
    pipe = keys(shards, seed=3)
    assert list(islice(pipe, 4)) == shards.order(run=2, seed=3)[:4]
    assert list(pipe) == shards.order(run=2, seed=3, epoch=1)


@pytest.mark.parametrize("block", [1, 4, 7])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (2, 1), (3, 2)])
def test_consumers_take_blocks_in_turn(shards: Shards, ranks: int, workers: int, block: int) -> None:
    """As a loader's ranks and workers do, whose place torch tells in one number."""
    found = []
    for rank in range(ranks):
        items = []
        for worker in range(workers):
            pipe = shards.pipe(run=2, seed=3, block=block).map(key_of)
            apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            apply_sharding(pipe, workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            mine = list(pipe)
            assert len(pipe) == len(mine)
            items.append([mine[start : start + block] for start in range(0, len(mine), block)])
        found.append(by_position(items))
    order = shards.order(run=2, seed=3)
    grid = order_kit.Grid(ranks, workers, block)
    assert found == [share_of(order, 0, grid, rank) for rank in range(ranks)]
    assert flat(by_position(found)) == order


@pytest.mark.parametrize("even", ["drop", "pad"])
@pytest.mark.parametrize("block", [1, 5])
def test_even_gives_all_ranks_as_many(shards: Shards, even: Any, block: int) -> None:
    """Without a loader of ours too: what is left out or repeated are fewer samples than ranks."""
    found = []
    for rank in range(3):
        mine: list[Any] = []
        for worker in range(2):
            pipe = shards.pipe(run=2, seed=3, block=block, even=even).map(marked_key)
            apply_sharding(pipe, 3, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            apply_sharding(pipe, 2, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            mine += pipe
        found.append(mine)
    each = len(shards.keys) // 3 + (even == "pad")
    assert [len(mine) for mine in found] == [each] * 3
    real = [key for mine in found for key, is_pad in mine if not is_pad]
    assert len(set(real)) == len(real) == (len(shards.keys) if even == "pad" else 3 * each)


# ------------------------------------------------------------------------------------------------- torch's DataLoader
@pytest.mark.parametrize(
    ("workers", "options", "batch", "block"),
    [
        (0, {}, None, 1),
        (0, {}, 4, 4),
        (2, {"multiprocessing_context": "fork"}, None, 4),
        (2, {"multiprocessing_context": "fork"}, 4, 1),
        (2, {"multiprocessing_context": "fork", "persistent_workers": True}, 4, 4),
    ],
)
def test_torchs_loader_yields_each_sample_once(
    shards: Shards, workers: int, options: dict[str, Any], batch: int | None, block: int
) -> None:
    """In a new order each epoch, on which all workers agree: that of one process, if blocks and batches are equal."""
    for seed in (None, 3):
        torch.manual_seed(1)
        pipe = keys(shards, block=block, seed=seed)
        loader = DataLoader(pipe, batch_size=batch, num_workers=workers, collate_fn=list if batch else None, **options)
        epochs = [flat(loader) if batch else list(loader) for _ in range(EPOCHS)]
        check_epochs(shards, epochs)
        if block == (batch or 1):
            torch.manual_seed(1)
            alone = DataLoader(keys(shards, seed=seed), batch_size=None)
            first = list(alone)
            assert epochs[0] == first


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_orders_may_be_joined_under_torchs_loader(shards: Shards, workers: int) -> None:
    """Each divides its own samples; so does a filter of another branch."""
    other = IterableWrapper(shards.urls).sharding_filter().load_wds_shards().group_by_key().map(key_of)
    for pipe in (keys(shards).concat(keys(shards)), keys(shards).mux(keys(shards)), keys(shards).concat(other)):
        for _ in range(2):
            assert sorted(DataLoader(pipe, batch_size=None, num_workers=workers)) == sorted(2 * shards.keys)


def whole_order(shards: Shards) -> Any:
    return keys(shards, seed=3)


def test_order_inside_a_stage_is_read_whole(shards: Shards) -> None:
    """As a reader that a function of another graph makes."""
    pipe = IterableWrapper([shards]).sharding_filter().map(whole_order).map(list)
    assert list(pipe) == [shards.order(run=2, seed=3)]


@pytest.mark.slow
@pytest.mark.parametrize("is_persistent", [False, True])
def test_torchs_loader_yields_each_sample_once_in_spawned_workers(shards: Shards, is_persistent: bool) -> None:
    """As in forked ones."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "persistent_workers": is_persistent}
    loader = DataLoader(keys(shards, block=4), 4, num_workers=2, collate_fn=list, **options)
    epochs = [flat(loader) for _ in range(2)]
    check_epochs(shards, epochs)
    torch.manual_seed(1)
    assert epochs[0] == list(DataLoader(keys(shards), batch_size=None))


def test_torchs_loader_batches_in_the_graph(shards: Shards) -> None:
    """Whole batches, but the last of each worker."""
    loader = DataLoader(keys(shards, block=4).batch(4), batch_size=None, num_workers=2)
    for _ in range(2):
        assert sorted(flat(loader)) == sorted(shards.keys)
        assert [len(batch) for batch in loader] == [4] * 8


class Holder(IterableDataset):
    """A data set that holds a pipe, which torch then tells nothing."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __iter__(self) -> Iterator[Any]:
        yield from self.pipe


def error_of(loader: Any) -> str:
    """The message of an error that names itself; nothing holds the iterator and its workers any longer."""
    try:
        list(loader)
    except DivisionError as error:
        return str(error)
    return ""


@pytest.mark.slow  # torch waits 5 s for each worker of an iterator that has failed
def test_pipe_inside_another_dataset_is_an_error(shards: Shards) -> None:
    """Not an epoch for each worker."""
    loader = DataLoader(Holder(keys(shards)), batch_size=None, num_workers=1)
    assert sorted(loader) == sorted(shards.keys)
    loader = DataLoader(Holder(keys(shards)), batch_size=None, num_workers=2)
    assert "never told of the 2 workers" in error_of(loader)
    gc.collect()  # ends the workers


# -------------------------------------------------------------------------------------------- loaders of other packages
@pytest.mark.parametrize("block", [1, 4])
def test_stock_service_yields_each_sample_once(shards: Shards, block: int) -> None:
    """With the streams of its workers joined."""
    service = MultiProcessingReadingService(2, main_prefetch_cnt=0, multiprocessing_context="fork")
    with DataLoader2(keys(shards, block=block).join_workers(), reading_service=service) as loader:
        epochs = []
        for epoch in range(EPOCHS):
            loader.seed(epoch)  # else it takes the same seed in each
            epochs.append(list(loader))
        check_epochs(shards, epochs)


@pytest.mark.parametrize("workers", [0, 2])
def test_dealers_of_items_get_all_of_them(shards: Shards, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as accelerate's loaders, which divide the items of one rank among all."""
    distributed = torch.distributed
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(distributed, name, lambda *_, value=value: value)
    monkeypatch.setattr(distributed, "new_group", lambda **_: None)
    monkeypatch.setattr("torch.utils.data.dataloader._share_dist_seed", lambda *_: 1)
    monkeypatch.setattr("torch.utils.data.dataloader._get_distributed_settings", lambda: (2, 0))
    loader = DataLoader(keys(shards), batch_size=None, num_workers=workers)
    dispatcher = foreign.DataLoaderDispatcher(loader)
    for _ in range(2):
        assert sorted(dispatcher) == sorted(shards.keys)
    halves = [foreign.IterableDatasetShard(keys(shards, seed=3), rank) for rank in range(2)]
    found = [list(DataLoader(half, batch_size=None)) for half in halves]
    assert sorted(found[0] + found[1]) == sorted(shards.keys)


RANKS = """
import sys
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from tests.kits import order_kit
from tests.kits.ranks import run_ranks
from tests.pipes.order.test_load_in_order import SIZES, keys

folder, *contexts = sys.argv[1:]

def run(rank):
    shards = order_kit.shards_in(Path(folder, str(rank)), SIZES)
    torch.manual_seed(rank)  # torch shares the seeds that matter
    found = []
    for context in contexts:
        workers, option = (0, None) if context == "none" else (2, context)
        for block in (4,) if context == "spawn" else (1, 4):
            pipe = keys(shards, block=block)
            loader = DataLoader(pipe, batch_size=None, num_workers=workers, multiprocessing_context=option)
            found.append([list(loader) for _ in range(2)])
    return found

if __name__ == "__main__":
    run_ranks(run, folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [("none", "fork"), ("spawn",)])
def test_ranks_share_each_epoch_under_torchs_loader(shards: Shards, tmp_path: Path, contexts: tuple[str, ...]) -> None:
    """Two gloo ranks, with workers and without."""
    first, second = ranks_of(RANKS, tmp_path, *contexts)
    for mine, yours in zip(first, second, strict=True):
        check_epochs(shards, [one + two for one, two in zip(mine, yours, strict=True)])
