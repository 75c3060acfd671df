"""The pipes of the graph that a dataset file describes: its shards, and what its samples are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds import storage
from torchdata_wds.format.dataset_specs import SpecEntry
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.pipes.base import Held, WdsPipe
from torchdata_wds.pipes.mapping import ItemMapper
from torchdata_wds.pipes.place import Place, Seed

__all__ = [
    "Entries",
    "EntryMapperIterDataPipe",
    "EntryUrl",
    "SpecShardsIterDataPipe",
    "Transform",
]

Entries = tuple[SpecEntry, ...]
Transform = Callable[..., Any]


class EntryUrl(str):
    """The URL of a shard, with the number of the entry that lists it."""

    __slots__ = ("entry",)

    entry: int


def _entry_url(url: str, entry: int) -> EntryUrl:
    made = EntryUrl(url)
    made.entry = entry
    return made


class SpecShardsIterDataPipe(WdsPipe[str]):
    """Lists the shards of entries of a dataset file, and draws those of the epoch; all consumers draw alike.

    Args:
        entries: The entries.
        storage_options: fsspec options by protocol, for listing.

    Yields:
        EntryUrl: One URL each, in the order of the entries.

    Raises:
        SpecError: if an entry has fewer shards than are to be chosen.
        ShardListError: if a pattern matches nothing.
        UnsafeDataError: at a URL that the file may not use.
    """

    def __init__(
        self, entries: Held[Entries], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.entries = entries
        self.storage_options = storage.StorageOptions(storage_options)
        self._seed = Seed()

    def set_seed(self, seed: int) -> SpecShardsIterDataPipe:
        """Makes the coming epochs' draws a function of the seed and their number."""
        self._seed.set(seed)
        return self

    def __iter__(self) -> Iterator[str]:
        entries = self.entries.value
        draw: Callable[[], float] = float  # 0.0, which nobody asks for
        if any(entry.count is not None for entry in entries):
            draw = self._seed.begin_epoch("load_dataset", Place()).random
        for number, entry in enumerate(entries):
            for url in entry.choose(self.storage_options, draw):
                yield _entry_url(url, number)


class EntryMapperIterDataPipe(ItemMapper):
    """Names the entry of each sample, keeps the entry's fields, and calls the user's function with its keys.

    Args:
        source_datapipe: Yields samples whose ``__url__`` is an `EntryUrl`.
        entries: The entries.
        transforms: ``callable(sample, **keys)``, or None.
        handler: Asked about each sample for which the function raises.

    Yields:
        dict: Samples with ``__dataset__``.
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        entries: Held[Entries],
        transforms: Transform | None,
        *,
        handler: Handler = reraise_exception,
    ) -> None:
        super().__init__(source_datapipe, handler)
        self.entries = entries
        self.transforms = transforms

    def apply(self, item: dict[str, Any]) -> Any:
        """Makes the sample of the entry out of that of the shard; None if it has none of the fields."""
        url = item["__url__"]
        entry = self.entries.value[url.entry]
        sample = item if entry.fields is None else _kept(item, entry.fields)
        if sample is None:
            return None
        meta = {"__key__": item["__key__"], "__url__": str(url), "__dataset__": entry.name}
        sample.update(meta)
        if self.transforms is None:
            return sample
        result = self.transforms(sample, **entry.keys)
        if isinstance(result, dict) and not meta.keys() <= result.keys():
            return {**meta, **result}  # a copy: the function may give one dict for many samples
        return result

    def __len__(self) -> int:
        if self.transforms is not None or any(entry.fields is not None for entry in self.entries.value):
            raise TypeError("load_dataset may drop samples: its length is not known; .set_length(n) sets one")
        return super().__len__()


def _kept(sample: dict[str, Any], fields: tuple[tuple[str, ...], ...]) -> dict[str, Any] | None:
    chosen = {next((name for name in names if name in sample), "") for names in fields} - {""}
    if not chosen:
        return None
    return {name: value for name, value in sample.items() if name in chosen or name.startswith("__")}
