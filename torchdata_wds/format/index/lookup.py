"""Finds the index of a list of shards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.storage import StorageOptions


def find_index(
    urls: Sequence[str],
    index: Any = "auto",
    *,
    index_dir: str | os.PathLike[str] | None = None,  # noqa: ARG001
    keys: str = "first_dot",  # noqa: ARG001
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> DatasetIndex:
    """Returns the index of shards in their order."""
    if isinstance(index, DatasetIndex):
        return index.select(urls)
    if index != "auto":
        return DatasetIndex.load(index, storage_options=storage_options).select(urls)
    return _scanned(tuple(urls), StorageOptions(storage_options))


@lru_cache(maxsize=4)
def _scanned(urls: tuple[str, ...], options: StorageOptions) -> DatasetIndex:
    return DatasetIndex.of((url, index_shard(url, to=False, storage_options=options)) for url in urls)
