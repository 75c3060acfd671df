"""Torch fields, loaded without running code from them."""

from __future__ import annotations

import io
from typing import Any

from torchdata_wds.codecs.options import DecodeOptions

__all__ = ["decode_torch"]


def decode_torch(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Loads what ``torch.save`` wrote, on the CPU and with ``weights_only=True`` always.

    Raises:
        ValueError: if it is damaged, or holds objects that ``weights_only`` refuses.
    """
    import torch

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
