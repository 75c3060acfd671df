"""Runs a graph that begins with a global order: its state is a position, from which any grid of consumers resumes.

With B samples in an item, R ranks and W workers, item i of a rank takes positions base + (i * R + rank) * B onward, and
worker i % W makes it. So once each rank has delivered i items, all positions before base + i * R * B are done.

A skipped sample must not move those after it: the source ends when the samples of an item are used up, so that
``batch`` yields what it has, and the graph is iterated anew for the next item. If nothing is left of an item, a `Gap`
takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.chain_text import stages_of
from torchdata_wds.pipes.order.ordered_pipe import OrderedPipe, OrderPoint

_ENDED: Any = object()


class Gap:
    """Stands for an item all of whose samples were skipped."""

    __slots__ = ()


def ordered_items(
    end: IterDataPipe[Any],
    source: OrderedPipe,
    point: OrderPoint,
    reseed: Callable[[int], object] | None,
    apart: Callable[[], AbstractContextManager[None]],
) -> Generator[Any, None, None]:
    """Yields the items of one consumer, from a position on, with a `Gap` for each of which nothing is left.

    `reseed` is called with the position of each sample; items are made in the context `apart`.
    """
    iterator: Any = None
    with apart():
        source.begin(point, reseed)
    try:
        while source.next_item():
            with apart():
                iterator = iter(end) if iterator is None else iterator
                item = next(iterator, _ENDED)
            if item is _ENDED and not source.is_drained:
                return  # a handler has ended the stream
            if source.is_drained:
                iterator = None
            yield Gap() if item is _ENDED else item
    finally:
        source.end()
        getattr(iterator, "close", list)()


def find_source(end: IterDataPipe[Any]) -> OrderedPipe:
    """Returns the stage of a graph that yields samples in order."""
    return next(stage for stage in stages_of(end) if isinstance(stage, OrderedPipe))
