"""Collates lists of samples into batches, and takes batches apart."""

import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataChunk

from torchdata_wds.codecs.table import find_codec
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.base import Pipe, WdsPipe, register

#: Returns memory for a column of the given size in bytes, or None.
Lend = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]] | None]

# In bytes: a smaller column is copied faster than memory is lent for it.
_LARGE = 1 << 16

# The first bytes of image and array files: such values in a batch were probably meant to be decoded.
_FILES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"\x93NUMPY", b"BM")
_CURE = "Choose the fields first, with .wds_to_tuple(...) or group_by_key(fields=...)."
_lend: Lend | None = None


def stack_in(lend: Lend) -> None:
    """Makes ``wds_collate`` stack large columns in memory from `lend`, which other processes read without a copy."""
    global _lend
    _lend = lend


def wds_collate(samples: Sequence[Any]) -> Any:
    """Collates a list of tuples or samples into a tuple or dict of columns, for ``.batch(n).collate(wds_collate)``.

    Tensors and arrays of equal shape and dtype, and numbers, are stacked: a worker sends such batches to the main
    process many times faster than lists. Everything else (strings, dicts, images, arrays of different shapes) stays a
    list. Bytes that look undecoded and PIL images cause a warning.

    Args:
        samples: Tuples of equal length, dicts with equal keys, or single values; others raise ValueError.

    Returns:
        A tuple of columns for tuples, a dict of columns for dicts, otherwise one column. A column of N values is a
        tensor (N, ...) of tensors; an array (N, ...) of NumPy arrays or scalars; a tensor (N,) of Python numbers
        (int64, float64 or bool) if it can hold them exactly; otherwise a list.

    Raises:
        ValueError: if the samples differ in length or keys, or have none.

    Example:
        >>> wds_collate([(1, "a"), (2, "b")])
        (tensor([1, 2]), ['a', 'b'])
    """
    samples = list(samples)
    if not samples:
        return []
    first = samples[0]
    if isinstance(first, (dict, tuple, list)) and not first:
        raise ValueError("samples of a batch have no fields: their number would be lost")
    if isinstance(first, dict):
        if any(not isinstance(sample, dict) or sample.keys() != first.keys() for sample in samples):
            raise ValueError(f"samples of one batch have different fields: {_different(samples)}. {_CURE}")
        return {field: _column([sample[field] for sample in samples], field) for field in first}
    if isinstance(first, (tuple, list)):
        if any(not isinstance(sample, (tuple, list)) or len(sample) != len(first) for sample in samples):
            raise ValueError(f"tuples of one batch have different lengths: {_different(samples)}")
        return tuple(_column(list(values)) for values in zip(*samples, strict=True))
    return _column(samples)


def _different(samples: list[Any]) -> str:
    """Describes two samples that differ, for a message."""
    kinds = set()
    for sample in samples:
        kind = sorted(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
        kinds.add(str(len(sample) if isinstance(sample, (tuple, list)) else kind))
    return " and ".join(sorted(kinds)[:2])


def _column(values: list[Any], field: str = "") -> Any:
    # Values are stacked only if that changes none of them: images of 224 x 224 and 224 x 225, or float32 and float64,
    # stay a list, neither padded nor cast. A list is slow to send, so that its usual causes are warned about.
    first = values[0]
    if isinstance(first, torch.Tensor):
        if all(_is_like(value, first, torch.Tensor) for value in values):
            return _stack_tensors(values)
    elif isinstance(first, (np.ndarray, np.generic)) and not isinstance(first, (str, bytes)):
        if all(_is_like(value, first, (np.ndarray, np.generic)) for value in values):
            return _stack_arrays(values)
    elif isinstance(first, numbers.Real):
        return _numbers(values)
    elif isinstance(first, bytes):
        codec = find_codec(field)
        if first.startswith(_FILES) or first.isdigit() or (codec is not None and codec.decode is not None):
            column = f"field {field!r}" if field else "a column"
            warn_once(
                f"wds_collate bytes {field}",
                f"wds_collate got bytes that were not decoded in {column}, which stay a list: put .wds_decode() before "
                ".batch(), unless the trainer decodes them",
            )
    elif type(first).__module__.partition(".")[0] == "PIL":
        warn_once(
            "wds_collate images",
            "wds_collate got PIL images, which stay a list: for one tensor decode with .wds_decode('torchrgb8') and "
            "make the images one size, or convert them with .wds_map_tuple(function, None) before .batch()",
        )
    return values


def _is_like(value: Any, first: Any, kind: Any) -> bool:
    can_stack = isinstance(value, kind) and not isinstance(value, np.ma.MaskedArray)  # whose mask would be lost
    return can_stack and value.shape == first.shape and value.dtype == first.dtype


def _stack_tensors(values: list[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    # Only if stack(out=) does the same as stack(): no gradients, subclasses or other devices.
    is_plain = all(
        type(value) is torch.Tensor
        and (value.is_cpu and value.layout is torch.strided)
        and not (value.requires_grad or value.is_quantized)
        for value in values
    )
    size = len(values) * first.numel() * first.element_size()
    memory = _lent(size, is_plain)
    if is_plain and first.dtype is torch.uint8 and not first.is_contiguous():
        # CHW views of HWC memory, which NumPy copies faster than torch; without out= it would keep their order.
        out = (np.empty(size, np.uint8) if memory is None else memory).reshape(len(values), *first.shape)
        return torch.from_numpy(np.stack([value.numpy() for value in values], out=out))
    if memory is None:
        return torch.stack(values)  # without out=, which a subclass's own stack may not take
    return torch.stack(values, out=torch.frombuffer(memory, dtype=first.dtype).view(len(values), *first.shape))


def _stack_arrays(values: list[Any]) -> np.ndarray[Any, Any]:
    first = values[0]
    is_plain = all(type(value) is np.ndarray for value in values) and not first.dtype.hasobject
    memory = _lent(len(values) * first.nbytes, is_plain)
    if memory is None:
        return np.stack(values)
    return np.stack(values, out=memory.view(first.dtype).reshape(len(values), *first.shape))


def _lent(size: int, is_plain: bool) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    return _lend(size) if _lend is not None and is_plain and size >= _LARGE else None


def _numbers(values: list[Any]) -> Any:
    """Returns bools, ints and floats as a tensor if it holds them exactly, otherwise as the list."""
    # A float64 holds integers exactly up to 2**53: [2**53 + 1, 0.5] would become [2**53, 0.5].
    kinds = {type(value) for value in values}
    if kinds == {bool} or (kinds == {int} and all(-(2**63) <= value < 2**63 for value in values)):
        return torch.tensor(values)  # bool or int64
    if kinds == {int, float} and any(type(value) is int and abs(value) > 2**53 for value in values):
        return values
    return torch.tensor(values, dtype=torch.float64) if float in kinds and kinds <= {int, float} else values


@register("wds_unbatch")
class SampleUnbatcherIterDataPipe(WdsPipe[Any]):
    """Takes collated batches apart (functional name: ``wds_unbatch``).

    The inverse of ``.batch(n).collate(wds_collate)``. After ``.join_workers()`` it allows samples to be shuffled and
    batched again across all workers.

    Args:
        source_datapipe: Yields tuples, lists or dicts of columns of equal length; other batches raise ValueError.

    Yields:
        tuple or dict: Single samples, in order.

    Raises:
        ValueError: if a batch is not a tuple, list or dict of columns of one length, or was not collated.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([([1, 2], ["a", "b"])]).wds_unbatch())
        [(1, 'a'), (2, 'b')]
    """

    def __init__(self, source_datapipe: Pipe) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source_datapipe:
            columns = _columns(batch)
            for values in zip(*columns, strict=True):
                yield dict(zip(batch, values, strict=True)) if isinstance(batch, dict) else values


def _columns(batch: Any) -> Sequence[Any]:
    columns = list(batch.values()) if isinstance(batch, dict) else batch
    if isinstance(batch, DataChunk):
        raise ValueError(  # noqa: TRY004  (an item that is wrong, not an argument)
            "wds_unbatch got a batch that was not collated; .unbatch() takes it apart, or put .collate(wds_collate) "
            "after .batch(n)"
        )
    if not isinstance(columns, (tuple, list)) or not all(map(_is_column, columns)):
        raise ValueError(
            f"wds_unbatch got {type(batch).__name__} {str(batch)[:80]!r}; it takes batches from wds_collate: "
            "a tuple or dict of columns"
        )
    sizes = {len(column) for column in columns}
    if len(sizes) > 1:
        raise ValueError(f"wds_unbatch got a batch whose columns have different lengths: {sorted(sizes)}")
    return columns


def _is_column(value: Any) -> bool:
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    return value.ndim > 0 if is_array else isinstance(value, Sequence) and not isinstance(value, (str, bytes))
