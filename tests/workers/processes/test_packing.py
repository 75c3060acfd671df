"""Items to bytes and back: every kind of value comes back equal, small ones inside the pickle, large ones outside."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from torchdata_wds.workers.processes.messages import LARGE, Packer


def round_trip(item: Any) -> tuple[Any, list[int]]:
    """The item as it comes back, and the sizes of what went outside of the pickle."""
    packer = Packer()
    packer.pack(item)
    body, outside = packer.take()
    return pickle.loads(body, buffers=[bytearray(piece) for piece in outside]), [piece.nbytes for piece in outside]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (3, 5), (200, 500)], ids=str)
def test_packer_keeps_values_and_types_of_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Tensors of every type come back equal, writable, and outside of the pickle if they are large."""
    tensor = (torch.rand(shape) * 200).to(dtype)
    found, outside = round_trip(tensor)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert bool(outside) == (tensor.nbytes >= LARGE)
    found.zero_()
    assert not found.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.permute(2, 0, 1),
        lambda x: x.permute(1, 2, 0)[None].to(memory_format=torch.channels_last),
        lambda x: x[10:50],
        lambda x: x[:, 10:50],
        lambda x: x[:, :1].expand(-1, 90, -1),
        lambda x: x[:0],
        lambda x: x.flip(0),
    ],
    ids=["permuted", "channels last", "rows", "columns", "expanded", "empty", "flipped"],
)
def test_packer_keeps_strides_of_tensors(change: Any) -> None:
    """Views come back equal, with their order in memory."""
    tensor = change(torch.rand(100, 90, 3))
    found, _ = round_trip(tensor)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_packer_takes_a_view_alone_when_its_base_is_larger() -> None:
    """Of a slice of a large tensor only the slice is sent."""
    found, outside = round_trip(torch.rand(1000, 1000)[:100])
    assert outside == [400_000]
    assert found.untyped_storage().nbytes() == 400_000


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # which torch's own way does without
@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, requires_grad=True),
        torch.nn.Parameter(torch.rand(3)),
        torch.rand(3, 3).to_sparse(),
        torch.rand(3).to(torch.complex64).conj(),
        torch.rand(3).share_memory_(),
    ],
    ids=["requires grad", "parameter", "sparse", "conjugate", "shared"],
)
def test_packer_leaves_other_tensors_to_torch(tensor: torch.Tensor) -> None:
    """What is more than values keeps what it is."""
    found, _ = round_trip(tensor)
    assert type(found) is type(tensor)
    assert found.requires_grad == tensor.requires_grad
    assert found.layout == tensor.layout
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_packer_keeps_a_tensor_shared_when_it_was_on_purpose() -> None:
    """A tensor in shared memory is the same memory on the other side."""
    tensor = torch.zeros(100_000).share_memory_()
    found, outside = round_trip(tensor)
    found[0] = 7
    assert tensor[0] == 7
    assert not outside


@pytest.mark.parametrize("size", [10, 100_000])
def test_packer_keeps_arrays(size: int) -> None:
    """Arrays come back equal and writable, large ones outside of the pickle."""
    array = np.arange(size, dtype=np.float32)
    found, outside = round_trip({"a": array, "b": array[::2], "c": "text"})
    assert found["a"].dtype == np.float32
    assert np.array_equal(found["a"], array)
    assert np.array_equal(found["b"], array[::2])
    assert bool(outside) == (size * 4 >= LARGE)
    found["a"][0] = 5


def test_packer_counts_what_is_outside() -> None:
    """The size of what was added is that inside and outside of the pickles."""
    packer = Packer()
    _, small = packer.pack(b"x" * 100)
    assert 100 < small < 200
    assert packer.pack(np.zeros(LARGE, np.uint8))[1] > small + LARGE


def test_packer_begins_anew_when_all_was_taken() -> None:
    """What was taken is not taken again."""
    packer = Packer()
    packer.pack(torch.zeros(LARGE))
    first, _ = packer.take()
    packer.pack("second")
    body, outside = packer.take()
    assert (pickle.loads(body, buffers=[]), outside) == ("second", [])
    assert len(first) > len(body)


def test_packer_leaves_out_an_item_when_it_cannot_be_pickled() -> None:
    """Items before and after one that fails half-way are whole."""
    packer = Packer()
    end, _ = packer.pack("before")
    with pytest.raises(Exception, match="pickle"):
        packer.pack([torch.zeros(LARGE), lambda: None])
    packer.pack("after")
    body, outside = packer.take()
    assert not outside
    assert [pickle.loads(body[:end]), pickle.loads(body[end:])] == ["before", "after"]


def test_packer_sends_an_item_anew_when_it_was_changed_since() -> None:
    """A list that is yielded again after a change comes as it was each time."""
    packer, item = Packer(), [1]
    end, _ = packer.pack(item)
    item.append(2)
    packer.pack(item)
    body, _ = packer.take()
    assert [pickle.loads(body[:end], buffers=[]), pickle.loads(body[end:], buffers=[])] == [[1], [1, 2]]
