"""One worker process as the main process sees it: it gets orders, is asked for items, and is ended."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing.forkserver
import os
import signal
import socket
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, Final

from torchdata_wds.pipes.resume_facts import Facts
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.messages import Message, Receiver
from torchdata_wds.workers.processes.shared_memory import Limits
from torchdata_wds.workers.processes.worker import CHECK_INTERVAL, GRACE, NoticeBoard, Order, WorkerGraph, run_worker

END: Final = object()  # stands for the end of a worker's stream

#: How many segments of shared memory, and so open files, all workers of a set may have in the main process if most
#: of their batches are held there; and how many more than are ahead each worker may have anyway, and keeps.
_MOST_SEGMENTS = 128
_SPARE_SEGMENTS = 6
_PATIENCE = GRACE + CHECK_INTERVAL + 1  # how many seconds a worker may take to end; its own guard sees to it sooner


class WorkerLink:
    """One worker process, number `number` of `workers`; it may be `ahead` messages ahead of what was taken."""

    def __init__(
        self, context: Any, graph: WorkerGraph, board: NoticeBoard, number: int, workers: int, ahead: int
    ) -> None:
        self._number = number
        self._workers = workers
        self._answered = context.RawValue(ctypes.c_uint64)  # the last order that the worker has taken up; 0 if none
        self._message: Message | None = None
        self._turn = self._first_turn = 0
        self._keeps_facts = False
        self.facts = Facts()
        self._credits = context.Semaphore(ahead)
        kept = ahead + _SPARE_SEGMENTS
        limits = Limits(max(_MOST_SEGMENTS // workers, kept), kept)
        self._connection, theirs = context.Pipe()
        arguments = (graph, number, workers, theirs, self._credits, limits, board, self._answered)
        self._process: BaseProcess = context.Process(
            target=run_worker, args=arguments, name=f"wds-worker-{number}", daemon=True
        )
        method = context.get_start_method()
        self._is_new = method != "fork"
        if method == "forkserver":  # the server starts while Ctrl-C is not blocked yet
            multiprocessing.forkserver.ensure_running()
        try:
            with interrupts_held():
                self._process.start()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, BrokenPipeError):  # the process ended before it had read what it is to run
                raise self._explained(error) from error
            raise
        finally:
            theirs.close()  # a connection ends only when nobody has its other end any more
        self._receiver = Receiver(self._connection, self._process.sentinel, self._credits, limits)

    def order(self, order: Order, facts: Facts, *, keeps_facts: bool) -> None:
        """Asks for a stream in place of any earlier one, whose reports `facts` still collects with `keeps_facts`."""
        self._drop_message()
        self._turn = order.turn
        self._first_turn = self._first_turn or order.turn
        self.facts = facts
        self._keeps_facts = keeps_facts
        is_known = bool(facts.passes)
        try:
            # What comes of an earlier order is in the way: the worker may wait for it to be taken in.
            while self._connection.poll():
                self._receive(0)
            self._drop_message()
            if not is_known:
                facts.passes.clear()  # of the epoch that was left
            self._receiver.is_settled = False
            self._connection.send(order)
            self._receiver.is_settled = True
        except (OSError, EOFError) as error:
            raise self._explained(error) from error

    @property
    def is_lost(self) -> bool:
        """Whether Ctrl-C interrupted the reading of a message, or ended the worker before it took up an order."""
        return not self._receiver.is_settled or self._ended_at_once

    @property
    def _ended_at_once(self) -> bool:
        return not self._answered.value and not self._process.is_alive()

    @property
    def never_began(self) -> bool:
        """Whether the worker ended without taking up any of several orders: Ctrl-C came while it started."""
        return self._ended_at_once and 0 < self._first_turn < self._turn

    @property
    def is_stuck(self) -> bool:
        """Whether the worker has taken up an earlier order, and not yet the last one."""
        return bool(0 < self._answered.value < self._turn)

    def wait_for_facts(self, timeout: float | None) -> None:
        """Waits until the graph has reported where the epoch began."""
        while not self.facts.passes:
            if self._receive(timeout).turn != self._turn:
                self.facts.passes.clear()  # of the epoch before

    def take(self, turn: int, timeout: float | None) -> Any:
        """Returns the next item of an order, or `END`; a RuntimeError if the worker has died or is too slow."""
        while self._message is None or self._message.turn != turn or self._message.is_empty:
            if self._message is not None and self._message.turn == turn and self._message.is_last:
                return END
            self._receive(timeout)
        return self._message.take()

    def _receive(self, timeout: float | None) -> Message:
        """Waits for the next message, in place of the last one, and notes what the graph reported with it."""
        self._drop_message()
        try:
            message = self._receiver.receive(timeout)
        except (OSError, EOFError) as error:
            raise self._explained(error) from error
        if message is None:
            raise RuntimeError(
                f"worker {self._number} of {self._workers} did not send its next item within timeout={timeout} s: its "
                "source is slow or stuck. A larger timeout waits longer, timeout=0 for ever"
            )
        if message.facts and (self._keeps_facts or message.turn == self._turn):
            self.facts.add(message.facts)
        self._message = message
        self._receiver.is_settled = True
        return message

    def _drop_message(self) -> None:
        message, self._message = self._message, None
        if message is not None:
            message.discard()

    def hang_up(self) -> None:
        """Ends the connection: the worker ends when it next uses it, and a thread waiting for it here wakes up."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as channel, suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)
        self._credits.release()

    def join(self) -> None:
        """Waits for the process to end, and kills it if it is stuck."""
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def kill(self) -> None:
        """Ends the worker at once, and releases all resources."""
        self._process.kill()
        self._process.join()
        self.close()

    def close(self) -> None:
        """Releases what the system holds for the connection and the ended process."""
        self._message = None
        self._connection.close()
        self._process.close()

    def _explained(self, error: Exception) -> Exception:
        """Returns the error that says how the worker ended, or that this process has too many files open."""
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return error
        process = self._process
        process.join(timeout=1)  # its exit code may take a moment
        code = process.exitcode
        if self._is_new and not self._answered.value and code == 1:
            return RuntimeError(
                f"worker {self._number} of {self._workers} ended before it could begin: its traceback stands above. "
                "Most often it cannot import what the graph holds: functions and classes that are defined under if "
                "__name__ == '__main__' belong into a module, and the loop that starts workers belongs under it; or "
                "start them with multiprocessing_context='fork'"
            )
        if code is None or code >= 0:
            how = f"ended by itself with exit code {code}"
        else:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (the system does so when memory runs out)" if -code == signal.SIGKILL else ""
        return RuntimeError(
            f"worker {self._number} of {self._workers} (pid {process.pid}) {how}; the epoch cannot be completed. "
            "num_workers=0 runs the same stages in the main process, where a crash shows its place"
        )
