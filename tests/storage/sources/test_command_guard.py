"""Commands end with the process that started them, also when it is killed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kits.processes import children, in_child, is_alive, open_files, wait_until
from torchdata_wds.cli.split import HookCommand
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.sources.command import CommandGuard


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A file in which commands note the processes that they start; whatever is left of these is killed."""
    path = tmp_path / "pids"
    yield path
    for pid in noted(path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def noted(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def sleeping(pids: Path) -> str:
    """A command that runs for long, with a child in the background."""
    return f"sleep 1000 & echo $! $$ >> {pids}; echo ready; wait"


def killed_while(work: Callable[[], object]) -> None:
    """Kills a forked process once it has done some work."""

    def work_and_die() -> None:
        keep = work()
        os.kill(os.getpid(), signal.SIGKILL)
        assert keep

    assert in_child(work_and_die) == -signal.SIGKILL


def are_gone(pids: Path) -> bool:
    assert noted(pids)
    return wait_until(lambda: not any(is_alive(pid) for pid in noted(pids)))


def started(url: str) -> object:
    stream = open_shard(url)
    assert stream.read(6) == b"ready\n"
    return stream


def test_commands_end_when_their_process_is_killed(pids: Path) -> None:
    """With all that they have started, and however many there are."""
    url = f"pipe:{sleeping(pids)}"
    killed_while(lambda: [started(url), started(url)])
    assert len(noted(pids)) == 4
    assert are_gone(pids)


def test_commands_end_when_a_process_that_was_forked_meanwhile_lives_on(pids: Path) -> None:
    """A child of the killed process holds nothing that would keep commands alive."""
    child = pids.with_name("child")

    def start_and_fork() -> object:
        stream = started(f"pipe:{sleeping(pids)}")
        pid = os.fork()
        if not pid:
            time.sleep(1000)
        child.write_text(str(pid))
        return stream

    killed_while(start_and_fork)
    assert are_gone(pids)
    (pid,) = noted(child)
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_hook_ends_when_its_process_is_killed(pids: Path) -> None:
    """A command that is run for a file ends with its process too."""
    pid = os.fork()
    if not pid:
        HookCommand(sleeping(pids), []).run({})
    assert wait_until(lambda: len(noted(pids)) == 2)
    time.sleep(0.1)  # until the guard knows the command
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert are_gone(pids)


def test_guard_spares_commands_that_were_removed(pids: Path) -> None:
    """Of several commands, those go on that the process had finished with."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True)

    one, two, three = start(), start(), start()

    def add_and_remove() -> object:
        guard = CommandGuard(one.pid)
        guard.add(two.pid)
        guard.add(three.pid)
        guard.remove(two.pid)
        return guard

    killed_while(add_and_remove)
    assert (one.wait(10), three.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert two.poll() is None
    two.kill()
    two.wait()


def test_guard_leaves_nothing_when_it_is_closed() -> None:
    """Neither a process nor a descriptor; closing twice and writing after it are harmless."""
    before, files = children(unreaped=True), open_files()
    guard = CommandGuard(os.getpid())  # would kill this process if it did its work
    guard.close()
    guard.close()
    guard.add(1)
    assert children(unreaped=True) == before
    assert open_files() <= files


def test_guard_does_no_harm_when_it_was_killed() -> None:
    """Another process may end it; commands run as if there were none, and nothing is left."""
    before, files = children(unreaped=True), open_files()
    guard = CommandGuard()
    os.kill(guard._process.pid, signal.SIGKILL)
    assert guard._process.wait() == -signal.SIGKILL
    guard.add(1)
    guard.close()
    assert children(unreaped=True) == before
    assert open_files() <= files
