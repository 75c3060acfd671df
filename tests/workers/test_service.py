"""Both loaders: every item once, a new order every epoch, the same again from the same seed."""

import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children
from tests.kits.torchdata import DataLoader2, WorkersReadingService, needs_torchdata
from tests.kits.workers_kit import (
    FRONTS,
    FRONTS_QUICK,
    SIZES,
    SeedTeller,
    expand,
    items_of,
    loader_of,
    run_script,
    uneven_pipe,
    with_pid,
)


def epochs(pipe: IterDataPipe, count: int = 3, dl_seeds: Any = None, **options: Any) -> list[list[Any]]:
    with loader_of(pipe, options.pop("num_workers"), **options) as loader:
        found = []
        for epoch in range(count):
            if dl_seeds is not None and epoch < len(dl_seeds):
                loader.seed(dl_seeds[epoch])
            found.append(list(loader))
    return found


def distinct(orders: list[list[Any]]) -> int:
    return len({tuple(order) for order in orders})


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("workers", [0, 2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 9))])
@pytest.mark.parametrize("sizes", [(10, 1), (9, 6, 3), SIZES, (0, 0)])
def test_loader_gives_each_item_once_when_streams_are_uneven(workers: int, sizes: tuple[int, ...], front: str) -> None:
    """Streams of any length, even none at all, and more workers than sources lose and double nothing."""
    for order in epochs(uneven_pipe(sizes), front=front, num_workers=workers):
        assert sorted(order) == items_of(sizes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "dl_seeds"),
    [({}, None), ({"seed": 7}, None), ({}, [7]), ({}, [0, 1, 2, 3]), ({"seed": 7}, [5, 5, 5, 5])],
    ids=["never seeded", "seed=", "dl.seed once", "dl.seed each epoch", "seed= over dl.seed"],
)
def test_service_orders_anew_when_an_epoch_begins(workers: int, options: dict[str, int], dl_seeds: list[int]) -> None:
    """Four epochs have four orders, however they are seeded or not."""
    orders = epochs(uneven_pipe(), 4, dl_seeds, num_workers=workers, **options)
    assert distinct(orders) == 4
    assert all(sorted(order) == items_of(SIZES) for order in orders)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "dl_seeds"), [({"seed": 7}, None), ({}, [7]), ({}, [3, 1, 4])], ids=["seed=", "once", "each epoch"]
)
def test_service_repeats_its_orders_when_seeded_alike(workers: int, options: dict[str, int], dl_seeds: Any) -> None:
    """Two runs with the same seed have the same order in each of their epochs."""
    first = epochs(uneven_pipe(), 3, dl_seeds, num_workers=workers, **options)
    torch.manual_seed(random.randrange(2**32))
    assert epochs(uneven_pipe(), 3, dl_seeds, num_workers=workers, **options) == first


@pytest.mark.parametrize("workers", [0, 2])
def test_service_repeats_an_order_when_the_loader_is_seeded_alike_each_epoch(workers: int) -> None:
    """The order is a function of the seed given for the epoch, and not of the epochs before."""
    one, two, three = epochs(uneven_pipe(), 3, [5, 9, 5], num_workers=workers)
    assert one == three != two


@needs_torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_service_obeys_torch_manual_seed_when_the_loader_is_not_seeded(workers: int) -> None:
    """Never seeded epochs follow from torch's global generator, one draw an epoch with any number of workers."""
    torch.manual_seed(1)
    first = epochs(uneven_pipe(), 3, num_workers=workers)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert epochs(uneven_pipe(), 3, num_workers=workers) == first
    torch.manual_seed(1)
    torch.empty((3,), dtype=torch.int64).random_()
    assert torch.rand(1) == after


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_orders_alike_when_one_worker_or_none_runs(front: str) -> None:
    """front=front, num_workers=0 is the order of one worker, also with stages after it in the main process."""
    pipe = uneven_pipe().shuffle(buffer_size=5).join_workers().shuffle(buffer_size=5)
    assert epochs(pipe, front=front, num_workers=0, seed=3) == epochs(pipe, front=front, num_workers=1, seed=3)


@pytest.mark.slow
def test_loader_orders_alike_when_workers_fork_or_spawn() -> None:
    """The way workers start makes no difference to any of three seeded epochs."""
    pipe = uneven_pipe().shuffle(buffer_size=5)
    forked = epochs(pipe, num_workers=2, seed=3, multiprocessing_context="fork")
    spawned = epochs(pipe, num_workers=2, seed=3, multiprocessing_context="spawn")
    assert spawned == forked
    assert distinct(spawned) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("front", "context", "workers"),
    [("loader", "spawn", 3), ("service", "spawn", 1), ("loader", "forkserver", 1), ("service", "forkserver", 3)],
)
def test_loader_gives_each_item_once_when_workers_are_not_forked(context: str, workers: int, front: str) -> None:
    """Spawned and fork-served workers behave as forked ones, in any number."""
    orders = epochs(uneven_pipe(), front=front, num_workers=workers, multiprocessing_context=context)
    assert all(sorted(order) == items_of(SIZES) for order in orders)
    assert distinct(orders) == 3
    assert children() == set()


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loader_seeds_pipes_alike_before_the_split_and_apart_after_it(workers: int, front: str) -> None:
    """Upstream of the native sharding_filter all workers have one seed, downstream each has its own."""
    pipe = SeedTeller(SeedTeller(IterableWrapper(range(12))).sharding_filter())
    for order in epochs(pipe, 2, front=front, num_workers=workers, seed=1):
        before = {inner[1] for inner, _, _ in order}
        after = {seed for _, seed, _ in order}
        assert len(before) == 1
        assert len(after) == workers
        assert not before & after


def global_draws(item: Any) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_seeds_the_global_generators_when_workers_start_an_epoch(front: str) -> None:
    """Python's, numpy's and torch's generators differ between workers and epochs, and repeat with the seed."""
    pipe = IterableWrapper(range(8)).sharding_filter().map(global_draws)
    found = epochs(pipe, 2, front=front, num_workers=2, seed=1)
    for kind in range(3):
        assert len({draws[kind] for order in found for draws in order}) == 16
    assert epochs(pipe, 2, front=front, num_workers=2, seed=1) == found


@pytest.mark.parametrize("front", FRONTS)
def test_loader_leaves_the_global_generators_alone_when_nothing_runs_in_workers(front: str) -> None:
    """front=front, num_workers=0 does not touch the generators that the training itself may use."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    epochs(uneven_pipe(), 2, front=front, num_workers=0, seed=4)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_seeds_pipes_of_the_main_process_when_they_follow_the_border(front: str) -> None:
    """A stage behind join_workers is seeded anew each epoch, apart from all workers."""
    pipe = SeedTeller(SeedTeller(IterableWrapper(range(4)).sharding_filter()).join_workers())
    first, second = epochs(pipe, 2, front=front, num_workers=2, seed=1)
    seeds = [{seed for _, seed, _ in order} for order in (first, second)]
    assert [len(found) for found in seeds] == [1, 1]
    assert seeds[0] != seeds[1]
    assert not seeds[0] & {inner[1] for inner, _, _ in first}
    assert {worker for _, _, worker in first} == {None}
    assert {inner[2] for inner, _, _ in first} == {0, 1}


def worker_place(item: Any) -> tuple[int, int] | None:
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else None


@pytest.mark.parametrize("front", FRONTS)
def test_loader_sets_worker_info_when_a_stage_runs_in_a_worker(front: str) -> None:
    """torch.utils.data.get_worker_info() tells each worker its number, and is None in the main process."""
    pipe = IterableWrapper(range(4)).sharding_filter().map(worker_place)
    assert epochs(pipe, 1, front=front, num_workers=2) == [[(0, 2), (1, 2), (0, 2), (1, 2)]]
    assert epochs(pipe, 1, front=front, num_workers=0) == [[None] * 4]


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_runs_each_branch_in_workers_when_several_are_joined(front: str) -> None:
    """Two joined branches, zipped, have two sets of workers, and each gives all its items once."""
    left = IterableWrapper(range(10)).shuffle().sharding_filter().map(with_pid).join_workers()
    right = IterableWrapper(range(10)).shuffle().sharding_filter().map(with_pid).join_workers()
    for order in epochs(left.zip(right), front=front, num_workers=2, seed=1):
        lefts, rights = zip(*order, strict=True)
        assert sorted(item for item, _ in lefts) == sorted(item for item, _ in rights) == list(range(10))
        assert [item for item, _ in lefts] != [item for item, _ in rights]
        assert len({pid for _, pid in lefts + rights}) == 4
    assert children() == set()


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_keeps_a_side_branch_in_the_main_process_when_only_the_other_is_joined(front: str) -> None:
    """Labels zipped to a joined stream are read once, not once per worker."""
    pipe = IterableWrapper(range(6)).sharding_filter().join_workers().zip(IterableWrapper("abcdef"))
    assert epochs(pipe, 2, front=front, num_workers=3) == [list(zip(range(6), "abcdef", strict=True))] * 2


@pytest.mark.parametrize("front", FRONTS)
def test_loader_rebatches_when_stages_stand_on_both_sides_of_the_border(front: str) -> None:
    """Batches of the workers' are taken apart and batched anew over all workers, and nothing is lost."""
    for order in epochs(uneven_pipe().batch(4).join_workers().unbatch().batch(5), front=front, num_workers=2):
        assert [len(batch) for batch in order] == [5] * 6 + [1]
        assert sorted(item for batch in order for item in batch) == items_of(SIZES)


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_orders_anew_when_the_main_process_cycles_over_the_workers(front: str) -> None:
    """A stage that reads the joined stream several times gets all items each time, in other orders."""
    (order,) = epochs(uneven_pipe().join_workers().cycle(3), 1, front=front, num_workers=2)
    passes = [order[start : start + 31] for start in (0, 31, 62)]
    assert all(sorted(items) == items_of(SIZES) for items in passes)
    assert distinct(passes) == 3


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("tail", ["join_workers", "prefetch"])
def test_loader_gives_no_stale_items_when_an_epoch_was_broken_off(tail: str, front: str) -> None:
    """After a break the next epoch is whole, even if a thread of the main process was reading ahead."""
    pipe = uneven_pipe().join_workers()
    pipe = pipe.prefetch(5) if tail == "prefetch" else pipe
    with loader_of(pipe, front=front) as loader:
        for taken in (1, 3, 0, 7):
            stream = iter(loader)
            for _ in range(taken):
                next(stream)
            assert sorted(loader) == items_of(SIZES)


@pytest.mark.parametrize("front", FRONTS)
def test_loader_gives_one_epoch_when_iter_is_called_repeatedly(front: str) -> None:
    """iter() without next() begins no new epoch, and the items come once."""
    with loader_of(uneven_pipe(), front=front) as loader:
        iter(loader)
        iter(loader)
        assert sorted(iter(loader)) == items_of(SIZES)


def test_service_serves_several_loaders_when_it_is_given_to_each() -> None:
    """DataLoader2 takes a copy: one service object may be given to two loaders that run at once."""
    service = pickle.loads(pickle.dumps(WorkersReadingService(1)))
    with (
        DataLoader2(IterableWrapper(range(5)), reading_service=service) as one,
        DataLoader2(IterableWrapper("abcde"), reading_service=service) as two,
    ):
        assert list(zip(one, two, strict=True)) == list(zip(range(5), "abcde", strict=True))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
        ({"num_workers": "2"}, TypeError, "num_workers must be a whole number"),
        ({"num_workers": True}, TypeError, "num_workers must be a whole number"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1"),
        ({"prefetch_factor": 1.5}, TypeError, "prefetch_factor must be a whole number"),
        ({"multiprocessing_context": "thread"}, ValueError, "fork.*spawn.*forkserver"),
        ({"multiprocessing_context": 3}, TypeError, "fork.*spawn.*forkserver"),
        ({"timeout": -1}, ValueError, "timeout must be 0"),
        ({"timeout": "1"}, TypeError, "timeout must be a number"),
        ({"distributed": 1}, TypeError, "distributed must be True or False"),
        ({"seed": -1}, ValueError, "seed must be 0 to 18446744073709551615, not -1"),
        ({"seed": 2**64}, ValueError, "seed must be 0 to 18446744073709551615, not 18446744073709551616"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number"),
    ],
)
def test_service_says_what_is_valid_when_an_argument_is_not(options: Any, error: type[Exception], says: str) -> None:
    """A wrong argument is an error of the constructor."""
    with pytest.raises(error, match=says):
        WorkersReadingService(**{"num_workers": 2, **options})


def test_service_takes_the_largest_seed_when_it_is_a_numpy_number() -> None:
    """Seeds are uint64 and may come from numpy."""
    options = {"num_workers": np.int64(1), "seed": np.uint64(2**64 - 1)}
    assert distinct(epochs(uneven_pipe(), 2, **options)) == 2


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_runs_a_dispatching_graph_in_the_main_process(
    workers: int, front: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands before sharding_round_robin_dispatch runs once, and no item is doubled or lost; a warning says so."""
    from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

    dealt = IterableWrapper([(0, 3), (1, 2)]).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    assert epochs(dealt.flatmap(expand), 2, front=front, num_workers=workers) == [items_of((3, 2))] * 2
    joined = dealt.flatmap(expand).map(with_pid).join_workers().map(with_pid)
    assert epochs(joined, 1, front=front, num_workers=workers) == [
        [((item, os.getpid()), os.getpid()) for item in items_of((3, 2))]
    ]
    warnings = [record for record in caplog.records if "write .sharding_filter() instead" in record.getMessage()]
    assert bool(warnings) == bool(workers)


@pytest.mark.slow
def test_service_explains_itself_when_torchdata_is_missing() -> None:
    """Without torchdata the package imports, and only asking for the service is an error that says why."""
    done = run_script(
        "import sys; sys.modules['torchdata'] = None\n"
        "import torchdata_wds\n"
        "try: torchdata_wds.workers.service\n"
        "except AttributeError: pass\n"
        "import torchdata_wds.workers.service"
    )
    assert done.returncode == 1
    assert "WorkersReadingService needs torchdata 0.9" in done.stderr
    assert "libcurl.so.4" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_service_prints_no_banner_when_workers_start(context: str) -> None:
    """Neither the main process nor a worker prints torchdata's announcement, and nothing warns."""
    done = run_script(
        "import sys\n"
        "from torchdata_wds.workers.service import WorkersReadingService\n"
        "from torchdata.dataloader2 import DataLoader2\n"
        "from torchdata.datapipes.iter import IterableWrapper\n"
        "pipe = IterableWrapper(range(4)).sharding_filter().prefetch(2)\n"
        "loader = DataLoader2(pipe, reading_service=WorkersReadingService(1, multiprocessing_context=sys.argv[1]))\n"
        "print(list(loader))\n",  # no shutdown either: the interpreter's end does it
        context,
    )
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3]\n", "")


def test_service_says_how_to_pass_it_when_it_is_taken_for_an_adapter() -> None:
    """DataLoader2's second argument by position is another."""
    with pytest.raises(TypeError, match=r"reading_service=WorkersReadingService\(num_workers\)"):
        DataLoader2(uneven_pipe(), WorkersReadingService(2))
