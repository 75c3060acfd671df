"""Shuffles samples through a buffer that yields early and can be limited in bytes."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple, Self, TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds.checks import check_count
from torchdata_wds.consumers import place_of
from torchdata_wds.pipes.base import WdsPipe, register
from torchdata_wds.pipes.foreign_loaders import heed_dealer
from torchdata_wds.pipes.resume_facts import Step, Wanted, Way
from torchdata_wds.pipes.seeds import Seed, Seeded

T = TypeVar("T")


class _Buffer:
    """The items in a shuffle's buffer, with their sizes, and whether the last one that came in sent one out."""

    def __init__(self, items: Iterable[Any] = (), gave: bool = False) -> None:
        self.items = [(item, 0) for item in items]
        self.gave = gave


class _Restart(NamedTuple):
    """Where a shuffle resumes; items are given by their numbers in the source."""

    needed: Sequence[int]  # the items to read first, ascending
    early: Sequence[int]  # those of them to yield at once
    waiting: Sequence[int]  # those of them that are in the buffer, by place
    gave: bool  # as in `_Buffer`
    rng: random.Random  # after the draws for all earlier items

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a pipe starts at the beginning


@register("wds_shuffle")
class SampleShufflerIterDataPipe(WdsPipe[T], Seeded, Step):
    """Shuffles items through a buffer (functional name: ``wds_shuffle``).

    The first item is yielded once `initial` items have been read. The buffer then grows to `buffer_size`, with one item
    yielded for every two read, and is emptied at the end. Each epoch has a new order. Downstream of a
    ``sharding_filter`` each consumer shuffles differently; upstream of it, or without one, all shuffle alike.

    Args:
        buffer_size: How many items to buffer; 0 or 1 keeps the order.
        initial: How many items to read before the first is yielded; at most `buffer_size`.
        max_bytes: The most bytes that the buffer holds, as estimated by `size_in_bytes`. A larger item passes straight
            through.

    Yields:
        The same items.

    Raises:
        ValueError: if a size is negative, or not a number.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> sorted(IterableWrapper(range(5)).wds_shuffle(3))
        [0, 1, 2, 3, 4]
    """

    repeats_shards = True
    reorders = True

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
            check_count(name, value, 0)
        self.source_datapipe = source_datapipe
        self.buffer_size, self.initial, self.max_bytes = buffer_size, initial, max_bytes
        self._seed = Seed()
        self._enabled = True
        self._restart: _Restart | None = None

    def set_shuffle(self, shuffle: bool = True) -> Self:
        """Turns shuffling on or off; called for ``DataLoader(shuffle=...)``, like that of the native ``shuffle``."""
        self._enabled = shuffle
        return self

    def __iter__(self) -> Iterator[T]:
        restart, self._restart = self._restart, None
        if not self._enabled:
            yield from self.source_datapipe
        elif restart is not None:
            yield from self._go_on(restart)
        else:
            heed_dealer(self)
            rng = self._seed.begin_epoch("wds_shuffle", place_of(self))
            yield from shuffled(self.source_datapipe, rng, self.buffer_size, self.initial, self.max_bytes)

    def __len__(self) -> int:
        return len(self.source_datapipe)

    def obstacle(self) -> str | None:
        """Returns why the order cannot be computed without the items; None if it can."""
        depends = self._enabled and self.max_bytes is not None
        return "SampleShuffler has max_bytes=, so that its order depends on the items" if depends else None

    def resume(self, wanted: Wanted, way: Way) -> tuple[Wanted, Way]:
        """Makes the next iteration begin in the middle; see `Step`."""
        if not self._enabled:
            return wanted, way
        # The draws depend on how many items there are, not on the items. So the shuffle is replayed with item numbers:
        # when 5,000 have gone out of a buffer of 1,000, it holds 999 of the first 5,999, and only these must be read
        # again.
        rng, buffer = self._seed.begin_epoch("wds_shuffle", place_of(self)), _Buffer()
        source = iter(count() if way.length is None else range(way.length))
        order = shuffled(source, rng, self.buffer_size, self.initial, buffer=buffer)
        early: list[int] = []
        given, last = 0, self.buffer_size - 1
        for number in (*wanted.early, wanted.first):
            while given < number:
                # The loop of `shuffled` for a full buffer, inlined for speed. The item that comes in takes the place of
                # the drawn one, which goes out; if the last place is drawn, the item itself goes out.
                if buffer.gave and len(buffer.items) >= last:
                    for taken in islice(source, number - given):
                        place = int(rng.random() * self.buffer_size)
                        if place < last:
                            buffer.items[place] = (taken, 0)
                        given += 1
                # Otherwise the buffer is filling up, or being emptied.
                if given < number:
                    if next(order, None) is None:
                        break
                    given += 1
            if number < wanted.first:
                early.extend(islice(order, 1))
                given += 1
        waiting = [number for number, _ in buffer.items]
        needed = sorted((*early, *waiting))
        self._restart = _Restart(needed, early, waiting, buffer.gave, rng)
        first = next(source, way.length)
        assert first is not None
        return Wanted(needed, first), way

    def undo(self) -> None:
        """Cancels a `resume`."""
        self._restart = None

    def _go_on(self, restart: _Restart) -> Iterator[T]:
        items = iter(self.source_datapipe)
        found = dict(zip(restart.needed, items, strict=False))
        if len(found) < len(restart.needed):
            raise ValueError(
                f"the source of wds_shuffle has {len(found):,} of the {len(restart.needed):,} items that it held when "
                "the state was made: the data is not the same"
            )
        for number in restart.early:
            yield found[number]
        buffer = _Buffer((found[number] for number in restart.waiting), restart.gave)
        del found
        yield from shuffled(items, restart.rng, self.buffer_size, self.initial, buffer=buffer)


def shuffled(
    items: Iterable[T],
    rng: random.Random,
    buffer_size: int,
    initial: int,
    max_bytes: int | None = None,
    buffer: _Buffer | None = None,
) -> Iterator[T]:
    """Shuffles items through `buffer`, or a new one; see `SampleShufflerIterDataPipe`."""
    # The order depends only on the draws, one per item that goes out: resuming relies on that, as do states that
    # earlier versions saved.
    draw = rng.random
    limit = sys.maxsize if max_bytes is None else max_bytes
    start = max(1, min(initial, buffer_size))
    state = _Buffer() if buffer is None else buffer
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
