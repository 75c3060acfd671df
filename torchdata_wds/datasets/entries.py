"""The pipes of the graph that a dataset file describes: its shards, and what its samples are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds import storage
from torchdata_wds.consumers import Place
from torchdata_wds.errors import DuplicateFieldError, MissingFieldError
from torchdata_wds.format.dataset_files.entries import SpecEntry
from torchdata_wds.format.samples.field_items import FieldItem
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.pipes.base import Held, WdsPipe
from torchdata_wds.pipes.samples.field_specs import missing_field, name_sample, noting_absent
from torchdata_wds.pipes.samples.map import ItemMapper, map_items
from torchdata_wds.pipes.seeds import Seed

__all__ = ["Entries", "EntryMapperIterDataPipe", "EntryUrl", "SpecShardsIterDataPipe", "Transform"]


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

    repeats_shards = True

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
        handler: Called for each sample that lacks a field or for which the function raises.

    Yields:
        dict: Samples with ``__dataset__``.

    Raises:
        MissingFieldError: through the handler; it names the entry, the sample and the fields that are there.
        Exception: through the handler, what the function raises.
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

    def __iter__(self) -> Iterator[Any]:
        samples = noting_absent(self.source_datapipe, dict(self._optional_fields()))
        chosen = map_items(samples, self._choose, self.handler, self.skipped, "MissingFieldError", self)
        yield from map_items(chosen, self.apply, self.handler, self.skipped, self.dropped, self)

    def _entry(self, sample: dict[str, Any]) -> SpecEntry:
        url: EntryUrl = sample["__url__"]
        return self.entries.value[url.entry]

    def _optional_fields(self) -> Iterator[tuple[str, Callable[[Any], bool | None]]]:
        for entry in self.entries.value:
            if entry.missing != "error":
                for item in entry.fields or ():
                    yield f"{entry.place.at('extensions')} names {item.column!r}", partial(self._has, entry, item)

    def _has(self, entry: SpecEntry, item: FieldItem, sample: dict[str, Any]) -> bool | None:
        return bool(item.find(sample)) if self._entry(sample) is entry else None

    def _choose(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        """Leaves the fields of the entry in a sample; None if one is missing and the sample is to be left out."""
        entry = self._entry(sample)
        return sample if entry.fields is None else _chosen(sample, entry, entry.fields)

    def apply(self, item: dict[str, Any]) -> Any:
        """Names the entry in its sample, and calls the function with the entry's keys."""
        entry = self._entry(item)
        meta = {"__key__": item["__key__"], "__url__": str(item["__url__"]), "__dataset__": entry.name}
        item.update(meta)
        if self.transforms is None:
            return item
        result = self.transforms(item, **entry.keys)
        if isinstance(result, dict) and not meta.keys() <= result.keys():
            return {**meta, **result}  # a copy: the function may give one dict for many samples
        return result

    def __len__(self) -> int:
        if self.transforms is not None or any(entry.missing == "skip" for entry in self.entries.value):
            raise TypeError("load_dataset may drop samples: its length is not known; .set_length(n) sets one")
        return super().__len__()


def _chosen(sample: dict[str, Any], entry: SpecEntry, fields: tuple[FieldItem, ...]) -> dict[str, Any] | None:
    chosen = {name: value for name, value in sample.items() if name.startswith("__")}
    for item in fields:
        found = item.find(sample)
        if not found and entry.missing == "skip":
            return None
        if not found and entry.missing == "error":
            raise _missing(sample, entry, item)
        for new, name in found:
            if new in chosen:
                raise DuplicateFieldError(
                    f"{entry.place.at('extensions')} gives a sample two fields {new!r}; rename one of them, as new=old",
                    **name_sample(sample)[1],
                    field=new,
                )
            chosen[new] = sample[name]
    return chosen


def _missing(sample: dict[str, Any], entry: SpecEntry, item: FieldItem) -> MissingFieldError:
    error = missing_field(sample, item.names)
    return MissingFieldError(
        f"{entry.place.at('extensions')}: {error} Correct the name, or write missing: skip to leave such samples out, "
        "or missing: none to have them without the field.",
        **name_sample(sample)[1],
        field=error.field,
    )
