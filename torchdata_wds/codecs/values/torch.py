"""Torch fields, which load without running code from them.

What torch fields may hold, and tensors that are small views of large memory.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.values.torch_claims import check_claims

if TYPE_CHECKING:
    import torch

__all__ = ["compact_views", "is_plain", "decode_torch", "encode_torch"]


# Not bytes and complex: torch.save writes some of them as calls of functions that weights_only refuses.
_PLAIN_TYPES = frozenset([float, bool, str, type(None)])

# What pickle writes in one way up to here, and in others beyond.
_MAX_INT = 2**31

_MAPPINGS = (dict, collections.OrderedDict)

_SEQUENCES = (list, tuple)

_SETS = (set, frozenset)

# Storages begin at addresses that suit every type; the parts that are cut out of them must, too.
_ALIGNMENT = 64


def is_plain(value: Any) -> bool:
    """Tells whether a value is tensors, numbers and text in plain containers, which always load with ``weights_only``.

    False means: not known by its types alone.

    Raises:
        TypeError: if there is a set, which is not written with the same bytes each time.
    """
    import torch

    is_known = True
    tensors = (torch.Tensor, torch.nn.Parameter)
    for leaf in _leaves(value, set()):
        kind = type(leaf)
        if kind is int:
            is_known = is_known and -_MAX_INT <= leaf < _MAX_INT
        elif kind in _SETS:
            raise TypeError("a set has its items in another order in each process; write sorted(value) instead")
        elif kind in tensors:
            is_known = is_known and not vars(leaf)
        elif kind not in _PLAIN_TYPES:
            is_known = False
    return is_known


def compact_views(value: Any) -> Any:
    """Gives tensors memory of their own where ``torch.save`` would write much more than they show.

    Tensors that share memory with each other still do. Looks into dicts, lists and tuples, and changes nothing of
    what it is given: where something is replaced, the containers around it are new ones.
    """
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = {id(leaf): leaf for leaf in _leaves(value, set()) if type(leaf) in kinds and _can_move(leaf)}
    sharing: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for tensor in tensors.values():
        sharing[tensor.untyped_storage()._cdata].append(tensor)
    moved: dict[int, Any] = {}
    for group in sharing.values():
        moved.update(_move(group))
    return _rebuild(value, moved) if moved else value


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Gives what is in the containers, and a container itself where it comes again: it may hold itself."""
    kind = type(value)
    if (kind not in _MAPPINGS and kind not in _SEQUENCES) or id(value) in seen:
        yield value
        return
    seen.add(id(value))
    for item in value if kind in _SEQUENCES else [*value.keys(), *value.values()]:
        yield from _leaves(item, seen)


def _can_move(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _move(group: list[torch.Tensor]) -> dict[int, Any]:
    """Copies the part of a storage that tensors show; gives id -> its new tensor, or nothing where they show it all."""
    import torch

    size = group[0].untyped_storage().nbytes()
    if len(group) == 1:
        tensor = group[0]
        if size <= tensor.numel() * tensor.element_size():
            return {}
        copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return {id(tensor): _finish(copy, tensor)}
    spans = [_span(tensor) for tensor in group if tensor.numel()]
    begin = min((span[0] for span in spans), default=0) // _ALIGNMENT * _ALIGNMENT
    end = max((span[1] for span in spans), default=0)
    if end - begin >= size:
        return {}
    storage = group[0].untyped_storage()[begin:end].clone()
    return {id(tensor): _finish(_show_in(storage, tensor, begin), tensor) for tensor in group}


def _finish(moved: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Gives a new tensor the type, the gradient's flag and the attributes of the one it stands for."""
    import torch

    if type(tensor) is torch.nn.Parameter:
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    vars(moved).update(vars(tensor))
    return moved.requires_grad_(tensor.requires_grad)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + int(last + 1) * tensor.element_size()


def _show_in(storage: Any, tensor: torch.Tensor, begin: int) -> torch.Tensor:
    import torch

    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if not tensor.numel():
        return empty.set_(storage, 0, tensor.shape, tensor.stride())
    offset = tensor.storage_offset() - begin // tensor.element_size()
    shown = empty.set_(storage, offset, tensor.shape, tensor.stride())
    shown = shown.conj() if tensor.is_conj() else shown
    return torch._neg_view(shown) if tensor.is_neg() else shown


def _rebuild(value: Any, done: dict[int, Any]) -> Any:
    """Copies the containers around replaced tensors; what is in several places stays one object."""
    kind = type(value)
    if id(value) in done:
        return done[id(value)]
    if kind in _MAPPINGS:
        mapping = done[id(value)] = kind()
        if kind is collections.OrderedDict:  # a module's state has its versions there
            vars(mapping).update(vars(value))
        for key, item in value.items():
            mapping[key] = _rebuild(item, done)
        return mapping
    if kind is list:
        items = done[id(value)] = []
        items.extend(_rebuild(item, done) for item in value)
        return items
    if kind is tuple:
        return done.setdefault(id(value), tuple(_rebuild(item, done) for item in value))
    return value


def decode_torch(data: bytes, options: DecodeOptions) -> Any:
    """Loads what ``torch.save`` wrote, on the CPU and with ``weights_only=True`` always.

    Raises:
        ValueError: if it is damaged, unpacks to more than the limit, claims much more memory than it has bytes, or
            holds objects that ``weights_only`` refuses.
    """
    import torch

    check_claims(data, options.max_bytes)
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as cause:
        # torch's own message is long and recommends weights_only=False, which there is no option for here
        raise ValueError(
            "torch.load(weights_only=True) refused it as damaged, or as holding more than tensors and plain "
            f"containers ({_first_sentence(cause)})"
        ) from cause


def _first_sentence(cause: Exception) -> str:
    return str(cause).split("\n", 1)[0].split(". ", 1)[0][:200]


def encode_torch(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Writes a value with ``torch.save``; a tensor that is a view takes only what it shows of its memory.

    Equal values may give different bytes: an object that is in a value twice is written once, also a str, where two
    equal ones are written twice.

    Raises:
        TypeError: if there is a set in it, whose order is another in each process.
        ValueError: if it would not load with ``weights_only=True``.
        Exception: whatever a value raises when it cannot be pickled.

    Example:
        >>> import torch
        >>> decode_torch(encode_torch(torch.zeros(1000)[:2], EncodeOptions()), DecodeOptions())
        tensor([0., 0.])
    """
    import torch

    is_known = is_plain(value)
    stream = io.BytesIO()
    torch.save(compact_views(value), stream)
    data = stream.getvalue()
    if not is_known:
        _check_loads(data)
    return data


def _check_loads(data: bytes) -> None:
    try:
        decode_torch(data, DecodeOptions())
    except ValueError as cause:
        raise ValueError(f"it could not be read back: {cause}; keep to those, or name the field pkl") from cause
