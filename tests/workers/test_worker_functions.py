"""worker_init_fn and worker_reset_fn, with torchdata's meaning."""

from functools import partial

import pytest

from tests.kits.pool_suite.service import Teller, init, numbers, reset
from tests.kits.torchdata import DataLoader2, MultiProcessingReadingService, WorkersReadingService
from tests.kits.workers_kit import loader_of


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


def test_functions_see_each_branch_when_the_main_process_runs_the_graph() -> None:
    """The graph is the same as in a worker, and its stages are found wherever it ends."""
    pipe = Teller(numbers()).join_workers().zip(Teller(numbers()).join_workers())
    with loader_of(pipe, 0, worker_init_fn=init, worker_reset_fn=reset) as loader:
        first, second = next(iter(loader)), next(iter(loader))
    once = (0, (("init", 0, 1), ("reset", 0)))
    twice = (0, (("init", 0, 1), ("reset", 0), ("reset", 0)))
    assert (first, second) == ((once, once), (twice, twice))


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
