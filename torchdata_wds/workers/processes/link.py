"""Controls one worker process from the main process: starts it, orders streams, takes items and ends it."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing.forkserver
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from torchdata_wds.consumers import no_traversal
from torchdata_wds.garbage import collection_held
from torchdata_wds.pipes.resume_facts import Facts
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.messages import Message, Receiver, open_channel
from torchdata_wds.workers.processes.shared_memory import Limits
from torchdata_wds.workers.processes.worker import CHECK_INTERVAL, GRACE, NoticeBoard, Order, WorkerGraph, run_worker
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot, SnapshotMemory
from torchdata_wds.workers.stats.stalls.stack_file import StackFile, collect, state_of
from torchdata_wds.workers.stats.stalls.worker_states import WorkerState
from torchdata_wds.workers.stream_pool import StreamLink

_PATIENCE = GRACE + CHECK_INTERVAL + 1  # how many seconds a worker may take to end; its guard normally ends it sooner
_SETTLING = 1  # how many seconds after its end its exit code may take to be known
_UNKNOWN_CODE: Final = 256  # one that no process can have


class WorkerLink(StreamLink):
    """Worker process number `number` of `workers`, which may run `ahead` messages ahead of the main process."""

    def __init__(
        self, context: Any, graph: WorkerGraph, board: NoticeBoard, number: int, workers: int, ahead: int
    ) -> None:
        super().__init__(number, workers)
        self._answered = context.RawValue(ctypes.c_uint64)  # the last order that the worker took up; 0 before the first
        self._first_turn = 0
        self._credits = context.Semaphore(ahead)
        limits = Limits.of(workers, ahead)
        self._connection, theirs = context.Pipe()
        self._stacks = StackFile()
        self._memory = context.RawValue(SnapshotMemory)
        shared = (self._credits, limits, board, self._answered, self._memory)
        arguments = (self._stacks, graph, number, workers, theirs, *shared)
        self._process: BaseProcess = context.Process(
            target=run_worker, args=arguments, name=f"wds-worker-{number}", daemon=True
        )
        method = context.get_start_method()
        self._is_new = method != "fork"
        if method == "forkserver":
            _start_server()  # before Ctrl-C is blocked
        try:
            with interrupts_held(), no_traversal(), collection_held():
                self._process.start()
        except BaseException as error:
            self._connection.close()
            self._stacks.close()
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):  # it, or its server, ended before it began
                raise self._explained(error) from error
            raise
        finally:
            theirs.close()  # a connection ends only once every copy of its other end is closed
        self._receiver = Receiver(self._connection, self._process.sentinel, self._credits, limits)

    def order(self, order: Order, facts: Facts, *, keeps_facts: bool) -> None:
        """Requests a stream in place of any earlier one; with `keeps_facts`, `facts` still collects that one's."""
        self._note_order(order.turn, facts, keeps_facts=keeps_facts)
        self._first_turn = self._first_turn or order.turn
        is_known = bool(facts.passes)
        try:
            # Messages of an earlier order come first: the worker may be blocked until they are received.
            while self._connection.poll():
                self._drop_message()
                if (message := self._next_message(0)) is not None:
                    self._note(message)
            self._drop_message()
            if not is_known:
                facts.passes.clear()  # those of the epoch that was left
            self._receiver.is_settled = False
            self._connection.send(order)
            self._receiver.is_settled = True
        except (OSError, EOFError) as error:
            raise self._explained(error) from error

    @property
    def is_lost(self) -> bool:
        """Whether Ctrl-C interrupted reading a message, or ended the worker before it took up an order."""
        return not self._receiver.is_settled or self._ended_at_once

    @property
    def _ended_at_once(self) -> bool:
        return not self._answered.value and not self._process.is_alive()

    @property
    def never_began(self) -> bool:
        """Whether the worker ended before it took up any of several orders: Ctrl-C came while it was starting."""
        return self._ended_at_once and 0 < self._first_turn < self._turn

    @property
    def is_stuck(self) -> bool:
        """Whether the worker has taken up an earlier order, but not the last one."""
        return bool(0 < self._answered.value < self._turn)

    def _next_message(self, timeout: float) -> Message | None:
        try:
            return self._receiver.receive(timeout)
        except (OSError, EOFError) as error:
            raise self._explained(error) from error

    def _note(self, message: Message) -> Message:
        super()._note(message)
        self._receiver.is_settled = True
        return message

    def process(self) -> int:
        """Returns the id of the worker's process, 0 once it has ended."""
        process = self._process
        return 0 if wait([process.sentinel], 0) or not process.is_alive() else process.pid or 0

    def known_state(self) -> WorkerState | None:
        """Returns what is known about the worker if its stacks are not needed, or not to be had."""
        if not self.process():
            return WorkerState(self._process.pid, "has ended")
        note = self._stacks.obstacle
        if self._has_ended:
            note = "has made all its items of this epoch"
        elif self._connection.poll():
            note = "has items ready"
        return WorkerState(self._process.pid, note) if note else None

    def told_stack(self, dump: str) -> WorkerState:
        """Returns the state of the worker, which has written `dump`."""
        process = self._process.pid or 0
        return WorkerState(process, "" if dump else state_of(process), dump, self.at)

    def snapshot(self) -> Snapshot | None:
        """Returns what the worker has last written about its work."""
        found: Snapshot | None = self._memory.read()
        return found

    def hang_up(self) -> None:
        """Shuts down the connection: the worker ends at its next use, and a thread waiting here wakes up."""
        with open_channel(self._connection) as channel, suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)
        self._credits.release()

    def join(self) -> None:
        """Waits for the process to end; kills it if it is stuck."""
        if self._exit_code(_PATIENCE) is None:
            self._kill()

    def kill(self) -> None:
        """Ends the worker at once, and releases all resources."""
        self._kill()
        self.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._settled_code()

    def _exit_code(self, patience: float) -> int | None:
        """Waits for the process to end; returns its exit code, or None if it still runs."""
        process: Any = self._process
        process.join(patience)
        code: int | None = process.exitcode
        return self._settled_code() if code is None and wait([process.sentinel], 0) else code

    def _settled_code(self) -> int:
        """Returns the exit code of the process, which has ended, even if another thread collects it."""
        # Whichever thread starts a process first collects the codes of all that have ended. Until it has noted one,
        # a moment later, that process looks alive here. A program that collects its children itself notes none.
        process: Any = self._process
        end = time.monotonic() + _SETTLING
        while process.exitcode is None and time.monotonic() < end:
            time.sleep(0.001)
        if process.exitcode is None:
            process._popen.returncode = _UNKNOWN_CODE  # or multiprocessing would take it for alive for ever
        code: int = process.exitcode
        return code

    def close(self) -> None:
        """Releases the connection and the resources of the ended process."""
        self._message = None
        self._connection.close()
        self._stacks.close()
        self._process.close()

    def _explained(self, error: Exception) -> RuntimeError:
        """Returns an error that says how the worker ended; raises `error` itself if its cause is in this process."""
        # Too many files are open here, or the program's own signal handler has ended a wait.
        if isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno == errno.EMFILE):
            raise error
        process = self._process
        code: int | None = 1  # its server ended, as it could not import the main module
        if process.pid is not None:
            code = self._exit_code(patience=1)
        if self._is_new and not self._answered.value and code == 1:
            return RuntimeError(
                f"worker {self._number} of {self._workers} ended before it could begin: its traceback is above. "
                "Most often it cannot import what the graph holds: move functions and classes out of if __name__ == "
                "'__main__' into a module, and put the loop that starts workers under it; or start workers with "
                "multiprocessing_context='fork'"
            )
        if code is None:
            how = "closed its connection, but is still running"
        elif code == _UNKNOWN_CODE:
            how = "ended; its exit code is unknown, because the program collects its child processes itself"
        elif code >= 0:
            how = f"ended with exit code {code}"
        else:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (the system does this when memory runs out)" if -code == signal.SIGKILL else ""
        return RuntimeError(
            f"worker {self._number} of {self._workers} (pid {process.pid}) {how}; the epoch cannot be completed. "
            "num_workers=0 runs the same stages in the main process, where a crash shows its traceback"
        )


def states_of(links: Sequence[WorkerLink]) -> list[WorkerState]:
    """Returns what each of some workers is at."""
    known = [link.known_state() for link in links]
    asked = [(link._stacks, link.process) for link, state in zip(links, known, strict=True) if state is None]
    dumps = iter(collect(asked))
    return [state or link.told_stack(next(dumps)) for link, state in zip(links, known, strict=True)]


def _start_server() -> None:
    """Starts the server that forks workers: it imports torch once for all, unless the program chose what it imports."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._preload_modules == ["__main__"]:
        used = sorted(name for name in list(sys.modules) if name.startswith("torchdata_wds."))  # by the graph's pipes
        server.set_forkserver_preload(["__main__", run_worker.__module__, *used])
    server.ensure_running()
