"""What a dataset file says, checked: which shards, how many of them in an epoch, and what their samples are given."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torchdata_wds import storage
from torchdata_wds.checks import is_count, is_number
from torchdata_wds.format.dataset_files.reading import Origin, SpecPlace, join_url, short
from torchdata_wds.format.samples.field_items import FieldItem, parse_field_items
from torchdata_wds.storage.urls import is_local

logger = logging.getLogger(__name__)

# The keys of an entry that have a meaning here; others go to the program's function.
ENTRY_KEYS = ("shards", "name", "weight", "probability", "extensions", "missing")
_SAMPLED_KEYS = ("prefix", "buckets", "datasets")
_COUNTS = ("resample", "choose", "perepoch")
_SOURCE_KEYS = ("name", "buckets", "shards", *_COUNTS)
_KIND = "wids-shard-index-v1"
_WIDS_PART_KEYS = ("name", "base", "info", "keep", "weight", "shardlist")
_WIDS_KEYS = ("__kind__", "wids_version", *_WIDS_PART_KEYS, "datasets")
_REFERENCE_KEYS = ("source_url", "name", "weight")
_SHARD_KEYS = ("url", "nsamples", "filesize", "md5sum", "weight", "name", "dataset")
Read = Callable[[str], tuple[Any, Origin]]
Missing = Literal["error", "skip", "none"]


@dataclass(frozen=True, repr=False)
class SpecEntry:
    """Shards whose samples are treated alike."""

    place: SpecPlace  # where they are listed
    name: str | int  # what their samples have as ``__dataset__``
    patterns: tuple[str, ...]  # as `storage.list_urls` takes them
    verbatim: bool = False  # whether the patterns are URLs already
    fields: tuple[FieldItem, ...] | None = None  # those to keep; None keeps all
    missing: Missing = "error"  # without one of them a sample is wrong, left out, or goes on without the field
    keys: Mapping[str, Any] = field(default_factory=dict)  # for the function that transforms their samples
    count: int | None = None  # how many of the shards an epoch has, None for all
    replacement: bool = False  # whether one shard may come several times among them

    def __repr__(self) -> str:
        # In every message about the pipes that hold it: neither long nor with what URLs may hold.
        return f"SpecEntry({self.place.path}, name={self.name!r})"

    def urls(self, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[str]:
        """Lists the shards."""
        listed = storage.list_urls(self.patterns, storage_options=storage_options)
        return map(self.place.check_url, self.patterns if self.verbatim else listed)

    def choose(self, storage_options: Mapping[str, Mapping[str, Any]] | None, draw: Callable[[], float]) -> list[str]:
        """Lists the shards of one epoch; those that are chosen are in random order."""
        urls = list(self.urls(storage_options))
        if self.count is None:
            return urls
        if self.replacement:
            return [urls[int(draw() * len(urls))] for _ in range(self.count)]
        if self.count > len(urls):
            what = f"{self.count:,} shards are to be chosen of {len(urls):,}; ask for fewer"
            raise self.place.error(f"{what}, or write resample: {self.count} to draw shards several times")
        for place in range(self.count):
            other = place + int(draw() * (len(urls) - place))
            urls[place], urls[other] = urls[other], urls[place]
        return urls[: self.count]


@dataclass(frozen=True)
class SpecGroup:
    """Entries whose shards are shuffled together."""

    entries: tuple[SpecEntry, ...]
    weight: float | None = None  # how often a sample is taken from them, relative to other groups


# Entries that are listed together: the place of the list, its weight, and they themselves.
Part = tuple[SpecPlace, float | None, list[SpecEntry]]


def spec_groups(content: Any, place: SpecPlace, read: Read) -> list[SpecGroup]:
    """Checks what a dataset file of any kind says; `read` reads another one, and returns its content and origin."""
    if isinstance(content, Mapping):
        if not content.keys().isdisjoint(("shardlist", "wids_version", "__kind__")):
            return _wids_groups(content, place, read)
        if "dataset" in content:
            return dataset_groups(content, place)
        if "datasets" in content:
            return _sampled_groups(content, place)
    raise place.error(
        "is not a dataset file: expected a mapping with a list 'dataset' (shards and keys for transforms), 'datasets' "
        f"(with prefix and buckets) or 'shardlist' (wids), found {short(content)}"
    )


def dataset_groups(content: Mapping[str, Any], place: SpecPlace) -> list[SpecGroup]:
    """Checks a specification with a ``dataset:`` list: one group, or with weights a group per entry."""
    place.check_keys(content, ("dataset",))
    here = place.at("dataset")
    items = _filled_list(content["dataset"], here)
    parts = [_entry(item, here.at(number), number) for number, item in enumerate(items)]
    keys = {key for item in items for key in ("weight", "probability") if key in item}
    if len(keys) > 1:
        raise here.error("some entries have a weight, others a probability; both mean the same: write one of them")
    return _groups_by_weight(parts, "".join(keys), "entries")


def _groups_by_weight(parts: list[Part], key: str, others: str) -> list[SpecGroup]:
    """Makes one group of all entries, or one of each part where parts have weights, as all of them must then."""
    if all(weight is None for _, weight, _ in parts):
        return [SpecGroup(tuple(entry for _, _, entries in parts for entry in entries))]
    for place, weight, _ in parts:
        if weight is None:
            raise place.error(f"has no {key}, other {others} have one; all or none must")
    return [SpecGroup(tuple(entries), weight) for _, weight, entries in parts]


def _entry(item: Any, place: SpecPlace, number: int) -> Part:
    if not isinstance(item, Mapping):
        raise place.error(f"expected a mapping with shards and other keys, found {short(item)}")
    free = {key: value for key, value in item.items() if key not in ENTRY_KEYS}
    if odd := [key for key in free if not isinstance(key, str)]:
        raise place.error(f"the key {short(odd[0])} is not text; it would be the name of an argument")
    name = _checked_name(item, place, number)
    patterns = tuple(map(place.at("shards").check_pattern, _texts(item, "shards", place)))
    fields = _fields(item, place)
    missing: Missing = item.get("missing", "error")
    if missing not in get_args(Missing):
        raise place.at("missing").error(f"must be one of {', '.join(get_args(Missing))}, found {short(missing)}")
    if "missing" in item and "extensions" not in item:
        raise place.at("missing").error("is about the fields of extensions, and this entry names none")
    weights = [_checked_weight(item, key, place) for key in ("weight", "probability") if key in item]
    if len(weights) > 1:
        raise place.error("has a weight and a probability; both mean the same: write one of them")
    weight = weights[0] if weights else None
    if weight is not None and weight > 1 and "probability" in item:
        raise place.at("probability").error(f"must be at most 1, found {weight}; larger numbers are a weight")
    return place, weight, [SpecEntry(place, name, patterns, fields=fields, missing=missing, keys=free)]


def _fields(item: Mapping[str, Any], place: SpecPlace) -> tuple[FieldItem, ...] | None:
    """Fields as ``"jpg;png label=cls"`` or a list of such; in small letters and without leading dots, as in samples."""
    if "extensions" not in item:
        return None
    here = place.at("extensions")
    text = " ".join(_texts(item, "extensions", place))
    if "," in text:
        raise here.error(f"separate fields by blanks and alternatives by ';', as 'jpg;png cls', not by ',': {text!r}")
    try:
        fields = parse_field_items(text)
    except ValueError as error:
        raise here.error(str(error)) from None
    if reserved := [name for found in fields for name in found.names if name.startswith("__")]:
        raise here.error(f"{reserved[0]!r} is not a field of a shard; samples keep what begins with __ anyway")
    return tuple(found._replace(names=tuple(name.lower() for name in found.names)) for found in fields)


def _sampled_groups(content: Mapping[str, Any], place: SpecPlace) -> list[SpecGroup]:
    place.check_keys(content, _SAMPLED_KEYS)
    prefix = place.at("prefix").expand(_text(content.get("prefix", ""), place.at("prefix")))
    here = place.at("datasets")
    items = _filled_list(content["datasets"], here)
    default = _bucket(content, place)
    return [SpecGroup(tuple(_source(item, here.at(i), prefix, default) for i, item in enumerate(items)))]


def _source(item: Any, place: SpecPlace, prefix: str, default: str) -> SpecEntry:
    place.check_keys(item, _SOURCE_KEYS)
    bucket = _bucket(item, place) if "buckets" in item else default
    here = place.at("shards")
    patterns = [here.expand(text) for text in _texts(item, "shards", place)]
    if (prefix or bucket) and any("::" in text for text in patterns):
        raise here.error("with a prefix or bucket, shards are not joined with '::'; write a list")
    counts = [key for key in _COUNTS if key in item]
    if len(counts) > 1:
        raise place.error(f"has {' and '.join(counts)}; write one of them")
    count = _checked_count(item, counts[0], place, least=1) if counts else None
    name = _checked_name(item, place, f"@{bucket}")
    urls = tuple(here.check_pattern(prefix + os.path.join(bucket, text)) for text in patterns)  # noqa: PTH118 - URLs
    return SpecEntry(place, name, urls, count=count, replacement="resample" in item)


def _bucket(item: Mapping[str, Any], place: SpecPlace) -> str:
    buckets = _texts(item, "buckets", place) if item.get("buckets", []) != [] else [""]
    if len(buckets) > 1:
        raise place.at("buckets").error(f"expected one bucket, found {len(buckets)}; write a dataset for each")
    return place.at("buckets").expand(buckets[0])


def _filled_list(value: Any, place: SpecPlace, what: str = "list") -> list[Any]:
    if not isinstance(value, (list, tuple)) or not value:
        raise place.error(f"expected a {what} that is not empty, found {short(value)}")
    return list(value)


def _text(value: Any, place: SpecPlace) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise place.error(f"expected text, found {short(value)}")
    return value


def _texts(item: Mapping[str, Any], key: str, place: SpecPlace) -> list[str]:
    here = place.at(key)
    if key not in item:
        raise place.error(f"has no {key}; expected a text or a list of texts")
    value = item[key]
    found = [_text(text, here) for text in (value if isinstance(value, (list, tuple)) else [value])]
    if not all(found) or not found:
        raise here.error("holds an empty text" if found else "is an empty list")
    return found


def _checked_name(item: Mapping[str, Any], place: SpecPlace, default: str | int) -> str | int:
    name: str | int = item.get("name", default)
    if "name" in item and not isinstance(name, str):
        raise place.at("name").error(f"expected text, found {short(name)}; put it in quotes")
    return name


def _checked_weight(item: Mapping[str, Any], key: str, place: SpecPlace) -> float | None:
    if key not in item:
        return None
    value = item[key]
    if not is_number(value) or not 0 < value <= sys.float_info.max:
        problem = f"expected a number above 0, found {short(value)}; remove the entry to leave its shards out"
        raise place.at(key).error(problem)
    return float(value)


def _checked_count(item: Mapping[str, Any], key: str, place: SpecPlace, *, least: int = 0) -> int:
    value: int = item[key]
    if not is_count(value, least):
        raise place.at(key).error(f"expected a whole number from {least}, found {short(value)}")
    return value


def _wids_groups(content: Mapping[str, Any], place: SpecPlace, read: Read) -> list[SpecGroup]:
    """Checks a ``wids`` shard list: one group, or with weights a group per dataset."""
    _check_wids(content, place)
    own = bool(content.get("shardlist"))
    parts: list[Part] = []
    if own:
        parts.append(_wids_part(content, place, _checked_name(content, place, 0), place.origin.folder))
    folder = _base(content, place, place.origin.folder)
    datasets = content.get("datasets", [])
    if not isinstance(datasets, (list, tuple)):
        raise place.at("datasets").error(f"expected a list, found {short(datasets)}")
    for number, item in enumerate(datasets, start=own):
        where = place.at("datasets").at(number - own)
        if isinstance(item, Mapping) and "source_url" in item:
            parts.append(_referenced(item, where, number, folder, read))
        else:
            where.check_keys(item, _WIDS_PART_KEYS)
            parts.append(_wids_part(item, where, _checked_name(item, where, number), folder))
    if not parts:
        raise place.error("has neither a shardlist nor datasets with one")
    return _groups_by_weight(parts, "weight", "datasets")


def wids_counts(content: Mapping[str, Any], url: str) -> Iterator[tuple[str, Any]]:
    """Yields the URL and the number of samples of each shard in the shard list of the file `url`, unchecked."""
    own_folder, slash, _ = (url if is_local(url) else url.partition("?")[0]).rpartition("/")
    for part in (content, *content.get("datasets", ())):
        folder = part.get("base") or content.get("base") or own_folder + slash
        for shard in part.get("shardlist", ()):
            yield join_url(folder, shard["url"].removeprefix("./")), shard["nsamples"]


def _referenced(item: Mapping[str, Any], place: SpecPlace, number: int, folder: str, read: Read) -> Part:
    """The list that an item points to; its weight and name are the item's, where it has some."""
    place.check_keys(item, _REFERENCE_KEYS)
    content, origin = read(_url(item, "source_url", place, "shard list", folder))
    inner = SpecPlace(origin)
    _check_wids(content, inner)
    if content.get("datasets"):
        raise inner.at("datasets").error(f"{place} points to this file, which must have shards only: one level is read")
    name = _checked_name(item, place, _checked_name(content, inner, number))
    listed, weight, entries = _wids_part(content, inner, name, origin.folder)
    return listed, _checked_weight(item, "weight", place) if "weight" in item else weight, entries


def _check_wids(content: Any, place: SpecPlace) -> None:
    place.check_keys(content, _WIDS_KEYS)
    version = content.get("wids_version", 1)
    if version != 1 or isinstance(version, bool):
        raise place.at("wids_version").error(f"expected 1, found {short(version)}: no other is known")
    if content.get("__kind__", _KIND) != _KIND:
        raise place.at("__kind__").error(f"expected {_KIND!r}, found {short(content['__kind__'])}")


def _base(item: Mapping[str, Any], place: SpecPlace, folder: str) -> str:
    base = item.get("base", "")
    if base is not None and not isinstance(base, str):
        raise place.at("base").error(f"expected the URL of a folder, found {short(base)}")
    return join_url(folder, base) if base else folder


def _wids_part(item: Mapping[str, Any], place: SpecPlace, name: str | int, folder: str) -> Part:
    """Makes an entry per name that the shards have; by default that of the list."""
    folder = _base(item, place, folder)
    here = place.at("shardlist")
    shards = _filled_list(item.get("shardlist"), here, "list of shards")
    if any(isinstance(shard, Mapping) and "weight" in shard for shard in shards):
        logger.warning("%s: weights of single shards are not used; weights of datasets are", here)
    urls: dict[str | int, list[str]] = {}
    for number, shard in enumerate(shards):
        where = here.at(number)
        where.check_keys(shard, _SHARD_KEYS)
        url = _url(shard, "url", where, "shard", folder)
        for key in ("nsamples", "filesize"):
            if shard.get(key) is not None:
                _checked_count(shard, key, where)
        own = shard.get("dataset", shard.get("name"))
        if not isinstance(own, str | int | None):
            raise where.at("dataset").error(f"expected text, found {short(own)}")
        urls.setdefault(name if own is None else own, []).append(url)
    entries = [SpecEntry(here, own, tuple(found), verbatim=True) for own, found in urls.items()]
    return here, _checked_weight(item, "weight", place), entries


def _url(item: Mapping[str, Any], key: str, place: SpecPlace, what: str, folder: str) -> str:
    here, url = place.at(key), item.get(key)
    if not isinstance(url, str) or not url:
        raise here.error(f"expected the URL of a {what}, found {short(url)}")
    return here.check_url(join_url(folder, url))
