"""What the tests of resuming share: graphs over uneven shards, and runs that are stopped and gone on with."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits import workers_kit
from tests.kits.shards import write_text_shards
from torchdata_wds import index_shard
from torchdata_wds.handlers import ignore_and_continue

#: Eight uneven shards, one of them empty.
SIZES = (9, 6, 3, 0, 5, 7, 1, 12)

#: The same in small, for tests that are to be fast.
SMALL = (4, 3, 6, 0, 2, 5, 1, 3)

SEED = 5

#: Where to cut an epoch: after so many items; "between" is after its end.
Cut = int | str


def shards_in(folder: Path, sizes: Sequence[int] = SIZES) -> list[str]:
    return write_text_shards(folder / "shards", sizes)


def indexed_shards_in(folder: Path) -> list[str]:
    """Small ones, with an index beside each."""
    urls = shards_in(folder, SMALL)
    for url in urls:
        index_shard(url)
    return urls


# ------------------------------------------------------------------------------------------------------ what graphs do
def augment(sample: dict[str, Any]) -> dict[str, Any]:
    """Adds a draw from each of the global generators."""
    return {**sample, "draws": (random.random(), float(np.random.rand()), float(torch.rand(())))}


def row(sample: dict[str, Any]) -> tuple[Any, ...]:
    return sample["__key__"], sample.get("cls"), sample.get("draws")


def marked_row(sample: dict[str, Any]) -> tuple[Any, ...]:
    """A key, whether it is a repeated sample, and draws."""
    return sample["__key__"], sample.get("__pad__", False), sample["draws"]


def keys_of(items: Any) -> list[str]:
    """The keys of rows, and of batches of rows, in their order."""
    if isinstance(items, tuple) and isinstance(items[0], str):
        return [items[0]]
    return [key for item in items for key in keys_of(item)]


def is_odd(sample: dict[str, Any]) -> bool:
    return bool(int(sample["cls"]) % 2)


def twice(items: list[Any]) -> list[Any]:
    return items + items[:1]


def fail_on_one(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 1:
        raise ValueError("one")
    return sample


def passed_on(items: Iterator[Any]) -> Iterator[Any]:
    yield from items


# -------------------------------------------------------------------------------------------------------------- graphs
def samples(urls: list[str]) -> Any:
    return IterableWrapper([urls]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()


def plain(urls: list[str]) -> Any:
    return samples(urls).wds_shuffle(7, initial=3).wds_decode().map(augment).map(row)


def batched(urls: list[str]) -> Any:
    return plain(urls).batch(4)


def in_epochs(urls: list[str]) -> Any:
    """A pass has 43 samples."""
    return plain(urls).wds_epoch(26)


def in_odd_epochs(urls: list[str]) -> Any:
    """22 samples an epoch: two ranks have 11 each, which no number of workers divides evenly."""
    return plain(urls).wds_epoch(22).batch(3)


def batches_in_epochs(urls: list[str]) -> Any:
    return batched(urls).wds_epoch(9)


def resampled(urls: list[str]) -> Any:
    first, second = (
        IterableWrapper(part).resample_shards().load_wds_shards().group_by_key().wds_shuffle(5, initial=2)
        for part in (urls[:2], urls[4:])
    )
    return first.wds_mix(second, weights=[0.3, 0.7], stop="first").wds_decode().map(augment).map(row).wds_epoch(24)


def filtered(urls: list[str]) -> Any:
    return samples(urls).wds_decode().filter(is_odd).map(augment).shuffle(buffer_size=5).map(row)


def split(urls: list[str]) -> Any:
    """The shards must have indexes."""
    pipe = IterableWrapper(urls).shuffle().split_shards(True, even="drop").load_wds_shards().group_by_key()
    return pipe.wds_shuffle(7, initial=3).wds_decode().map(augment).map(row).batch(3)


def padded(urls: list[str]) -> Any:
    """The same with some samples twice, which are marked; the shards must have indexes."""
    pipe = IterableWrapper(urls).shuffle().split_shards(True, even="pad").load_wds_shards().group_by_key()
    return pipe.wds_shuffle(7, initial=3).wds_decode().map(augment).map(marked_row).batch(3)


def joined(urls: list[str]) -> Any:
    return samples(urls).wds_shuffle(7, initial=3).wds_decode().map(augment).join_workers().map(row).batch(3).map(twice)


def handled(urls: list[str]) -> Any:
    pipe = samples(urls).wds_shuffle(7, initial=3).wds_decode().wds_map(fail_on_one, handler=ignore_and_continue)
    return pipe.map(augment).map(row)


Graph = Callable[[list[str]], Any]

#: The graphs by their names, for scripts.
GRAPHS: dict[str, Graph] = {
    graph.__name__: graph
    for graph in (
        plain,
        batched,
        in_epochs,
        in_odd_epochs,
        batches_in_epochs,
        resampled,
        filtered,
        split,
        padded,
        joined,
        handled,
    )
}


# ---------------------------------------------------------------------------------------------------------------- runs
def loader_of(pipe: IterDataPipe, workers: int, *, seed: int | None = SEED, **options: Any) -> Any:
    return workers_kit.loader_of(pipe, workers, seed=seed, **options)


def run(pipe: IterDataPipe, workers: int, epochs: int, **options: Any) -> list[list[Any]]:
    """The items of the first epochs of a run that is never stopped."""
    with loader_of(pipe, workers, **options) as loader:
        return [list(loader) for _ in range(epochs)]


def states_at(loader: Any, cuts: Sequence[Cut]) -> tuple[list[Any], list[Any]]:
    """Runs through an epoch, and takes the state at each cut: gives the states and the items."""
    states: dict[Cut, Any] = {}
    items = []
    iterator = iter(loader)
    if 0 in cuts:
        states[0] = loader.state_dict()
    for item in iterator:
        items.append(item)
        if len(items) in cuts:
            states[len(items)] = loader.state_dict()
    states["between"] = loader.state_dict()
    return [states[cut] for cut in cuts], items


def stopped(pipe: IterDataPipe, workers: int, epoch: int, cut: Cut, **options: Any) -> Any:
    """The state of a run that is stopped after `cut` items of an epoch, counted from 0."""
    with loader_of(pipe, workers, **options) as loader:
        for _ in range(epoch):
            list(loader)
        iterator = iter(loader)
        for number, _ in enumerate(iterator if cut else ()):
            if number + 1 == cut:
                break
        return loader.state_dict()


def resumed(state: Any, workers: int, epochs: int, *, seed: int | None = SEED, **options: Any) -> list[list[Any]]:
    """What a new loader gives that goes on from a state: the rest of its epoch, and those behind it."""
    with workers_kit.loader_from(state, workers, seed=seed, **options) as loader:
        return [list(loader) for _ in range(epochs)]


def left_of(epochs: list[list[Any]], epoch: int, cut: Cut, more: int = 1) -> list[list[Any]]:
    """What must come of a run behind a cut: the rest of the epoch and `more` epochs."""
    behind = epochs[epoch + 1 : epoch + 1 + more]
    assert len(behind) == more
    return behind if cut == "between" else [epochs[epoch][cut:], *behind]  # type: ignore[index]
