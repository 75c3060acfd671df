"""Shard lists of ``wids``: ``{"wids_version": 1, "shardlist": [{"url": ..., "nsamples": ...}, ...]}``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchdata_wds.format.dataset_files.entries import SpecEntry, SpecGroup, checked_count, checked_name, checked_weight
from torchdata_wds.format.dataset_files.trust import Origin, SpecPlace, join_url, short

logger = logging.getLogger(__name__)
KIND = "wids-shard-index-v1"
_FILE_KEYS = ("__kind__", "wids_version", "name", "base", "info", "keep", "weight", "shardlist", "datasets")
_PART_KEYS = ("name", "base", "info", "keep", "weight", "shardlist")
_REFERENCE_KEYS = ("source_url", "name", "weight")
_SHARD_KEYS = ("url", "nsamples", "filesize", "md5sum", "weight", "name", "dataset")
Read = Callable[[str], tuple[Any, Origin]]


@dataclass(frozen=True)
class _Part:
    """One of the shard lists that a file holds or points to."""

    place: SpecPlace
    name: str | int
    weight: float | None
    folder: str
    shards: Any


def wids_groups(content: Mapping[str, Any], place: SpecPlace, read: Read) -> list[SpecGroup]:
    """Checks a ``wids`` shard list: one group, or with weights a group per dataset.

    `read` reads the file of a ``source_url`` and returns its content and origin.

    Example:
        >>> content = {"wids_version": 1, "base": "s3://b/d", "shardlist": [{"url": "x.tar", "nsamples": 3}]}
        >>> [group] = wids_groups(content, SpecPlace(Origin("spec")), None)
        >>> [(entry.name, entry.patterns) for entry in group.entries]
        [(0, ('s3://b/d/x.tar',))]
    """
    parts = list(_parts(content, place, read))
    if not parts:
        raise place.error("has neither a shardlist nor datasets with one")
    entries = [_entries(part) for part in parts]
    weights = [part.weight for part in parts]
    if all(weight is None for weight in weights) or len(parts) == 1:
        return [SpecGroup(tuple(entry for found in entries for entry in found))]
    if None in weights:
        raise parts[weights.index(None)].place.error("has no weight, other datasets have one; all or none must")
    return [SpecGroup(tuple(found), weight) for found, weight in zip(entries, weights, strict=True)]


def _parts(content: Mapping[str, Any], place: SpecPlace, read: Read) -> Iterator[_Part]:
    _check_file(content, place)
    folder = _base(content, place, place.origin.folder)
    if content.get("shardlist"):
        yield _part(content, place, 0, checked_weight(content, "weight", place), folder)
    here = place.at("datasets")
    datasets = content.get("datasets", [])
    if not isinstance(datasets, (list, tuple)):
        raise here.error(f"expected a list, found {short(datasets)}")
    for number, item in enumerate(datasets, start=bool(content.get("shardlist"))):
        where = here.at(number - bool(content.get("shardlist")))
        if isinstance(item, Mapping) and "source_url" in item:
            yield _referenced(item, where, number, folder, read)
        else:
            where.check_keys(item, _PART_KEYS)
            weight = checked_weight(item, "weight", where)
            yield _part(item, where, number, weight, _base(item, where, folder))


def _referenced(item: Mapping[str, Any], place: SpecPlace, number: int, folder: str, read: Read) -> _Part:
    """The list that an item points to; its weight and name are the item's, where it has some."""
    place.check_keys(item, _REFERENCE_KEYS)
    here = place.at("source_url")
    url = item["source_url"]
    if not isinstance(url, str) or not url:
        raise here.error(f"expected the URL of a shard list, found {short(url)}")
    content, origin = read(here.check_url(join_url(folder, url)))
    inner = SpecPlace(origin)
    _check_file(content, inner)
    if content.get("datasets"):
        raise inner.at("datasets").error(f"{place} points to this file, which must have shards only: one level is read")
    weight = checked_weight(item if "weight" in item else content, "weight", place if "weight" in item else inner)
    part = _part(content, inner, number, weight, _base(content, inner, origin.folder))
    return _Part(part.place, checked_name(item, place, part.name), weight, part.folder, part.shards)


def _check_file(content: Any, place: SpecPlace) -> None:
    place.check_keys(content, _FILE_KEYS)
    version = content.get("wids_version", 1)
    if version != 1 or isinstance(version, bool):
        raise place.at("wids_version").error(f"expected 1, found {short(version)}: no other is known")
    if content.get("__kind__", KIND) != KIND:
        raise place.at("__kind__").error(f"expected {KIND!r}, found {short(content['__kind__'])}")


def _part(item: Mapping[str, Any], place: SpecPlace, number: int, weight: float | None, folder: str) -> _Part:
    here = place.at("shardlist")
    shards = item.get("shardlist")
    if not isinstance(shards, (list, tuple)) or not shards:
        raise here.error(f"expected a list of shards that is not empty, found {short(shards)}")
    if any(isinstance(shard, Mapping) and "weight" in shard for shard in shards):
        logger.warning("%s: weights of single shards are not used; weights of datasets are", here)
    return _Part(here, checked_name(item, place, number), weight, folder, shards)


def _base(item: Mapping[str, Any], place: SpecPlace, folder: str) -> str:
    base = item.get("base")
    if base is None:
        return folder
    if not isinstance(base, str):
        raise place.at("base").error(f"expected the URL of a folder, found {short(base)}")
    return join_url(folder, base)


def _entries(part: _Part) -> Iterator[SpecEntry]:
    """An entry per name that the shards have."""
    urls: dict[str | int, list[str]] = {}
    for number, shard in enumerate(part.shards):
        name, url = _shard(shard, part.place.at(number), part)
        urls.setdefault(name, []).append(url)
    return (SpecEntry(part.place, name, tuple(found), verbatim=True) for name, found in urls.items())


def _shard(shard: Any, place: SpecPlace, part: _Part) -> tuple[str | int, str]:
    place.check_keys(shard, _SHARD_KEYS)
    url = shard.get("url")
    if not isinstance(url, str) or not url:
        raise place.at("url").error(f"expected the URL of a shard, found {short(url)}")
    for key in ("nsamples", "filesize"):
        if shard.get(key) is not None:
            checked_count(shard, key, place)
    name = shard.get("dataset", shard.get("name"))
    name = part.name if name is None else name
    if not isinstance(name, (str, int)):
        raise place.at("dataset").error(f"expected text, found {short(name)}")
    return name, place.at("url").check_url(join_url(part.folder, url))
