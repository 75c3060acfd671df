"""Asks a process for the stacks of its threads, even if it is stuck in C code that holds the interpreter.

``faulthandler`` writes them to a file in memory, which the process that asks has open too. A thread does that when it
finds a mark in the file. If C code holds the interpreter, that thread cannot run; then a signal has them written,
without any Python code. Never at first: while threads run Python code, a signal handler may find a stack in pieces,
and crash. The file is not a pipe, because writing to a full pipe would block the handler.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

from torchdata_wds.workers.processes.shared_memory import open_memory_file

#: A real-time signal, which nothing else uses; where there are none, the one that programs may define.
SIGNAL: Final = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_READY, _TAKEN, _ASKED = b"ready", b"taken", b"asked"
_MOST_BYTES = 1 << 20
_LOOK = 0.25  # how often, in seconds, the thread looks for the mark
_ANSWER = 1.5  # how many seconds the thread may take to answer before a signal is sent
_SIGNALLED = 0.5  # and how many a signal handler may take
_INTERVAL = 0.005
_QUIET = 0.3  # after how many seconds without more text it counts as complete
#: States in which Linux shows a process that does not answer.
_STOPPED = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}
_STATES = {**_STOPPED, "D": "waits in the system for a disk or mount"}


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
        """Has this process answer from now on, without signals if the program itself uses that one; idempotent."""
        if self._mark:
            return
        is_free = signal.getsignal(SIGNAL) is signal.SIG_DFL
        self._mark = _READY if is_free else _TAKEN
        if is_free:
            faulthandler.register(SIGNAL, file=self._descriptor, all_threads=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])  # the program may have blocked all signals
        os.write(self._descriptor, self._mark)
        threading.Thread(target=self._answer, name="wds-stacks", daemon=True).start()

    def _answer(self) -> None:
        while True:
            time.sleep(_LOOK)
            if os.pread(self._descriptor, len(_ASKED), 0) == _ASKED:
                os.ftruncate(self._descriptor, 0)
                faulthandler.dump_traceback(self._descriptor, all_threads=True)

    @property
    def descriptor(self) -> int:
        """The descriptor in this process."""
        return self._descriptor

    @property
    def obstacle(self) -> str:
        """Why the process cannot be asked, if it cannot."""
        if not self._mark:
            self._mark = os.pread(self._descriptor, len(_READY), 0)
        return "" if self._mark in (_READY, _TAKEN) else "is still starting"

    def ask(self) -> None:
        """Asks the process for its stacks."""
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, _ASKED)

    def insist(self, process: int) -> bool:
        """Sends the signal to the process, which must still run, unless it could not answer now; returns whether."""
        # A stopped process would answer once it continues, when its threads run Python code.
        if self._mark != _READY or self._is_owed or _letter(process) in _STOPPED:
            return False
        os.ftruncate(self._descriptor, 0)
        os.kill(process, SIGNAL)
        self._is_owed = True
        return True

    def read(self) -> str:
        """Returns what has been written."""
        data = os.pread(self._descriptor, _MOST_BYTES, 0)
        text = "" if data == _ASKED else data.decode("utf-8", "replace")
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


Asked = tuple[StackFile, Callable[[], int]]


def collect(asked: Sequence[Asked]) -> list[str]:
    """Returns the stacks of processes, "" for those that do not answer within two seconds.

    Each comes with a function that returns the id of the process, 0 once it has ended.
    """
    files = [file for file, _ in asked]
    for file in files:
        file.ask()
    _wait(files, _ANSWER)
    late = [(file, process) for file, find in asked if not file.read() and (process := find())]
    _wait([file for file, process in late if file.insist(process)], _SIGNALLED)
    return [file.read() for file in files]


def _wait(files: Sequence[StackFile], patience: float) -> None:
    """Waits until all files are complete, at most `patience` seconds."""
    end = time.monotonic() + patience
    texts = [file.read() for file in files]
    changed = time.monotonic()
    while not all(map(_is_complete, texts)) and time.monotonic() < min(end, changed + _QUIET if all(texts) else end):
        time.sleep(_INTERVAL)
        before, texts = texts, [file.read() for file in files]
        if texts != before:
            changed = time.monotonic()


def _is_complete(text: str) -> bool:
    # The main thread comes last. Its outermost call is a module's code, or ``python -m``, or is cut off.
    return text.rstrip().endswith(("in <module>", "in _run_module_as_main", "  ..."))


def state_of(process: int) -> str:
    """Returns why a process does not answer, as far as the system knows."""
    return _STATES.get(_letter(process), "does not answer")


def _letter(process: int) -> str:
    """Returns the state of a process, as Linux abbreviates it."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
