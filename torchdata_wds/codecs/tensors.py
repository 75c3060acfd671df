"""Torch fields, which load without running code from them."""

from __future__ import annotations

import io
from typing import Any

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.torch_claims import check_claims
from torchdata_wds.codecs.torch_values import compact_views, is_plain

__all__ = ["decode_torch", "encode_torch"]


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
