"""Torch fields: loaded without running code from them, and written without the memory outside a view."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.values.torch_claims import check_claims

if TYPE_CHECKING:
    import torch

# Not bytes and complex: torch.save writes some of them as calls of functions that weights_only refuses.
_PLAIN_TYPES = frozenset([float, bool, str, type(None)])
_MAX_INT = 2**31  # pickle writes larger integers with other opcodes
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)
_ALIGNMENT = 64  # a storage is aligned for every dtype, so a part that is cut out of one must be aligned, too


def decode_torch(data: bytes, options: DecodeOptions) -> Any:
    """Loads what ``torch.save`` wrote, on the CPU and always with ``weights_only=True``."""
    import torch

    check_claims(data, options.max_bytes)
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as cause:
        # torch's own message is long and recommends weights_only=False, which is not an option here
        shown = str(cause).split("\n", 1)[0].split(". ", 1)[0][:200]
        raise ValueError(
            "torch.load(weights_only=True) refused it as damaged, or as holding more than tensors and plain "
            f"containers ({shown})"
        ) from cause


def encode_torch(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Writes a value with ``torch.save``; of a view, only the memory that it shows."""
    import torch

    leaves = list(_leaves(value, set()))
    # True while the types alone guarantee that weights_only=True loads the value
    loads_surely = True
    for leaf in leaves:
        kind = type(leaf)
        if kind in (set, frozenset):
            raise TypeError("the order of a set differs between processes; write sorted(value) instead")
        if kind is int:
            is_plain = -_MAX_INT <= leaf < _MAX_INT
        else:
            is_plain = not vars(leaf) if kind in (torch.Tensor, torch.nn.Parameter) else kind in _PLAIN_TYPES
        loads_surely = loads_surely and is_plain
    stream = io.BytesIO()
    torch.save(_compact_views(value, leaves), stream)
    data = stream.getvalue()
    if not loads_surely:
        try:
            decode_torch(data, DecodeOptions())
        except ValueError as cause:
            raise ValueError(f"it could not be read back: {cause}; keep to those, or name the field pkl") from cause
    return data


def _compact_views(value: Any, leaves: list[Any]) -> Any:
    """Copies tensors if ``torch.save`` would write much more than they show; those that share memory still do."""
    import torch

    sharing: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for leaf in {id(leaf): leaf for leaf in leaves if type(leaf) in (torch.Tensor, torch.nn.Parameter)}.values():
        if leaf.layout is torch.strided and not leaf.is_quantized and leaf.device.type != "meta":
            sharing[leaf.untyped_storage()._cdata].append(leaf)
    moved = {name: tensor for group in sharing.values() for name, tensor in _move(group).items()}
    if not moved:
        return value
    # deepcopy takes what is in its memo for copied already, so it makes new containers and nothing else.
    kept = {id(leaf): leaf for leaf in leaves if type(leaf) not in _CONTAINERS}
    return copy.deepcopy(value, {**kept, **moved})


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the values in containers, and a container itself when it occurs again: it may contain itself."""
    if type(value) not in _CONTAINERS or id(value) in seen:
        yield value
        return
    seen.add(id(value))
    for item in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
        yield from _leaves(item, seen)


def _move(group: list[torch.Tensor]) -> dict[int, Any]:
    """Copies the part of a storage that tensors show; returns id -> new tensor, or nothing if they show all of it."""
    import torch

    size = group[0].untyped_storage().nbytes()
    if len(group) == 1:
        tensor = group[0]
        if size <= tensor.numel() * tensor.element_size():
            return {}
        copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return {id(tensor): _finish(copy, tensor)}
    # Shape (3, 4) and strides (10, 1) at offset 5 show items 5 to 5 + 2 * 10 + 3 * 1 = 28; of float32, bytes 20 to 116.
    begins, ends = [], [0]
    for tensor in group:
        if tensor.numel():
            first = int(tensor.storage_offset())
            last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begins.append(first * tensor.element_size())
            ends.append(int(last + 1) * tensor.element_size())
    begin, end = min(begins, default=0) // _ALIGNMENT * _ALIGNMENT, max(ends)
    if end - begin >= size:
        return {}
    storage = group[0].untyped_storage()[begin:end].clone()
    moved = {}
    for tensor in group:
        offset = tensor.storage_offset() - begin // tensor.element_size() if tensor.numel() else 0
        shown = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        shown.set_(storage, offset, tensor.shape, tensor.stride())
        shown = shown.conj() if tensor.is_conj() else shown
        moved[id(tensor)] = _finish(torch._neg_view(shown) if tensor.is_neg() else shown, tensor)
    return moved


def _finish(moved: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copies the type, the gradient's flag and the attributes of a tensor to the one that replaces it."""
    import torch

    if type(tensor) is torch.nn.Parameter:
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    vars(moved).update(vars(tensor))
    return moved.requires_grad_(tensor.requires_grad)
