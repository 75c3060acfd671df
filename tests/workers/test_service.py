"""Both loaders: every item once, a new order every epoch, the same again from the same seed."""

import os
import pickle
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from tests.kits.workers_kit import (
    FRONTS_QUICK,
    SIZES,
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
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
@pytest.mark.parametrize("sizes", [(10, 1), (9, 6, 3), SIZES, (0, 0)])
def test_loader_gives_each_item_once_when_streams_are_uneven(workers: int, sizes: tuple[int, ...], front: str) -> None:
    """Streams of any length, even none at all, and more workers than sources lose and double nothing."""
    for order in epochs(uneven_pipe(sizes), front=front, num_workers=workers):
        assert sorted(order) == items_of(sizes)


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_orders_alike_when_one_worker_or_none_runs(front: str) -> None:
    """front=front, num_workers=0 is the order of one worker, also with stages after it in the main process."""
    pipe = uneven_pipe().shuffle(buffer_size=5).join_workers().shuffle(buffer_size=5)
    assert epochs(pipe, front=front, num_workers=0, seed=3) == epochs(pipe, front=front, num_workers=1, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(("front", "workers"), [("loader", 1), ("service", 3)])
def test_loader_gives_each_item_once_when_a_server_forks_the_workers(workers: int, front: str) -> None:
    """They behave as others, in any number."""
    orders = epochs(uneven_pipe(), front=front, num_workers=workers, multiprocessing_context="forkserver")
    assert all(sorted(order) == items_of(SIZES) for order in orders)
    assert distinct(orders) == 3
    assert children() == set()


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
