"""Shards into commands: whole and confirmed, or killed before they can take a part for the whole."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kits.processes import children, is_alive, open_files, wait_until
from tests.kits.storage_kit import read, write
from torchdata_wds.errors import ShardOpenError, UnsafeDataError
from torchdata_wds.storage import kill_commands, open_target
from torchdata_wds.storage.sources import command
from torchdata_wds.storage.targets import command as command_target
from torchdata_wds.storage.targets.table import Target

DATA = os.urandom(3_000_000)


def store(path: Path) -> str:
    """A command such as that of a store: what it gets appears under its name when its input ends."""
    return f"pipe:cat > '{path}.part' && mv '{path}.part' '{path}'"


# --------------------------------------------------------------------------------------------------------- finished
def test_command_target_gets_the_shard_when_committed(tmp_path: Path) -> None:
    """The command has ended when commit returns, and what it stored reads back; quotes and pipes are the shell's."""
    path = tmp_path / "a b.tar"
    write(store(path), DATA[:1], DATA[1:2_000_000], DATA[2_000_000:])
    assert read(path) == DATA
    write(f"pipe:gzip | cat > '{path}.gz'", DATA)
    assert read(Path(f"{path}.gz")) == DATA


def test_command_target_blocks_nothing_when_the_command_says_much(capfd: pytest.CaptureFixture[str]) -> None:
    """Megabytes on its standard output and standard error neither fill a pipe nor reach our own output."""
    write("pipe:head -c 2000000 /dev/zero; cat; cat /dev/null >&2; head -c 2000000 /dev/zero >&2", DATA)
    assert capfd.readouterr() == ("", "")


def test_command_target_logs_what_the_command_said_when_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """What a successful command wrote, on either output, is not lost."""
    with caplog.at_level(logging.INFO):
        write("pipe:cat > /dev/null; echo careful >&2; echo stored", DATA)
    assert "careful\nstored" in caplog.text


@pytest.mark.slow
def test_command_target_spares_what_still_writes_when_the_command_has_succeeded(tmp_path: Path) -> None:
    """A process substitution may end after the shell; its file is whole."""
    write(f"pipe:tee >(sleep 0.3; cat > {tmp_path}/late) > {tmp_path}/x.tar", DATA[:1000])
    assert read(tmp_path / "x.tar") == DATA[:1000]
    assert wait_until(lambda: (tmp_path / "late").exists() and (tmp_path / "late").read_bytes() == DATA[:1000])


# ------------------------------------------------------------------------------------------------------------ failing
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("cat > /dev/null; echo bad token=abc >&2; exit 3", r"exit status 3.*ends with: bad token=\*\*\*"),
        ("(cat; exit 22) | cat > /dev/null", "exit status 22"),
        ("cat > /dev/null; exit 141", "exit status 141"),
        ("cat > /dev/null; kill -KILL $$", "signal SIGKILL"),
    ],
)
def test_command_target_raises_when_the_command_fails_at_the_end(script: str, said: str) -> None:
    """Only exit status 0 is success, and each early part of a pipeline counts."""
    target = open_target(f"pipe:{script}")
    target.write(DATA)
    with pytest.raises(ShardOpenError, match=rf"(?s){said}") as caught:
        target.commit()
    assert "not stored whole" in str(caught.value)
    assert caught.value.shard == f"pipe:{script}".replace("abc", "***")
    with pytest.raises(ShardOpenError, match="has failed"):
        target.commit()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("no-such-program-x", "command not found"),
        ("echo no access >&2; exit 4", "exit status 4(?s:.*)no access"),
        ("head -c 1000000 > /dev/null; exit 5", "exit status 5"),
        ("head -c 1000000 > /dev/null", "exit status 0"),
        ("kill -KILL $$", "SIGKILL"),
    ],
)
def test_command_target_raises_when_the_command_ends_before_the_shard(script: str, said: str) -> None:
    """A command that ends early, in whatever way, is an error with its status at the next write."""
    target = open_target(f"pipe:{script}")
    with pytest.raises(ShardOpenError, match=f"ended with .*{said}") as caught:
        for _ in range(10):
            target.write(DATA)
    assert "before it had read the whole shard" in str(caught.value)
    with pytest.raises(ShardOpenError, match="has failed"):
        target.write(DATA)


def test_command_target_raises_when_the_command_stops_reading_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that closes its input and never ends is killed after a while."""
    monkeypatch.setattr(command_target, "GRACE_SECONDS", 0.2)
    before = children(unreaped=True)
    target = open_target("pipe:exec <&-; sleep 1000")
    start = time.monotonic()
    with pytest.raises(ShardOpenError, match="closed its input and went on"):
        for _ in range(1000):
            target.write(DATA)
    assert time.monotonic() - start < 5
    assert children(unreaped=True) == before


@pytest.mark.parametrize("url", ["pipe:", "pipe:  "])
def test_open_target_raises_when_there_is_no_command(url: str) -> None:
    """An empty command is an error that shows a command that writes."""
    with pytest.raises(ShardOpenError, match=r"names no command; write pipe:cat > x\.tar"):
        open_target(url)


@pytest.mark.parametrize(
    "url", ["pipe:echo a\0b", pytest.param("pipe:true " + "x" * 3_000_000, marks=pytest.mark.slow, id="long")]
)
def test_open_target_raises_when_the_command_cannot_start(url: str) -> None:
    """What the system refuses to start is a ShardOpenError and leaves nothing open."""
    before = open_files()
    with pytest.raises(ShardOpenError, match="cannot start"):
        open_target(url)
    assert open_files() <= before


def test_open_target_leaves_no_command_when_its_guard_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no process left, the command that has just started is killed."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(command, "CommandGuard", refuse)
    before, files = children(unreaped=True), open_files()
    with pytest.raises(ShardOpenError, match=r"cannot start the command.*Resource"):
        open_target("pipe:sleep 1000")
    assert children(unreaped=True) == before
    assert open_files() <= files


def test_open_target_refuses_commands_when_secure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under WDS_SECURE=1 nothing is run."""
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE=1"):
        open_target(f"pipe:touch {tmp_path}/ran --token=abc")
    assert not (tmp_path / "ran").exists()


def test_command_target_falls_back_to_sh_when_there_is_no_bash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without bash, commands run."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    write(store(tmp_path / "x.tar"), DATA)
    assert read(tmp_path / "x.tar") == DATA


# --------------------------------------------------------------------------------------------------------- not finished
def started(path: Path) -> Target:
    """A target that has got a part of its shard."""
    target = open_target(store(path))
    target.write(DATA[:1_500_000])
    return target


def nothing_appears(path: Path) -> bool:
    time.sleep(0.2)
    return not path.exists()


def test_command_target_aborts_at_once_when_the_command_hangs(tmp_path: Path) -> None:
    """A command that ignores the end of its input and signals, and what it started, are gone at once."""
    pids = tmp_path / "pids"
    target = open_target(f"pipe:trap '' TERM INT PIPE; sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; sleep 1000")
    target.write(DATA[:1000])
    assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    start = time.monotonic()
    target.abort()
    assert time.monotonic() - start < 60
    assert wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.slow
def test_command_target_aborts_when_a_write_is_interrupted(tmp_path: Path) -> None:
    """An interrupt in the middle of a write that hangs leaves no command and no shard."""
    before = children(unreaped=True)
    target = open_target(f"pipe:sleep 1000; cat > {tmp_path}/x.tar")

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            target.write(DATA)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert children(unreaped=True) == before
    assert nothing_appears(tmp_path / "x.tar")


def test_kill_commands_ends_a_write_when_the_command_hangs() -> None:
    """A watchdog frees a writer that waits for its command; the error names the signal."""
    target = open_target("pipe:sleep 1000 | cat")
    threading.Timer(0.3, kill_commands).start()
    with pytest.raises(ShardOpenError, match="SIGKILL"):
        target.write(DATA)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError"])
def test_command_target_stores_nothing_when_its_program_ends(tmp_path: Path, end: str) -> None:
    """A program that ends, by exit or exception, kills the commands that it has not finished."""
    code = (
        "import sys\nfrom torchdata_wds.storage import open_target\n"
        f"target = open_target({store(tmp_path / 'x.tar')!r})\n"
        "keep = [target]; keep.append(keep)\n"
        f"target.write(bytes(1_500_000))\n{end}"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
    assert nothing_appears(tmp_path / "x.tar")


kept: list[Target] = []


def _write_and_return(path: Path) -> None:
    kept.append(started(path))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_command_target_stores_nothing_when_its_worker_ends(tmp_path: Path, method: str) -> None:
    """A worker process skips most of Python's end, but not this."""
    worker = multiprocessing.get_context(method).Process(target=_write_and_return, args=(tmp_path / "x.tar",))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    worker.close()
    assert (tmp_path / "x.tar.part").exists()
    assert nothing_appears(tmp_path / "x.tar")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.slow
def test_command_target_stores_nothing_when_its_process_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """A process that is killed closes the command's input, and yet the command does not see its end."""
    pid = os.fork()
    if not pid:
        try:
            kept.append(started(tmp_path / "x.tar"))
            os.kill(os.getpid(), number)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number
    assert (tmp_path / "x.tar.part").exists()
    assert nothing_appears(tmp_path / "x.tar")


# ------------------------------------------------------------------------------------------------------ other processes
def forked(work: Callable[[], object]) -> int:
    """The pid of a forked child that does some work, and then waits to be killed."""
    pid = os.fork()
    if not pid:
        try:
            work()
            time.sleep(60)
        finally:
            os._exit(1)
    return pid


def test_command_target_commits_when_a_forked_child_still_lives(tmp_path: Path) -> None:
    """A child that was forked meanwhile does not keep the command's input open."""
    target = started(tmp_path / "x.tar")
    pid = forked(lambda: None)
    try:
        target.write(DATA[1_500_000:])
        target.commit()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert read(tmp_path / "x.tar") == DATA


@pytest.mark.slow
def test_command_targets_leave_no_child_and_no_file_when_there_are_many() -> None:
    """Commits, aborts, failures and dropped targets leave no process and no descriptor."""
    before, files = children(unreaped=True), open_files()
    for turn in range(80):
        target = open_target(("pipe:cat > /dev/null", "pipe:cat; exit 3", "pipe:sleep 1000", "pipe:cat")[turn % 4])
        target.write(b"x" * 1000)
        if turn % 4 == 0:
            target.commit()
        elif turn % 4 == 1:
            with pytest.raises(ShardOpenError, match="exit status 3"):
                target.commit()
        elif turn % 4 == 2:
            target.abort()
        del target
    assert children(unreaped=True) == before
    assert open_files() <= files
    assert not command._running
