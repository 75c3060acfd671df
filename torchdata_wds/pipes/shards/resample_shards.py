"""A stream of shards drawn at random, without end or n of them, in every consumer another one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import ShardingFilterIterDataPipe

from torchdata_wds.checks import check_flags
from torchdata_wds.consumers import Place, find_sharder, place_among_ranks, process_place
from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.base import WdsPipe, register
from torchdata_wds.pipes.samples.shuffle import shuffled
from torchdata_wds.pipes.seeds import Seed
from torchdata_wds.pipes.starvation import DrawnShards

__all__ = ["ShardResamplerIterDataPipe"]


T = TypeVar("T")


@register("resample_shards")
class ShardResamplerIterDataPipe(WdsPipe[T]):
    """Draws shards at random, endlessly or n of them (functional name: ``resample_shards``).

    It stands in place of ``sharding_filter``: shards are not divided, every consumer (worker of a rank) draws from the
    whole list, each differently, and differently each epoch. After ``set_seed`` the draws follow from the seed, the
    epoch and the consumer's place. The list is read once an epoch and kept; it must end.

    An endless stream has no epochs of its own: a stage further down sets them, such as ``wds_epoch``.

    Args:
        source_datapipe: Yields URLs.
        n: How many shards each consumer draws per epoch: with 4 consumers, 4 * n shards are read; None draws without
            end.
        replacement: Whether each draw is from all shards. False passes over the list again and again, each pass a new
            shuffle: no shard comes twice before all others of its pass have come. n may end within a pass.

    Yields:
        str: One URL each.

    Raises:
        ValueError: if `n` is no number of shards, or if there is a ``sharding_filter`` or the like upstream, which
            would leave each consumer only its part of the list.
        ShardListError: if there is no shard to draw from; if the stream is endless, also once each shard has been
            drawn and nothing has come of them.
        RuntimeError: "Sharding twice", from torch, if a ``sharding_filter`` follows.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> shards = IterableWrapper(["a.tar", "b.tar", "c.tar"]).resample_shards(6, replacement=False)
        >>> sorted(shards)
        ['a.tar', 'a.tar', 'b.tar', 'b.tar', 'c.tar', 'c.tar']
    """

    repeats_shards = True

    def __init__(self, source_datapipe: IterDataPipe[T], n: int | None = None, *, replacement: bool = True) -> None:
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ValueError(f"n must be a whole number of shards from 1, or None for an endless stream, not {n!r}")
        check_flags(replacement=replacement)
        sharder = find_sharder(source_datapipe)
        if sharder is not None:
            raise ValueError(
                f"resample_shards draws from the whole list of shards, but {sharder} upstream leaves each consumer a "
                "part of it: remove that stage, resample_shards stands in its place"
            )
        # Knows the consumer's place, and divides nothing: a sharder of our own would upset the seeds upstream.
        self.source_datapipe = ShardingFilterIterDataPipe(source_datapipe)
        self.n = n
        self.replacement = replacement
        self._seed = Seed()

    def set_seed(self, seed: int) -> ShardResamplerIterDataPipe[T]:
        """Makes the coming epochs a function of the seed, their number and this consumer's place."""
        self._seed.set(seed)
        return self

    def __iter__(self) -> Iterator[T]:
        source = self.source_datapipe.source_datapipe
        shards: list[T] = list(source)
        if not shards:
            raise ShardListError(
                f"resample_shards got no shard to draw from: {type(source).__name__} gave nothing. Check the patterns "
                "and filters before it"
            )
        rng = self._seed.begin_epoch("resample_shards", self._place())
        places = range(len(shards))
        draws = drawn(places, rng) if self.replacement else passed(places, rng)
        watched = DrawnShards(len(shards)) if self.n is None else None
        for place in islice(draws, self.n):
            yield shards[place]
            if watched is not None:
                watched.note(place)

    def _place(self) -> Place:
        """This consumer's place among all: as the graph was divided, or where nobody did as processes are."""
        place = Place(self.source_datapipe.num_of_instances, self.source_datapipe.instance_id)
        return process_place() if place.consumers == 1 else place_among_ranks(place)

    def __len__(self) -> int:
        if self.n is None:
            raise TypeError("resample_shards() has no length: it is endless; resample_shards(n) has n")
        return self.n


def drawn(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    """Draws items without end, each from all of them."""
    draw = rng.random
    while True:
        yield items[int(draw() * len(items))]


def passed(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    """Passes over items without end, each pass in a new order."""
    while True:
        yield from shuffled(items, rng, len(items), len(items))
