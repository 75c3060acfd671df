"""A training loop that waits long for an item: what the warning says, when it comes, and ``timeout=``."""

import ctypes
import linecache
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.shards import tar_bytes
from tests.kits.workers_kit import FRONTS, engine_of, loader_of, time_limit
from torchdata_wds.process_place import Place
from torchdata_wds.workers.processes import link, worker
from torchdata_wds.workers.stats.stalls import stack_file
from torchdata_wds.workers.stats.stalls.stack_file import SIGNAL, StackFile, collect
from torchdata_wds.workers.stats.stalls.stack_text import shortened, stacks_in, working
from torchdata_wds.workers.stats.stalls.watch import StallWatch
from torchdata_wds.workers.stats.stalls.worker_states import WorkerState

_LOCK = threading.Lock()
_STUCK = multiprocessing.get_context("fork").Semaphore(0)  # counts the workers that are about to get stuck
LOGGER = "torchdata_wds.workers.stats.stalls.worker_states"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stuck workers that are forked end at once, and those that do not are killed soon."""
    monkeypatch.setattr(worker, "GRACE", 0.01)
    monkeypatch.setattr(worker, "CHECK_INTERVAL", 0.02)
    monkeypatch.setattr(link, "_PATIENCE", 0.1)
    monkeypatch.setattr(stack_file, "_LOOK", 0.02)
    monkeypatch.setattr(stack_file, "_ANSWER", 30)
    monkeypatch.setattr(stack_file, "_SIGNALLED", 30)


def take_twice(item: int) -> int:
    if item < 2:
        return item
    with _LOCK:
        _STUCK.release()
        _LOCK.acquire()  # never returns
    return item


def hold_interpreter(item: int) -> int:
    _STUCK.release()
    ctypes.PyDLL(None).pause()  # the signal ends it, but nothing else
    ctypes.PyDLL(None).pause()
    return item


def stop_itself(item: int) -> int:
    if get_worker_info().id == 1:
        _STUCK.release()
        os.kill(os.getpid(), signal.SIGSTOP)
    return take_twice(item + 2)


class Ahead(IterDataPipe):
    """Waits for a thread, which gets stuck."""

    def __init__(self, source_datapipe: IterDataPipe) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        thread = threading.Thread(target=take_twice, args=(2,), daemon=True)
        thread.start()
        thread.join()
        yield from self.source_datapipe


def numbers(count: int = 8) -> Any:
    return IterableWrapper(range(count)).sharding_filter()


def stall_of(
    pipe: Any,
    workers: int = 2,
    *,
    taken: int = 0,
    stuck: int | None = None,
    front: str = "loader",
    context: str = "fork",
    **options: Any,
) -> str:
    """The text of the error of a loader whose workers get stuck, `stuck` of them in functions of this file."""
    times = {"timeout": 0.2, "stall_after": 0, **options}
    with time_limit(60), loader_of(pipe, workers, front=front, multiprocessing_context=context) as loader:
        items = iter(loader)
        for _ in range(taken):
            next(items)
        for _ in range(workers if stuck is None else stuck):
            assert _STUCK.acquire(timeout=50)
        pool = engine_of(loader).graph.runs[0]  # it hurries from now on only: a busy machine starts workers slowly
        pool._watch = StallWatch(Place(), workers, states=pool._watch._states, **times)
        with pytest.raises(RuntimeError, match="timeout=") as caught:
            list(items)
    return str(caught.value)


def line_of(text: str) -> int:
    """The number of a line of this file."""
    lines = linecache.getlines(__file__)
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("front", [FRONTS[1], pytest.param(FRONTS[0], marks=pytest.mark.slow)])
def test_dead_lock_in_a_function_is_named_when_no_item_comes(front: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning and the error have the line that waits; the log has all frames at the level DEBUG."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    with caplog.at_level(logging.DEBUG, LOGGER):
        text = stall_of(numbers().map(take_twice), front=front, timeout=0.25, stall_after=0.15)
    (warning,) = warnings_in(caplog)
    assert re.match(r"no item has come for \d+ s: the training loop waits for worker 0 of 2", warning)
    assert "worker 0 of 2 did not send its next item within timeout=0.25 s" in text
    line = line_of("_LOCK.acquire()")
    for found in (warning, text):
        assert found.count(f'in take_twice, line {line} of "{__file__}"') == 2
        assert found.count(f'File "{__file__}", line {line}, in take_twice\n      _LOCK.acquire()') == 1
        assert "_hook_iterator" not in found
        assert "calls of torch and torchdata_wds outside" in found
    assert "all stacks of worker 0" in caplog.text
    assert "_hook_iterator.py" in caplog.text
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


@pytest.mark.slow
def test_workers_that_wait_are_named_so() -> None:
    """Worker 1 has made all its items."""
    text = stall_of(numbers(3).map(take_twice), stuck=1)
    assert re.search(r"worker 1 \(pid \d+\): has (items ready|made all its items of this epoch)", text)


@pytest.mark.slow
def test_c_code_is_named_when_it_holds_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack needs no Python code to run in the worker."""
    monkeypatch.setattr(stack_file, "_ANSWER", 0.1)
    text = stall_of(numbers().map(hold_interpreter), 1)
    assert f"in hold_interpreter, line {line_of('ctypes.PyDLL(None).pause()')} of" in text


@pytest.mark.slow
def test_stopped_worker_is_named_and_does_not_hold_up_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' stacks are there all the same."""
    monkeypatch.setattr(link, "_PATIENCE", 0)  # it is killed at once
    monkeypatch.setattr(stack_file, "_ANSWER", 0.5)
    text = stall_of(numbers().map(stop_itself))
    stopped = next(line for line in text.splitlines() if line.startswith("worker 1 "))
    assert stopped.endswith("is stopped (SIGSTOP)")
    assert "in take_twice, line" in text


@pytest.mark.slow
def test_other_threads_are_shown_when_a_stage_waits_for_them() -> None:
    """After the main thread's stack."""
    text = stall_of(Ahead(numbers()), 1)
    main, thread = text.split("another thread:")
    assert "thread.join()" in main
    assert "_LOCK.acquire()" in thread


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_dead_lock_is_named_in_workers_that_are_not_forked(context: str) -> None:
    """They get the file for their stacks when they start."""
    text = stall_of(numbers().map(take_twice), 1, context=context, taken=2, stuck=0, timeout=1)
    assert f"in take_twice, line {line_of('_LOCK.acquire()')} of" in text


@pytest.mark.slow
def test_stalled_server_is_named_with_the_stack_in_the_source() -> None:
    """The innermost stage's frames, down to the connection."""
    data = tar_bytes([("a.txt", bytes(1_000_000))])
    site = Site({"/a.tar": data}, plans={"/a.tar": iter([Fault("stall", until=600_000)] * 9)})
    with serve_site(site) as address:
        pipe = IterableWrapper([f"{address}/a.tar?signature=secret"]).sharding_filter().load_wds_shards()
        text = stall_of(pipe, 1, timeout=2, stuck=0)
        site.closing.set()
    found = r"load_wds_shards\(\), http://127.0.0.1:\d+/a.tar\S* at byte 600,000, for \d+ s; waits for its source\n"
    assert re.search(found, text)
    assert "torchdata_wds/storage/sources/http.py" in text
    assert "_hook_iterator" not in text
    assert "secret" not in text


class Clock:
    """Time that passes while a watch waits, and the warnings that it logs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1000.0
        self.asked: list[float] = []  # when the states were asked for
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = StallWatch(Place(4, 1), 1, states=self.states, **{"timeout": 0, "stall_after": 60, **options})

    def states(self) -> list[WorkerState]:
        self.asked.append(self.now)
        return [WorkerState(7, "sleeps")]

    def wait(self, seconds: float) -> None:
        """Waits for a message that comes after some seconds."""
        end = self.now + seconds

        def receive(most: float) -> str | None:
            assert most <= 0.5  # a signal that comes just before a wait is handled after it
            self.now = min(self.now + most, end)
            return "message" if self.now >= end else None

        assert self.watch.wait(0, receive) == "message"


def test_warnings_become_rare_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1, 2, 4 ... times `stall_after`; in a later wait, not earlier than that after the last one."""
    clock = Clock(monkeypatch)
    clock.wait(59.5)
    assert clock.asked == []
    clock.now = 0.0
    clock.wait(1000)
    assert clock.asked == [60, 120, 240, 480, 960]
    clock.wait(100)
    assert len(clock.asked) == 5
    clock.now = 10_000
    clock.wait(61)
    assert clock.asked[5:] == [10_060]


def test_warnings_become_rare_when_every_item_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that takes 70 s is slow, not stuck."""
    clock = Clock(monkeypatch)
    for _ in range(50):
        clock.wait(70)
    assert len(clock.asked) == 6  # in an hour


def test_nothing_is_said_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stall_after=0."""
    clock = Clock(monkeypatch, stall_after=0)
    clock.wait(10_000)
    assert clock.asked == []


def test_rank_is_named_when_there_are_several(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the warning and in the error."""
    clock = Clock(monkeypatch, timeout=90)
    with pytest.raises(RuntimeError, match="rank 1 of 4: worker 0 of 1 did not send its next item within timeout=90 s"):
        clock.wait(100)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("rank 1 of 4: no item has come for 60 s")
    assert warning.endswith("worker 0 (pid 7): sleeps")
    assert clock.now == 1090


def test_nothing_is_said_when_a_thread_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that works ahead may wait while the training loop is busy."""
    clock = Clock(monkeypatch)
    thread = threading.Thread(target=clock.wait, args=(1000,))
    thread.start()
    thread.join()
    assert clock.asked == []


def test_nothing_is_said_when_the_training_loop_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the time in a wait counts, be it for the first item of an epoch."""
    clock = Clock(monkeypatch)
    for _ in range(5):
        clock.wait(50)
        clock.now += 1000
    assert clock.asked == []


@pytest.mark.slow
def test_signal_is_left_alone_when_the_program_uses_it() -> None:
    """A worker inherits the program's handler by a fork, and keeps it; it answers without signals."""
    before = signal.signal(SIGNAL, lambda *_: os._exit(1))
    try:
        text = stall_of(numbers().map(take_twice), 1)
    finally:
        signal.signal(SIGNAL, before)
    assert "in take_twice, line" in text


@pytest.mark.parametrize("by_signal", [False, True])
def test_file_has_what_a_process_wrote_last(by_signal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier answers are dropped; a thread answers, or a signal handler where no thread can."""
    monkeypatch.setattr(stack_file, "_LOOK", 1000 if by_signal else 0.01)
    monkeypatch.setattr(stack_file, "_ANSWER", 0.01 if by_signal else 50)
    file = StackFile()
    try:
        assert file.obstacle == "is still starting"
        process = os.fork()
        if not process:
            file.register()
            time.sleep(1000)
        while file.obstacle:
            time.sleep(0.001)
        texts = [collect([(file, lambda: process)])[0] for _ in range(2)]
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    finally:
        file.close()
    assert [text.count(" in test_file_has_what") for text in texts] == [1, 1]


DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "{stdlib}/concurrent/futures/thread.py", line 81 in _worker

Current thread 0x00007f0000000002 (most recent call first):
  File "{stdlib}/threading.py", line 327 in wait
  File "/home/me/train.py", line 12 in parse
  File "/home/me/train.py", line 34 in decode
  File "{torch}/utils/data/datapipes/iter/callable.py", line 123 in _apply_fn
  File "{torch}/utils/data/datapipes/_hook_iterator.py", line 195 in wrap_generator
  File "/home/me/stages.py", line 5 in __iter__
  File "{torch}/utils/data/datapipes/_hook_iterator.py", line 195 in wrap_generator
  File "{stdlib}/multiprocessing/process.py", line 314 in _bootstrap
  File "/home/me/main.py", line 1 in <module>
"""


def test_stack_is_shortened_to_the_program_functions() -> None:
    """Innermost first, without torch's hooks and without the stack of the process that forked it."""
    torch = str(Path(sys.modules["torch"].__file__ or "").parent)
    stdlib = str(Path(threading.__file__).parent)
    dump = DUMP.format(torch=torch, stdlib=stdlib).replace("/usr/lib/python3.11", stdlib)
    (stack,) = working(stacks_in(dump))
    assert [line.strip() for line in shortened(stack)] == [
        f'File "{stdlib}/threading.py", line 327, in wait',
        'File "/home/me/train.py", line 12, in parse',
        'File "/home/me/train.py", line 34, in decode',
        'File "/home/me/stages.py", line 5, in __iter__',
        "... and 3 calls of torch and torchdata_wds outside",
    ]
