"""Runs shell commands on samples, each sample in a folder of its own, several at a time."""

import argparse
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.cli.command import UsageError, usage_checked
from torchdata_wds.cli.proc.sample_folders import failure, read_folder, write_folder
from torchdata_wds.cli.terminal import counted
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import SampleError, UnsafeDataError
from torchdata_wds.format.samples.names import check_field, is_metadata
from torchdata_wds.storage.sources.command import CommandGuard, ShellCommand, status_text

logger = logging.getLogger(__name__)
_failure = partial(failure, subject="the command for ")

#: How much of the end of a command's output is kept, in bytes.
KEPT_OUTPUT = 1 << 20

#: How many samples per thread may be ahead of the one whose result is due.
_AHEAD = 4
_CHUNK = 1 << 16
_MOST_IN_A_PIPE = 1 << 20  # the system's limit: a pipe can hold no more when its command ends

# How often to check for a command's end: where the system has no pidfd, and where it has one.
_POLL_SECONDS = 0.02
_LONG_SECONDS = 3600.0
_REMOVALS = 30  # a process that has escaped may create a file again between two steps of a removal
_NAMED = 5  # how many unused files are named

# The latter is the status of a pipeline such as `yes | head`, whose later part had read enough, as in `pipe:` commands.
_SUCCESS = (0, 128 + signal.SIGPIPE)


class _Started:
    """A running command, and the end of what it writes."""

    def __init__(self, arguments: list[str], folder: str) -> None:
        try:
            process = subprocess.Popen(
                arguments,
                cwd=folder,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise OSError(f"the command cannot be started: {getattr(error, 'strerror', None) or error}") from error
        assert process.stdout is not None
        self.shell = ShellCommand(process, process.stdout, "")
        self._kept = bytearray()
        self._left_out = 0
        # A process that has escaped may hold the pipe open: reading must not wait for it.
        os.set_blocking(self.shell.pipe.fileno(), False)

    def ends_within(self, seconds: float) -> bool:
        """Reads output until the command ends; returns whether it ended in time. It is not reaped yet.

        The end shows in the command's pidfd, where the system has one. The end of its output would not do: a background
        process may hold the pipe open.
        """
        last = time.monotonic() + seconds
        waiting: list[Any] = [self.shell.pipe]
        end = None
        try:
            with suppress(AttributeError, OSError):
                end = os.pidfd_open(self.shell.group)
                waiting.append(end)
            while (left := last - time.monotonic()) > 0:
                ready: list[Any] = wait_for(waiting, min(left, _POLL_SECONDS if end is None else _LONG_SECONDS))
                if self.shell.pipe in ready and not self._read():
                    waiting.remove(self.shell.pipe)
                if end in ready or (end is None and self.shell.ends_within(0)):
                    return True
        finally:
            if end is not None:
                os.close(end)
        return False

    def _read(self) -> bool:
        """Reads a piece of the output; returns whether there was one."""
        data = self.shell.pipe.read(_CHUNK)
        self._kept += data or b""
        if len(self._kept) > 2 * KEPT_OUTPUT:
            self._left_out += len(self._kept) - KEPT_OUTPUT
            del self._kept[:-KEPT_OUTPUT]
        return bool(data)

    def output(self) -> bytes:
        """Returns the last part of the command's output, once it has ended."""
        for _ in range(_MOST_IN_A_PIPE // _CHUNK):
            if not self._read():
                break
        left_out = self._left_out + max(0, len(self._kept) - KEPT_OUTPUT)
        note = b"[%d bytes before this are left out]\n" % left_out if left_out else b""
        return note + self._kept[-KEPT_OUTPUT:]


class _Running:
    """The running commands, and the guard that kills them if this process dies."""

    def __init__(self) -> None:
        self.guard = CommandGuard()
        self._lock = threading.Lock()
        self._commands: set[_Started] = set()
        self._is_over = False

    @contextmanager
    def command(self, arguments: list[str], folder: str) -> Iterator[_Started]:
        """Starts a command in a folder, and kills it on exit if it is still running."""
        with self._lock:
            if self._is_over:
                raise RuntimeError("the commands were told to stop")
            started = _Started(arguments, folder)
            self.guard.add(started.shell.group)
            self._commands.add(started)
        try:
            yield started
        finally:
            started.shell.close()
            with self._lock:
                self._commands.discard(started)
            self.guard.remove(started.shell.group)

    def stop(self) -> None:
        """Kills all commands and prevents new ones."""
        with self._lock:
            self._is_over = True
            for command in self._commands:
                command.shell.kill()


class CommandResult(NamedTuple):
    """The samples that a command made of one sample; None if it is lost."""

    samples: list[dict[str, Any]] | None
    output: bytes = b""  # to standard output and error
    error: SampleError | None = None  # set even if the samples are used in spite of it
    unused: SampleError | None = None  # names the files that belong to no sample


class SampleCommand:
    """A shell command that turns samples into new samples.

    `write_folder` puts a sample into the command's working directory, and `read_folder` reads what is there when it
    ends. The command runs in bash with ``pipefail``, or in sh if bash is not installed, with an empty standard input.
    Processes that it leaves in the background are killed, unless they have started a session of their own.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        if is_secure():
            raise UnsafeDataError("a command would run for each sample, which WDS_SECURE=1 forbids")
        if bool(arguments.shell_command.strip()) == (arguments.script is not None):
            raise UsageError("expected either a command that is not empty, or a script")
        log_field: str | None = arguments.log_field
        if log_field is not None:
            with usage_checked():
                check_field(log_field, None, lowercase=False)
            if is_metadata(log_field):
                raise UsageError(f"field {log_field!r} for the command's output is metadata, which shards do not hold")
        bash = shutil.which("bash")
        shell = [bash, "-o", "pipefail"] if bash else ["/bin/sh"]
        if arguments.script is None:
            self._command = [*shell, "-c", arguments.shell_command]
        else:
            path = Path(arguments.script).absolute()
            self._command = [*shell, str(path)]
            path.open("rb").close()  # fails now instead of once per sample
        self._arguments = arguments

    def run(self, samples: Iterable[Mapping[str, Any]]) -> Generator[CommandResult, None, None]:
        """Yields a result per sample, reading a bounded number ahead; closing the generator kills the commands."""
        running = _Running()
        pending: list[Future[CommandResult]] = []
        pool = ThreadPoolExecutor(self._arguments.parallel, thread_name_prefix="sample-command")
        try:
            for sample in samples:
                # with 2 threads at most 8 samples are in memory: after each, all but 7 must be done and yielded
                pending.append(pool.submit(self._work, sample, running))
                yield from self._results(pending, _AHEAD * self._arguments.parallel - 1)
            yield from self._results(pending, 0)
        finally:
            running.stop()
            pool.shutdown(cancel_futures=True)
            running.guard.close()

    def _results(self, pending: list[Future[CommandResult]], most: int) -> Iterator[CommandResult]:
        """Yields the results that are ready, and waits while more than `most` are pending."""
        while pending:
            due = pending if self._arguments.unordered else pending[:1]
            if len(pending) <= most and not any(future.done() for future in due):
                return
            ready = next(iter(wait(due, return_when=FIRST_COMPLETED).done))
            pending.remove(ready)
            yield ready.result()

    def _work(self, sample: Mapping[str, Any], running: _Running) -> CommandResult:
        """Runs the command on one sample, in a thread of the pool."""
        timeout, log_field = self._arguments.timeout, self._arguments.log_field
        output, failed, unused = b"", None, None
        with _temporary_folder(self._arguments.tmpdir) as name:
            try:
                write_folder(sample, Path(name))
                with running.command(self._command, name) as command:
                    if not command.ends_within(math.inf if timeout is None else timeout):
                        what = f"took longer than {timeout:g} s and was killed with everything it had started"
                        failed = _failure(sample, what)
                        command.shell.kill()
                    # Wait before reading the last output and the folder: `wait` also kills the command's background
                    # processes, which could still write to both.
                    status = command.shell.wait()
                    output = command.output()
                if failed is None and status not in _SUCCESS:
                    failed = _failure(sample, f"failed with {status_text(status)}")
                if failed is not None and self._arguments.errors != "ignore":
                    return CommandResult(None, output, failed)
                made, others = read_folder(Path(name), sample)
                for new in made if log_field is not None else ():
                    if log_field in new:
                        raise _failure(sample, f"has left a file for the field {log_field!r}, where its output goes")
                    new[log_field] = output
            except SampleError as error:
                return CommandResult(None, output, error)
        if others:
            files = counted(len(others), "file that belongs", "files that belong")
            shown = ", ".join(map(repr, others[:_NAMED])) + (", ..." if len(others) > _NAMED else "")
            what = f"left {files} to no sample: {shown}. A field is a file 'sample.FIELD', or for an additional sample "
            what += "'sample-NAME.FIELD' or 'NAME/sample.FIELD'. Rename such files, or delete them"
            unused = _failure(sample, what)
        return CommandResult(made, output, failed, unused)


@contextmanager
def _temporary_folder(parent: str | None) -> Iterator[str]:
    """A folder that is removed even while processes that escaped still write there."""
    made = tempfile.TemporaryDirectory(prefix="wds-proc-", dir=parent, ignore_cleanup_errors=True)
    try:
        yield made.name
    finally:
        for _ in range(_REMOVALS):
            made.cleanup()
            if not os.path.lexists(made.name):
                break
        else:
            logger.warning("cannot remove the folder %s: perhaps a process that escaped still writes there", made.name)
