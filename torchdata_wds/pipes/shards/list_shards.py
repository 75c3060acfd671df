"""The shards of an epoch: patterns expanded to URLs, and shards drawn at random."""

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, ShardingFilterIterDataPipe

from torchdata_wds import storage
from torchdata_wds.checks import check_flags, is_count
from torchdata_wds.consumers import find_sharder, place_among_ranks
from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.base import Pipe, WdsPipe, register
from torchdata_wds.pipes.samples.shuffle_buffer import shuffled
from torchdata_wds.pipes.seeds import Seed, Seeded
from torchdata_wds.pipes.starvation import DrawnShards
from torchdata_wds.process_place import Place, process_place

T = TypeVar("T")


@register("list_shards")
class ShardListerIterDataPipe(WdsPipe[str]):
    """Expands shard patterns into URLs (functional name: ``list_shards``).

    Patterns are expanded in order, again in each epoch; the matches of a glob or folder are sorted. Only the matches of
    one pattern are kept in memory.

    Args:
        source_datapipe: Yields patterns: str or Path with braces (``{000..123}``, ``{a,b}``) and globs, local or of
            any fsspec file system; folders; several patterns joined by ``::``; (nested) lists of those. A path that
            exists is taken verbatim. A name that ends in ``.tar``, ``.tar.gz`` or another suffix of shards is not
            looked up, so a folder of such a name needs its ``/``. In ``pipe:`` and ``http(s):`` only braces that are
            lists or ranges are expanded. ``${name}`` is the environment variable ``WDS_name``; in ``pipe:`` only if
            that is set.
        storage_options: fsspec options by protocol, such as ``{"s3": {...}}``, for listing.
        rewrite: Rules that redirect URLs: ``"regex=replacement;..."``, or a mapping from regex to replacement. The
            first rule that matches the beginning of a URL replaces the matching part; those in the environment
            variables ``WDS_REWRITE`` and ``GOPEN_REWRITE`` come after these. The original URLs are yielded: pass the
            same rules to the loader, and the same `storage_options`.

    Yields:
        str: One URL each.

    Raises:
        ShardListError: if a pattern matches nothing, or is not a pattern, or a variable is not set.
        UnsafeDataError: if a rule would turn a URL that contains shell syntax into a command.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper(["train-{08..10}.tar"]).list_shards())
        ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """

    repeats_shards = True

    def __init__(
        self,
        source_datapipe: Pipe,
        *,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
    ) -> None:
        self.source_datapipe = source_datapipe
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite

    def __iter__(self) -> Iterator[str]:
        yield from storage.list_each(self.source_datapipe, self.storage_options, variables=True)

    def list_again(self, patterns: Iterable[Any]) -> list[str]:
        """Expands patterns as of now, with the options of this pipe."""
        return list(storage.list_each(patterns, self.storage_options, variables=True))


@register("resample_shards")
class ShardResamplerIterDataPipe(WdsPipe[T], Seeded):
    """Draws shards at random, endlessly or n of them (functional name: ``resample_shards``).

    Use it instead of ``sharding_filter``: shards are not divided, and each consumer (a worker of a rank) draws from the
    whole list, seeded by the loader's seed, the epoch and the consumer's number. The list must be finite; it is read
    once per epoch and kept in memory. An endless stream has no epochs: cut it with a later stage such as ``wds_epoch``.

    Args:
        n: How many shards each consumer draws per epoch; None draws endlessly.
        replacement: Whether each draw is from all shards. False passes over the whole list repeatedly, each time in a
            new order; n may end within a pass.

    Yields:
        str: One URL each.

    Raises:
        ShardListError: if there are no shards, or if all shards of an endless stream yield nothing.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> sorted(IterableWrapper(["a.tar", "b.tar"]).resample_shards(4, replacement=False))
        ['a.tar', 'a.tar', 'b.tar', 'b.tar']
    """

    repeats_shards = True

    def __init__(self, source_datapipe: IterDataPipe[T], n: int | None = None, *, replacement: bool = True) -> None:
        if n is not None and not is_count(n, 1):
            raise ValueError(f"n must be a whole number of shards from 1, or None for an endless stream, not {n!r}")
        check_flags(replacement=replacement)
        if (sharder := find_sharder(source_datapipe)) is not None:
            raise ValueError(
                f"resample_shards draws from the whole list of shards, but {sharder} upstream leaves each consumer a "
                "part of it: remove that stage, which resample_shards replaces"
            )
        # Only learns the consumer's place, and divides nothing. Another class would change the seeds upstream.
        self.source_datapipe = ShardingFilterIterDataPipe(source_datapipe)
        self.n, self.replacement = n, replacement
        self._seed = Seed()

    def __iter__(self) -> Iterator[T]:
        source = self.source_datapipe.source_datapipe
        shards: list[T] = list(source)
        if not shards:
            raise ShardListError(
                f"resample_shards has no shards to draw from: {type(source).__name__} gave nothing. Check the patterns "
                "and filters before it"
            )
        # The place comes from the sharding of the graph or, if the graph was not sharded, from the process. Ranks that
        # the graph was told of count as they are: those of one model replica share a place, and draw the same shards.
        place = Place(self.source_datapipe.num_of_instances, self.source_datapipe.instance_id)
        if SHARDING_PRIORITIES.DISTRIBUTED not in self.source_datapipe.groups:
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
    """Yields shard numbers endlessly: each drawn from all, or in passes over all of them, each in a new order."""
    while True:
        if replacement:
            yield int(rng.random() * count)
        else:
            yield from shuffled(range(count), rng, count, count)
