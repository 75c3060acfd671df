"""Graphs over real shards for clusters whose nodes are lost, and what an undisturbed epoch of them yields."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits import loss_graphs
from tests.kits.resume_kit import augment
from tests.kits.shards import write_text_shards
from torchdata_wds import WdsLoader, index_shard

#: 160 samples in eight uneven shards, one of them empty.
SIZES = (31, 9, 24, 0, 17, 40, 3, 36)

SEED = 11

#: Seconds that a sample takes in an actor: with two of them, an epoch takes more than a second.
pace = 0.015


def shards_in(folder: Path) -> list[str]:
    urls = write_text_shards(folder / "shards", SIZES)
    for url in urls:
        index_shard(url)
    return urls


def row(sample: dict[str, Any]) -> tuple[Any, ...]:
    """A slow sample: its key, its draws, and for each third an array that crosses in the object store."""
    time.sleep(loss_graphs.pace)
    number = int(sample["cls"])
    return sample["__key__"], sample.get("draws"), np.full(20_000 if number % 3 == 0 else 3, number)


def digest(item: Any) -> Any:
    """An item in plain values that can be compared."""
    if isinstance(item, list):
        return [digest(one) for one in item]
    key, draws, array = item
    return key, draws, array.size, zlib.crc32(array)


def samples(urls: list[str]) -> Any:
    return IterableWrapper([urls]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()


def shuffled(urls: list[str]) -> Any:
    return samples(urls).wds_shuffle(20, initial=10).wds_decode().map(augment).map(row)


def batched(urls: list[str]) -> Any:
    return shuffled(urls).batch(4)


def mixed(urls: list[str]) -> Any:
    first, second = (samples(part).wds_shuffle(9, initial=4) for part in (urls[:5], urls[5:]))
    return first.wds_mix(second, weights=[0.4, 0.6], stop="all").wds_decode().map(augment).map(row)


def in_epochs(urls: list[str]) -> Any:
    """Each epoch has 110 of the stream's samples, whose passes have 160."""
    return shuffled(urls).wds_epoch(110)


def in_order(urls: list[str]) -> Any:
    return IterableWrapper([urls]).list_shards().load_in_order(index=True, run=4).wds_decode().map(row).batch(4)


GRAPHS: dict[str, Callable[[list[str]], Any]] = {
    "shuffle": shuffled,
    "batch": batched,
    "mix": mixed,
    "wds_epoch": in_epochs,
    "load_in_order": in_order,
}


def undisturbed(graph: Callable[[list[str]], Any], urls: list[str], workers: int, epochs: int) -> list[list[Any]]:
    """The items of each epoch, made by processes of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_graphs, "pace", 0)
        with WdsLoader(graph(urls), workers, seed=SEED) as loader:
            return [[digest(item) for item in loader] for _ in range(epochs)]


def rest_of(graph: Callable[[list[str]], Any], urls: list[str], workers: int, state: dict[str, Any]) -> list[Any]:
    """The items that are left of an epoch from a state on, made by processes of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_graphs, "pace", 0)
        with WdsLoader(graph(urls), workers, seed=SEED) as loader:
            loader.load_state_dict(state)
            return digests(loader)


def digests(items: Iterable[Any]) -> list[Any]:
    return [digest(item) for item in items]
