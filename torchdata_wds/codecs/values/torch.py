"""Torch fields: loaded without running code from them, and written without the memory that a view does not show."""

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
_MAX_INT = 2**31  # what pickle writes in one way up to here, and in others beyond
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)
_ALIGNMENT = 64  # storages begin at addresses that suit every type; the parts that are cut out of them must, too


def decode_torch(data: bytes, options: DecodeOptions) -> Any:
    """Loads what ``torch.save`` wrote, on the CPU and always with ``weights_only=True``."""
    import torch

    check_claims(data, options.max_bytes)
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as cause:
        # torch's own message is long and recommends weights_only=False, which there is no option for here
        shown = str(cause).split("\n", 1)[0].split(". ", 1)[0][:200]
        raise ValueError(
            "torch.load(weights_only=True) refused it as damaged, or as holding more than tensors and plain "
            f"containers ({shown})"
        ) from cause


def encode_torch(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Writes a value with ``torch.save``; a tensor that is a view takes only what it shows of its memory."""
    import torch

    leaves = list(_leaves(value, set()))
    # whether the types alone say that a value of tensors, numbers and text loads with weights_only
    loads_surely = True
    for leaf in leaves:
        kind = type(leaf)
        if kind in (set, frozenset):
            raise TypeError("a set has its items in another order in each process; write sorted(value) instead")
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
    """Copies tensors where ``torch.save`` would write much more than they show; those that share memory still do."""
    import torch

    sharing: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for leaf in {id(leaf): leaf for leaf in leaves if type(leaf) in (torch.Tensor, torch.nn.Parameter)}.values():
        if leaf.layout is torch.strided and not leaf.is_quantized and leaf.device.type != "meta":
            sharing[leaf.untyped_storage()._cdata].append(leaf)
    moved = {name: tensor for group in sharing.values() for name, tensor in _move(group).items()}
    if not moved:
        return value
    # What deepcopy finds in its memo it takes for copied: that leaves it the containers, one for one, and all new.
    kept = {id(leaf): leaf for leaf in leaves if type(leaf) not in _CONTAINERS}
    return copy.deepcopy(value, {**kept, **moved})


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields what is in the containers, and a container itself where it comes again: it may hold itself."""
    if type(value) not in _CONTAINERS or id(value) in seen:
        yield value
        return
    seen.add(id(value))
    for item in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
        yield from _leaves(item, seen)


def _move(group: list[torch.Tensor]) -> dict[int, Any]:
    """Copies the part of a storage that tensors show; returns id -> new tensor, or nothing where they show it all."""
    import torch

    size = group[0].untyped_storage().nbytes()
    if len(group) == 1:
        tensor = group[0]
        if size <= tensor.numel() * tensor.element_size():
            return {}
        copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return {id(tensor): _finish(copy, tensor)}
    # Shape (3, 4) and strides (10, 1) at offset 5: items 5 to 5 + 2 * 10 + 3 * 1 = 28, each of some bytes.
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
