"""Runs a function over many items in worker processes, any of which may die without harm to the others."""

import multiprocessing
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

from torchdata_wds.garbage import collection_held, leave_garbage
from torchdata_wds.post_import import when_imported
from torchdata_wds.storage.sources.command import status_text
from torchdata_wds.workers.interrupts import interrupts_held

T = TypeVar("T")
R = TypeVar("R")

# Seconds that workers have to exit on their own, as after Ctrl-C, and then to clean up after SIGTERM.
PATIENCE, GRACE = 1.0, 5.0

# How often, in seconds, to look for dead workers.
CHECK_INTERVAL = 1.0


def map_in_order(function: Callable[[T], R], items: Sequence[T], processes: int) -> Generator[R, None, None]:
    """Yields the results in the order of the items; raises what the function raised, or RuntimeError if killed."""
    count = min(processes, len(items))
    if count <= 1:
        yield from map(function, items)
        return
    method = multiprocessing.get_start_method()
    if method == "fork" and threading.active_count() > 1:  # another thread may hold a lock, which would stay locked
        method = "spawn"
    early: dict[int, Any] = {}
    due = 0
    work: Any = partial(_value_or_error, function)
    with closing(run_in_processes(work, enumerate(items), count, start_method=method)) as results:
        for (number, _), result in results:
            early[number] = result
            while due in early:
                found = early.pop(due)
                due += 1
                if isinstance(found, str):  # the worker died
                    raise RuntimeError(f"item {due:,} of {len(items):,} was lost: {found}")  # noqa: TRY004
                value, error = found
                if error is not None:
                    raise error
                yield value


def _value_or_error(function: Callable[[Any], Any], item: tuple[int, Any]) -> tuple[Any, Exception | None]:
    try:
        return function(item[1]), None
    except Exception as error:  # noqa: BLE001 - raised where the result is used
        return None, error


def run_in_processes(
    work: Callable[[T], str], items: Iterable[T], num_workers: int, *, start_method: str | None = None
) -> Generator[tuple[T, str], None, None]:
    """Yields each item with its result, as soon as it is ready.

    If a worker dies, the result of its item says so, and a new worker takes its place. Closing the generator early ends
    the workers. `work` must not raise, and is pickled unless processes are forked; items are always pickled.
    """
    todo = deque(items)
    context = multiprocessing.get_context(start_method)
    workers: list[_Worker] = []
    try:
        while workers or todo:
            while todo and len(workers) < num_workers:
                workers.append(_Worker(context, work))
                workers[-1].give(todo.popleft())
            # A child of a dead worker may hold both its connection and its sentinel open: then nothing becomes ready,
            # and only `exitcode`, looked at every CHECK_INTERVAL, shows that the worker is dead.
            wait([line for worker in workers for line in (worker.line, worker.process.sentinel)], CHECK_INTERVAL)
            for worker in [worker for worker in workers if worker.process.exitcode is not None or worker.line.poll()]:
                result, is_alive = worker.take()
                if is_alive and todo:
                    worker.give(todo.popleft())
                else:
                    workers.remove(worker)
                    worker.give(None)  # which ends it
                    worker.close()
                yield result
    finally:
        # Ctrl-C reaches the workers too: let them exit on their own, then send SIGTERM, and at last SIGKILL
        for seconds, stop in ((PATIENCE, "terminate"), (GRACE, "kill")):
            end = time.monotonic() + seconds
            for worker in workers:
                worker.process.join(max(0.0, end - time.monotonic()))
            for worker in workers:
                getattr(worker.process, stop)()
        for worker in workers:
            worker.close()


class _Worker:
    """A process, and the item it works on."""

    def __init__(self, context: BaseContext, work: Callable[[Any], str]) -> None:
        self.line, other = context.Pipe()
        self.process: Any = context.Process(target=_serve, args=(other, work))  # type: ignore[attr-defined]
        self._item: Any = None
        try:
            with interrupts_held(), collection_held():
                self.process.start()
        except BaseException:
            self.line.close()
            raise
        finally:
            other.close()

    def give(self, item: Any) -> None:
        """Sends an item to the worker; if it has died, `take` notices."""
        self._item = item
        with suppress(BrokenPipeError, ConnectionResetError):
            self.line.send(item)

    def take(self) -> tuple[tuple[Any, str], bool]:
        """Returns the worker's item with its result, and whether it can take another."""
        with suppress(EOFError, ConnectionResetError):
            if self.line.poll():
                return (self._item, self.line.recv()), self.process.exitcode is None
        self.process.join()
        status = self.process.exitcode
        hint = ", perhaps because the system ran out of memory" if status == -signal.SIGKILL else ""
        return (self._item, f"its worker process ended with {status_text(status)}{hint}"), False

    def close(self) -> None:
        """Waits for the end of the process, and releases it."""
        self.process.join()
        self.line.close()
        self.process.close()


def _serve(line: Connection, work: Callable[[Any], str]) -> None:
    """Works on items, in a worker, until none are left or the parent dies."""
    leave_garbage()
    # SIGTERM raises KeyboardInterrupt, which the work cannot take for an error of its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # the processes are what runs in parallel
    when_imported("torch", lambda: sys.modules["torch"].set_num_threads(1))
    parent: Any = multiprocessing.parent_process()
    try:
        # The process starts with SIGINT blocked. From here on Ctrl-C ends it, even one that has already arrived.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        while line in wait([line, parent.sentinel]):
            if (item := line.recv()) is None:
                return
            line.send(work(item))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
