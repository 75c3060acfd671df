"""What a pool promises about items: they arrive as they were made, in their place."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.kind import PoolKind
from tests.kits.processes import wait_until
from tests.kits.workers_kit import SIZES, items_of, uneven_pipe
from torchdata_wds import wds_collate


class Pair(NamedTuple):
    """A named tuple, which stays one."""

    image: torch.Tensor
    label: int


@dataclass
class Box:
    """An object of a user's."""

    content: Any


@cache
def values() -> dict[str, Any]:
    """Values of every kind that a stage may yield; those of 64 KB or more travel outside of the pickle."""
    table = np.arange(200_000, dtype=np.int32).reshape(400, 500)
    return {
        "none": None,
        "plain": {"a": [1, 2.5, "text", b"bytes", {3}, (True, None)]},
        "bytes": bytes(range(256)) * 4096,
        "text": "\u00e4" * 500_000,
        "array": table,
        "array without items": np.zeros((0, 3), np.float16),
        "array of no dimension": np.array(7.5),
        "array with gaps": table[:, ::2],
        "array in Fortran's order": np.asfortranarray(table),
        "array of text": np.array(["a", "bcd"]),
        "records": np.zeros(20_000, [("a", "i4"), ("b", "f8")]),
        "tensor": torch.arange(100_000),
        "tensor without items": torch.zeros(2, 0),
        "tensor of no dimension": torch.tensor(3),
        "tensor with gaps": torch.arange(200_000).reshape(400, 500)[:, ::2],
        "tensor transposed": torch.arange(60_000.0).reshape(200, 300).T,
        "bfloat16": torch.ones(50_000, dtype=torch.bfloat16) * 1.5,
        "tensor with gradient": torch.ones(30_000, requires_grad=True),
        "small image": Image.new("L", (3, 2), 7),
        "image": Image.new("RGB", (300, 200), (1, 2, 3)),
        "named tuple": Pair(torch.arange(20_000.0), 1),
        "object": Box([Box(1), np.arange(30_000)]),
        "path": Path("a/b"),
    }


def value_of(name: str) -> Any:
    return values()[name]


def assert_same(found: Any, expected: Any) -> None:
    """Fails unless a value has the type, the contents and the layout of another."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found, expected)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found, expected)
    elif isinstance(expected, Image.Image):
        assert (found.mode, found.size, found.tobytes()) == (expected.mode, expected.size, expected.tobytes())
    elif isinstance(expected, Box):
        assert_same(found.content, expected.content)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


class Made:
    """Counts, in a file, the items that it is called with, in whatever process."""

    def __init__(self, file: Path, size: int) -> None:
        self.file = file
        self.size = size  # of each result, in bytes

    def __call__(self, item: int) -> Any:
        with self.file.open("ab") as file:
            file.write(b"x")
        return np.full(self.size, item % 251, np.uint8) if self.size else item

    @property
    def count(self) -> int:
        return self.file.stat().st_size if self.file.exists() else 0


def image(number: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], int, bytes]:
    """An image as a tensor and as an array, its number, and bytes; 24 kB each."""
    array = np.full((3, 64, 128), number % 251, np.uint8)
    return torch.from_numpy(array), array, number, bytes([number % 251]) * 24_000


def image_batches(count: int) -> IterDataPipe:
    return IterableWrapper(range(count)).sharding_filter().map(image).batch(8).collate(wds_collate)


def assert_whole(batch: Any) -> None:
    tensors, arrays, numbers, texts = batch
    assert tensors.shape == arrays.shape == (len(numbers), 3, 64, 128)
    for row, number in enumerate(numbers.tolist()):
        fill = number % 251
        assert bool((tensors[row] == fill).all())
        assert bool((arrays[row] == fill).all())
        assert texts[row] == bytes([fill]) * 24_000


def keep_all(batches: Iterator[Any]) -> Iterator[Any]:
    """A stage of the worker that keeps what it has sent, and sends it again."""
    kept = []
    for batch in batches:
        kept.append(batch)
        yield batch
    yield from kept


def at_odd_times(item: Any) -> Any:
    time.sleep(random.random() ** 8 * 0.02)
    return item


class ItemSuite:
    """Items on their way to the training loop."""

    def test_values_come_as_they_were_made(self, pool: PoolKind) -> None:
        """Types, contents, and what a tensor is beside its numbers."""
        expected = values()
        with pool.loader(IterableWrapper(list(expected)).sharding_filter().map(value_of)) as loader:
            found = list(loader)
        for name, value in zip(expected, found, strict=True):
            try:
                assert_same(value, expected[name])
            except AssertionError as error:
                error.add_note(name)
                raise

    @pytest.mark.slow
    def test_batches_stay_as_they_are_when_they_are_kept(self, pool: PoolKind) -> None:
        """In the training loop and in the worker, some and all, also after the loader's end."""
        with pool.loader(image_batches(160).wds_compose(keep_all)) as loader:
            for _ in range(2):
                kept: list[Any] = []
                numbers: list[int] = []
                for batch in loader:
                    assert_whole(batch)
                    numbers += batch[2].tolist()
                    kept.append(batch)
                    if len(kept) > 20:
                        del kept[random.randrange(len(kept))]
                assert sorted(numbers) == sorted([*range(160)] * 2)
                for batch in kept:
                    assert_whole(batch)
        for batch in kept:
            assert_whole(batch)

    def test_order_does_not_depend_on_when_items_come(self, pool: PoolKind) -> None:
        """The same seed gives the same order, whichever worker is late."""
        orders = []
        kind = pool.of(3)
        for place, pipe in ((kind.elsewhere, uneven_pipe()), (kind, uneven_pipe().map(at_odd_times))):
            with place.loader(pipe, seed=1) as loader:
                orders.append(list(loader))
        assert orders[0] == orders[1]
        assert sorted(orders[0]) == items_of(SIZES)


class AheadSuite:
    """What workers make ahead."""

    @pytest.mark.parametrize(
        ("size", "ahead"),
        [(1_100_000, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1_100_000, 3), (0, 1)))],
    )
    def test_nothing_piles_up_when_the_trainer_pauses(
        self, pool: PoolKind, size: int, ahead: int, tmp_path: Path
    ) -> None:
        """Workers make `prefetch_factor` large items ahead, or groups of small ones, and wait."""
        made = Made(tmp_path / "made", size)
        pipe = IterableWrapper(range(500_000)).sharding_filter().map(made)
        least = ahead * pool.workers if size else 0  # small items go when they are ready: a group may be any size
        most = (ahead + pool.spare if size else (ahead + pool.spare + 1) * pool.group) * pool.workers
        with pool.loader(pipe, prefetch_factor=ahead) as loader:
            items = iter(loader)
            for taken in (1, 2, 3):
                next(items)
                assert wait_until(lambda: made.count >= taken + least)  # noqa: B023
                time.sleep(0.1)
                assert made.count <= taken + most
