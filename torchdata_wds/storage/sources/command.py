"""Shell commands, and shards from their output: ``pipe:command``.

The command runs in bash with ``pipefail`` if bash is installed: if ``curl`` fails in ``curl ... | gunzip``, reading the
shard fails instead of ending early. Status 141 counts as success: it means that SIGPIPE stopped an earlier part of the
pipeline because a later one, which itself succeeded, had read enough (``... | head -c 1000``). Without bash, the shell
is ``/bin/sh``, and only the status of the last part counts.

Each command has its own process group, so that all of it can be killed when the reader stops early; a `CommandGuard`
kills it when this process is killed. `targets.command`, which writes shards to commands, uses the same functions to
start, kill and report.
"""

import contextlib
import io
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Collection
from typing import IO

from torchdata_wds.environment import is_secure
from torchdata_wds.errors import ShardOpenError, UnsafeDataError
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, Source, wrap_source
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.secrets.masking import mask_text

logger = logging.getLogger(__name__)
_ENOUGH_READ = 128 + signal.SIGPIPE
_SHOWN_LINES, _SHOWN_BYTES = 5, 2000
_POLL_SECONDS = 0.02
_HAS_WAITID = hasattr(os, "waitid")  # without it, only reaping a command shows that it has ended

# When the package's process dies, its input to this script ends, and the script kills the groups that are left. A group
# reported as ended is not killed: its id may belong to another one by then.
_GUARDING = """
groups=$*
while read -r sign group; do
    if [ "$sign" = + ]; then
        groups="$groups $group"
    else
        rest=
        for other in $groups; do [ "$other" = "$group" ] || rest="$rest $other"; done
        groups=$rest
    fi
done
for group in $groups; do kill -s KILL -- "-$group"; done
"""

# The commands of this process that may still be running, by process id, and its guards.
_running: "dict[int, ShellCommand]" = {}
_guards: "weakref.WeakSet[CommandGuard]" = weakref.WeakSet()


def _forget_all() -> None:
    """Runs in a forked child, which must not kill its parent's commands.

    If the child kept its copy of a guard's pipe open, the guard would not notice the death of the parent.
    """
    _running.clear()
    for guard in list(_guards):
        guard.forget()
    _guards.clear()


os.register_at_fork(after_in_child=_forget_all)


class CommandGuard:
    """A helper process that kills the groups of running commands when this process dies, even by SIGKILL.

    The guard belongs to the process that made it; a forked child's copy does nothing. The helper keeps the descriptors
    in `holding` open until the commands are killed.
    """

    def __init__(self, *groups: int, holding: Collection[int] = ()) -> None:
        reading, self._line = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARDING, "sh", *map(str, groups)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=holding,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._line)
            raise
        finally:
            os.close(reading)
        _guards.add(self)

    def add(self, group: int) -> None:
        """Adds the group of a command that has started."""
        self._write(f"+ {group}\n")

    def remove(self, group: int) -> None:
        """Removes the group of a command that has ended, or may outlive this process."""
        self._write(f"- {group}\n")

    def close(self) -> None:
        """Ends the guard, after its commands have ended."""
        if self._line >= 0:
            # Closing its pipe would make it kill the groups, whose ids may belong to others by now.
            self._process.kill()
            self._process.wait()
            self.forget()

    def forget(self) -> None:
        """Makes this object do nothing from now on."""
        if self._line >= 0:
            self._process.returncode = self._process.returncode or 0  # a forked child must not wait for the helper
            os.close(self._line)
            self._line = -1

    def _write(self, line: str) -> None:
        if self._line >= 0:
            with contextlib.suppress(BrokenPipeError):  # the guard itself was killed
                os.write(self._line, line.encode())


class ShellCommand:
    """A command that runs for a shard, with all processes that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], complaints: IO[bytes], shard: str) -> None:
        pipe = process.stdout or process.stdin
        assert pipe is not None
        self.shard = shard
        self.pipe = pipe  # its output or its input, unbuffered
        self.group = process.pid  # the id of its process group
        self._process = process
        self._complaints = complaints
        self.guard: CommandGuard | None = None
        self._owner = os.getpid()
        _running[process.pid] = self

    def kill(self) -> None:
        """Kills the command and all processes that it has started; does nothing in a forked child."""
        if self._process.returncode is None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)

    def wait(self, *, spare_rest: bool = False) -> int:
        """Waits for the command and kills what it left running; `spare_rest` spares that after a success."""
        # WNOWAIT waits for the shell but leaves it as a zombie, so that no other process can get its id. Until it is
        # reaped below, killing the group of this id can only reach what the command itself left running.
        if _HAS_WAITID:
            found = None
            with contextlib.suppress(ChildProcessError):
                found = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOWAIT)
            if not (spare_rest and found and (found.si_code, found.si_status) == (os.CLD_EXITED, 0)):
                self.kill()
        status = self._process.wait()
        _running.pop(self.group, None)
        self.dismiss_guard()
        return status

    def dismiss_guard(self) -> None:
        """Ends the guard: the command has ended, or may outlive this process because its shard is complete."""
        if self.guard is not None:
            self.guard.close()

    def ends_within(self, seconds: float) -> bool:
        """Returns whether the command ends in time; does not reap it, so that its group can still be killed."""
        end = time.monotonic() + seconds
        with contextlib.suppress(ChildProcessError):  # other code has reaped it
            flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
            while (os.waitid(os.P_PID, self.group, flags) if _HAS_WAITID else self._process.poll()) is None:
                if time.monotonic() > end:
                    return False
                time.sleep(_POLL_SECONDS)
        return True

    def report(self, message: str) -> ShardOpenError:
        """Returns an error with a message and the end of the command's standard error."""
        complaints = self._last_complaints() or "It wrote nothing to its standard error"
        return ShardOpenError(f"the command of shard {self.shard} {message}. {complaints}", shard=self.shard)

    def log_complaints(self) -> None:
        """Logs the standard error of a command that has succeeded."""
        if complaints := self._last_complaints():
            logger.info("the command of shard %s succeeded. %s", self.shard, complaints)

    def _last_complaints(self) -> str:
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - _SHOWN_BYTES))
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return mask_text("Its standard error ends with: " + "\n".join(lines)) if lines else ""

    def close(self) -> None:
        """Kills the command if it is still running, and only then closes its pipe; a forked child only closes."""
        try:
            if self._owner == os.getpid():
                self.kill()
                self._process.wait()
                _running.pop(self.group, None)
                self.dismiss_guard()
            else:
                self._process.returncode = 0  # the command is the parent's, which waits for it
        finally:
            self.pipe.close()
            self._complaints.close()


class CommandSource(Source):
    """The output of a running command, whose exit status is checked at its end."""

    def __init__(self, command: ShellCommand) -> None:
        self._command = command
        self._ended = False

    def fill(self, view: memoryview) -> int:
        """Reads output; checks the status at its end."""
        count: int = 0 if self._ended else self._command.pipe.readinto(view)  # type: ignore[attr-defined]
        if not count and not self._ended:
            self._ended = True
            status = self._command.wait()
            if status not in (0, _ENOUGH_READ):
                raise self._command.report(f"failed with {status_text(status)}: its output is not the whole shard")
            self._command.log_complaints()
        return count

    def interrupt(self) -> None:
        """Kills the command, so that its output ends."""
        self._command.kill()

    def _close(self) -> None:
        self._command.close()


def open_command(place: Place, offset: int) -> io.BufferedReader:
    """Starts a command as `start_command` does, and returns a stream of its output."""
    command = start_command(place)
    return wrap_source(CommandSource(command), command.shard, skip=offset)


def start_command(place: Place, *, writing: bool = False) -> ShellCommand:
    """Starts the command of a ``pipe:`` URL, with a pipe from its output or, for writing, to its input."""
    shard = place.shown
    if is_secure():
        raise UnsafeDataError(f"shard {shard} would run a command, which WDS_SECURE=1 forbids", shard=shard)
    command = place.url[len("pipe:") :].strip()
    if not command:
        example = "cat > x.tar" if writing else "cat x.tar"
        raise ShardOpenError(f"shard {shard!r} names no command; write pipe:{example}", shard=shard)
    bash = shutil.which("bash")
    with contextlib.ExitStack() as undoing:
        try:
            # A file, because a pipe would have to be emptied while the command runs.
            complaints = undoing.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [bash, "-o", "pipefail", "-c", command] if bash else ["/bin/sh", "-c", command],
                bufsize=0,
                stdin=subprocess.PIPE if writing else subprocess.DEVNULL,
                # When writing, the command's output must not get into a shard on our own standard output.
                stdout=complaints if writing else subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
            )
            started = ShellCommand(process, complaints, shard)
            undoing.callback(started.close)
            # When writing, the command must be killed before its input ends, so the guard keeps that open.
            started.guard = CommandGuard(process.pid, holding=[process.stdin.fileno()] if process.stdin else [])
        except (OSError, ValueError) as error:
            raise ShardOpenError(f"cannot start the command of shard {shard}: {error}", shard=shard) from error
        undoing.pop_all()
    # A larger pipe lets one side run ahead of the other by a whole buffer.
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(started.pipe, fcntl.F_SETPIPE_SZ, BUFFER_SIZE)
    return started


def kill_commands() -> None:
    """Kills every command that this process has started for a shard; their readers get an error that says so."""
    for command in list(_running.values()):
        command.kill()


def status_text(status: int) -> str:
    """Describes how a process ended."""
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        return f"signal {name}" if status < 0 else f"exit status {status} (perhaps {name})"
    return f"exit status {status}" + (" (command not found)" if status == 127 else "")
