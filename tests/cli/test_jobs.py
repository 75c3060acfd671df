"""Processes that work on items: one of them may die, and none is left."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.processes import children, garbage_at_forks, is_alive, open_files, wait_until
from torchdata_wds.cli.jobs import map_in_order, run_in_processes


@pytest.fixture(scope="module", autouse=True)
def _no_process_left() -> Iterator[None]:
    """None that runs or waits to be reaped: once for all tests, since looking takes longer than most of them."""
    if multiprocessing.get_start_method() == "forkserver":  # as on Linux from Python 3.14 on: its own process stays
        forkserver.ensure_running()
    running = children(unreaped=True)
    yield
    assert children(unreaped=True) == running


@pytest.fixture(autouse=True)
def _no_file_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for that of multiprocessing's own helper for spawned processes, which stays."""
    if "spawn" in request.node.name:
        yield
        return
    before = open_files(collect=False)
    yield
    assert open_files(collect=False) <= before


def run(work: Any, count: int, num_workers: int, **options: Any) -> dict[int, str]:
    """The results by item; each came once."""
    results = list(run_in_processes(work, range(count), num_workers, **options))
    assert sorted(item for item, _ in results) == list(range(count))
    return dict(results)


def double(item: int) -> str:
    return str(2 * item)


def collect(item: int) -> str:
    gc.collect()
    return str(item)


def test_processes_leave_the_garbage_of_the_program_alone() -> None:
    """Its finalizers may wait for threads and locks of the program, which a fork does not have."""
    with garbage_at_forks(2):
        assert run(collect, 3, 2, start_method="fork") == {0: "0", 1: "1", 2: "2"}


def where(folder: Path, item: int) -> str:
    """Waits until both workers have begun something, and says which process this is."""
    (folder / str(os.getpid())).touch()
    assert wait_until(lambda: len(list(folder.iterdir())) == 2)
    return f"{os.getpid()} {torch.get_num_threads()}"


def die(how: str, item: int) -> str:
    """Dies at the item 2."""
    if item == 2:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die_in_company(folder: Path, item: int) -> str:
    """Dies, and leaves a child that has its files open."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    (folder / "pid").write_text(str(child.pid))
    os._exit(3)


def wait_for_ever(folder: Path, item: int) -> str:
    """Says that it has begun, and whether it could tidy up."""
    try:
        (folder / f"begun-{item}").touch()
        time.sleep(1000)
    finally:
        (folder / f"tidied-{item}").touch()
    return ""


@pytest.mark.parametrize("num_workers", [1, 9])
def test_every_item_is_worked_on_once(num_workers: int) -> None:
    """However many workers there are; none for nothing."""
    assert run(double, 5, num_workers) == {item: str(2 * item) for item in range(5)}
    assert run(double, 0, num_workers) == {}


@pytest.mark.slow
def test_every_item_is_worked_on_once_when_processes_are_spawned() -> None:
    """What a worker needs is pickled."""
    assert run(double, 3, 1, start_method="spawn") == {0: "0", 1: "2", 2: "4"}


def test_workers_are_processes_that_stay(tmp_path: Path) -> None:
    """As many as asked for, each with a single thread for torch."""
    processes = set(run(partial(where, tmp_path), 6, 2).values())
    assert len(processes) == 2
    assert {text.partition(" ")[2] for text in processes} == {"1"}
    assert str(os.getpid()) not in {text.partition(" ")[0] for text in processes}


@pytest.mark.parametrize(
    ("how", "said", "num_workers"),
    [("exit", "exit status 3", 1), ("kill", "signal SIGKILL, perhaps because the system ran out of memory", 2)],
)
def test_only_its_item_fails_when_a_worker_dies(how: str, said: str, num_workers: int) -> None:
    """Another takes its place."""
    results = run(partial(die, how), 6, num_workers)
    assert results.pop(2) == f"its worker process ended with {said}"
    assert set(results.values()) == {"done"}


def test_death_is_noticed_when_a_child_holds_the_line_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own child lives on."""
    monkeypatch.setattr("torchdata_wds.cli.jobs.CHECK_INTERVAL", 0.1)
    assert run(partial(die_in_company, tmp_path), 1, 1) == {0: "its worker process ended with exit status 3"}
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_workers_end_when_nobody_wants_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are busy can tidy up, however long that takes here."""
    monkeypatch.setattr("torchdata_wds.cli.jobs.PATIENCE", 0.1)
    monkeypatch.setattr("torchdata_wds.cli.jobs.GRACE", 300)

    def work(item: int) -> str:
        return "first" if item == 0 else wait_for_ever(tmp_path, item)

    results = run_in_processes(work, range(9), 2, start_method="fork")
    assert next(results) == (0, "first")
    assert wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    results.close()
    assert sorted(path.name for path in tmp_path.glob("tidied-*")) == ["tidied-1", "tidied-2"]


def test_workers_end_when_they_heed_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word is SIGKILL."""
    monkeypatch.setattr("torchdata_wds.cli.jobs.PATIENCE", 0.1)
    monkeypatch.setattr("torchdata_wds.cli.jobs.GRACE", 0.1)

    def work(item: int) -> str:
        if item:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "begun").touch()
            time.sleep(1000)
        return ""

    results = run_in_processes(work, range(3), 1, start_method="fork")
    next(results)
    assert wait_until((tmp_path / "begun").exists)
    results.close()


def test_workers_are_quiet_when_interrupted_while_they_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by Ctrl-C, which comes to them too: no traceback of multiprocessing."""
    bootstrap = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def interrupted(process: BaseProcess, *arguments: Any, **options: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return bootstrap(process, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(BaseProcess, "_bootstrap", interrupted)
    results = run(str, 2, 2, start_method="fork")
    assert results == dict.fromkeys(range(2), "its worker process ended with exit status 130 (perhaps SIGINT)")
    assert capfd.readouterr() == ("", "")


SCRIPT = """
import os, sys, time
from torchdata_wds.cli.jobs import run_in_processes

def work(item):
    if item == 0:
        return "first"
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(1 if item == 1 else 1000)
    return ""

for _ in run_in_processes(work, range(9), 2, start_method="fork"):
    print("one", flush=True)
"""


@pytest.mark.slow
def test_idle_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """What is being worked on is finished first, and then there is nobody to send it to."""
    script = SCRIPT.replace("1000", "2")
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n"
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_until(lambda: not any(is_alive(int(path.name)) for path in tmp_path.iterdir()))


# ------------------------------------------------------------------------------------------------------- in their order
def number_and_process(number: int) -> tuple[int, int]:
    """Takes longer for the first ones."""
    if number == 13:
        raise ValueError("no luck")
    time.sleep(0.02 if number < 2 else 0)
    return number, os.getpid()


def kill_itself(number: int) -> int:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_map_in_order_starts_no_process_for_one() -> None:
    """One process, one item or none."""
    for items, processes in (([1, 2], 1), ([3], 8), ([], 8)):
        assert list(map_in_order(number_and_process, items, processes)) == [(item, os.getpid()) for item in items]


@pytest.fixture
def _forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks processes although this one has threads, those of pytest-xdist; spawned ones take seconds to start."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "fork")
    monkeypatch.setattr("torchdata_wds.cli.jobs.threading.active_count", lambda: 1)


@pytest.mark.usefixtures("_forking")
def test_map_in_order_keeps_the_order_on_several_processes() -> None:
    """More items than are handed out at once; an error comes in its turn, and nothing is left running."""
    threads = threading.enumerate()
    items = [*range(10), *range(20, 40)]
    results = list(map_in_order(number_and_process, items, 2))
    assert [number for number, _ in results] == items
    assert os.getpid() not in {process for _, process in results}
    given = []
    with pytest.raises(ValueError, match="no luck"):
        for number, _ in map_in_order(number_and_process, [0, 1, 13, 2], 2):
            given.append(number)
    assert given == [0, 1]
    assert set(threading.enumerate()) <= set(threads)


@pytest.mark.usefixtures("_forking")
def test_map_in_order_raises_when_a_process_is_killed() -> None:
    """And does not wait for ever."""
    with pytest.raises(RuntimeError, match=r"item 1 of 3 .* SIGKILL"):
        list(map_in_order(kill_itself, [1, 2, 3], 2))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.usefixtures("_forking")
def test_map_in_order_ends_its_processes_when_it_is_closed() -> None:
    """Also those that are at a long item."""
    results = map_in_order(time.sleep, [0, 3600, 3600], 2)
    assert next(results) is None
    assert len(multiprocessing.active_children()) == 2
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
