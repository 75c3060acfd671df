"""Asks a process for the stacks of its threads, even if it is stuck in C code that holds the interpreter.

On a signal, ``faulthandler`` writes them to a file without running any Python code. The file is in memory and unnamed;
the process that asks has it open too. It is not a pipe, because writing to a full pipe would block the signal handler.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

from torchdata_wds.workers.processes.shared_memory import open_memory_file

#: A real-time signal, which nothing else uses; where there are none, the one that programs may define.
SIGNAL: Final = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_READY, _TAKEN = b"ready", b"taken"
_MOST_BYTES = 1 << 20
_INTERVAL = 0.005
_QUIET = 0.3  # after how many seconds without more text it counts as complete
#: States in which Linux shows a process that does not answer.
_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits in the system for a disk or mount"}


class StackFile:
    """The file to which a worker writes its stacks; it is passed to the worker when that starts."""

    def __init__(self, descriptor: int | None = None, *, is_ready: bool = False) -> None:
        self._descriptor = open_memory_file(0) if descriptor is None else descriptor
        # Both processes share its position: this one empties it, and the other writes at its end.
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_APPEND)
        self._mark = _READY if is_ready else b""
        self._is_owed = False  # whether an answer has not come yet

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._descriptor),)

    def register(self) -> None:
        """Has this process answer from now on, unless the program itself uses the signal; idempotent."""
        if self._mark:
            return
        is_free = signal.getsignal(SIGNAL) is signal.SIG_DFL
        self._mark = _READY if is_free else _TAKEN
        if is_free:
            faulthandler.register(SIGNAL, file=self._descriptor, all_threads=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])  # the program may have blocked all signals
        os.write(self._descriptor, self._mark)

    @property
    def descriptor(self) -> int:
        """The descriptor in this process; -1 if it cannot be asked."""
        return -1 if self._mark == _TAKEN else self._descriptor

    @property
    def obstacle(self) -> str:
        """Why the process cannot be asked, if it cannot: a signal would end it before it has registered."""
        if not self._mark:
            self._mark = os.pread(self._descriptor, len(_READY), 0)
        if self._mark == _TAKEN:
            return f"its stack is not known, because the program itself uses signal {int(SIGNAL)}"
        return "" if self._mark == _READY else "is still starting"

    def ask(self, process: int) -> None:
        """Asks the process, which must still run, for its stacks."""
        if not self._is_owed:  # a stopped process answers all signals once it continues
            os.ftruncate(self._descriptor, 0)
            os.kill(process, SIGNAL)
            self._is_owed = True

    def read(self) -> str:
        """Returns what has been written."""
        text = os.pread(self._descriptor, _MOST_BYTES, 0).decode("utf-8", "replace")
        self._is_owed = self._is_owed and not text
        return text

    def close(self) -> None:
        """Closes the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def own_stacks() -> str:
    """Returns the stacks of all threads of this process."""
    descriptor = open_memory_file(0)
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return os.pread(descriptor, _MOST_BYTES, 0).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def _received(duplicate: Any) -> StackFile:
    # At once, since a worker that is not forked unpickles the graph next, and may get stuck in what that imports.
    file = StackFile(duplicate.detach())
    file.register()
    return file


def collect(files: Sequence[StackFile], patience: float) -> list[str]:
    """Returns what processes that were asked have written, after at most `patience` seconds."""
    end = time.monotonic() + patience
    texts = [file.read() for file in files]
    changed = time.monotonic()
    while not all(map(_is_complete, texts)) and time.monotonic() < min(end, changed + _QUIET if all(texts) else end):
        time.sleep(_INTERVAL)
        before, texts = texts, [file.read() for file in files]
        if texts != before:
            changed = time.monotonic()
    return texts


def _is_complete(text: str) -> bool:
    # The main thread comes last. Its outermost call is a module's code, or ``python -m``, or is cut off.
    return text.rstrip().endswith(("in <module>", "in _run_module_as_main", "  ..."))


def state_of(process: int) -> str:
    """Returns why a process does not answer, as far as the system knows."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return _STATES.get(fields[0], "does not answer")
    return "does not answer"
