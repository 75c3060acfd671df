"""Shards from the output of a shell command: ``pipe:command``.

The command runs in bash with ``pipefail`` where there is a bash: the failure of ``curl`` in ``curl ... | gunzip`` is
the failure of the shard, not its early end. Status 141 is taken as success: it says that an earlier part of the
pipeline was stopped by SIGPIPE because a later one, which itself succeeded, had read enough (``... | head -c 1000``).
Without bash, the shell is ``/bin/sh`` and the status is that of the last part alone.

Each command is a process group of its own, so that all of it can be killed when the reader stops early.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from typing import IO, TYPE_CHECKING

from torchdata_wds.environment import is_secure
from torchdata_wds.errors import ShardOpenError, UnsafeDataError
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.streams import BUFFER_SIZE, Source, wrap_source
from torchdata_wds.storage.urls import mask_text, mask_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["kill_commands", "open_command"]

logger = logging.getLogger(__name__)

_PREFIX = "pipe:"
_ENOUGH_READ = 128 + signal.SIGPIPE
_SHOWN_LINES = 5
_SHOWN_BYTES = 2000

# The commands that this process started and that may still run, by process id.
_running: dict[int, CommandSource] = {}

# A forked child must not kill its parent's commands.
os.register_at_fork(after_in_child=_running.clear)


class CommandSource(Source):
    """The output of a running command, whose exit status is checked at its end."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes], complaints: IO[bytes], shard: str) -> None:
        self._process = process
        self._output = output
        self._complaints = complaints
        self._shard = shard
        self._owner = os.getpid()
        self._ended = False
        _running[process.pid] = self

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count: int = 0 if self._ended else self._output.readinto(buffer)  # type: ignore[attr-defined]
        if not count and not self._ended:
            self._ended = True
            self._check_status()
        return count

    def kill(self) -> None:
        """Kills the command with all that it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _check_status(self) -> None:
        status = self._wait()
        complaints = self._last_complaints()
        if status not in (0, _ENOUGH_READ):
            raise ShardOpenError(
                f"the command of shard {self._shard} failed with {_status_text(status)}: what it gave is not the whole "
                f"shard. {complaints or 'It wrote nothing to its standard error'}",
                shard=self._shard,
            )
        if complaints:
            logger.info("the command of shard %s succeeded. %s", self._shard, complaints)

    def _wait(self) -> int:
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            # What the command has left in the background; its group is still its own, for it is not yet reaped.
            self.kill()
        status = self._process.wait()
        _running.pop(self._process.pid, None)
        return status

    def _last_complaints(self) -> str:
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - _SHOWN_BYTES))
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return mask_text("Its standard error ends with: " + "\n".join(lines)) if lines else ""

    def _close(self) -> None:
        try:
            if self._owner == os.getpid():
                self.kill()
                self._process.wait()
                _running.pop(self._process.pid, None)
            else:
                # A copy in a forked child: the command is the parent's.
                self._process.returncode = 0
        finally:
            self._output.close()
            self._complaints.close()


def open_command(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:  # noqa: ARG001 - as all
    """Starts a command and reads what it writes.

    Raises:
        UnsafeDataError: under ``WDS_SECURE=1``.
        ShardOpenError: if the command cannot be started.
    """
    shard = mask_url(url)
    if is_secure():
        raise UnsafeDataError(f"shard {shard} would run a command, which WDS_SECURE=1 forbids", shard=shard)
    command = url[len(_PREFIX) :].strip()
    if not command:
        raise ShardOpenError(f"shard {shard!r} names no command; write pipe:cat x.tar", shard=shard)
    try:
        source = _start(command, shard)
    except (OSError, ValueError) as error:
        raise ShardOpenError(f"cannot start the command of shard {shard}: {error}", shard=shard) from error
    return wrap_source(source, shard, skip=offset)


def kill_commands() -> None:
    """Kills every command that this process has started for a shard and that still runs, each with its whole group.

    For a watchdog in a worker process: reading goes on to an error that says that the command was killed.
    """
    for source in list(_running.values()):
        source.kill()


def _start(command: str, shard: str) -> CommandSource:
    bash = shutil.which("bash")
    # A file, not a pipe: nobody has to empty it while the command runs.
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
    try:
        process = subprocess.Popen(
            [bash, "-o", "pipefail", "-c", command] if bash else ["/bin/sh", "-c", command],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
        )
    except BaseException:
        complaints.close()
        raise
    assert process.stdout is not None
    _widen(process.stdout)
    return CommandSource(process, process.stdout, complaints, shard)


def _widen(pipe: IO[bytes]) -> None:
    """Lets the command write ahead by a whole buffer, where the system allows it."""
    import fcntl

    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, BUFFER_SIZE)


def _status_text(status: int) -> str:
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        return f"signal {name}" if status < 0 else f"exit status {status} (perhaps {name})"
    return f"exit status {status}" + (" (command not found)" if status == 127 else "")
