"""Shard URLs to samples in one global order, whatever the grid of ranks and workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torchdata_wds import storage
from torchdata_wds.checks import check_choice, check_flags
from torchdata_wds.consumers import upstream
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.lookup import find_index
from torchdata_wds.format.index.samples import LARGEST_LOCAL_PIECE, LARGEST_REMOTE_PIECE, SampleReader
from torchdata_wds.format.samples.names import grouping_rules
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Even, OnDuplicate
from torchdata_wds.pipes.base import Held, Pipe, in_order, register
from torchdata_wds.pipes.chain_text import form_name
from torchdata_wds.pipes.order.ordered_pipe import Contents, OrderedPipe
from torchdata_wds.pipes.order.permutation import Order
from torchdata_wds.pipes.order.reading import Lookup
from torchdata_wds.storage.ranges import ShardRanges
from torchdata_wds.storage.urls import check_letter

_DIVIDES = "drop it: load_in_order divides the samples among workers and ranks itself"
_SHUFFLES = "drop it: load_in_order shuffles all samples itself, and needs the shards in the same order in each epoch"
#: What to write in place of stages that must not come before.
_CURES = {
    **dict.fromkeys(("sharding_filter", "split_shards", "resample_shards", "load_in_order"), _DIVIDES),
    **dict.fromkeys(("shuffle", "wds_shuffle"), _SHUFFLES),
    "cache_shards": "write load_in_order(cache=folder)",
    "join_workers": "put it after load_in_order",
    "cycle": "drop it: each iteration is an epoch of all shards",
}
_ASKED = 16  # how many shards are looked at, to see whether they are local
_REMOTE_PIECES = 8  # how many pieces of remote shards are read ahead by default


class _Converted:
    """The index that was made of a dict, which takes long for each epoch."""

    def __init__(self, urls: list[str], index: DatasetIndex) -> None:
        self.urls, self.index = urls, index

    def __deepcopy__(self, memo: dict[int, Any]) -> _Converted:
        return self  # a loader runs a copy of its graph

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@register("load_in_order")
class OrderedLoaderIterDataPipe(OrderedPipe):
    """Loads samples in one global order (functional name: ``load_in_order``).

    It stands directly after the list of shards, in place of shuffles, ``sharding_filter``, ``load_wds_shards`` and
    ``group_by_key``. The shards' index numbers all samples; runs of `run` neighbours are shuffled over the whole data
    set, anew in each epoch. Position p of an epoch has the same sample for any number of ranks and workers, and any
    batch size: `WdsLoader`, `WorkersReadingService` and `StatefulPipeline` deal batches to ranks and workers in turn,
    and their states resume on any other grid.

    Under those, only ``.batch`` and stages that yield one item for each may follow. A sample that a handler skips makes
    its batch shorter; all others stay where they are. Under torch's DataLoader, too, each sample comes once per epoch,
    but the order depends on the numbers of ranks and workers: see `block`. ``wds help order`` says more.

    Args:
        source_datapipe: Yields URLs (str or Path) of uncompressed shards, in the same order in each epoch.
        index: Where the samples are. ``"auto"``: the indexes beside the shards, if they are of this version of the
            shards, else a scan of the headers, which is kept in the user's cache folder. True: the indexes beside the
            shards, which must exist. A path or URL: a packed index, a folder of indexes, or a ``wids`` list. Or a dict
            from URL to `ShardIndex`, or a `DatasetIndex`.
        index_dir: Another folder to look for indexes in, and to keep scans in.
        shuffle: Whether to shuffle; False yields the samples as they lie in the shards.
        run: How many neighbours stay together, and are read at once. 1 is a perfect shuffle.
        even: What to do if the samples do not divide by the number of ranks: ``"drop"`` leaves out up to ranks - 1,
            ``"pad"`` repeats up to ranks - 1, marked ``__pad__: True``. None gives the first ranks more.
        seed: Determines the order, with the epoch's number; None takes the loader's seed. Under torch's DataLoader the
            order also depends on the seed that it draws for each epoch.
        block: Under other loaders: how many samples a worker takes before the next one's turn. With the batch size,
            batches come in the same order for any number of workers.
        keys: The rule for names, as in ``group_by_key``; the index must have been made with it.
        lowercase, fields, on_duplicate: As in ``group_by_key``.
        cache: A folder for local copies of remote shards, made when first needed; None reads parts of shards.
        read_ahead: How many runs to read before their turn, in threads. None is 0 for local shards, and 8 for others.
        storage_options, rewrite: As in ``list_shards``.
        handler: Called for each sample that cannot be read (ShardOpenError), is damaged or not what the index says
            (ShardFormatError), or is refused as by ``group_by_key`` (SampleError).

    Yields:
        dict: ``__key__`` (str), ``__url__`` (str), and bytes by field.

    Raises:
        ShardListError: if there is no shard, a rank would get no sample, or a shard has no index.
        ShardFormatError: if an index is damaged, or another version's.

    Example:
        >>> import tarfile
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> with tarfile.open("three.tar", "w") as tar:
        ...     for key in "abc":
        ...         tar.addfile(tarfile.TarInfo(f"{key}.txt"))
        >>> pipe = IterableWrapper(["three.tar"]).load_in_order(run=1, seed=7)
        >>> sorted(sample["__key__"] for sample in pipe)
        ['a', 'b', 'c']
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        *,
        index: Any = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        shuffle: bool = True,
        run: int = 16,
        even: Even = None,
        seed: int | None = None,
        block: int = 1,
        keys: Literal["first_dot", "last_dot"] = "first_dot",
        lowercase: bool = True,
        fields: Iterable[str] | str | None = None,
        on_duplicate: OnDuplicate = "error",
        cache: str | os.PathLike[str] | None = None,
        read_ahead: int | None = None,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        check_flags(shuffle=shuffle, lowercase=lowercase)
        check_choice("keys", keys, ("first_dot", "last_dot"))
        fields = fields if fields is None or isinstance(fields, str) else in_order(fields)
        grouping_rules(keys, lowercase, fields, on_duplicate)
        _check_source(source_datapipe)
        super().__init__(source_datapipe, handler, run=run, even=even, seed=seed, block=block, read_ahead=read_ahead)
        self.index: Any = Held(index) if isinstance(index, Mapping) else index
        self.index_dir = index_dir
        self._shuffle = shuffle  # not under its name, which is that of a form
        self.keys, self.lowercase, self.fields, self.on_duplicate = keys, lowercase, fields, on_duplicate
        self.cache = cache
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite
        self._converted: _Converted | None = None
        self._ranges = ShardRanges(self.storage_options, cache=cache)

    def contents(self) -> Contents:
        """Reads the list of shards, and finds their index."""
        urls = [_as_url(item) for item in self._agreed().source_datapipe]
        index = self._find_index(urls)
        return Contents((index,), len(index), f"{index.digest}-{self.run if self._shuffle else 0}")

    def _find_index(self, urls: list[str]) -> DatasetIndex:
        given = self.index.value if isinstance(self.index, Held) else self.index
        if self._converted is not None and self._converted.urls == urls:
            return self._converted.index
        found = find_index(urls, given, index_dir=self.index_dir, keys=self.keys, storage_options=self.storage_options)
        if isinstance(given, Mapping):
            self._converted = _Converted(urls, found)
        return found

    def _lookup(self, contents: Contents, seed: int, epoch: int) -> Lookup:
        order = Order(contents.total, run=self.run, shuffle=self._shuffle, seed=seed, epoch=epoch)
        return lambda first, stop: (None, order.numbers(first, stop))

    def _readers(self, contents: Contents) -> list[SampleReader]:
        options: dict[str, Any] = {name: getattr(self, name) for name in ("lowercase", "fields", "on_duplicate")}
        largest = LARGEST_REMOTE_PIECE if self._ahead(contents) else LARGEST_LOCAL_PIECE
        return [SampleReader(contents.indexes[0], self._ranges, largest=largest, **options)]

    def _ahead(self, contents: Contents) -> int:
        return _REMOTE_PIECES if self._is_remote(contents.indexes[0]) else 0

    def _is_remote(self, index: DatasetIndex) -> bool:
        """Returns whether shards come from a store or server, going by some of them."""
        some = index.shards[:: max(len(index.shards) // _ASKED, 1)]
        return not all(self._ranges.is_local(shard.url) for shard in some)


def _check_source(source: Pipe) -> None:
    """Raises a ValueError that names a stage through which the shards must not come."""
    for pipe in upstream(source):
        name = form_name(pipe)
        if cure := _CURES.get(name, _DIVIDES if hasattr(type(pipe), "apply_sharding") else ""):
            raise ValueError(f"{name} cannot come before load_in_order: {cure}")


def _as_url(item: Any) -> str:
    if isinstance(item, (str, os.PathLike)):
        url = os.fspath(item)
        if isinstance(url, str):
            check_letter(url, "load_in_order got the shard")
            return url
    raise ShardListError(
        f"load_in_order got {type(item).__name__} {storage.mask_item(item)}; it takes URLs (str or Path). Lists of "
        "patterns go through .list_shards() first"
    )
