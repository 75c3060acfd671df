"""How items cross from the workers to the main process: whole, in their place, in time, and at little cost."""

import gc
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.items import assert_whole, image_batches
from tests.kits.processes import garbage_at_forks, open_files
from tests.kits.workers_kit import engine_of, loader_of, run_script
from torchdata_wds import wds_collate
from torchdata_wds.workers.processes.messages import Receiver


@pytest.mark.slow
def test_batches_stay_as_they_are_when_all_are_kept() -> None:
    """More batches than shared memory is kept for come whole, all at once."""
    with loader_of(image_batches(8 * 700), 1) as loader:
        batches = list(loader)
    assert sum(len(batch[2]) for batch in batches) == 5600
    for batch in batches:
        assert_whole(batch)


def segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:torchdata_wds")


@pytest.mark.slow
def test_memory_is_used_again_when_batches_are_dropped() -> None:
    """An epoch of many batches takes as much shared memory as a few of them."""
    gc.collect()
    before, mapped = open_files(), segments()
    with loader_of(image_batches(800)) as loader:
        for batch in loader:
            assert_whole(batch)
        del batch
        assert 0 < segments() - mapped <= 30  # three a batch, for those that are ahead and the one in hand
    del loader
    gc.collect()
    assert open_files() <= before


@pytest.mark.slow
def test_rows_stay_as_they_are_when_batches_are_taken_apart() -> None:
    """Samples shuffled and batched anew in the main process keep the memory that they were sent in."""
    pipe = image_batches(400).join_workers().wds_unbatch().wds_shuffle(100).batch(10).collate(wds_collate)
    with loader_of(pipe) as loader:
        numbers = []
        for batch in loader:
            assert_whole(batch)
            numbers.extend(batch[2].tolist())
    assert sorted(numbers) == list(range(400))


def files_of_worker(loader: Any) -> int:
    pid = engine_of(loader).graph.runs[0]._links[0]._process.pid
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def shared(number: int) -> torch.Tensor:
    return torch.full((10,), number).share_memory_()


@pytest.mark.slow
def test_workers_hold_no_files_when_shared_tensors_are_dropped() -> None:
    """What torch keeps open for tensors in shared memory is closed also when nobody wants them any more."""
    with loader_of(IterableWrapper(range(60)).map(shared), 1) as loader:
        next(iter(loader))
        before = files_of_worker(loader)
        for _ in range(40):
            next(iter(loader))
        assert len(list(loader)) == 60
        assert files_of_worker(loader) <= before + 10


def test_small_items_cross_together(monkeypatch: Any) -> None:
    """A thousand numbers come in a fraction as many messages, every one of them in its turn."""
    received = []
    receive = Receiver.receive
    monkeypatch.setattr(Receiver, "receive", lambda *args: received.append(1) or receive(*args))
    with loader_of(IterableWrapper(range(2000)).sharding_filter()) as loader:
        assert list(loader) == list(range(2000))
    assert len(received) < 500


def thread_count(item: Any) -> int:
    return torch.get_num_threads()


def test_workers_run_torch_in_one_thread() -> None:
    """As in torch's DataLoader, workers do not each take all cores."""
    with loader_of(IterableWrapper([0]).map(thread_count), 1) as loader:
        assert list(loader) == [1]


def refuse_to_end(*_: Any) -> None:
    pass


def test_workers_end_when_the_program_handles_signals() -> None:
    """A handler of the program for SIGTERM, inherited by a fork, does not keep workers alive."""
    before = signal.signal(signal.SIGTERM, refuse_to_end)
    try:
        with loader_of(IterableWrapper(range(4)), multiprocessing_context="fork") as loader:
            next(iter(loader))
            process = engine_of(loader).graph.runs[0]._links[0]._process
            process.terminate()
            process.join(5)
            assert process.exitcode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def slow_tensor(number: int) -> torch.Tensor:
    """A large tensor that the main process has to wait for."""
    time.sleep(0.05)
    return torch.full((50_000, 2), number)


def collect(item: Any) -> Any:
    gc.collect()
    return item


def test_workers_leave_the_garbage_of_the_program_alone() -> None:
    """Its finalizers may wait for threads and locks of the program, which a fork does not have."""
    with garbage_at_forks(2), loader_of(IterableWrapper(range(4)).sharding_filter().map(collect)) as loader:
        assert sorted(loader) == [0, 1, 2, 3]


@pytest.mark.slow
def test_batches_come_whole_when_sockets_have_a_default_timeout() -> None:
    """The program's default for its own sockets does not reach the connections to workers."""
    socket.setdefaulttimeout(30)
    try:
        with loader_of(IterableWrapper(range(6)).sharding_filter().map(slow_tensor)) as loader:
            for _ in range(2):
                assert [int(batch[-1, -1]) for batch in loader] == [*range(6)]
    finally:
        socket.setdefaulttimeout(None)


def test_batches_come_whole_when_the_program_makes_tensors_elsewhere() -> None:
    """The default device is that of the program's own tensors; batches stay on the CPU."""
    with loader_of(IterableWrapper(range(4)).sharding_filter().map(slow_tensor)) as loader:
        items = iter(loader)
        found = [next(items)]
        with torch.device("meta"):
            found += items
    assert [int(batch[-1, -1]) for batch in found] == [*range(4)]


HOLDER = """
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import WdsLoader
tensors = [torch.full((50_000,), number) for number in range(4)]
batches = iter(WdsLoader(IterableWrapper(tensors).sharding_filter(), 2))
first, torch.second, cycle = next(batches), next(batches), [next(batches)]
cycle.append(cycle)
"""


@pytest.mark.slow
def test_the_program_ends_quietly_when_it_holds_batches() -> None:
    """Shared memory may be held until the very end, by a module and by a cycle."""
    done = run_script(HOLDER)
    assert (done.returncode, done.stderr) == (0, "")
