"""How items cross from the workers to the main process: whole, in their place, in time, and at little cost."""

import gc
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import open_files
from tests.kits.workers_kit import SIZES, engine_of, items_of, loader_of, run_script, uneven_pipe
from torchdata_wds import wds_collate
from torchdata_wds.workers.processes import pool as pools
from torchdata_wds.workers.processes.messages import Receiver


def image(number: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], int, bytes]:
    """An image as a tensor and as an array, its number, and bytes; 24 kB each."""
    array = np.full((3, 64, 128), number % 251, np.uint8)
    return torch.from_numpy(array), array, number, bytes([number % 251]) * 24_000


def image_batches(count: int) -> IterDataPipe:
    return IterableWrapper(range(count)).sharding_filter().map(image).batch(8).collate(wds_collate)


def assert_whole(batch: Any) -> None:
    tensors, arrays, numbers, texts = batch
    assert tensors.shape == arrays.shape == (len(numbers), 3, 64, 128)
    for row, number in enumerate(numbers.tolist()):
        fill = number % 251
        assert bool((tensors[row] == fill).all())
        assert bool((arrays[row] == fill).all())
        assert texts[row] == bytes([fill]) * 24_000


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_stay_as_they_are_when_they_are_kept(context: str) -> None:
    """Batches that the main process keeps, some of them and some only in part, do not change as others come."""
    with loader_of(image_batches(640), multiprocessing_context=context) as loader:
        for _ in range(2):
            kept: list[Any] = []
            for batch in loader:
                assert_whole(batch)
                kept.append(batch)
                if len(kept) > 20:
                    del kept[random.randrange(len(kept))]
            for batch in kept:
                assert_whole(batch)
    for batch in kept:  # and after the workers are gone
        assert_whole(batch)


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


def keep_all(batches: Any) -> Iterator[Any]:
    """A stage of the worker that keeps what it has sent, and sends it again."""
    kept = []
    for batch in batches:
        kept.append(batch)
        yield batch
    yield from kept


@pytest.mark.slow
def test_batches_come_whole_when_the_worker_keeps_and_repeats_them() -> None:
    """Memory that a worker's stage still refers to is not written over."""
    pipe = image_batches(400).wds_compose(keep_all)
    with loader_of(pipe) as loader:
        numbers = []
        for batch in loader:
            assert_whole(batch)
            numbers.extend(batch[2].tolist())
    assert sorted(numbers) == sorted([*range(400)] * 2)


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


def at_odd_times(item: Any) -> Any:
    time.sleep(random.random() ** 8 * 0.02)
    return item


def test_order_does_not_depend_on_when_items_come() -> None:
    """The same seed gives the same order, whatever the messages hold."""
    orders = []
    for pipe in (uneven_pipe(), uneven_pipe().map(at_odd_times), uneven_pipe().map(at_odd_times)):
        with loader_of(pipe, 3, seed=1) as loader:
            orders.append(list(loader))
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == items_of(SIZES)


def then_stuck(item: int) -> int:
    """Waits for longer than any test may take."""
    if item == 3:
        time.sleep(1000)
    return item


@pytest.mark.slow
def test_items_come_in_time_when_the_next_one_does_not(monkeypatch: Any) -> None:
    """What a worker has made does not wait for its next item."""
    monkeypatch.setattr(pools, "GRACE", 0.2)
    with loader_of(IterableWrapper(range(4)).map(then_stuck), 1) as loader:
        stream = iter(loader)
        assert next(stream) == 0
        assert [next(stream), next(stream)] == [1, 2]


def failing(item: int) -> Any:
    if item == 7:
        raise KeyError(item)
    return (lambda: item) if item == 1007 else item


@pytest.mark.parametrize(("start", "error"), [(0, KeyError), (1000, RuntimeError)], ids=["raised", "not picklable"])
def test_items_come_first_when_they_were_made_before_an_error(start: int, error: type[Exception]) -> None:
    """An error has its place among the items, also when they are sent together."""
    found = []
    with pytest.raises(error), loader_of(IterableWrapper(range(start, start + 20)).map(failing), 1) as loader:
        for item in loader:
            found.append(item)
    assert found == list(range(start, start + 7))


made = RawArray("q", 1)


def counted(item: int) -> np.ndarray[Any, Any]:
    made[0] += 1
    return np.full(50_000, item)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.slow
def test_worker_is_ahead_by_so_many_large_items(ahead: int) -> None:
    """Large items are made ahead one by one: prefetch_factor of them, and no more."""
    made[0] = 0
    pipe = IterableWrapper(range(50)).map(counted)
    with loader_of(pipe, 1, prefetch_factor=ahead, multiprocessing_context="fork") as loader:
        stream = iter(loader)
        for taken in (1, 2, 3):
            next(stream)
            time.sleep(0.2)
            assert made[0] == taken + ahead


def thread_count(item: Any) -> int:
    return torch.get_num_threads()


def test_workers_run_torch_in_one_thread() -> None:
    """As in torch's DataLoader, workers do not each take all cores."""
    with loader_of(IterableWrapper([0]).map(thread_count), 1) as loader:
        assert list(loader) == [1]


def info(item: Any) -> tuple[int, int, int]:
    worker = get_worker_info()
    assert worker is not None
    return worker.id, worker.num_workers, worker.seed


def test_workers_know_who_they_are() -> None:
    """get_worker_info says what it says in torch's DataLoader."""
    with loader_of(IterableWrapper(range(4)).sharding_filter().map(info)) as loader:
        first, second, *others = list(loader)
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[2] != second[2]
    assert others == [first, second]


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


class Lost:
    """Notes, in a file, which process finalizes it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.itself = self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


def collect(item: Any) -> Any:
    gc.collect()
    return item


def test_workers_leave_the_garbage_of_the_program_alone(tmp_path: Path) -> None:
    """Its finalizers may wait for threads and locks of the program, which a fork does not have."""
    files = [tmp_path / "0", tmp_path / "1"]
    os.register_at_fork(before=lambda: Lost(files.pop()) if files else None)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with loader_of(IterableWrapper(range(4)).sharding_filter().map(collect)) as loader:
            assert sorted(loader) == [0, 1, 2, 3]
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert not files
    assert [file.read_text().split() for file in tmp_path.iterdir()] == [[str(os.getpid())]] * 2


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
