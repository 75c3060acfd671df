"""Shuffles samples through a buffer that yields early and can be limited in bytes."""

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple, Self, TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds.checks import check_count
from torchdata_wds.consumers import place_of
from torchdata_wds.pipes.base import WdsPipe, register
from torchdata_wds.pipes.foreign_loaders import heed_dealer
from torchdata_wds.pipes.resume_facts import Step, Wanted, Way
from torchdata_wds.pipes.samples.shuffle_buffer import Buffer, shuffled
from torchdata_wds.pipes.seeds import Seed, Seeded

T = TypeVar("T")


class _Restart(NamedTuple):
    """Where a shuffle resumes; items are given by their numbers in the source."""

    needed: Sequence[int]  # the items to read first, ascending
    early: Sequence[int]  # those of them to yield at once
    waiting: Sequence[int]  # those of them that are in the buffer, by place
    gave: bool  # as in `Buffer`
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
        rng, buffer = self._seed.begin_epoch("wds_shuffle", place_of(self)), Buffer()
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
        buffer = Buffer((found[number] for number in restart.waiting), restart.gave)
        del found
        yield from shuffled(items, restart.rng, self.buffer_size, self.initial, buffer=buffer)
