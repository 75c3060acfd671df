"""Commands: their exit status is part of the shard, and nothing of them is left over."""

import gc
import gzip
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.kits.processes import children, in_child, is_alive, open_files, wait_until
from torchdata_wds.errors import ShardFormatError, ShardOpenError, UnsafeDataError
from torchdata_wds.storage import kill_commands, open_shard
from torchdata_wds.storage.sources import command


def read(url: str, offset: int = 0) -> bytes:
    with open_shard(url, offset=offset) as stream:
        return stream.read(1 << 20)


def test_open_shard_reads_what_a_command_writes(tmp_path: Path) -> None:
    """Output is read, decompressed and read past like a file's; quotes and pipes are the shell's."""
    (tmp_path / "a b").write_bytes(gzip.compress(b"0123456789"))
    assert read(f"pipe:cat '{tmp_path}/a b'") == b"0123456789"
    assert read(f"pipe:cat '{tmp_path}/a b' | gunzip", offset=4) == b"456789"
    assert read("pipe:cat") == b""
    assert read("PIPE:printf x") == b"x"


def test_open_shard_reads_much_when_the_command_also_complains_much() -> None:
    """A megabyte on standard error blocks nothing."""
    with open_shard("pipe:head -c 1000000 /dev/zero >&2; head -c 3000000 /dev/zero") as stream:
        assert len(stream.read(4_000_000)) == 3_000_000


def test_command_delivers_its_output_before_the_error_when_it_fails() -> None:
    """The exit status is checked before the end is believed, each time; the error shows the last words, masked."""
    url = "pipe:printf 0123456789; echo bad token=abc >&2; exit 3"
    with open_shard(url) as stream:
        assert stream.read(10) == b"0123456789"
        for _ in range(2):
            with pytest.raises(ShardOpenError, match=r"exit status 3.*ends with: bad token=\*\*\*") as caught:
                stream.read(1)
        assert caught.value.shard == url.replace("abc", "***")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("false", "exit status 1"),
        ("exit 22", "exit status 22"),
        ("no-such-program-x", "command not found"),
        ("kill -KILL $$", "signal SIGKILL"),
        ("bash -c 'kill -KILL $$'; exit $?", "SIGKILL"),
        ("'", "exit status"),
    ],
)
def test_command_raises_when_it_fails(script: str, said: str) -> None:
    """Every way to fail is an error that names the status or the signal."""
    with open_shard(f"pipe:{script}") as stream, pytest.raises(ShardOpenError, match=said):
        stream.read(1)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_command_raises_when_an_early_part_of_a_pipeline_fails() -> None:
    """The failure of the first program is the shard's failure, though the last one succeeds."""
    with open_shard("pipe:(echo hello; exit 22) | cat") as stream, pytest.raises(ShardOpenError, match="status 22"):
        stream.read(10)


def test_command_succeeds_when_a_later_part_had_read_enough() -> None:
    """SIGPIPE in an earlier part of a pipeline is no failure."""
    assert read("pipe:yes | head -c 10") == b"y\n" * 5


def test_command_failure_is_named_when_it_cuts_a_compressed_stream(tmp_path: Path) -> None:
    """A download that breaks inside gzip data is reported as the broken download; a cut file as a cut file."""
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(os.urandom(1000))[:500])
    with open_shard(f"pipe:cat {path}; exit 18") as stream, pytest.raises(ShardOpenError, match="status 18"):
        stream.read(1000)
    with open_shard(f"pipe:cat {path}") as stream, pytest.raises(ShardFormatError, match="cut off"):
        stream.read(1000)


def test_command_falls_back_to_sh_when_there_is_no_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bash, commands run, and the status of the last part counts."""
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    assert read("pipe:echo hello") == b"hello\n"
    with open_shard("pipe:exit 4") as stream, pytest.raises(ShardOpenError, match="status 4"):
        stream.read(1)


def test_command_logs_what_it_said_when_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """What a successful command wrote to standard error is not lost."""
    with caplog.at_level(logging.INFO):
        assert read("pipe:echo hello; echo careful >&2") == b"hello\n"
    assert "careful" in caplog.text


@pytest.mark.parametrize("url", ["pipe:", "pipe:  "])
def test_open_shard_raises_when_there_is_no_command(url: str) -> None:
    """An empty command is an error and not an empty shard."""
    with pytest.raises(ShardOpenError, match="names no command"):
        open_shard(url)


@pytest.mark.parametrize(
    "url", ["pipe:echo a\0b", pytest.param("pipe:true " + "x" * 3_000_000, marks=pytest.mark.slow, id="long")]
)
def test_open_shard_raises_when_the_command_cannot_start(url: str) -> None:
    """What the system refuses to start is a ShardOpenError and leaves nothing open."""
    before = open_files()
    with pytest.raises(ShardOpenError, match="cannot start"):
        open_shard(url)
    gc.collect()
    assert open_files() <= before


def test_open_shard_refuses_commands_when_secure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under WDS_SECURE=1 nothing is run."""
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE=1"):
        open_shard(f"pipe:touch {tmp_path}/ran --token=abc")
    assert not (tmp_path / "ran").exists()


def test_close_kills_the_whole_group_at_once_when_early(tmp_path: Path) -> None:
    """A command that would run for a quarter of an hour, and what it started, are gone at once and quietly."""
    pids = tmp_path / "pids"
    stream = open_shard(f"pipe:sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; echo ready; sleep 1000 | cat")
    assert stream.read(6) == b"ready\n"
    start = time.monotonic()
    stream.close()
    stream.close()
    assert time.monotonic() - start < 60
    assert wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


def test_command_leaves_nothing_in_the_background_when_it_has_ended(tmp_path: Path) -> None:
    """What a command started and left behind ends with it."""
    pid = tmp_path / "pid"
    assert read(f"pipe:sleep 1000 >/dev/null & echo $! > {pid}; echo hello") == b"hello\n"
    assert wait_until(lambda: not is_alive(int(pid.read_text())))


@pytest.mark.slow
def test_early_closes_leave_no_child_and_no_file_when_there_are_many() -> None:
    """Two hundred early closes, failures and whole readings leave no process and no descriptor."""
    before, files = children(unreaped=True), open_files()
    for turn in range(200):
        with open_shard(("pipe:yes", "pipe:echo x", "pipe:exit 3", "pipe:yes | cat")[turn % 4]) as stream:
            if turn % 4 == 2:
                with pytest.raises(ShardOpenError):
                    stream.read(5)
            else:
                stream.read(5)
    assert children(unreaped=True) == before
    assert open_files() <= files
    assert not command._running


def test_command_ends_when_its_stream_is_dropped() -> None:
    """A stream that nobody closed kills its command when it is collected, without a warning."""
    before = children(unreaped=True)
    stream = open_shard("pipe:sleep 1000")
    del stream
    gc.collect()
    assert children(unreaped=True) == before


def test_kill_commands_ends_what_runs() -> None:
    """The watchdog's call kills all running commands; their readers see an error that names the signal."""
    with open_shard("pipe:echo a; sleep 1000") as one, open_shard("pipe:sleep 1000 | cat") as two:
        assert one.read(2) == b"a\n"
        threading.Timer(0.1, kill_commands).start()
        for stream in (one, two):
            with pytest.raises(ShardOpenError, match="SIGKILL"):
                stream.read(1)
    kill_commands()


def test_command_lives_on_when_a_forked_child_closes_its_copy() -> None:
    """A child process that closes or drops its copy of a stream leaves the parent's command alone."""
    with open_shard("pipe:echo a; sleep 0.3; echo b") as stream:
        assert stream.read(2) == b"a\n"

        def drop() -> None:
            kill_commands()
            stream.close()

        assert in_child(drop) == 0
        assert stream.read(10) == b"b\n"


def test_commands_are_read_in_a_forked_child() -> None:
    """A child process starts its own commands."""

    def read_own() -> None:
        assert read("pipe:echo hello") == b"hello\n"
        assert not children(unreaped=True)

    assert in_child(read_own) == 0


def test_command_runs_in_a_group_of_its_own() -> None:
    """An interrupt at the terminal reaches the program and not its commands."""
    with open_shard("pipe:echo $$; sleep 1000") as stream:
        pid = int(stream.readline())  # type: ignore[attr-defined]
        assert os.getpgid(pid) == pid != os.getpgrp()
        os.kill(pid, signal.SIGKILL)
