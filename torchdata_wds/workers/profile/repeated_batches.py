"""A few batches repeated from memory: a training loop that reads nothing, so that its own limit shows."""

from __future__ import annotations

import copy as copying
import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from torchdata_wds.checks import check_flags, checked_int

T = TypeVar("T")


def repeat_batches(
    loader: Iterable[T], n: int = 10, *, count: int | None = None, copy: bool = False
) -> RepeatedBatches[T]:
    """Takes the first batches of a loader now, and returns an iterable that repeats them from memory.

    Put it in the place of the loader: the training loop then runs at its own limit, since no batch has to be read or
    decoded. The rate of the loader alone, divided by that limit, is the headroom; below 1, training waits for data.
    `profile_pipe` measures both with ``step=``.

    The batches stay valid after the loader goes on or is shut down: shared memory is not used again while a batch in it
    is alive. They are the same objects in every round, so a training loop that changes its batches in place needs
    ``copy=True``, whose time then counts as time of the training loop.

    Args:
        loader: A `WdsLoader`, any other loader or iterable, or an iterator such as ``loader.prefetch_to_device(...)``.
        n: How many batches to keep in memory. If the loader has fewer, those are repeated.
        count: How many batches each iteration yields; None repeats them forever.
        copy: Whether to yield a deep copy of the batch each time.

    Returns:
        An iterable that starts with the first batch in each iteration; it has a length if `count` is given.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of range, or the loader yields nothing.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> from torchdata_wds import WdsLoader, repeat_batches
        >>> with WdsLoader(IterableWrapper(range(100)).batch(2)) as loader:
        ...     batches = repeat_batches(loader, 2, count=5)
        >>> list(batches)
        [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    """
    n = checked_int("n", n, 1)
    count = None if count is None else checked_int("count", count, 0)
    check_flags(copy=copy)
    if not isinstance(loader, Iterable):
        raise TypeError(f"repeat_batches takes a loader or another iterable, not {loader!r:.60}")
    batches = list(itertools.islice(loader, n))
    if not batches:
        raise ValueError("the loader yields no batches, so there is nothing to repeat")
    return RepeatedBatches(batches, count, copy=copy)


class RepeatedBatches(Generic[T]):
    """What `repeat_batches` returns."""

    def __init__(self, batches: list[T], count: int | None, *, copy: bool) -> None:
        self.batches = batches
        self.count = count
        self.copy = copy

    def __iter__(self) -> Iterator[T]:
        found = itertools.islice(itertools.cycle(self.batches), self.count)
        return map(copying.deepcopy, found) if self.copy else found

    def __bool__(self) -> bool:
        return True  # also if it has no length

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("batches repeated forever have no length: pass count= to repeat_batches")
        return self.count
