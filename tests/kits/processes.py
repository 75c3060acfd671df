"""What this process has open and has started: for tests that nothing is left over."""

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["children", "garbage_at_forks", "in_child", "in_worker", "is_alive", "open_files", "wait_until"]


def children(*, unreaped: bool = False) -> set[int]:
    """Pids of this process's living children, and of dead ones that nobody has waited for if asked.

    multiprocessing's own helpers are left out.
    """
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = _state_and_parent(folder)
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        is_helper = b"resource_tracker" in command or b"forkserver" in command
        if parent == os.getpid() and not is_helper and (state != "Z" or unreaped):
            found.add(int(folder.name))
    return found


def _state_and_parent(folder: Path) -> tuple[str, int]:
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie has ended."""
    try:
        return _state_and_parent(Path(f"/proc/{pid}"))[0] != "Z"
    except OSError:
        return False


def open_files(*, collect: bool = True) -> int:
    """How many descriptors this process has open; garbage of other tests is collected first.

    Compare with ``<=``: threads of earlier tests may close theirs in the meantime.
    """
    if collect:
        gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> bool:
    """Whether a condition comes true; the time is a guard against hanging, wide enough for any machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does some work: 0 if it raised nothing."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_worker(work: Callable[[], str]) -> str:
    """What a function returns in a process that multiprocessing has forked."""
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    worker = context.Process(target=lambda: answers.put(work()))
    worker.start()
    worker.join(300)
    assert worker.exitcode == 0
    answer = answers.get()
    worker.close()
    answers.close()
    return answer


class _Lost:
    """Notes which process finalizes it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.itself = self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@contextmanager
def garbage_at_forks(count: int) -> Iterator[None]:
    """Makes garbage before each of the next forks, of which at least `count` follow; only this process finalizes it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(count)]
        os.register_at_fork(before=lambda: _Lost(files.pop()) if files else None)
        thresholds = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
        gc.collect()
        assert not files
        assert [file.read_text().split() for file in Path(folder).iterdir()] == [[str(os.getpid())]] * count
