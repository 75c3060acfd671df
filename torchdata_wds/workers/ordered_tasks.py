"""A function of each item, on several processes, with the results in the items' order."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

from torchdata_wds.workers.processes import run_in_processes

__all__ = ["map_in_order"]

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
