"""The index of a list of shards, from wherever a user has one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.format.dataset_files.entries import wids_counts
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.foreign import check_counts
from torchdata_wds.format.index.packed import KEY_RULES, MAGIC
from torchdata_wds.format.index.search import search_indexes
from torchdata_wds.format.index.shard_lookup import Keys, Wanted
from torchdata_wds.format.index.url_table import UrlTable
from torchdata_wds.storage import StorageOptions, mask_url, open_shard
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.urls import local_path, url_text

#: Where the index of shards comes from, as `find_index` takes it; True is one, and "auto" one of the strings.
IndexSource = bool | str | os.PathLike[str] | Mapping[Any, ShardIndex | str | os.PathLike[str]] | DatasetIndex


def find_index(
    urls: Iterable[str | os.PathLike[str]],
    index: IndexSource = "auto",
    *,
    index_dir: str | os.PathLike[str] | None = None,
    keys: str = "first_dot",
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> DatasetIndex:
    """Returns the index of shards, whose samples are numbered in the order in which the shards are listed.

    Args:
        urls: The shards.
        index: Where it comes from. ``"auto"``: the index of each shard (``.wds-index/<name>.index`` or
            ``<name>.index`` beside it, or in `index_dir`), if it is of the present version of the shard; else the
            shard is scanned, a local one by its headers, and the result kept in the user's cache folder. True: the same
            without scans. A path or URL: a packed index, a folder of indexes, or a shard list of ``wids`` (shards are
            looked up as by ``"auto"``, and must have the numbers of samples in the list). A mapping from URL or base
            name to a `ShardIndex` or the path of one. A `DatasetIndex`.
        index_dir: A folder of indexes, ``<name>.index``, for shards that have none beside them. ``"auto"`` writes there
            what it scans, instead of the user's cache folder.
        keys: How names are split, as in ``group_by_key``.
        storage_options: Options by protocol, for shards and indexes.

    Raises:
        ShardListError: if a shard has no index, or the index is of other shards or another rule.
        ShardOpenError: if an index or shard cannot be opened.
        ShardFormatError: if an index is damaged or does not fit, or a shard that is scanned is damaged;
            ChangedShardError, which is one, if the index is of another version of a shard.

    Example:
        >>> from torchdata_wds import TarWriter
        >>> with TarWriter("x.tar", index=True) as writer:
        ...     _ = writer.write({"__key__": "a", "txt": "text"})
        >>> index = find_index(["x.tar"])
        >>> len(index), index.find("a")
        (1, [0])
    """
    if keys not in KEY_RULES:
        raise ValueError(f"an index needs keys='first_dot' or 'last_dot', which it can name, not {keys!r}")
    listed = [url_text(url) for url in urls]
    options = StorageOptions(storage_options)
    folder = None if index_dir is None else os.fspath(index_dir)
    wanted = Wanted(cast("Keys", keys), options, scans=True, folder=folder)
    if isinstance(index, DatasetIndex):
        found = index.select(listed)
    elif index is True or (isinstance(index, str) and index == "auto"):
        return search_indexes(listed, wanted._replace(scans=index is not True))
    elif isinstance(index, Mapping):
        found = _of_mapping(index, listed, options)
    elif isinstance(index, (str, os.PathLike)):
        found = _of_file(os.fspath(index), listed, wanted)
    else:
        raise TypeError(
            "index must be 'auto', True (an index beside each shard), the path or URL of a packed index, a folder of "
            f"indexes or a wids shard list, a mapping from URL to ShardIndex or path, or a DatasetIndex, not {index!r}"
        )
    if listed and found.keys != keys:
        what = f"the index splits names at keys={found.keys!r}, and keys={keys!r} is asked for"
        raise ShardListError(f"{what}: pass the same, or make it again")
    return found


def _of_mapping(index: Mapping[Any, Any], urls: Sequence[str], options: StorageOptions) -> DatasetIndex:
    """Takes the index of each shard out of a mapping."""
    names = [url_text(url) for url in index]
    values = list(index.values())
    table = UrlTable(names, "the mapping given as index=", "index")
    pairs = []
    for url, place in zip(urls, table.places(urls), strict=True):
        found = values[place]
        if isinstance(found, (str, os.PathLike)):
            found = ShardIndex.load(found, storage_options=options)
        if not isinstance(found, ShardIndex):
            raise TypeError(
                f"the mapping given as index= has {found!r:.80} for shard {mask_url(url)}, where a ShardIndex or the "
                "path of one is expected"
            )
        pairs.append((url, found))
    return DatasetIndex.of(pairs)


def _of_file(url: str, urls: Sequence[str], wanted: Wanted) -> DatasetIndex:
    """Takes the index of shards from a folder, a packed file, a list of counts, or the index of the only shard."""
    place, shown = resolve(url, wanted.options), mask_url(url)
    if Path(local_path(place.url)).is_dir() if place.is_local else place.url.endswith("/"):
        return search_indexes(urls, wanted._replace(scans=False, folder=url, is_beside=False))
    with open_shard(url, storage_options=wanted.options) as stream:
        data = stream.read(len(MAGIC))
        if data != MAGIC:
            data += stream.read()
    if data == MAGIC:
        return DatasetIndex.load(url, storage_options=wanted.options).select(urls)
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise TypeError(f"it is a JSON {type(content).__name__}")
        is_wids = "shardlist" in content or "datasets" in content
        counts = list(wids_counts(content, url) if is_wids else content.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{shown} is not a packed index, a folder of indexes or a wids shard list"
        why = f"{type(error).__name__}: {error}. `wds index --pack` makes a packed index"
        raise ShardFormatError(f"{what}: {why}", shard=shown, kind="index") from error
    found = search_indexes(urls, wanted)
    check_counts(found, counts, f"the index {shown}")
    return found
