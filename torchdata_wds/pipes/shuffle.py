"""Samples in random order, through a buffer that starts early and can be limited in bytes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.base import WdsPipe, register
from torchdata_wds.pipes.place import Seed, place_of

__all__ = ["SampleShufflerIterDataPipe", "size_in_bytes"]

T = TypeVar("T")


@register("wds_shuffle")
class SampleShufflerIterDataPipe(WdsPipe[T]):
    """Shuffles items through a buffer (functional name: ``wds_shuffle``).

    The first item comes once `initial` items are there; the buffer then grows to `buffer_size`, one item going out
    for two that come in. Each consumer of a ``sharding_filter`` shuffles differently, also under torch's DataLoader,
    which gives all its workers the same seed; before the filter, or without one, all shuffle alike. A new order comes
    each epoch. Nothing is lost at the end: the buffer is emptied.

    Args:
        source_datapipe: Yields anything.
        buffer_size: How many items to keep; 0 or 1 passes items through in their order.
        initial: How many items to wait for before the first is given out; at most `buffer_size`.
        max_bytes: The most that the buffer holds in bytes, as `size_in_bytes` counts them, when it asks for the next
            item. An item that is larger by itself goes straight through.

    Yields:
        The same items.

    Raises:
        ValueError: if a size is negative, or no number.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> sorted(IterableWrapper(range(5)).wds_shuffle(3))
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[T],
        buffer_size: int = 1000,
        *,
        initial: int = 100,
        max_bytes: int | None = None,
    ) -> None:
        limit = 0 if max_bytes is None else max_bytes
        for name, value in (("buffer_size", buffer_size), ("initial", initial), ("max_bytes", limit)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a whole number from 0, not {value!r}")
        self.source_datapipe = source_datapipe
        self.buffer_size = buffer_size
        self.initial = initial
        self.max_bytes = max_bytes
        self._seed = Seed()
        self._enabled = True

    def set_shuffle(self, shuffle: bool = True) -> SampleShufflerIterDataPipe[T]:
        """Turns shuffling on or off, as ``DataLoader(shuffle=...)`` asks the native ``shuffle`` to."""
        self._enabled = shuffle
        return self

    def set_seed(self, seed: int) -> SampleShufflerIterDataPipe[T]:
        """Makes the coming epochs a function of the seed, their number and this consumer's place."""
        self._seed.set(seed)
        return self

    def __iter__(self) -> Iterator[T]:
        if not self._enabled:
            yield from self.source_datapipe
            return
        rng = self._seed.begin_epoch("wds_shuffle", place_of(self))
        yield from shuffled(self.source_datapipe, rng, self.buffer_size, self.initial, self.max_bytes)

    def __len__(self) -> int:
        return len(self.source_datapipe)


def shuffled(
    items: Iterable[T],
    rng: random.Random,
    buffer_size: int,
    initial: int,
    max_bytes: int | None = None,
) -> Iterator[T]:
    """Shuffles items through a buffer; see `SampleShufflerIterDataPipe`."""
    draw = rng.random
    limit = sys.maxsize if max_bytes is None else max_bytes
    start = max(1, min(initial, buffer_size))
    buffer: list[tuple[T, int]] = []  # with their sizes: an item may have changed until it goes out
    held = 0
    gave = False
    for item in items:
        size = 0 if max_bytes is None else size_in_bytes(item)
        if size > limit:
            yield item
            continue
        buffer.append((item, size))
        held += size
        # while the buffer grows, one goes out for every two that come in
        gave = len(buffer) >= buffer_size or (len(buffer) >= start and not gave)
        surplus = gave
        while surplus or held > limit:
            chosen, size = _pop(buffer, draw)
            held -= size
            yield chosen
            surplus = False
    while buffer:
        yield _pop(buffer, draw)[0]


def _pop(buffer: list[T], draw: Callable[[], float]) -> T:
    place = int(draw() * len(buffer))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def size_in_bytes(item: Any) -> int:
    """Estimates what an item holds in memory: the bytes of its buffers and strings, containers walked through.

    Example:
        >>> size_in_bytes({"txt": b"12345", "cls": 3}) >= 5
        True
    """
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
