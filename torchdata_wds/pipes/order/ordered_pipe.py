"""The base of sources that yield samples in one global order, under a loader that knows the order or any other."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch

from torchdata_wds.checks import check_count, checked_int
from torchdata_wds.consumers import Grid, grid_of, upstream
from torchdata_wds.errors import DivisionError, ShardListError
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.samples import Result, SampleReader
from torchdata_wds.format.samples.grouping import WITHOUT_FIELDS
from torchdata_wds.handlers import Asked, Handler
from torchdata_wds.option_types import Even
from torchdata_wds.pipes.base import Pipe
from torchdata_wds.pipes.chain_text import form_name, short_name
from torchdata_wds.pipes.division import check_workers
from torchdata_wds.pipes.order.blocks import Share, blocks, count_samples
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.order.reading import Item, Lookup, items_of, parts_of, read_items
from torchdata_wds.pipes.running import running_pipes
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.split_shards import AgreedIterDataPipe

_LONE_BLOCK = 64
_SOON = 10  # seconds


class Contents(NamedTuple):
    """What there is to read in an epoch: the indexes of the sets of shards, and how many positions the epoch has."""

    indexes: tuple[DatasetIndex, ...]
    total: int
    digest: str  # of everything that the order follows from, besides seed and epoch


class OrderPoint(NamedTuple):
    """Where the order begins, and how it is divided: all that a consumer must know besides its place."""

    contents: Contents
    seed: int
    epoch: int  # its number, from 0
    base: int  # the first position
    block: int  # how many samples one consumer takes before the next one's turn
    item: int  # how many samples make one item of the graph: a divisor of `block`
    worker: int | None = None  # the worker whose turn is first, in this consumer's count; None for its own place

    @property
    def stream_seeds(self) -> tuple[int, int]:
        """The seeds of the epoch, as `Point` has them."""
        return mix(self.seed, self.epoch), mix(self.seed, self.epoch)


class _Feed:
    """The samples of one consumer, an item of the graph at a time."""

    def __init__(
        self, items: Iterator[Item], results: Generator[Result, None, None], readers: list[SampleReader]
    ) -> None:
        self._items, self._results, self._readers = items, results, readers
        self._places: Iterator[tuple[int, bool]] = iter(())  # positions of the item, and whether they are padding
        self.is_drained = False  # whether more samples were asked for than the item has

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the pipe has begun nothing

    def advance(self) -> bool:
        """Goes on to the next item, past what is left of this one; returns whether there is one."""
        for _ in self._places:
            next(self._results, None)
        item = next(self._items, None)
        self.is_drained = False
        self._places = (
            iter(()) if item is None else ((p, b.padding) for b in item.blocks for p in range(b.start, b.stop))
        )
        return item is not None

    def take(self) -> tuple[int, bool, Result] | None:
        """Returns the next sample of the item, with its position; None if the item has no more."""
        place = next(self._places, None)
        if place is None:
            self.is_drained = True
            return None
        return *place, next(self._results)

    def stop(self) -> None:
        """Ends all items."""
        self._items, self._places = iter(()), iter(())

    def close(self) -> None:
        """Closes files, and ends threads."""
        self.stop()
        self._results.close()
        for reader in self._readers:
            reader.ranges.close()


class _Soon:
    """The contents that an epoch will have, and when they were looked up."""

    def __init__(self, contents: Contents) -> None:
        self.contents, self._time = contents, time.monotonic()

    @property
    def is_fresh(self) -> bool:
        """Whether that was just now."""
        return time.monotonic() - self._time < _SOON

    def __deepcopy__(self, memo: dict[int, Any]) -> _Soon:
        return self  # a loader runs a copy of its graph

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # another process looks them up anew


class OrderedPipe(HandlingPipe[dict[str, Any]]):
    """Base of the sources of samples in a global order.

    A loader of this package calls `begin` at the start of an epoch, and `next_item` before each item. Under any other
    loader, the pipe finds its place by itself, and an item is `block` samples.
    """

    makes_samples = True
    is_ordered = True
    reads_shards = True

    def __init__(
        self,
        source: Pipe,
        handler: Handler,
        *,
        run: int,
        even: Even,
        seed: int | None,
        block: int,
        read_ahead: int | None,
    ) -> None:
        check_count("run", run, 1)
        check_count("block", block, 1)
        if even not in (None, "drop", "pad"):
            raise ValueError(f"even must be 'drop', 'pad' or None, not {even!r}")
        if read_ahead is not None:
            check_count("read_ahead", read_ahead, 0)
        # Services set the place on the native filter, and give all consumers equal seeds upstream of it.
        super().__init__(AgreedIterDataPipe(source).sharding_filter(), handler)
        self.run, self.even, self.block, self.read_ahead = run, even, block, read_ahead
        self.seed = None if seed is None else checked_int("seed", seed, 0, 2**64 - 1)
        self._feed: _Feed | None = None
        self._reseed: Callable[[int], object] | None = None
        self._soon: _Soon | None = None

    @abstractmethod
    def contents(self) -> Contents:
        """Reads the list of shards, and their indexes."""

    @abstractmethod
    def _lookup(self, contents: Contents, seed: int, epoch: int) -> Lookup:
        """Returns the order of an epoch."""

    @abstractmethod
    def _readers(self, contents: Contents) -> list[SampleReader]:
        """Returns what reads the samples of each set."""

    def order_arguments(self) -> tuple[Any, ...]:
        """Returns the arguments that tell two orders of a program apart."""
        return (self.run, self.even, self.seed, vars(self).get("_shuffle"), vars(self).get("fields"))

    def contents_soon(self) -> Contents:
        """Returns the contents of the next epoch, which are looked up once if it begins soon."""
        if self._soon is None or not self._soon.is_fresh:
            self._soon = _Soon(self.contents())
        return self._soon.contents

    def contents_now(self) -> Contents:
        """Returns the contents of an epoch that begins now."""
        # A loader's length is asked for right before an epoch: a store should not be asked about each shard twice.
        soon, self._soon = self._soon, None
        return soon.contents if soon is not None and soon.is_fresh else self.contents()

    def begin(self, point: OrderPoint, reseed: Callable[[int], object] | None = None) -> None:
        """Begins an epoch at a position; `reseed` is called with the position of each sample before it is yielded."""
        self.end()
        self._reseed = reseed
        self._feed = self._feed_from(point)

    def next_item(self) -> bool:
        """Lets the next iteration, or the running one, yield the samples of the next item; False after the last."""
        return self._feed is not None and self._feed.advance()

    @property
    def is_drained(self) -> bool:
        """Whether the running iteration has ended, since more samples were asked for than the item has."""
        return self._feed is None or self._feed.is_drained

    def end(self) -> None:
        """Ends the epoch."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def _feed_from(self, point: OrderPoint) -> _Feed:
        contents, seed, epoch, base, block, item, worker = point
        share = Share(*self.grid())
        if worker is not None:
            share = share._replace(worker=worker)
        check_share(form_name(self), contents.total, share.ranks, block, self.even)

        def items() -> Iterator[Item]:
            found = items_of(blocks(contents.total, base, share, block, self.even), block)
            return found if item == block else parts_of(found, item)

        ahead = self._ahead(contents) if self.read_ahead is None else self.read_ahead
        lookup = self._lookup(contents, seed, epoch)
        readers = self._readers(contents)
        return _Feed(items(), read_items(items(), readers, lookup, ahead), readers)

    def _ahead(self, contents: Contents) -> int:  # noqa: ARG002
        """Returns how many pieces to read ahead by default."""
        return 0

    def grid(self) -> Grid:
        """Returns the place of this consumer among the ranks and workers, as far as it was told."""
        return grid_of(self.source_datapipe)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        ask = self.asked()
        if self._feed is not None:
            yield from self._samples(self._feed, ask)
            return
        check_workers(self)
        self._check_filters()
        with closing(self._feed_from(self._own_point())) as feed:
            while feed.advance():
                yield from self._samples(feed, ask)

    def _samples(self, feed: _Feed, ask: Asked) -> Iterator[dict[str, Any]]:
        """Yields the samples of items until one has no more."""
        while (found := feed.take()) is not None:
            position, is_padding, result = found
            if isinstance(result, Exception):
                if not ask(result):
                    feed.stop()
                continue
            if len(result) == 2:
                self.skipped[WITHOUT_FIELDS] += 1
                continue
            if is_padding:
                result["__pad__"] = True
            if self._reseed is not None:
                self._reseed(position)
            yield result

    def _own_point(self) -> OrderPoint:
        """Returns the point at which an epoch begins under a loader that knows nothing of the order."""
        drawn, epoch = self._agreed().begin_order()
        seed = self.seed if drawn is None else drawn if self.seed is None else mix(self.seed, drawn)
        if seed is None and self.grid()[::2] == (1, 1):
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        # A lone consumer reads the same order in blocks of any size.
        block = self.block if self.source_datapipe.num_of_instances > 1 else max(self.block, _LONE_BLOCK)
        return OrderPoint(self.contents_now(), seed or 0, epoch, 0, block, block)

    def _agreed(self) -> AgreedIterDataPipe:
        agreed: AgreedIterDataPipe = self.source_datapipe.source_datapipe
        return agreed

    def _check_filters(self) -> None:
        """Raises if a stage divides the samples once more."""
        for root in running_pipes()[-1:]:
            for pipe in upstream(root):
                if hasattr(type(pipe), "apply_sharding") and any(above is self for above in upstream(pipe)):
                    raise DivisionError(
                        f"{form_name(self)} divides its samples among workers and ranks itself, and a "
                        f"{short_name(pipe)} in the same graph divides them once more: samples would be lost.",
                        advice="Drop .sharding_filter()",
                    )

    def __len__(self) -> int:
        """Returns how many samples this consumer gets in an epoch under a loader that knows nothing of the order."""
        return count_samples(self.contents_soon().total, 0, Share(*self.grid()), self.block, self.even)


def check_share(form: str, total: int, ranks: int, block: int, even: Even) -> None:
    """Raises in all ranks if one would get nothing: the others would wait for it."""
    # 10 samples in blocks of 8 for 4 ranks: without `even`, the ranks get 8, 2, 0 and 0.
    if count_samples(total, 0, Share(ranks, ranks - 1), block, even):
        return
    if not total:
        raise ShardListError(f"{form} has no samples: its shards are empty, or there is none. Check the list of shards")
    ways = ", or even='pad'" if total < ranks or even else ", or even='drop' or 'pad'"
    blocks = f" in blocks of {block:,}" if total >= ranks else ""
    raise ShardListError(
        f"{form} has {total:,} samples{blocks} for {ranks:,} ranks: a rank would get nothing. Check the list of "
        f"shards, or use fewer ranks{ways}"
    )
