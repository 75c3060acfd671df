"""worker_init_fn and worker_reset_fn, with torchdata's meaning."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from tests.kits.shards import text_keys, write_text_shards
from tests.kits.torchdata import DataLoader2, MultiProcessingReadingService, WorkersReadingService
from tests.kits.workers_kit import SeedTeller, loader_of


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


def test_functions_are_called_as_torchdata_calls_them_when_workers_run() -> None:
    """Once in each worker, and before each epoch."""
    found = []
    for service in (
        WorkersReadingService(2, worker_init_fn=init, worker_reset_fn=reset),
        MultiProcessingReadingService(2, worker_init_fn=init, worker_reset_fn=reset, worker_prefetch_cnt=0),
    ):
        with DataLoader2(Teller(numbers()), reading_service=service) as loader:
            found.append([sorted(loader), sorted(loader)])
    ours, theirs = found
    assert ours == theirs
    assert ours[1][1] == (1, (("init", 1, 2), ("reset", 1), ("reset", 1)))


@pytest.mark.parametrize("branches", [1, 2])
def test_functions_see_one_worker_when_the_main_process_runs_the_graph(branches: int) -> None:
    """The graph is the same as in a worker, and its stages are found wherever it ends."""
    pipe = (
        Teller(numbers()) if branches == 1 else Teller(numbers()).join_workers().zip(Teller(numbers()).join_workers())
    )
    with loader_of(pipe, 0, worker_init_fn=init, worker_reset_fn=reset) as loader:
        first, second = next(iter(loader)), next(iter(loader))
    once = (0, (("init", 0, 1), ("reset", 0)))
    twice = (0, (("init", 0, 1), ("reset", 0), ("reset", 0)))
    assert (first, second) == ((once, twice) if branches == 1 else ((once, once), (twice, twice)))


def ten_times(item: int) -> int:
    return item * 10


def add_stage(datapipe: Any, *_: Any) -> Any:
    return datapipe.map(ten_times)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_functions_may_add_stages(workers: int, joined: bool) -> None:
    """As in torchdata, the graph that one call returns is that of the next."""
    pipe = numbers().join_workers().map(str) if joined else numbers()
    with loader_of(pipe, workers, worker_init_fn=add_stage, worker_reset_fn=add_stage) as loader:
        for factor in (100, 1000):
            assert list(loader) == [(str if joined else int)(item * factor) for item in range(4)]


class SeedsOf(SeedTeller):
    """Yields the seeds that a reset function was given, too."""

    shared = own = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in self.source_datapipe:
            yield self.shared, self.own, self.seed


def draw(datapipe: Any, info: Any, seed_generator: Any) -> Any:
    datapipe.shared, datapipe.own = seed_generator.generate_shared_seed(), seed_generator.generate_seed()
    return datapipe


def test_reset_function_gets_seeds_of_its_own_and_shared_ones() -> None:
    """The same again for the same seed, others in each epoch."""
    runs = []
    for _ in range(2):
        with loader_of(SeedsOf(numbers()), seed=1, worker_reset_fn=draw) as loader:
            runs.append([list(loader), list(loader)])
    assert runs[0] == runs[1]
    (one, two, *_), (other, *_) = runs[0]
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert one[0] != other[0]
    assert len({*one, *two}) == 5


def set_own_seed(datapipe: Any, info: Any, seed_generator: Any) -> Any:
    return datapipe.set_seed(info.worker_id)


def test_reset_function_comes_after_seeding() -> None:
    """A seed that it sets is the one that holds."""
    with loader_of(SeedTeller(numbers()), worker_reset_fn=set_own_seed) as loader:
        assert list(loader) == [(0, 0, 0), (1, 1, 1), (2, 0, 0), (3, 1, 1)]


def odd_only(sample: dict[str, Any]) -> bool:
    return int(sample["__key__"][-5:]) % 2 == 1


def add_filter(datapipe: Any, *_: Any) -> Any:
    return datapipe.filter(odd_only)


def keep(datapipe: Any, *_: Any) -> Any:
    return datapipe


@pytest.mark.parametrize("function", [keep, add_filter])
@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_when_functions_see_the_graph(workers: int, name: str, function: Any, tmp_path: Any) -> None:
    """Also where they add a stage that items cannot be counted through."""
    urls = write_text_shards(tmp_path, (9, 8, 7))
    pipe = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key().wds_decode()
    options: dict[str, Any] = {name: function, "seed": 1}
    with loader_of(pipe, workers, **options) as loader:
        items = iter(loader)
        first = [next(items)["__key__"] for _ in range(5)]
        state = loader.state_dict()
        rest = [sample["__key__"] for sample in items]
    assert function is add_filter or sorted([*first, *rest]) == sorted(text_keys((9, 8, 7)))
    again = DataLoader2.from_state(state, WorkersReadingService(workers, **options))
    assert [sample["__key__"] for sample in again] == rest
    again.shutdown()


def forget_to_return(datapipe: Any, *_: Any) -> None:
    pass


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
@pytest.mark.parametrize("workers", [0, 1])
def test_service_says_so_when_a_function_returns_no_graph(workers: int, name: str) -> None:
    """A forgotten return is the usual mistake."""
    loader = loader_of(numbers(), workers, **{name: forget_to_return})
    with pytest.raises(TypeError, match=f"{name} returned None; it must return a DataPipe"):
        list(loader)
    loader.shutdown()


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
def test_service_refuses_when_a_function_is_none(name: str) -> None:
    """What cannot be called is an error where it is given."""
    with pytest.raises(TypeError, match=f"{name} must be a function or None, not 3"):
        WorkersReadingService(1, **{name: 3})


@pytest.mark.slow
def test_functions_are_called_when_workers_are_spawned() -> None:
    """They are sent to the workers, partial ones too."""
    options = {"worker_init_fn": partial(init), "multiprocessing_context": "spawn"}
    with loader_of(Teller(numbers()), 1, **options) as loader:
        assert next(iter(loader)) == (0, (("init", 0, 1),))
