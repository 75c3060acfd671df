"""A shuffle through a buffer, as a function of items and a generator of random numbers."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Buffer:
    """The items in a shuffle's buffer, with their sizes, and whether the last one that came in sent one out."""

    def __init__(self, items: Iterable[Any] = (), gave: bool = False) -> None:
        self.items = [(item, 0) for item in items]
        self.gave = gave


def shuffled(
    items: Iterable[T],
    rng: random.Random,
    buffer_size: int,
    initial: int,
    max_bytes: int | None = None,
    buffer: Buffer | None = None,
) -> Iterator[T]:
    """Shuffles items through `buffer`, or a new one; see `SampleShufflerIterDataPipe`."""
    # The order depends only on the draws, one per item that goes out: resuming relies on that, as do states that
    # earlier versions saved.
    draw = rng.random
    limit = sys.maxsize if max_bytes is None else max_bytes
    start = max(1, min(initial, buffer_size))
    state = Buffer() if buffer is None else buffer
    waiting: list[tuple[T, int]] = state.items  # with sizes: an item may change before it goes out
    held = 0
    for item in items:
        size = 0 if max_bytes is None else size_in_bytes(item)
        if size > limit:
            yield item
            continue
        waiting.append((item, size))
        held += size
        # A full buffer sends out one item for each that comes in, a growing one for every second: with buffer_size=1000
        # and initial=100 the first goes out when the 100th comes in, and the buffer is full after 1,900 in and 901 out.
        surplus = state.gave = len(waiting) >= buffer_size or (len(waiting) >= start and not state.gave)
        while surplus or held > limit:
            chosen, size = _pop(waiting, draw)
            held -= size
            yield chosen
            surplus = False
    while waiting:
        yield _pop(waiting, draw)[0]


def _pop(buffer: list[T], draw: Callable[[], float]) -> T:
    place = int(draw() * len(buffer))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def size_in_bytes(item: Any) -> int:
    """Estimates the size of an item in memory, with the contents of its containers."""
    if isinstance(item, dict):
        return sys.getsizeof(item) + sum(size_in_bytes(value) for value in item.values())
    if isinstance(item, (list, tuple)):
        return sys.getsizeof(item) + sum(map(size_in_bytes, item))
    held = getattr(item, "nbytes", None)  # arrays, tensors, memoryviews
    if isinstance(held, int):
        return held
    if hasattr(item, "getbands"):  # a PIL image
        return int(item.width) * int(item.height) * len(item.getbands())
    return sys.getsizeof(item)
