"""Batches repeated from memory: the same ones in every round, whatever becomes of their loader."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WdsLoader, repeat_batches, wds_collate


def batches_of(size: int, count: int) -> Any:
    """A pipe of batches of tensors; batch 3 is full of 3s."""
    return IterableWrapper(range(count)).wds_map(partial(full, size)).batch(1).collate(wds_collate)


def full(size: int, number: int) -> torch.Tensor:
    """A batch's one sample."""
    return torch.full((size,), number)


def test_batches_come_again_in_their_order_in_each_iteration() -> None:
    """Every iteration starts with the first batch, and has the length that was asked for."""
    batches = repeat_batches(iter(range(100)), 3, count=4)
    assert [list(batches), list(batches), len(batches)] == [[0, 1, 2, 0], [0, 1, 2, 0], 4]


def test_batches_come_forever_without_a_count() -> None:
    """An object without a length still counts as true."""
    batches = repeat_batches(range(2))
    assert list(itertools.islice(batches, 5)) == [0, 1, 0, 1, 0]
    assert batches
    with pytest.raises(TypeError, match="count="):
        len(batches)


@pytest.mark.parametrize(("copy", "sums"), [(True, [4, 4, 4]), (False, [4, 8, 16])])
def test_batches_are_copies_when_asked_for(copy: bool, sums: list[int]) -> None:
    """What a training loop does to a copy in place does not come back in the next round."""
    batches = repeat_batches([torch.ones(2)], count=3, copy=copy)
    assert [int(batch.mul_(2).sum()) for batch in batches] == sums


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([],), ValueError, "no batches"),
        ((3,), TypeError, "not 3"),
        ((range(3), 0), ValueError, "n must be"),
        ((range(3), "2"), TypeError, "n must be"),
    ],
)
def test_wrong_arguments_are_errors(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    """An empty loader and numbers out of range are named."""
    with pytest.raises(error, match=words):
        repeat_batches(*arguments)


@pytest.mark.slow
def test_batches_in_shared_memory_outlive_their_epoch_and_their_loader() -> None:
    """The workers do not write into the memory of batches that are still in use."""
    with WdsLoader(batches_of(100_000, 40), 1, multiprocessing_context="fork") as loader:
        batches = repeat_batches(loader, 10)
        assert sum(1 for _ in loader) == 40  # the segments are used again
    assert [int(batch.min()) for batch in batches.batches] == list(range(10))
    assert [int(batch.max()) for batch in itertools.islice(batches, 20)] == [*range(10), *range(10)]
