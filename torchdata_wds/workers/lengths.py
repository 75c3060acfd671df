"""The length that ``.set_length(n)`` promises, against what an epoch gives."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.consumers import upstream
from torchdata_wds.handlers import warn_once
from torchdata_wds.workers.resume.planner import is_torchdata


def promised_length(datapipe: IterDataPipe[Any]) -> int | None:
    """Returns the length that ``.set_length(n)`` gives a graph, before workers run it; None without one."""
    if not any(is_torchdata(pipe, "LengthSetter") for pipe in upstream(datapipe)):
        return None
    try:
        return len(datapipe)
    except TypeError:  # a stage after it has none
        return None


def warn_of_more(count: int, promised: int | None, num_workers: int) -> None:
    """Warns, once per process, if an epoch gave more items than its length promised."""
    if promised is None or count <= promised:
        return
    cure = (
        f"each of the {num_workers} workers makes a last, shorter batch of its own, so n is the sum over all of them. "
        "Or batch and set the length after .join_workers(), or count with .wds_epoch(n), whose length is exact"
        if num_workers > 1
        else "give .set_length(n) the number of items that come"
    )
    warn_once(
        "length",
        f"an epoch gave {count:,} items, but its length is set to {promised:,} by .set_length(n), and what stops there "
        f"loses the rest: {cure}",
    )
