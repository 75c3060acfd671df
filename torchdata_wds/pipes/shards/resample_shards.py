"""A stream of shards drawn at random, without end or n of them, in every consumer another one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import ShardingFilterIterDataPipe

from torchdata_wds.checks import check_flags, is_count
from torchdata_wds.consumers import Place, find_sharder, place_among_ranks, process_place
from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.base import WdsPipe, register
from torchdata_wds.pipes.samples.shuffle import shuffled
from torchdata_wds.pipes.seeds import Seed
from torchdata_wds.pipes.starvation import DrawnShards

T = TypeVar("T")


@register("resample_shards")
class ShardResamplerIterDataPipe(WdsPipe[T]):
    """Draws shards at random, endlessly or n of them (functional name: ``resample_shards``).

    It replaces ``sharding_filter``: shards are not divided, every consumer (worker of a rank) draws from the whole
    list, each differently, and differently each epoch. After ``set_seed`` the draws follow from the seed, the epoch and
    the consumer's place. The list, which must end, is read once an epoch and kept. An endless stream has no epochs of
    its own: a later stage such as ``wds_epoch`` sets them.

    Args:
        source_datapipe: Yields URLs.
        n: How many shards each consumer draws per epoch: with 4 consumers, 4 * n shards are read; None draws endlessly.
        replacement: Whether each draw is from all shards. False passes over the list again and again, each pass a new
            shuffle: no shard comes twice before all others of its pass have come. n may end within a pass.

    Yields:
        str: One URL each.

    Raises:
        ValueError: if `n` is not a number of shards, or if a ``sharding_filter`` or the like stands upstream and leaves
            each consumer only a part of the list.
        ShardListError: if there is no shard to draw from; if the stream is endless, also once each shard has been
            drawn without yielding anything.
        RuntimeError: "Sharding twice", from torch, if a ``sharding_filter`` follows.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> shards = IterableWrapper(["a.tar", "b.tar", "c.tar"]).resample_shards(6, replacement=False)
        >>> sorted(shards)
        ['a.tar', 'a.tar', 'b.tar', 'b.tar', 'c.tar', 'c.tar']
    """

    repeats_shards = True

    def __init__(self, source_datapipe: IterDataPipe[T], n: int | None = None, *, replacement: bool = True) -> None:
        if n is not None and not is_count(n, 1):
            raise ValueError(f"n must be a whole number of shards from 1, or None for an endless stream, not {n!r}")
        check_flags(replacement=replacement)
        if (sharder := find_sharder(source_datapipe)) is not None:
            raise ValueError(
                f"resample_shards draws from the whole list of shards, but {sharder} upstream leaves each consumer a "
                "part of it: remove that stage, resample_shards stands in its place"
            )
        # It learns the consumer's place and divides nothing: another class of sharder would upset the seeds upstream.
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
        # The consumer's place is that by which the graph was divided, or if it was not, that of the process.
        place = Place(self.source_datapipe.num_of_instances, self.source_datapipe.instance_id)
        place = process_place() if place.consumers == 1 else place_among_ranks(place)
        draws = _numbers(len(shards), self._seed.begin_epoch("resample_shards", place), self.replacement)
        watched = DrawnShards(len(shards)) if self.n is None else None
        for number in islice(draws, self.n):
            yield shards[number]
            if watched is not None:
                watched.note(number)

    def __len__(self) -> int:
        if self.n is None:
            raise TypeError("resample_shards() has no length: it is endless; resample_shards(n) has n")
        return self.n


def _numbers(count: int, rng: random.Random, replacement: bool) -> Iterator[int]:
    """Yields numbers of shards endlessly: each from all of them, or in passes that have a new order each."""
    draw = rng.random
    while True:
        if replacement:
            yield int(draw() * count)
        else:
            yield from shuffled(range(count), rng, count, count)
