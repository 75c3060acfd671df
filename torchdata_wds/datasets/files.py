"""Builds the graph that a dataset file describes."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds import storage
from torchdata_wds.checks import check_choice, check_flags
from torchdata_wds.errors import DuplicateFieldError, MissingFieldError
from torchdata_wds.format.dataset_files.entries import ENTRY_KEYS, SpecEntry, SpecGroup, spec_groups
from torchdata_wds.format.dataset_files.reading import Origin, SpecPlace, read_spec
from torchdata_wds.format.samples.field_items import FieldItem
from torchdata_wds.handlers import Handler, check_handler, reraise_exception
from torchdata_wds.pipes.base import Held, WdsPipe
from torchdata_wds.pipes.samples.field_specs import missing_field, name_sample, noting_absent
from torchdata_wds.pipes.samples.map import ItemMapper, check_function
from torchdata_wds.pipes.seeds import Seed, Seeded
from torchdata_wds.process_place import Place

Entries = tuple[SpecEntry, ...]
Transform = Callable[..., Any]


class EntryUrl(str):
    """The URL of a shard, with the number of the entry that lists it."""

    __slots__ = ("entry",)

    entry: int


class SpecShardsIterDataPipe(WdsPipe[str], Seeded):
    """Lists the shards of a dataset file's entries as `EntryUrl`; all consumers choose the same ones in an epoch."""

    repeats_shards = True

    def __init__(
        self, entries: Held[Entries], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.entries = entries
        self.storage_options = storage.StorageOptions(storage_options)
        self._seed = Seed()

    def __iter__(self) -> Iterator[str]:
        entries = self.entries.value
        draw: Callable[[], float] = float  # never called
        if any(entry.count is not None for entry in entries):
            draw = self._seed.begin_epoch("load_dataset", Place()).random
        for number, entry in enumerate(entries):
            for url in entry.choose(self.storage_options, draw):
                marked = EntryUrl(url)
                marked.entry = number
                yield marked

    def patterns(self) -> list[Any] | None:
        """Returns the patterns whose shards each epoch has; None if an epoch has a choice of them."""
        entries = self.entries.value
        return None if any(entry.count is not None for entry in entries) else [entry.patterns for entry in entries]

    def list_all(self) -> list[str]:
        """Lists the shards of all entries as of now."""
        return [url for entry in self.entries.value for url in entry.urls(self.storage_options)]


class EntryMapperIterDataPipe(ItemMapper):
    """Adds the entry's name to each sample, keeps the entry's fields, and calls the user's function with its keys."""

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
        optional = {
            f"{entry.place.at('extensions')} names {item.column!r}": partial(self._has, entry, item)
            for entry in self.entries.value
            if entry.missing != "error"
            for item in entry.fields or ()
        }
        samples = noting_absent(self.source_datapipe, optional)
        chosen = self.map_items(samples, self._choose, "MissingFieldError")
        yield from self.map_items(chosen, self.apply, self.dropped)

    def _entry(self, sample: dict[str, Any]) -> SpecEntry:
        url: EntryUrl = sample["__url__"]
        return self.entries.value[url.entry]

    def _has(self, entry: SpecEntry, item: FieldItem, sample: dict[str, Any]) -> bool | None:
        return bool(item.find(sample)) if self._entry(sample) is entry else None

    def _choose(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a sample with only the fields of its entry; None if one is missing and such samples are skipped."""
        entry = self._entry(sample)
        if entry.fields is None:
            return sample
        where = entry.place.at("extensions")
        chosen = {name: value for name, value in sample.items() if name.startswith("__")}
        for item in entry.fields:
            found = item.find(sample)
            if not found and entry.missing == "skip":
                return None
            if not found and entry.missing == "error":
                error = missing_field(sample, item.names)
                raise MissingFieldError(
                    f"{where}: {error} Correct the name, or write missing: skip to leave such samples out, or "
                    "missing: none to have them without the field.",
                    **name_sample(sample)[1],
                    field=error.field,
                )
            for new, name in found:
                if new in chosen:
                    raise DuplicateFieldError(
                        f"{where} gives a sample two fields {new!r}; rename one of them, as new=old",
                        **name_sample(sample)[1],
                        field=new,
                    )
                chosen[new] = sample[name]
        return chosen

    def apply(self, item: dict[str, Any]) -> Any:
        """Adds the entry's name to its sample, and calls the function with the entry's keys."""
        entry = self._entry(item)
        meta = {"__key__": item["__key__"], "__url__": str(item["__url__"]), "__dataset__": entry.name}
        item.update(meta)
        if self.transforms is None:
            return item
        result = self.transforms(item, **entry.keys)
        if isinstance(result, dict) and not meta.keys() <= result.keys():
            return {**meta, **result}  # a copy: the function may return one dict for many samples
        return result

    def __len__(self) -> int:
        if self.transforms is not None or any(entry.missing == "skip" for entry in self.entries.value):
            raise TypeError("load_dataset may drop samples: its length is not known; .set_length(n) sets one")
        return super().__len__()


def load_dataset(
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    *,
    transforms: Transform | None = None,
    stop: str = "all",
    allow_pipe: bool = False,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    handler: Handler = reraise_exception,
) -> WdsPipe[dict[str, Any]]:
    """Builds the graph that a dataset file describes: list, shuffle and split shards, load, group, mix.

    The file is read immediately, the shards when the result is iterated. It is YAML (needs ``torchdata_wds[spec]``) or
    JSON, of one of three kinds. ``__dataset__`` of a sample is the name of its entry, or the entry's number from 0.

    A ``dataset:`` list has entries with ``shards`` (a pattern or a list of patterns, as for ``list_shards``, relative
    to the working directory), and optionally ``name``; ``extensions``, the fields to keep (``"jpg;png label=cls
    *.json"`` keeps the first of jpg and png that exists, cls renamed to label, and all fields that match the glob);
    ``missing``, what happens to a sample without one of them (``error``; ``skip`` leaves it out; ``none`` keeps it
    without the field); ``weight`` or ``probability``, relative numbers that all entries have or none; and any other
    keys, which are passed to `transforms`. With weights, each entry is shuffled and split separately, and ``wds_mix``
    draws from them; without, all shards form one shuffled list.

    A ``datasets:`` list, with ``prefix`` and ``buckets`` beside it, has entries with ``shards``, ``name`` (otherwise
    ``@bucket``), ``buckets``, and ``resample: n``, ``choose: n`` or ``perepoch: n`` (the same as choose). A URL is
    prefix + bucket/shard, with ``~`` and ``$NAME`` expanded. An epoch has all shards of an entry, n drawn with
    replacement, or n different ones. All workers and ranks draw the same, again in each epoch.

    A ``wids`` shard list has ``wids_version: 1`` and a ``shardlist``, or ``datasets`` that each have a ``shardlist`` or
    the ``source_url`` of a file, which must not name further files. URLs are taken verbatim; relative ones are relative
    to ``base``, or else to the file's own folder. If datasets have weights, ``wds_mix`` draws from them; weights of
    single shards are not used.

    The file may be untrusted: ``pipe:``, ``-`` and templates (``reference:``) are refused in it and in files that it
    names, as are environment variables in a file from the network, or whose names look secret. A dict may have them
    all. The `storage_options` of a protocol are sent to every server that the file names.

    Args:
        path_or_dict: A local path, a URL, or a dict with the content of such a file.
        transforms: ``callable(sample, **keys)`` for all samples, which returns a sample, or None to drop it; `keys` are
            the other keys of the sample's entry.
        stop: When a mix by weights ends, as in ``wds_mix``: ``"all"``, ``"first"`` or ``"cycle"``.
        allow_pipe: Whether to trust the file like the program; ``WDS_SECURE=1`` refuses commands regardless.
        storage_options: fsspec options by protocol, such as ``{"s3": {...}}``, for the file and its shards.
        rewrite: Rules that redirect the URLs of the file and its shards, as in ``list_shards``.
        cache_dir: A folder for copies of remote shards and command output, as in ``cache_shards``.
        handler: Passed to every stage; the loader calls it once per shard.

    Returns:
        A pipe of samples: ``__key__``, ``__url__``, ``__dataset__`` and fields as bytes. Chain further stages to it.

    Raises:
        SpecError: if the file is invalid, naming file, entry and key; or on iteration, if there are too few shards.
        UnsafeDataError, ShardOpenError, ImportError: if the file does what it may not, cannot be read, or needs PyYAML.
        MissingFieldError: on iteration, through the handler, for a sample without a field of its entry's extensions.
        ValueError, TypeError: if an argument is wrong.

    Example:
        >>> import tarfile, torchdata_wds
        >>> for name in ("a", "b"):
        ...     with tarfile.open(f"{name}.tar", "w") as tar:
        ...         tar.addfile(tarfile.TarInfo(f"{name}1.txt"))
        >>> def scaled(sample, scale=1):
        ...     return {**sample, "scale": scale}
        >>> spec = {"dataset": [{"shards": "a.tar", "scale": 3, "name": "A"}, {"shards": "b.tar"}]}
        >>> for sample in sorted(torchdata_wds.load_dataset(spec, transforms=scaled), key=str):
        ...     print(sample)
        {'__key__': 'a1', '__url__': 'a.tar', 'txt': b'', '__dataset__': 'A', 'scale': 3}
        {'__key__': 'b1', '__url__': 'b.tar', 'txt': b'', '__dataset__': 1, 'scale': 1}
    """
    check_flags(allow_pipe=allow_pipe)
    check_choice("stop", stop, ("first", "all", "cycle"))
    if transforms is not None:
        check_function("load_dataset(transforms=)", transforms, "a function of a sample and an entry's other keys")
    if cache_dir is not None and (not isinstance(cache_dir, (str, os.PathLike)) or not os.fspath(cache_dir)):
        raise ValueError(f"cache_dir must be a folder, or None, not {cache_dir!r}")
    check_handler(handler)
    options = storage.StorageOptions(storage_options, rewrite=rewrite)
    groups = _groups(path_or_dict, allow_pipe, options)
    for group in groups:
        for entry in group.entries:
            _check_entry(entry, transforms, options)
    branches: list[Any] = []
    for group in groups:
        held = Held(group.entries)
        shards: Any = SpecShardsIterDataPipe(held, storage_options=options)
        # the list is in memory anyway; a smaller buffer would leave the shards of one dataset together
        shards = shards.shuffle(buffer_size=1_000_000).sharding_filter()
        if cache_dir is not None:
            shards = shards.cache_shards(cache_dir, storage_options=options, handler=handler)
        # all fields are grouped, so that an error can list them
        samples = shards.load_wds_shards(storage_options=options, handler=handler).group_by_key(handler=handler)
        branches.append(EntryMapperIterDataPipe(samples, held, transforms, handler=handler))
    if len(branches) == 1:
        return branches[0]  # type: ignore[no-any-return]
    weights = [group.weight for group in groups]
    return branches[0].wds_mix(*branches[1:], weights=weights, stop=stop)  # type: ignore[no-any-return]


def _groups(source: Any, allow_pipe: bool, options: storage.StorageOptions) -> list[SpecGroup]:
    def read(url: str) -> tuple[Any, Origin]:
        return read_spec(url, storage_options=options), Origin.of_file(url, trusted=allow_pipe)

    if isinstance(source, Mapping):
        content, origin = source, Origin("the dataset dict")
    elif isinstance(source, (str, os.PathLike)) and isinstance(path := os.fspath(source), str):
        content, origin = read(path)
    else:
        raise TypeError(f"load_dataset takes a path, a URL or a dict, not {type(source).__name__}")
    return spec_groups(content, SpecPlace(origin), read)


def _check_entry(entry: SpecEntry, transforms: Transform | None, options: storage.StorageOptions) -> None:
    """Raises now the errors that would otherwise end the first epoch."""
    names = ", ".join(entry.keys)
    if entry.keys:
        if transforms is None:
            raise entry.place.error(
                f"has {names}, which only a function can use: pass transforms=f to load_dataset, where "
                f"f(sample, {names}) returns a sample; known keys are {', '.join(ENTRY_KEYS)}"
            )
        try:
            signature = inspect.signature(transforms)
        except (TypeError, ValueError):  # some functions written in C have none
            return
        try:
            signature.bind({}, **entry.keys)
        except TypeError as error:
            raise entry.place.error(f"transforms cannot be called with {names}: {error}") from error
        for key in entry.keys.keys() - signature.parameters.keys():  # **kwargs also accepts a misspelled key
            if near := difflib.get_close_matches(key, ENTRY_KEYS, n=1, cutoff=0.8):
                raise entry.place.error(
                    f"unknown key {key!r}: did you mean {near[0]!r}? If it is meant for transforms, name it among the "
                    "function's arguments"
                )
    if entry.count is not None and not entry.replacement:
        entry.choose(options, float)  # raises if there are too few; the choice is not used
