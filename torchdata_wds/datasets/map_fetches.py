"""Batched fetches from map-style pipes: torch's wrapper and its ``.map`` and ``.batch`` pass ``__getitems__`` on."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from torch.utils.data import MapDataPipe
from torch.utils.data.datapipes import datapipe as torch_datapipe
from torch.utils.data.datapipes.map import Batcher, Mapper

#: What torch's DataLoader puts around a map-style pipe; it lacks `__getitems__`.
_WRAPPER = getattr(torch_datapipe, "_MapDataPipeSerializationWrapper", None)


def fetch_items(pipe: MapDataPipe[Any], numbers: Sequence[int]) -> list[Any]:
    """Returns the items with these numbers: in one fetch if the source under torch's own stages allows it."""
    kind = type(pipe)
    if hasattr(kind, "__getitems__"):
        return list(kind.__getitems__(pipe, numbers))
    if kind is _WRAPPER:
        return fetch_items(pipe._datapipe, numbers)
    if kind is Mapper:
        return list(map(pipe.fn, fetch_items(pipe.datapipe, numbers)))
    if kind is Batcher:
        return _fetch_batches(pipe, numbers)
    return [pipe[number] for number in numbers]


def _fetch_batches(pipe: Any, numbers: Sequence[int]) -> list[Any]:
    """Fetches batches: numbers 4 and 0 of batches of 2 are the items 8, 9, 0 and 1 of the source."""
    size, total = pipe.batch_size, len(pipe.datapipe) if isinstance(pipe.datapipe, Sized) else 0
    count = total // size if pipe.drop_last else -(-total // size)
    if not all(0 <= number < count for number in numbers):
        return [pipe[number] for number in numbers]  # as torch does, which may raise
    spans = [range(number * size, min((number + 1) * size, total)) for number in numbers]
    items = iter(fetch_items(pipe.datapipe, [place for span in spans for place in span]))
    return [pipe.wrapper_class([next(items) for _ in span]) for span in spans]


# `MapDataPipe` looks up names that a class lacks among the registered functions.
MapDataPipe.register_function("__getitems__", fetch_items)
