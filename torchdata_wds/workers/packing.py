"""Items to bytes and back: pickles, with large buffers left outside so that they can go by shared memory."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # makes ForkingPickler know the tensors that are not packed here

__all__ = ["LARGE", "Packer", "unpack"]

#: From how many bytes on a buffer is left outside of the pickle: below, one more copy costs less than the bookkeeping.
LARGE = 1 << 16

_PROTOCOL = 5

Buffer = bytes | bytearray | memoryview


class Packer:
    """Pickles items one after another, each for itself, as a worker sends them.

    Plain tensors are packed by value, like everything else. Those that share their memory with other processes on
    purpose, those of other devices, layouts and classes, and those that require gradients go as
    ``torch.multiprocessing`` sends them.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._outside: list[pickle.PickleBuffer] = []
        self._pickler = _TensorPickler(self._file, _PROTOCOL, True, self._keep_inside)

    def pack(self, item: Any) -> int:
        """Adds an item, and returns how many bytes all that was added takes, inside and outside.

        Raises:
            Exception: whatever pickling the item raises; the item is left out then.
        """
        size, outside = self._file.tell(), len(self._outside)
        try:
            self._pickler.dump(item)
        except BaseException:
            self._file.seek(size)
            self._file.truncate()
            del self._outside[outside:]
            raise
        finally:
            # An item that is changed and sent again is pickled again; and nothing is kept alive here.
            self._pickler.clear_memo()
        return self._file.tell() + sum(buffer.raw().nbytes for buffer in self._outside)

    @property
    def end(self) -> int:
        """Where the pickle of the next item will begin."""
        return self._file.tell()

    def take(self) -> tuple[bytes, list[memoryview]]:
        """Returns the pickles of all items and what was left outside of them, and begins anew."""
        body, outside = self._file.getvalue(), [buffer.raw() for buffer in self._outside]
        self._file.seek(0)
        self._file.truncate()
        self._outside.clear()
        return body, outside

    def _keep_inside(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE:
            return True
        self._outside.append(buffer)
        return False


def unpack(data: Buffer, outside: Iterable[Buffer]) -> Any:
    """Returns the item that was packed; what was left outside has to be writable, as it becomes part of it."""
    return pickle.loads(data, buffers=outside)


class _TensorPickler(ForkingPickler):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        return _tensor_of, (pickle.PickleBuffer(_memory_of(value)), value.dtype, tuple(value.shape), value.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and not tensor.untyped_storage().is_shared()
        and (tensor.is_contiguous() or _is_permuted(tensor))
    )


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gaps and overlaps, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _memory_of(tensor: torch.Tensor) -> Any:
    # Not through numpy, which does not know all of torch's types.
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # keeps it alive as long as its memory is referred to
    return memory


def _tensor_of(buffer: Buffer, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)
