"""join_workers: the border of the workers under every service, and the cure for uneven ones under torchdata's own."""

import itertools
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

from tests.kits.torchdata import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    WorkersReadingService,
)
from tests.kits.workers_kit import SIZES, items_of, run_script, time_limit, uneven_pipe, with_pid
from torchdata_wds import JoinWorkers
from torchdata_wds.consumers import in_stock_worker, is_joined, note_join


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    with time_limit(180):
        yield


def stock(workers: int = 2, **options: Any) -> MultiProcessingReadingService:
    return MultiProcessingReadingService(workers, **{"main_prefetch_cnt": 0, **options})


def epochs(pipe: IterDataPipe, service: Any, count: int = 3) -> list[list[Any]]:
    with DataLoader2(pipe, reading_service=service) as loader:
        found = []
        for epoch in range(count):
            loader.seed(epoch)
            found.append(list(loader))
    return found


@pytest.mark.parametrize("workers", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 9))])
@pytest.mark.parametrize("sizes", [(10, 1), (9, 6, 3), SIZES, (0, 0)])
def test_join_makes_the_stock_service_safe_when_streams_are_uneven(workers: int, sizes: tuple[int, ...]) -> None:
    """Under torchdata's own service each item comes once in each of three epochs, whatever the lengths."""
    for order in epochs(uneven_pipe(sizes).join_workers(), stock(workers)):
        assert sorted(order) == items_of(sizes)


@pytest.mark.parametrize(
    ("main_prefetch", "worker_prefetch"),
    [(10, 10), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(0, 0), (0, 10), (10, 0)])],
)
def test_join_makes_the_stock_service_safe_when_it_prefetches(main_prefetch: int, worker_prefetch: int) -> None:
    """Prefetching on either side of the border neither loses items nor lets marks through."""
    service = stock(3, main_prefetch_cnt=main_prefetch, worker_prefetch_cnt=worker_prefetch)
    for order in epochs(uneven_pipe().join_workers(), service):
        assert sorted(order) == items_of(SIZES)


@pytest.mark.slow
def test_stock_service_breaks_when_streams_are_uneven_and_not_joined() -> None:
    """Without join_workers torchdata's service fails on such streams: the reason why the pipe exists."""
    done = run_script(
        "from tests.kits.workers_kit import uneven_pipe\n"
        "from tests.pipes.streams.test_join_workers import stock, epochs\n"
        "epochs(uneven_pipe((10, 1)), stock(), 1)",
        seconds=40,
    )
    assert "without submitted request" in done.stderr


SERVICES = {
    "stock": (stock, {}),
    "stock, main prefetch": (stock, {"main_prefetch_cnt": 10}),
    "ours": (WorkersReadingService, {"num_workers": 2}),
    "ours, no workers": (WorkersReadingService, {"num_workers": 0}),
    "in process": (InProcessReadingService, {}),
}
SPAWNED = {
    "stock, spawn": (stock, {"multiprocessing_context": "spawn"}),
    "ours, spawn": (WorkersReadingService, {"num_workers": 2, "multiprocessing_context": "spawn"}),
}


@pytest.mark.parametrize("name", [*SERVICES, *(pytest.param(name, marks=pytest.mark.slow) for name in SPAWNED)])
def test_join_lets_stages_rebatch_when_they_stand_on_both_sides(name: str) -> None:
    """Batches are taken apart and made anew in the main process under every service, and nothing is lost."""
    make, options = (SERVICES | SPAWNED)[name]
    orders = epochs(uneven_pipe().batch(4).join_workers().unbatch().batch(5), make(**options))
    for order in orders:
        assert [len(batch) for batch in order] == [5] * 6 + [1]
        assert sorted(item for batch in order for item in batch) == items_of(SIZES)
    assert len({str(order) for order in orders}) == 3


@pytest.mark.parametrize("name", ["stock", "ours"])
def test_join_is_the_border_when_workers_run(name: str) -> None:
    """Stages before it run in the workers, stages after it in the main process."""
    make, options = SERVICES[name]
    pipe = IterableWrapper(range(8)).sharding_filter().map(with_pid).join_workers().map(with_pid)
    (order,) = epochs(pipe, make(**options), 1)
    before, after = {inner[1] for inner, _ in order}, {pid for _, pid in order}
    assert (len(before), len(after)) == (2, 1)
    assert not before & after


@pytest.mark.slow
def test_join_leaks_no_marks_when_a_stock_epoch_was_broken_off() -> None:
    """After a break at any point the next epoch is whole, and so is the one after it."""
    with DataLoader2(uneven_pipe().join_workers(), reading_service=stock()) as loader:
        for taken in (1, 7, 20, len(items_of(SIZES))):
            stream = iter(loader)
            for _ in range(taken):
                next(stream)
            for _ in range(2):
                assert sorted(loader) == items_of(SIZES)


@pytest.mark.slow
def test_join_never_hangs_when_stock_epochs_are_many() -> None:
    """Eighty epochs of two and of three workers with prefetching, a shutdown after every tenth, all complete."""
    for sizes, workers in 2 * list(itertools.product([(10, 1), SIZES], [2, 3])):
        orders = epochs(uneven_pipe(sizes).join_workers(), stock(workers, main_prefetch_cnt=10), 10)
        assert len({tuple(sorted(order)) for order in orders}) == 1


def test_join_passes_items_unchanged_when_one_process_iterates() -> None:
    """Without workers it is transparent, twice over."""
    pipe = IterableWrapper([3, None, "a"]).join_workers()
    assert list(pipe) == list(pipe) == [3, None, "a"]
    assert isinstance(pipe, JoinWorkers)


def place_of(item: Any) -> tuple[Any, int]:
    worker = get_worker_info()
    return item, -1 if worker is None else worker.id


def test_join_passes_items_unchanged_when_torch_dataloader_runs_it() -> None:
    """In torch's DataLoader there is no main part of a graph: stages behind join_workers run in its workers too."""
    found = list(DataLoader(uneven_pipe().join_workers().map(place_of), batch_size=None, num_workers=2))
    assert sorted(tuple(item) for item, _ in found) == items_of(SIZES)
    assert {worker for _, worker in found} == {0, 1}


@pytest.mark.parametrize("name", ["stock", "ours"])
def test_join_is_transparent_when_it_comes_twice(name: str) -> None:
    """The first border counts; a second one in the main process changes nothing."""
    make, options = SERVICES[name]
    for order in epochs(uneven_pipe().join_workers().map(place_of).join_workers(), make(**options)):
        assert sorted(item for item, _ in order) == items_of(SIZES)
        assert {worker for _, worker in order} == {-1}


def test_join_knows_its_length_when_its_source_does() -> None:
    """The length is that of the source before it is divided, or a TypeError."""
    assert len(IterableWrapper(range(7)).sharding_filter().join_workers()) == 7
    with pytest.raises(TypeError):
        len(uneven_pipe().join_workers())


def test_join_survives_pickling_when_it_is_in_the_middle_of_an_epoch() -> None:
    """It holds no state of its own."""
    pipe = IterableWrapper(range(5)).join_workers()
    stream = iter(pipe)
    assert next(stream) == 0
    assert list(pickle.loads(pickle.dumps(pipe))) == list(range(5))


def test_join_keeps_the_graph_visible_when_it_is_traversed() -> None:
    """Every pipe upstream is found, and sharded, through it."""
    names = str(traverse_dps(uneven_pipe().join_workers()))
    assert ".sharding_filter()" in names
    assert ".shuffle()" in names


class StockPlace(IterDataPipe):
    """Yields what a source pipe can learn about the process it is in."""

    def __iter__(self) -> Iterator[tuple[bool, bool]]:
        yield in_stock_worker(), is_joined()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_stock_workers_are_recognised_when_they_fork_or_spawn(context: str) -> None:
    """A pipe sees that it is in a stock worker, and whether a join_workers is downstream; nowhere else."""
    joined, bare = StockPlace().join_workers(), StockPlace()
    workers = 2 if context == "fork" else 1
    list(joined)  # the main process's own iteration leaves no note for forked workers
    assert epochs(joined, stock(workers, multiprocessing_context=context), 2) == [[(True, True)] * workers] * 2
    assert epochs(bare, stock(workers, multiprocessing_context=context), 1) == [[(True, False)] * workers]
    for pipe in (joined, bare):
        service = WorkersReadingService(workers, multiprocessing_context=context)
        assert epochs(pipe, service, 1) == [[(False, False)] * workers]
        assert list(pipe) == [(False, False)]
        assert list(DataLoader(pipe, batch_size=None, num_workers=1)) == [[False, False]]


def exit_with_place() -> None:
    os._exit(int(in_stock_worker()))


def test_stock_workers_are_not_recognised_when_a_rank_process_runs() -> None:
    """A process started by multiprocessing for another purpose is no stock worker."""
    process = multiprocessing.get_context("fork").Process(target=exit_with_place)
    process.start()
    process.join()
    assert process.exitcode == 0
    note_join()
    assert not is_joined()
