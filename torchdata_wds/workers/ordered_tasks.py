"""A function of each item, on several processes, with the results in the items' order."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing.context import BaseContext
from typing import TypeVar

__all__ = ["map_in_order"]

T = TypeVar("T")
R = TypeVar("R")

#: So many items for each process are handed out before their results are taken.
_AHEAD = 4


def map_in_order(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[R]:
    """Calls a function for each item.

    Args:
        function: Picklable, as are items and results; for one process it need not be.
        items: The items.
        processes: How many processes to start at most; with 1, or one item, none is started.

    Yields:
        The results, in the order of the items.

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
    rest = iter(items)
    waiting: deque[Future[R]] = deque()
    with ProcessPoolExecutor(count, mp_context=_context(), initializer=_end_at_interrupt) as pool:
        try:
            waiting.extend(pool.submit(function, item) for item in islice(rest, _AHEAD * count))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, item) for item in islice(rest, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


def _context() -> BaseContext:
    """The usual way to start processes, but never by a fork while threads may hold locks."""
    method = multiprocessing.get_start_method()
    return multiprocessing.get_context("spawn" if method == "fork" and threading.active_count() > 1 else method)


def _end_at_interrupt() -> None:
    """Lets Ctrl-C end a process at once and without a word: the one that started it says what is to be said."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
