"""What a pool promises under a reading service of DataLoader2 alone: its seeds, and the functions of its workers."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from tests.kits.pool_suite.kind import PoolKind
from tests.kits.pool_suite.orders import distinct
from tests.kits.resume_kit import row, samples
from tests.kits.workers_kit import SIZES, SeedTeller, items_of, uneven_pipe


class Teller(IterDataPipe):
    """Yields each item with what the worker's functions have left on the pipe."""

    def __init__(self, source_datapipe: IterDataPipe) -> None:
        self.source_datapipe = source_datapipe
        self.told: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for item in self.source_datapipe:
            yield item, tuple(self.told)


def teller(datapipe: Any) -> Teller:
    (found,) = (pipe for pipe in get_all_graph_pipes(traverse_dps(datapipe)) if isinstance(pipe, Teller))
    return found


def init(datapipe: Any, info: Any) -> Any:
    teller(datapipe).told = [("init", info.worker_id, info.num_workers)]
    return datapipe


def reset(datapipe: Any, info: Any, seed_generator: Any) -> Any:
    teller(datapipe).told.append(("reset", info.worker_id))
    return datapipe


def numbers() -> IterDataPipe:
    return IterableWrapper(range(4)).sharding_filter()


def ten_times(item: int) -> int:
    return item * 10


def add_stage(datapipe: Any, *_: Any) -> Any:
    return datapipe.map(ten_times)


class SeedsOf(SeedTeller):
    """Yields the seeds that a reset function was given, too."""

    shared = own = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in self.source_datapipe:
            yield self.shared, self.own, self.seed


def draw(datapipe: Any, info: Any, seed_generator: Any) -> Any:
    datapipe.shared, datapipe.own = seed_generator.generate_shared_seed(), seed_generator.generate_seed()
    return datapipe


def set_own_seed(datapipe: Any, info: Any, seed_generator: Any) -> Any:
    return datapipe.set_seed(info.worker_id)


def odd_only(item: Any) -> bool:
    return int(item[0][-5:]) % 2 == 1


def add_filter(datapipe: Any, *_: Any) -> Any:
    return datapipe.filter(odd_only)


def keep(datapipe: Any, *_: Any) -> Any:
    return datapipe


def forget_to_return(datapipe: Any, *_: Any) -> None:
    pass


class SeedSuite:
    """The seeds of DataLoader2."""

    @pytest.mark.parametrize(
        ("options", "seeds"),
        [({}, [7]), ({}, [3, 1, 4]), ({"seed": 7}, [5, 5, 5])],
        ids=["once", "each epoch", "seed= over dl.seed"],
    )
    def test_orders_follow_from_the_seed_of_the_loader(
        self, pool: PoolKind, options: dict[str, int], seeds: list[int]
    ) -> None:
        """Given once or for each epoch; each epoch has its own order."""
        runs = []
        for _ in range(2):
            torch.manual_seed(random.randrange(2**32))
            with pool.loader(uneven_pipe(), **options) as loader:
                runs.append([])
                for epoch in range(3):
                    if epoch < len(seeds):
                        loader.seed(seeds[epoch])
                    runs[-1].append(list(loader))
        assert runs[0] == runs[1]
        assert distinct(runs[0]) == 3
        assert all(sorted(order) == items_of(SIZES) for order in runs[0])

    def test_order_repeats_when_the_loader_is_seeded_alike(self, pool: PoolKind) -> None:
        """It is a function of the seed given for the epoch, and not of the epochs before."""
        orders = []
        with pool.loader(uneven_pipe()) as loader:
            for seed in (5, 9, 5):
                loader.seed(seed)
                orders.append(list(loader))
        assert orders[0] == orders[2] != orders[1]

    def test_epoch_takes_one_number_from_torch_when_nothing_is_seeded(self, pool: PoolKind) -> None:
        """As torch's DataLoader does, with any number of workers."""
        torch.manual_seed(1)
        with pool.loader(uneven_pipe()) as loader:
            for _ in range(3):
                list(loader)
        after = torch.rand(1)
        torch.manual_seed(1)
        torch.empty((3,), dtype=torch.int64).random_()
        assert torch.rand(1) == after


class FunctionSuite:
    """The functions that each worker calls."""

    def test_functions_are_called_in_each_worker(self, pool: PoolKind) -> None:
        """One when it starts, one before each epoch; in the main process they see worker 0 of 1."""
        with pool.loader(Teller(numbers()), worker_init_fn=init, worker_reset_fn=reset) as loader:
            epochs = [sorted(loader), sorted(loader)]
        for epoch, items in enumerate(epochs):
            for item, told in items:
                worker = item % pool.streams
                assert told == (("init", worker, pool.streams), *[("reset", worker)] * (epoch + 1))

    @pytest.mark.parametrize("joined", [False, True])
    def test_functions_may_add_stages(self, pool: PoolKind, joined: bool) -> None:
        """As in torchdata, the graph that one call returns is that of the next."""
        pipe = numbers().join_workers().map(str) if joined else numbers()
        with pool.loader(pipe, worker_init_fn=add_stage, worker_reset_fn=add_stage) as loader:
            for factor in (100, 1000):
                assert list(loader) == [(str if joined else int)(item * factor) for item in range(4)]

    def test_reset_function_gets_seeds_of_its_own_and_shared_ones(self, pool: PoolKind) -> None:
        """The same again for the same seed, others in each epoch."""
        runs = []
        for place in (pool, pool.elsewhere):
            with place.loader(SeedsOf(numbers()), seed=1, worker_reset_fn=draw) as loader:
                runs.append([list(loader), list(loader)])
        assert runs[0] == runs[1]
        (one, two, *_), (other, *_) = runs[0]
        assert one[0] == two[0]
        assert (one[1] != two[1]) == (pool.streams > 1)
        assert one[0] != other[0]
        assert len({*one, *two}) == 1 + 2 * pool.streams

    def test_reset_function_comes_after_seeding(self, pool: PoolKind) -> None:
        """A seed that it sets is the one that holds."""
        with pool.loader(SeedTeller(numbers()), worker_reset_fn=set_own_seed) as loader:
            assert [(item, seed) for item, seed, _ in loader] == [(item, item % pool.streams) for item in range(4)]

    @pytest.mark.parametrize(
        ("first", "later"), [(keep, keep), (add_filter, None), (None, add_filter)], ids=["same", "init", "reset"]
    )
    def test_state_resumes_when_functions_see_the_graph(
        self, pool: PoolKind, first: Any, later: Any, indexed_urls: list[str]
    ) -> None:
        """Also where they add a stage that items cannot be counted through."""
        pipe = samples(indexed_urls).map(row)
        options: dict[str, Any] = {"worker_init_fn": first, "worker_reset_fn": later, "seed": 1}
        with pool.loader(pipe, **options) as loader:
            items = iter(loader)
            for _ in range(5):
                next(items)
            state = loader.state_dict()
            rest = list(items)
        with pool.elsewhere.resumed(state, pipe, **options) as again:
            assert list(again) == rest

    @pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
    def test_function_that_returns_no_graph_is_an_error(self, pool: PoolKind, name: str) -> None:
        """A forgotten return is the usual mistake."""
        with (
            pool.of(1).loader(numbers(), **{name: forget_to_return}) as loader,
            pytest.raises(TypeError, match=f"{name} returned None; it must return a DataPipe"),
        ):
            list(loader)
