"""Workers that die, hang, raise, or are left alone: an error that says so, never a hang, no process left."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children, in_child, is_alive, open_files, wait_until
from tests.kits.workers_kit import (
    FRONTS,
    FRONTS_QUICK,
    ROOT,
    engine_of,
    loader_of,
    uneven_pipe,
    with_pid,
)
from torchdata_wds.storage import open_shard


def in_worker_one(item: int) -> bool:
    worker = get_worker_info()
    return worker is not None and worker.id == 1 and item > 4


def killed(item: int) -> int:
    if in_worker_one(item):
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def exited(item: int) -> int:
    if in_worker_one(item):
        os._exit(0)
    return item


def exited_badly(item: int) -> int:
    if in_worker_one(item):
        sys.exit(3)
    return item


def exited_while_sending(item: int) -> bytes:
    """Ends the process while its other thread is likely to be writing the large item before."""
    if in_worker_one(item):
        os._exit(0)
    return bytes(10_000_000)


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        (killed, "killed by SIGKILL"),
        (exited, "exit code 0"),
        (exited_badly, "exit code 3"),
        (exited_while_sending, "exit code 0"),
    ],
)
@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize(
    "in_thread", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["main thread", "prefetch thread"]
)
def test_loader_names_the_worker_when_it_dies(fault: Any, how: str, in_thread: bool, front: str) -> None:
    """A dead worker is a RuntimeError with its number, pid and exit, whichever thread reads; nothing is left."""
    pipe = IterableWrapper(range(100)).sharding_filter().map(fault)
    loader = loader_of(pipe.join_workers().prefetch(2) if in_thread else pipe, front=front)
    with pytest.raises(RuntimeError, match=rf"worker 1 of 2 \(pid \d+\) .*{how}"):
        list(loader)
    loader.shutdown()
    assert wait_until(lambda: not children())


def waits_once(item: int) -> int:
    """Waits for a second in the first epoch."""
    if item == 3 and not hasattr(waits_once, "has_waited"):
        waits_once.has_waited = True  # type: ignore[attr-defined]
        time.sleep(1)
    return item


def too_late(*_: Any) -> None:
    raise TimeoutError("too late")


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_goes_on_when_a_signal_handler_ends_a_wait(front: str) -> None:
    """The program's own time limit is not taken for the end of a worker. DataLoader2 shuts down at any exception."""
    before = signal.signal(signal.SIGUSR1, too_late)
    try:
        with loader_of(IterableWrapper(range(8)).sharding_filter().map(waits_once), front=front) as loader:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(TimeoutError, match="too late"):
                list(loader)
            if front == "loader":
                assert sorted(loader) == list(range(8))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_loader_names_the_worker_when_it_dies_between_epochs(front: str) -> None:
    """A worker killed after an epoch is found at the start of the next, and shutdown still works."""
    loader = loader_of(IterableWrapper(range(4)).sharding_filter().map(with_pid), front=front)
    pids = [pid for _, pid in loader]
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pids[1]))
    with pytest.raises(RuntimeError, match=rf"worker 1 of 2 \(pid {pids[1]}\) was killed by SIGKILL"):
        list(loader)
    loader.shutdown()


class Endless(IterDataPipe):
    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        while True:
            yield bytes(1000), os.getpid()


@pytest.mark.parametrize(
    ("front", "make"),
    [
        ("loader", lambda: uneven_pipe().join_workers().prefetch(3)),
        pytest.param("service", lambda: uneven_pipe().join_workers().prefetch(3), marks=pytest.mark.slow),
        pytest.param("service", uneven_pipe, marks=pytest.mark.slow),
        pytest.param("loader", Endless, marks=pytest.mark.slow),
    ],
)
def test_loader_leaves_nothing_behind_when_epochs_are_broken_off(make: Callable[[], IterDataPipe], front: str) -> None:
    """Twenty early breaks in two loaders end with the files and processes of the beginning."""
    pipe = make()
    with loader_of(pipe, front=front) as loader:
        next(iter(loader))
    gc.collect()
    before = open_files()
    for _ in range(2):
        with loader_of(pipe, front=front) as loader:
            for taken in (1, 4, 2, 1, 9, 3, 0, 1, 5, 2):
                stream = iter(loader)
                for _ in range(taken):
                    next(stream)
    del loader, stream
    gc.collect()
    assert wait_until(lambda: not children())
    assert open_files() <= before


ORPHANS = """
import sys, time
from tests.kits.workers_kit import loader_of
from tests.workers.test_faults import Endless, forever_stuck
from torch.utils.data.datapipes.iter import IterableWrapper

if __name__ == "__main__":
    options = {"multiprocessing_context": sys.argv[1], "prefetch_factor": 1000, "front": sys.argv[3]}
    pipes = Endless(), IterableWrapper(["", sys.argv[2]]).map(forever_stuck)
    streams = [iter(loader_of(pipe, **options)) for pipe in pipes]
    print(*[next(stream)[1] for stream in streams for _ in range(2)], flush=True)
    time.sleep(100)
"""


def forever_stuck(command: str) -> tuple[bytes, int]:
    if command:
        with open_shard(f"pipe:{command}") as stream:
            return stream.read(1), os.getpid()
    return b"", os.getpid()


def running(command: str) -> list[int]:
    words = command.replace(" ", "\0").encode()
    return [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/cmdline") if words in _bytes(file)]


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has just ended
        return b""


@pytest.mark.parametrize(
    ("front", "context"), [("service", "fork"), ("loader", "fork"), ("loader", "spawn"), ("loader", "forkserver")]
)
@pytest.mark.slow
def test_workers_end_when_the_main_process_is_killed(tmp_path: Path, front: str, context: str) -> None:
    """No worker outlives a killed main process, stuck before a full pipe or in a command, nor the command."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    sleep = f"sleep 1000.{os.getpid()}"
    command = [sys.executable, str(script), context, sleep, front]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as main:
        assert main.stdout is not None
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(set(pids)) == 4
        assert wait_until(lambda: len(running(sleep)) >= 2)
        time.sleep(0.3)  # for the pipe to fill
        main.kill()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids) and not running(sleep))


def reading(url: str) -> bytes:
    with open_shard(url) as stream:
        return bytes(stream.read(6))


@pytest.mark.parametrize("front", FRONTS_QUICK)
def test_commands_of_a_worker_end_when_it_is_killed(tmp_path: Path, front: str) -> None:
    """The system kills workers when memory runs out; what they read from ends at once, while the main process lives."""
    pids = tmp_path / "pids"
    url = f"pipe:sleep 1000 & echo $$ $! > {pids}; wait"
    with loader_of(IterableWrapper([url]).map(reading), 1, front=front) as loader:
        items = iter(loader)

        def wait_for_item() -> None:
            with suppress(RuntimeError):  # that the worker has died
                next(items)

        waiting = threading.Thread(target=wait_for_item)
        waiting.start()
        assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        time.sleep(0.1)
        os.kill(engine_of(loader).graph.runs[0]._links[0]._process.pid, signal.SIGKILL)
        assert wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
        waiting.join(20)


@pytest.mark.parametrize("front", FRONTS)
def test_loader_refuses_when_a_forked_process_iterates_it(front: str) -> None:
    """A child cannot take items away from its parent, neither of the running epoch nor by beginning another."""
    with loader_of(IterableWrapper(range(6)).sharding_filter(), front=front) as loader:
        items = iter(loader)
        first = next(items)

        def iterate() -> None:
            with pytest.raises(RuntimeError, match=r"was forked.*Make a separate loader"):
                next(items)

        def begin() -> None:
            with pytest.raises(RuntimeError, match="was forked"):
                list(loader)

        assert (in_child(iterate), in_child(begin)) == (0, 0)
        assert [first, *items] == [*range(6)]
        assert list(loader) == [*range(6)]
