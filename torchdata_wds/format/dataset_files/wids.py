"""Shard lists of ``wids``: ``{"wids_version": 1, "shardlist": [{"url": ..., "nsamples": ...}, ...]}``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchdata_wds.format.dataset_files import entries
from torchdata_wds.format.dataset_files.entries import Part, SpecEntry, SpecGroup, checked_name, checked_weight
from torchdata_wds.format.dataset_files.trust import Origin, SpecPlace, join_url, short
from torchdata_wds.storage.urls import is_local

logger = logging.getLogger(__name__)
KIND = "wids-shard-index-v1"
_PART_KEYS = ("name", "base", "info", "keep", "weight", "shardlist")
_FILE_KEYS = ("__kind__", "wids_version", *_PART_KEYS, "datasets")
_REFERENCE_KEYS = ("source_url", "name", "weight")
_SHARD_KEYS = ("url", "nsamples", "filesize", "md5sum", "weight", "name", "dataset")
Read = Callable[[str], tuple[Any, Origin]]


def wids_groups(content: Mapping[str, Any], place: SpecPlace, read: Read) -> list[SpecGroup]:
    """Checks a ``wids`` shard list: one group, or with weights a group per dataset.

    `read` reads the file of a ``source_url`` and returns its content and origin.
    """
    parts = list(_parts(content, place, read))
    if not parts:
        raise place.error("has neither a shardlist nor datasets with one")
    return entries.groups_by_weight(parts, "weight", "datasets")


def wids_counts(content: Mapping[str, Any], url: str) -> Iterator[tuple[str, Any]]:
    """Yields the URL and the number of samples of each shard in the shard list of the file `url`, unchecked."""
    own_folder, slash, _ = (url if is_local(url) else url.partition("?")[0]).rpartition("/")
    for part in (content, *content.get("datasets", ())):
        folder = part.get("base") or content.get("base") or own_folder + slash
        for shard in part.get("shardlist", ()):
            yield join_url(folder, shard["url"].removeprefix("./")), shard["nsamples"]


def _parts(content: Mapping[str, Any], place: SpecPlace, read: Read) -> Iterator[Part]:
    _check_file(content, place)
    folder = _base(content, place, place.origin.folder)
    own = bool(content.get("shardlist"))
    if own:
        yield _part(content, place, checked_name(content, place, 0), checked_weight(content, "weight", place), folder)
    here = place.at("datasets")
    datasets = content.get("datasets", [])
    if not isinstance(datasets, (list, tuple)):
        raise here.error(f"expected a list, found {short(datasets)}")
    for number, item in enumerate(datasets):
        where = here.at(number)
        if isinstance(item, Mapping) and "source_url" in item:
            yield _referenced(item, where, number + own, folder, read)
        else:
            where.check_keys(item, _PART_KEYS)
            weight = checked_weight(item, "weight", where)
            yield _part(item, where, checked_name(item, where, number + own), weight, _base(item, where, folder))


def _referenced(item: Mapping[str, Any], place: SpecPlace, number: int, folder: str, read: Read) -> Part:
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
    name = checked_name(item, place, checked_name(content, inner, number))
    return _part(content, inner, name, weight, _base(content, inner, origin.folder))


def _check_file(content: Any, place: SpecPlace) -> None:
    place.check_keys(content, _FILE_KEYS)
    version = content.get("wids_version", 1)
    if version != 1 or isinstance(version, bool):
        raise place.at("wids_version").error(f"expected 1, found {short(version)}: no other is known")
    if content.get("__kind__", KIND) != KIND:
        raise place.at("__kind__").error(f"expected {KIND!r}, found {short(content['__kind__'])}")


def _base(item: Mapping[str, Any], place: SpecPlace, folder: str) -> str:
    base = item.get("base", "")
    if base is not None and not isinstance(base, str):
        raise place.at("base").error(f"expected the URL of a folder, found {short(base)}")
    return join_url(folder, base) if base else folder


def _part(item: Mapping[str, Any], place: SpecPlace, name: str | int, weight: float | None, folder: str) -> Part:
    """Makes an entry per name that the shards have; by default that of the list."""
    here = place.at("shardlist")
    shards = item.get("shardlist")
    if not isinstance(shards, (list, tuple)) or not shards:
        raise here.error(f"expected a list of shards that is not empty, found {short(shards)}")
    if any(isinstance(shard, Mapping) and "weight" in shard for shard in shards):
        logger.warning("%s: weights of single shards are not used; weights of datasets are", here)
    urls: dict[str | int, list[str]] = {}
    for number, shard in enumerate(shards):
        where = here.at(number)
        where.check_keys(shard, _SHARD_KEYS)
        url = shard.get("url")
        if not isinstance(url, str) or not url:
            raise where.at("url").error(f"expected the URL of a shard, found {short(url)}")
        for key in ("nsamples", "filesize"):
            if shard.get(key) is not None:
                entries.checked_count(shard, key, where)
        own = shard.get("dataset", shard.get("name"))
        if not isinstance(own, str | int | None):
            raise where.at("dataset").error(f"expected text, found {short(own)}")
        found = urls.setdefault(name if own is None else own, [])
        found.append(where.at("url").check_url(join_url(folder, url)))
    return here, weight, [SpecEntry(here, own, tuple(found), verbatim=True) for own, found in urls.items()]
