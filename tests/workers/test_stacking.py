"""Columns that wds_collate stacks in a worker's shared memory: the same values and types as anywhere else."""

from typing import Any

import numpy as np
import pytest
import torch

from torchdata_wds import wds_collate
from torchdata_wds.pipes.samples import collate
from torchdata_wds.workers.processes.shared_memory import Limits, SegmentPool

ROW = (100, 300)


@pytest.fixture
def lent(monkeypatch: Any) -> list[int]:
    """The sizes of what was lent, as in a worker."""
    sizes: list[int] = []
    pool = SegmentPool(Limits(8, 8))

    def lend(size: int) -> Any:
        sizes.append(size)
        return pool.lend(size)

    monkeypatch.setattr(collate, "_lend", None)  # so that it is put back afterwards
    collate.stack_in(lend)
    return sizes


def rows(dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.rand(ROW) * 100).to(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str
)
def test_collate_stacks_tensors_in_lent_memory(lent: list[int], dtype: torch.dtype) -> None:
    """Large columns of tensors are stacked where they can be sent from, with equal values."""
    tensors = rows(dtype)
    batch = wds_collate(tensors)
    assert batch.dtype == dtype
    assert torch.equal(batch, torch.stack(tensors))
    assert lent == [batch.nbytes]


def test_collate_stacks_views_in_lent_memory(lent: list[int]) -> None:
    """Rows need not be contiguous."""
    tensors = [tensor.t() for tensor in rows(torch.float32)]
    assert torch.equal(wds_collate(tensors), torch.stack(tensors))
    assert len(lent) == 1


def test_collate_stacks_images_in_lent_memory(lent: list[int]) -> None:
    """CHW views of HWC memory become a contiguous batch, here and in a worker."""
    images = [torch.randint(256, (100, 200, 3), dtype=torch.uint8).permute(2, 0, 1) for _ in range(3)]
    for size in ([180_000], []):
        batch = wds_collate(images)
        assert batch.is_contiguous()
        assert torch.equal(batch, torch.stack(images))
        assert lent == size
        lent.clear()
        collate._lend = None


@pytest.mark.parametrize("dtype", ["u1", "f4", ">i4", "?", "M8[s]", "U3", "i2,f8"])
def test_collate_stacks_arrays_in_lent_memory(lent: list[int], dtype: str) -> None:
    """Large columns of arrays too, of every type that is no Python object."""
    arrays = [np.arange(30_000).reshape(ROW).astype(dtype) for _ in range(3)]
    batch = wds_collate(arrays)
    assert batch.dtype == np.dtype(dtype)
    assert np.array_equal(batch, np.stack(arrays))
    assert lent == [batch.nbytes]


class Labelled(torch.Tensor):
    """A tensor with a class of its own."""


@pytest.mark.parametrize(
    "values",
    [
        [torch.rand(ROW, requires_grad=True) for _ in range(3)],
        [torch.rand(ROW), torch.rand(ROW, requires_grad=True)],
        [torch.rand(ROW).as_subclass(Labelled) for _ in range(3)],
        [torch.eye(300).to_sparse() for _ in range(3)],
        [torch.rand(10) for _ in range(3)],
        [np.full(ROW, "a", object) for _ in range(3)],
        [np.zeros(10) for _ in range(3)],
    ],
    ids=["gradients", "some gradients", "subclass", "sparse", "small", "objects", "small array"],
)
def test_collate_stacks_the_rest_as_ever(lent: list[int], values: list[Any]) -> None:
    """What cannot be stacked into given memory as it would be otherwise, or is small, is not."""
    batch = wds_collate(values)
    expected = np.stack(values) if isinstance(values[0], np.ndarray) else torch.stack(values)
    assert type(batch) is type(expected)
    assert getattr(batch, "requires_grad", False) == getattr(expected, "requires_grad", False)
    assert batch.shape == expected.shape
    assert not lent


def test_collate_stacks_as_ever_when_nothing_can_be_lent(lent: list[int]) -> None:
    """A stage that keeps all batches gets them nevertheless."""
    kept = [wds_collate(rows(torch.float32)) for _ in range(20)]
    assert all(batch.shape == (3, *ROW) for batch in kept)
    assert len(lent) == 20
