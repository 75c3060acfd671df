"""The sample shuffle: its buffer, its orders, its seeds."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset.filters
from PIL import Image
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_keys, write_text_shards
from torchdata_wds.pipes.samples.shuffle_buffer import shuffled, size_in_bytes

NUMBERS = list(range(300))

#: What seed 7 makes of twelve numbers, in any process of any machine: one order per epoch.
SEVEN = [[0, 4, 1, 3, 5, 8, 10, 11, 2, 6, 7, 9], [2, 1, 3, 0, 7, 10, 9, 11, 8, 5, 6, 4]]


class Watched:
    """A source that notes how many items and bytes its consumer holds whenever it asks for the next."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.held: Counter[int] = Counter()
        self.most_items = self.most_bytes = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self._note()
            self.held[id(item)] += 1
            yield item
        self._note()

    def took(self, item: Any) -> None:
        self.held[id(item)] -= 1

    def _note(self) -> None:
        held = [item for item in self.items if self.held[id(item)] > 0]
        self.most_items = max(self.most_items, len(held))
        self.most_bytes = max(self.most_bytes, sum(map(size_in_bytes, held)))


def through(
    items: list[Any], buffer_size: int, initial: int, max_bytes: int | None = None
) -> tuple[Watched, list[Any]]:
    """Shuffles items, and watches."""
    source, given = Watched(items), []
    for item in shuffled(source, random.Random(1), buffer_size, initial, max_bytes):
        source.took(item)
        given.append(item)
    return source, given


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_wds_shuffle_loses_nothing_when_sizes_vary(count: int) -> None:
    """Every item comes once, and the buffer never holds more than buffer_size items."""
    items = [f"item {number}" for number in range(count)]
    for buffer_size, initial in itertools.product((0, 1, 2, 3, 10, 99, 100, 101, 1000), (0, 1, 2, 7, 100, 1000)):
        source, given = through(items, buffer_size, initial)
        assert sorted(given) == sorted(items)
        assert source.most_items <= buffer_size


@pytest.mark.parametrize("buffer_size", [1, 10, 1000])
def test_wds_shuffle_keeps_its_limits_when_items_differ_in_size(buffer_size: int) -> None:
    """Whenever it takes the next item, the buffer holds at most max_bytes and buffer_size items; nothing is lost."""
    items = [bytes(size) for size in random.Random(2).choices(range(2000), k=200)]
    for max_bytes in (0, 100, 1000, 5000, 10**9):
        source, given = through(items, buffer_size, 5, max_bytes)
        assert Counter(map(id, given)) == Counter(map(id, items))
        assert source.most_bytes <= max_bytes
        assert source.most_items <= buffer_size


def test_wds_shuffle_keeps_its_buffer_when_one_item_is_larger_than_the_limit() -> None:
    """A giant goes straight through and does not flush the others."""
    items = [bytes([number]) * 100 for number in range(100)]
    items.insert(50, bytes(10**6))
    source, given = through(items, 40, 40, 10_000)
    assert given.index(bytes(10**6)) == 50 - 39
    assert source.most_items == 39


def test_wds_shuffle_keeps_count_when_items_grow_inside_the_buffer() -> None:
    """A size is measured once: an item that changes meanwhile does not unbalance the sum."""
    items = [[0] for _ in range(100)]
    stream = shuffled(iter(items), random.Random(0), 1000, 10, 2000)
    given = []
    for item in stream:
        given.append(item)
        for other in items:
            other.append(0)
    assert len(given) == 100


def test_wds_shuffle_gives_its_first_item_when_the_initial_ones_are_there() -> None:
    """The first item comes after `initial` items have been read, or a full buffer."""
    for buffer_size, initial, first in ((1000, 100, 100), (1000, 0, 1), (50, 100, 50), (9, 4, 4)):
        source = iter(NUMBERS)
        next(shuffled(source, random.Random(0), buffer_size, initial))
        assert next(source) == first


def test_wds_shuffle_grows_its_buffer_to_the_full_size_when_it_starts_early() -> None:
    """One item goes out for two that come in, until buffer_size is reached: initial is not the size for good."""
    source, _ = through([str(number) for number in range(300)], 100, 10)
    assert source.most_items == 99
    rest = iter(NUMBERS)
    given = [*itertools.islice(shuffled(rest, random.Random(0), 100, 10), 51)]
    assert len(given) + 59 == next(rest) == 10 + 2 * 50


def test_wds_shuffle_spreads_items_when_the_buffer_is_large() -> None:
    """Once the buffer is full, neighbours of the source end far apart, and no place is favoured."""
    given = list(shuffled(iter(list(range(5000))), random.Random(3), 1000, 100))
    places = np.empty(5000)
    places[given] = np.arange(5000)
    steady = places[1500:4000]
    assert np.abs(np.diff(steady)).mean() > 700  # two independent waits of mean 1,000 differ by 1,000 on average
    assert abs(np.corrcoef(np.diff(steady)[:-1], np.diff(steady)[1:])[0, 1] + 0.5) < 0.1  # as of independent noise


def test_wds_shuffle_mixes_all_positions_when_everything_fits() -> None:
    """With a buffer and an initial number as large as the source, each item comes in each place equally often."""
    counts = np.zeros((6, 6))
    for seed in range(3000):
        for place, item in enumerate(shuffled(iter(range(6)), random.Random(seed), 6, 6)):
            counts[place, item] += 1
    assert counts.min() > 400
    assert counts.max() < 600


def test_wds_shuffle_keeps_the_order_when_its_buffer_is_trivial() -> None:
    """0 and 1 pass items through, as webdataset's shuffle(0) does; the length is that of the source."""
    for buffer_size in (0, 1):
        pipe = IterableWrapper(NUMBERS).wds_shuffle(buffer_size)
        assert len(pipe) == 300
        assert list(pipe) == NUMBERS


@pytest.mark.parametrize("arguments", [(10,), (1000,), (5, 100)])
def test_wds_shuffle_equals_webdataset_as_a_multiset(arguments: tuple[int, ...]) -> None:
    """Both give the same items, in another order than they came."""
    ours = list(IterableWrapper(NUMBERS).wds_shuffle(arguments[0], initial=arguments[-1]))
    theirs = list(webdataset.filters.shuffle(*arguments)(iter(NUMBERS)))
    assert Counter(ours) == Counter(theirs)
    assert ours != NUMBERS


def seven() -> IterDataPipe[Any]:
    """Twelve numbers, shuffled with seed 7."""
    return IterableWrapper(range(12)).wds_shuffle(6, initial=3).set_seed(7)


def test_wds_shuffle_gives_the_stored_orders_when_seeded() -> None:
    """The orders of a seed are the same on every machine and Python version: these were written down."""
    pipe = seven()
    assert [list(pipe), list(pipe)] == SEVEN


class TwoEpochs(torch.utils.data.IterableDataset):
    """Two epochs of the same shuffle, for torch's DataLoader, which would set its own seed on a pipe."""

    def __iter__(self) -> Iterator[list[int]]:
        pipe = seven()
        yield list(pipe)
        yield list(pipe)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_wds_shuffle_gives_the_stored_orders_when_run_in_a_worker(context: str) -> None:
    """A forked and a spawned process give the same orders as this one."""
    loader = DataLoader(TwoEpochs(), batch_size=None, num_workers=1, multiprocessing_context=context, collate_fn=list)
    assert list(loader) == SEVEN


def test_wds_shuffle_gives_other_orders_when_seeds_or_epochs_differ() -> None:
    """Each seed and each epoch has its order; setting the seed again starts over."""
    pipe = IterableWrapper(range(50)).wds_shuffle(50)
    orders = []
    for seed in (0, 1, 2**64 - 1):
        pipe.set_seed(seed)
        orders += [tuple(pipe), tuple(pipe)]
    assert len(set(orders)) == 6
    assert tuple(pipe.set_seed(0)) == orders[0]


def by_worker(pairs: list[tuple[int, int]]) -> dict[int, list[int]]:
    """The items of each worker in their order."""
    found: dict[int, list[int]] = {}
    for worker, item in pairs:
        found.setdefault(worker, []).append(item)
    return found


def with_worker(item: int) -> tuple[int, int]:
    info = torch.utils.data.get_worker_info()
    return (-1 if info is None else info.id), item


def in_two_workers(pipe: IterDataPipe[Any]) -> dict[int, list[int]]:
    """One epoch under torch's DataLoader, by worker."""
    return by_worker(list(DataLoader(pipe.map(with_worker), batch_size=None, num_workers=2, collate_fn=tuple)))


def test_wds_shuffle_differs_between_workers_when_torch_seeds_them_alike() -> None:
    """Behind a sharding filter each worker has an order of its own: positions of equal rank do not go together."""
    found = in_two_workers(IterableWrapper(range(200)).sharding_filter().wds_shuffle(100, initial=100))
    assert sorted(found[0] + found[1]) == list(range(200))
    assert [item // 2 for item in found[0]] != [item // 2 for item in found[1]]


def test_wds_shuffle_is_alike_in_all_workers_when_it_stands_before_the_sharding_filter() -> None:
    """Before the split all workers must see one order, or items would be lost and doubled."""
    found = in_two_workers(IterableWrapper(range(200)).wds_shuffle(100).sharding_filter())
    assert sorted(found[0] + found[1]) == list(range(200))
    assert found[0] != sorted(found[0])


def test_wds_shuffle_works_on_both_sides_when_shards_are_split(tmp_path: Path) -> None:
    """Shuffled shards, a split, shuffled samples: each key once, in another order each epoch."""
    sizes = (5, 0, 9, 3)
    pipe = IterableWrapper(write_text_shards(tmp_path, sizes)).wds_shuffle(10).sharding_filter()
    pipe = pipe.load_wds_shards().group_by_key().wds_shuffle(20).wds_to_tuple("__key__")
    loader = DataLoader(pipe, batch_size=None, num_workers=2, collate_fn=tuple, persistent_workers=True)
    epochs = [[key for (key,) in loader] for _ in range(2)]
    assert all(sorted(keys) == sorted(text_keys(sizes)) for keys in epochs)
    assert epochs[0] != epochs[1]


def test_wds_shuffle_obeys_when_the_dataloader_turns_shuffling_off_or_on() -> None:
    """DataLoader(shuffle=False) keeps the order, as with the native shuffle; shuffle=True adds no second shuffle."""
    pipe = IterableWrapper(NUMBERS).wds_shuffle(100)
    assert list(DataLoader(pipe, batch_size=None, shuffle=False)) == NUMBERS
    given = list(DataLoader(pipe, batch_size=None, shuffle=True))
    assert sorted(given) == NUMBERS
    assert given != NUMBERS


@pytest.mark.parametrize(
    ("item", "least", "most"),
    [
        (bytes(1000), 1000, 1100),
        ("x" * 1000, 1000, 1100),
        (np.zeros((10, 100), "u1"), 1000, 1000),
        (torch.zeros(10, 100, dtype=torch.uint8), 1000, 1000),
        (memoryview(bytes(1000)), 1000, 1000),
        (Image.new("RGB", (10, 10)), 300, 300),
        ((bytes(500), [bytes(500)]), 1000, 1400),
        ({"__key__": "a", "jpg": bytes(1000), "json": {"a": ["b"]}}, 1000, 2000),
        (3, 1, 50),
        (None, 1, 50),
    ],
)
def test_size_in_bytes_counts_what_an_item_holds(item: Any, least: int, most: int) -> None:
    """The bytes of buffers and strings, with containers walked through."""
    assert least <= size_in_bytes(item) <= most
