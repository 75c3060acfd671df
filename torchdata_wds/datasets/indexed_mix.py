"""Several indexed sets of shards as one stream, mixed by weights in one global order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds.checks import check_flags, checked_int, checked_weights
from torchdata_wds.datasets.indexed_shards import IndexedShards
from torchdata_wds.format.index.samples import Piece, Result, SampleReader
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Even
from torchdata_wds.pipes.base import Held
from torchdata_wds.pipes.order.mixing import MixedOrder
from torchdata_wds.pipes.order.ordered_pipe import Contents, OrderedPipe
from torchdata_wds.pipes.order.reading import Lookup


class IndexedMixIterDataPipe(OrderedPipe):
    """Mixes indexed sets of shards by weights, in one global order.

    Which set a position takes its sample from, and which sample, are pure functions of the position, so that a mixture
    is resumed on any number of ranks and workers, like the one set of ``load_in_order``. All epochs are one stream:
    each set yields all of its samples, in a new order, before it yields one again. A small set with a large weight
    comes several times in an epoch, a large set continues in the next epoch where this one ends. What may follow it,
    and what loaders do, is as for ``load_in_order``.

    Args:
        sets: A dict from `IndexedShards` to weight: how often a sample comes from the set, relative to the others. The
            sets decode their samples, if they were told to.
        length: How many samples an epoch has; None for as many as all sets have.
        shuffle, run, even, seed, block, read_ahead, handler: As in ``load_in_order``.

    Yields:
        dict: Samples of the sets.

    Raises:
        TypeError, ValueError: if a key is not an `IndexedShards`, or a weight not a number above 0.
        ShardListError: at the first item, if a set has no samples.

    Example:
        >>> from torchdata_wds import IndexedMix, IndexedShards, TarWriter
        >>> for name in "ab":
        ...     with TarWriter(f"{name}.tar") as writer:
        ...         for number in range(100):
        ...             _ = writer.write({"__key__": f"{name}{number:02d}", "cls": number})
        >>> mix = IndexedMix({IndexedShards("a.tar"): 1, IndexedShards("b.tar"): 1}, length=40, seed=5)
        >>> len({sample["__key__"] for sample in mix})
        40
    """

    def __init__(
        self,
        sets: Mapping[IndexedShards, float],
        *,
        length: int | None = None,
        shuffle: bool = True,
        run: int = 16,
        even: Even = None,
        seed: int | None = None,
        block: int = 1,
        read_ahead: int | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        if not isinstance(sets, Mapping) or not all(isinstance(one, IndexedShards) for one in sets):
            raise TypeError(f"IndexedMix takes a dict from IndexedShards to weight, not {sets!r}")
        if not sets:
            raise ValueError("IndexedMix needs at least one set")
        check_flags(shuffle=shuffle)
        super().__init__(
            IterableWrapper([]), handler, run=run, even=even, seed=seed, block=block, read_ahead=read_ahead
        )
        self.weights = checked_weights(list(sets.values()), len(sets))
        self.sets = Held(tuple(sets))  # they are not sources of the graph
        self.length = None if length is None else checked_int("length", length, 1)
        self._shuffle = shuffle  # not under its name, which is that of a form

    def contents(self) -> Contents:
        """Opens the indexes of the sets."""
        indexes = tuple(one._opened.index for one in self.sets.value)
        total = self._order([len(one) for one in self.sets.value], 0, 0).length
        parts = [(one._opened.index.digest, one._numbers) for one in self.sets.value]
        described = repr((parts, self.weights, total, self.run if self._shuffle else 0))
        return Contents(indexes, total, hashlib.blake2b(described.encode(), digest_size=8).hexdigest())

    def _order(self, totals: list[int], seed: int, epoch: int) -> MixedOrder:
        options = {"length": self.length, "run": self.run, "shuffle": self._shuffle}
        return MixedOrder(totals, self.weights, seed=seed, epoch=epoch, **options)  # type: ignore[arg-type]

    def _lookup(self, contents: Contents, seed: int, epoch: int) -> Lookup:  # noqa: ARG002
        numbers = [one._numbers for one in self.sets.value]
        order = self._order(list(map(len, numbers)), seed, epoch)
        begins = np.array([found.start for found in numbers])
        steps = np.array([found.step for found in numbers])

        def lookup(first: int, stop: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
            sets, places = order.numbers(first, stop)
            return sets, begins[sets] + steps[sets] * places

        return lookup

    def _readers(self, contents: Contents) -> list[SampleReader]:  # noqa: ARG002
        return [_DecodingReader(one) for one in self.sets.value]


class _DecodingReader(SampleReader):
    """Reads the samples of a set, and decodes them as it does."""

    def __init__(self, shards: IndexedShards) -> None:
        reader = shards._opened.reader
        vars(self).update(vars(reader))
        self._shards = shards

    def take(self, piece: Piece, data: bytes | Exception) -> list[Result]:
        """Turns the bytes of a piece into decoded samples."""
        return list(map(self._decoded, super().take(piece, data)))

    def _decoded(self, result: Result) -> Result:
        if isinstance(result, Exception):
            return result
        try:
            return self._shards._decoded(result)
        except Exception as error:  # noqa: BLE001  (the handler decides, when the sample's turn comes)
            return error
