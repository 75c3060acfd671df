"""A function over many items in processes, of which one may die without harm to the others.

A function of each item, on several processes, with the results in the items' order.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, Generic, NoReturn, TypeVar

import torch

from torchdata_wds.storage.sources.command import status_text
from torchdata_wds.workers.interrupts import interrupts_held

__all__ = ["run_in_processes", "map_in_order"]


Item = TypeVar("Item")

#: How long, in seconds, a worker may take to end by itself, as after Ctrl-C, and then to tidy up when it is told to.
PATIENCE = 1.0

GRACE = 5.0

#: How often, in seconds, is looked whether a worker has died whose line a child of its own holds open.
CHECK_INTERVAL = 1.0


def run_in_processes(
    work: Callable[[Item], str], items: Iterable[Item], num_workers: int, *, start_method: str | None = None
) -> Generator[tuple[Item, str], None, None]:
    """Works on items in processes.

    Args:
        work: Gives "", or what has failed. It must not raise. It is pickled unless processes are forked.
        items: The items, which are pickled.
        num_workers: The number of processes; there are no more than items.
        start_method: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for Python's default.

    Yields:
        Each item with what the function gave, as they are ready. A worker that dies is a failure of the item that it
        was at, and another takes its place. When the generator is closed before its end, the workers are ended.
    """
    todo = deque(items)
    context = multiprocessing.get_context(start_method)
    workers: list[_Worker[Item]] = []
    try:
        for _ in range(min(num_workers, len(todo))):
            workers.append(_Worker(context, work))
            workers[-1].give(todo.popleft())
        while workers:
            wait([line for worker in workers for line in (worker.line, worker.process.sentinel)], CHECK_INTERVAL)
            for worker in [worker for worker in workers if worker.is_ready()]:
                result, is_alive = worker.take()
                if not is_alive:
                    workers.remove(worker)
                    worker.close()
                    if todo:
                        workers.append(worker := _Worker(context, work))
                if todo:
                    worker.give(todo.popleft())
                elif is_alive:
                    workers.remove(worker)
                    worker.dismiss()
                yield result
    finally:
        _end(workers)


class _Worker(Generic[Item]):
    """A process, and the item that it is at."""

    def __init__(self, context: BaseContext, work: Callable[[Item], str]) -> None:
        self.line, other = context.Pipe()
        self.process: Any = context.Process(target=_serve, args=(other, work))  # type: ignore[attr-defined]
        self._item: Item
        try:
            with interrupts_held():
                self.process.start()
        except BaseException:
            self.line.close()
            raise
        finally:
            other.close()

    def give(self, item: Item) -> None:
        """Hands it an item; that it has died is seen when the result is taken."""
        self._item = item
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.line.send(item)

    def is_ready(self) -> bool:
        """Whether it is done with its item, or dead."""
        return self.process.exitcode is not None or self.line.poll()

    def take(self) -> tuple[tuple[Item, str], bool]:
        """Gives its item with the result, and whether it can have another one."""
        try:
            if self.line.poll():
                return (self._item, self.line.recv()), self.process.exitcode is None
        except (EOFError, ConnectionResetError):
            pass
        self.process.join()
        status = self.process.exitcode
        hint = ", as when the system has no more memory" if status == -signal.SIGKILL else ""
        return (self._item, f"its worker process ended with {status_text(status)}{hint}"), False

    def dismiss(self) -> None:
        """Lets a worker end that has nothing to do."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.line.send(None)
        self.process.join()
        self.close()

    def close(self) -> None:
        """Lets go of an ended process."""
        self.line.close()
        self.process.close()


def _end(workers: list[_Worker[Any]]) -> None:
    """Ends workers, first by waiting: after Ctrl-C they end by themselves, and should not be disturbed in that."""
    _join(workers, PATIENCE)
    for worker in workers:
        worker.process.terminate()
    _join(workers, GRACE)
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.close()


def _join(workers: list[_Worker[Any]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))


class _Terminated(KeyboardInterrupt):
    """The worker was told to end: no error that the work could take for its own."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _heed_interrupts() -> None:
    """Lets Ctrl-C end this process, which began with the signal held; one that came meanwhile does so now."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _serve(line: Connection, work: Callable[[Item], str]) -> None:
    """Runs in a worker: works on items until there are no more, or the parent has died."""
    signal.signal(signal.SIGTERM, _terminate)
    torch.set_num_threads(1)  # the processes are what runs in parallel
    parent: Any = multiprocessing.parent_process()
    try:
        _heed_interrupts()
        while line in wait([line, parent.sentinel]):
            item = line.recv()
            if item is None:
                return
            line.send(work(item))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


T = TypeVar("T")

R = TypeVar("R")


def map_in_order(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[R]:
    """Calls a function for each item.

    Args:
        function: Picklable, as are items and results; for one process it need not be.
        items: The items.
        processes: How many processes to start at most; with 1, or one item, none is started.

    Yields:
        The results, in the order of the items. When the generator is closed before its end, the processes are ended.

    Raises:
        RuntimeError: if a process was killed.
        Exception: what the function raises, in its turn.

    Example:
        >>> list(map_in_order(abs, [3, -1], 1))
        [3, 1]
    """
    count = min(processes, len(items))
    if count <= 1:
        yield from map(function, items)
        return
    early: dict[int, Any] = {}
    due = 0
    work: Any = _Numbered(function)
    with closing(run_in_processes(work, enumerate(items), count, start_method=_start_method())) as results:
        for (number, _), result in results:
            early[number] = result
            while due in early:
                yield _value(early.pop(due), due, len(items))
                due += 1


class _Numbered:
    """Calls a function with an item behind its number, and gives an exception as it does a value."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, item: tuple[int, Any]) -> tuple[Any, Exception | None]:
        try:
            return self._function(item[1]), None
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            return None, error


def _value(result: tuple[Any, Exception | None] | str, number: int, count: int) -> Any:
    if isinstance(result, str):  # of a worker that has died
        raise RuntimeError(  # noqa: TRY004 - nothing is wrong with its type
            f"item {number + 1:,} of {count:,} was lost: {result}"
        )
    value, error = result
    if error is not None:
        raise error
    return value


def _start_method() -> str | None:
    """The usual way to start processes, but never by a fork while threads may hold locks."""
    method = multiprocessing.get_start_method()
    return "spawn" if method == "fork" and threading.active_count() > 1 else method
