"""Divides shards among consumers so that all have equal work."""

import copy
import os
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchdata_wds import storage
from torchdata_wds.consumers import find_sharder, no_traversal, ranks_of_filter
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index.slices import PaddingSlice, ShardSlice, TailSlice
from torchdata_wds.handlers import warn_once
from torchdata_wds.option_types import Even, Index
from torchdata_wds.pipes.base import Pipe, WdsPipe, register
from torchdata_wds.pipes.seeds import Seed, Seeded
from torchdata_wds.pipes.shards.shard_counts import shard_counts
from torchdata_wds.process_place import Place
from torchdata_wds.storage.urls import check_letter, is_local, local_path


@register("split_shards")
class ShardSplitterIterDataPipe(WdsPipe[ShardSlice]):
    """Divides the samples of shards among workers and ranks (functional name: ``split_shards``).

    Use it instead of ``sharding_filter``, after the shuffle of the shards. With an index, consumer i of N reads samples
    ``i*T//N`` to ``(i+1)*T//N`` of the epoch's T samples, in the order of the shards: shares differ by at most one
    sample, and few shards are opened by two consumers. Without an index, whole shards are dealt out; if there are fewer
    shards than consumers, each consumer reads all of them and keeps every N-th sample, with a warning. Shares become
    unequal if handlers skip samples or stages drop them: to keep ranks in step, use ``wds_epoch``. The list of shards
    must be finite; it and the index are read in each epoch, remote indexes only once.

    Args:
        source_datapipe: Yields URLs (str or Path).
        index: How many samples the shards have: True for the index beside each shard, from ``index_shard`` and
            writers with ``index=True``; the path or URL of one JSON file, a ``wids`` shard list or
            an object from URL to number; or a dict from URL to number. A shard is looked up by its whole URL, or by its
            base name if only one shard has it. None divides whole shards.
        even: ``"drop"`` makes all shares equal by leaving out up to N - 1 samples, drawn again in each epoch. ``"pad"``
            makes them equal by repeating up to N - 1 samples, marked ``__pad__: True``: leave these out of sums, and an
            evaluation is exact. Both need an index.
        storage_options, rewrite: As in ``list_shards``, for reading the index.

    Yields:
        ShardSlice: ``(url, start, stop, step)``, for ``load_wds_shards``.

    Raises:
        ShardListError: if there are no samples, a rank would get none, or the index lacks a shard.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> shards = IterableWrapper(["a.tar", "b.tar"]).split_shards({"a.tar": 3, "b.tar": 5})
        >>> shards.source_datapipe.apply_sharding(2, 1)  # as a DataLoader does in its second worker
        >>> [tuple(part) for part in shards]
        [('b.tar', 1, 5, 1)]
    """

    repeats_shards = True

    def __init__(
        self,
        source_datapipe: Pipe,
        index: Index = None,
        *,
        even: Even = None,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
    ) -> None:
        if even not in (None, "drop", "pad"):
            raise ValueError(f"even must be 'drop', 'pad' or None, not {even!r}")
        if even is not None and index is None:
            raise ValueError(
                f"even={even!r} must know how many samples the shards have: pass index=True for the indexes beside "
                "them, or another kind of index="
            )
        if (sharder := find_sharder(source_datapipe)) is not None:
            raise ValueError(
                f"split_shards divides the shards among workers and ranks, and a {sharder} before it has done that "
                "already: each consumer would read a part of its part. Keep one of .split_shards(), .sharding_filter() "
                "and .resample_shards()"
            )
        # Services set the place on the native filter, and give all consumers equal seeds upstream of it.
        self.source_datapipe: Any = AgreedIterDataPipe(source_datapipe).sharding_filter()
        self.index = shard_counts(index)
        self.even = even
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite

    def __iter__(self) -> Iterator[ShardSlice]:
        shards, place = self.source_datapipe.source_datapipe, self._place()
        draw = shards.begin_epoch().random()
        urls = list(map(_as_url, shards))
        if self.index is None:
            if not urls:
                raise self._nothing_for(0, urls, None)
            if len(urls) < place.consumers and not place.number:  # one warning is enough
                _warn_about_strides(urls, place.consumers)
            yield from whole_shards(urls, place)
            return
        try:
            counts = self.index.of(urls, self.storage_options)
        except (ShardListError, OSError):
            for url in urls:
                check_letter(url, "split_shards got the shard")
            raise
        total = sum(counts)
        for rank, members in enumerate(ranks_of_filter(self.source_datapipe)):
            # All ranks raise, not only those without data: otherwise those with data would wait for them.
            if not any(share_of(total, Place(place.consumers, number), self.even) for number in members):
                raise self._nothing_for(rank, urls, total)
        yield from slices_of(share_of(total, place, self.even, draw), urls, counts)

    def count_samples(self) -> int:
        """Returns how many samples this consumer gets in the coming epoch; leaves random states unchanged."""
        if self.index is None:
            raise TypeError("split_shards has no index that tells how many samples the shards have: pass index=")
        # A copy of the source and a fork of torch's generator: an iteration here must not count as an epoch.
        with torch.random.fork_rng(devices=[]):
            with no_traversal():
                source = copy.deepcopy(self.source_datapipe.source_datapipe)
            urls = list(map(_as_url, source))
        total = sum(self.index.of(urls, self.storage_options))
        return sum(piece.stop - piece.start for piece in share_of(total, self._place(), self.even))

    def known_counts(self, urls: Sequence[str]) -> list[int] | None:
        """Returns how many samples shards have; None unless all are known without contacting a server."""
        with suppress(ShardListError, OSError):
            return self.index.of(urls, self.storage_options) if self.index is not None and self.index.is_local else None
        return None

    def _place(self) -> Place:
        return Place(self.source_datapipe.num_of_instances, self.source_datapipe.instance_id)

    def _nothing_for(self, rank: int, urls: list[str], total: int | None) -> ShardListError:
        ranks = ranks_of_filter(self.source_datapipe)
        samples = "" if total is None else f"{total:,} samples in "
        left_out = " and even='drop' gives all the same number" if self.even == "drop" and total else ""
        return ShardListError(
            f"split_shards has {samples}{len(urls):,} shards for {len(ranks):,} ranks of {len(ranks[0]):,} workers"
            f"{left_out}: rank {rank} would get nothing. Check the list of shards, or use fewer ranks or workers"
            f"{', or even=' + repr('pad') if total else ''}"
        )


class AgreedIterDataPipe(WdsPipe[Any], Seeded):
    """Passes items through, and holds the seed that all consumers share: services seed equally above a filter."""

    repeats_shards = True
    is_inner = True

    def __init__(self, source_datapipe: Pipe) -> None:
        self.source_datapipe = source_datapipe
        self._seed = Seed()

    def begin_epoch(self) -> random.Random:
        """Returns the generator of the next epoch, the same for all consumers."""
        if self._seed.seed is None:  # torch's global generator may differ among consumers
            self._seed.epoch += 1
            return random.Random(f"unseeded/{self._seed.epoch}/split_shards")
        return self._seed.begin_epoch("split_shards", Place())

    def begin_order(self) -> tuple[int | None, int]:
        """Returns the seed that all consumers share, None if there is none, and the number of the epoch."""
        self._seed.epoch += 1
        return self._seed.seed, self._seed.epoch - 1

    def __iter__(self) -> Iterator[Any]:
        yield from self.source_datapipe


class Piece(NamedTuple):
    """Samples `start` to `stop` (exclusive), counted over all shards; padding is what another consumer reads too."""

    start: int
    stop: int
    is_padding: bool = False


def share_of(total: int, place: Place, even: Even = None, draw: float = 0.0) -> list[Piece]:
    """Returns which of `total` samples a consumer reads; `draw`, from 0 to 1, decides which are left out."""
    consumers, number = place
    if even is None:
        pieces = [Piece(number * total // consumers, (number + 1) * total // consumers)]
    elif even == "drop":
        # 8 samples for 3 consumers: each reads 2, and 2 are left out. With gap=3 these are samples 3 and 4: consumer 0
        # reads 0 and 1, consumer 1 reads 2 and 5 instead of 2 and 3, and consumer 2 reads 6 and 7.
        each, left_out = divmod(total, consumers)
        start, stop = number * each, (number + 1) * each
        gap = int(draw * (each * consumers + 1)) if left_out else total
        pieces = [Piece(start, min(stop, gap)), Piece(max(start, gap) + left_out, stop + left_out)]
    else:
        # 8 samples for 3 consumers: each reads 3, and the last one reads 6, 7 and, as padding, 8 % 8 = 0.
        pieces = []
        each = -(-total // consumers)
        start, stop = number * each, (number + 1) * each
        while start < stop:
            first = start % total
            length = min(stop - start, total - first)
            pieces.append(Piece(first, first + length, start >= total))
            start += length
    return [piece for piece in pieces if piece.start < piece.stop]


def slices_of(pieces: Sequence[Piece], urls: Sequence[str], counts: Sequence[int]) -> Iterator[ShardSlice]:
    """Turns pieces into slices of shards. Empty shards have one too, so that a reader checks that they are empty."""
    # Counts [3, 0, 4] have the bounds [0, 3, 3, 7]. The piece 2 to 5 is sample 2 of the first shard, nothing of the
    # second and samples 0 and 1 of the third. An empty shard goes to the piece that begins there or spans it: of the
    # pieces 0 to 3 and 3 to 7, to the second. An empty shard at the very end goes to the last piece.
    bounds = [0, *accumulate(counts)]
    total = bounds[-1]
    for start, stop, is_padding in pieces:
        shard = bisect_right(bounds, start) - 1
        while shard and bounds[shard - 1] == start:
            shard -= 1
        while shard < len(urls) and (bounds[shard] < stop or bounds[shard] == stop == total):
            begin, end = bounds[shard], bounds[shard + 1]
            first, last = max(start, begin) - begin, min(stop, end) - begin
            kind = PaddingSlice if is_padding else TailSlice if last == counts[shard] else ShardSlice
            if first < last or not is_padding:
                yield kind(urls[shard], first, last)
            shard += 1


def whole_shards(urls: Sequence[str], place: Place) -> Iterable[ShardSlice]:
    """Divides shards of unknown length: whole ones, or every N-th sample where there are too few."""
    consumers, number = place
    if len(urls) >= consumers:
        return map(ShardSlice, urls[number::consumers])
    # The first sample goes to another consumer in each shard, or consumer 0 would have the most samples: of 2 shards
    # for 3 consumers, consumer 0 reads samples 0, 3, 6 of the first and 1, 4, 7 of the second.
    return [ShardSlice(url, (number + shard) % consumers, None, consumers) for shard, url in enumerate(urls)]


def _as_url(item: Any) -> str:
    if isinstance(item, (str, os.PathLike)):
        return os.fspath(item)
    raise ShardListError(
        f"split_shards got {type(item).__name__} {storage.mask_item(item)}; it takes URLs (str or Path). Lists of "
        "patterns go through .list_shards() first, streams can only be divided by .sharding_filter()"
    )


def _warn_about_strides(urls: Sequence[str], consumers: int) -> None:
    sizes = []
    with suppress(OSError):
        sizes = [Path(local_path(url)).stat().st_size for url in urls if is_local(url)]
    others = consumers - 1
    amount = f"{others * sum(sizes):,} bytes" if len(sizes) == len(urls) else f"{others * len(urls):,} of them"
    warn_once(
        "strides",
        f"there are fewer shards than consumers, {len(urls):,} for {consumers:,}: every consumer reads all of them and "
        f"keeps one sample in {consumers:,}, which makes {len(urls) * consumers:,} readings an epoch. With an index "
        f"split_shards reads each part once and saves {amount}: make indexes with index_shard and pass index=True",
    )
