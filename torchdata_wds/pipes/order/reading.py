"""Reads the samples at positions of a global order, neighbours together, some pieces ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.format.index.samples import LARGEST_REMOTE_PIECE, Piece, Result, SampleReader
from torchdata_wds.pipes.order.blocks import Block
from torchdata_wds.pipes.order.fetching import FetchThreads, result_of

#: Turns positions, from the first to the one before the second, into the sets (None if there is one) and the numbers.
Lookup = Callable[[int, int], "tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any]]"]

_WINDOW = 256  # positions that are looked up at once
_SPREAD = 64  # how many positions may be looked up for each that is wanted


class Item(NamedTuple):
    """The positions that one item of the graph takes, and how many of its samples repeat others."""

    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        """The number of samples."""
        return sum(block.stop - block.start for block in self.blocks)


def items_of(blocks: Iterable[Block], size: int) -> Iterator[Item]:
    """Puts blocks together that belong to one item: only the last item of an epoch is filled up with padding."""
    waiting: list[Block] = []
    for block in blocks:
        if waiting and not (block.padding and sum(found.stop - found.start for found in waiting) < size):
            yield Item(tuple(waiting))
            waiting = []
        waiting.append(block)
    if waiting:
        yield Item(tuple(waiting))


def parts_of(items: Iterable[Item], size: int) -> Iterator[Item]:
    """Cuts items into those of `size` samples."""
    for item in items:
        part: list[Block] = []
        room = size
        for start, stop, padding in item.blocks:
            while start < stop:
                end = min(stop, start + room)
                part.append(Block(start, end, padding))
                room -= end - start
                start = end
                if not room:
                    yield Item(tuple(part))
                    part, room = [], size
        if part:
            yield Item(tuple(part))


class _Window:
    """The samples at some positions, in order, as far as they have been read."""

    def __init__(self, count: int) -> None:
        self.results: list[Result | None] = [None] * count
        self._next = 0

    def ready(self) -> Iterator[Result]:
        """Yields the results that come next, until one is missing."""
        results = self.results
        while self._next < len(results) and (result := results[self._next]) is not None:
            results[self._next] = None
            self._next += 1
            yield result


class _Planned(NamedTuple):
    window: _Window
    places: Sequence[int]  # where in the window the samples go
    reader: SampleReader
    piece: Piece

    @property
    def size(self) -> int:
        """How many bytes are to be read."""
        return self.piece.starts[-1] - self.piece.starts[0]


def read_items(
    items: Iterable[Item], readers: Sequence[SampleReader], lookup: Lookup, ahead: int
) -> Generator[Result, None, None]:
    """Yields the samples of items in order, or exceptions in their place; reads `ahead` pieces before their turn."""
    planned = (found for window in _windows(items) for found in _plan(window, readers, lookup))
    with closing(_fetched(planned, ahead)) as fetched:
        for plan, data in fetched:
            samples = plan.reader.take(plan.piece, data)
            for place, sample in zip(plan.places, samples, strict=True):
                plan.window.results[place] = sample
            yield from plan.window.ready()


def _windows(items: Iterable[Item]) -> Iterator[list[Block]]:
    """Joins the blocks of items that follow each other, up to `_WINDOW` positions or one item."""
    window: list[Block] = []
    count = 0
    for item in items:
        for start, stop, _ in item.blocks:
            if window and window[-1].stop == start:
                start = window.pop().start
            window.append(Block(start, stop))
        count += item.size
        if count >= _WINDOW:
            yield window
            window, count = [], 0
    if window:
        yield window


def _plan(blocks: list[Block], readers: Sequence[SampleReader], lookup: Lookup) -> list[_Planned]:
    sets, numbers = _looked_up(blocks, lookup)
    window = _Window(len(numbers))
    if len(readers) == 1:
        planned, place = [], 0
        for piece in readers[0].pieces(numbers):
            end = place + len(piece)
            planned.append(_Planned(window, range(place, end), readers[0], piece))
            place = end
        return planned
    # Neighbours of one set lie between those of others: they are read together, when the first of them is needed.
    assert sets is not None
    planned = []
    for number in np.unique(sets).tolist():
        places = np.flatnonzero(sets == number)
        rest = places.tolist()
        for piece in readers[number].pieces(numbers[places]):
            count = len(piece)
            planned.append(_Planned(window, rest[:count], readers[number], piece))
            rest = rest[count:]
    return sorted(planned, key=lambda plan: plan.places[0])


def _looked_up(blocks: list[Block], lookup: Lookup) -> tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any]]:
    """Looks the positions of blocks up: all between the first and the last at once, if they lie close together."""
    # Of 8 consumers that take one sample in turn, one has positions 3, 11, 19, ...: a call for each would cost more
    # than to look up all of 3 to 2,043, and to leave seven in eight out.
    first, last = min(blocks).start, max(stop for _, stop, _ in blocks)
    if len(blocks) > 1 and last - first <= _SPREAD * sum(stop - start for start, stop, _ in blocks):
        sets, numbers = lookup(first, last)
        places = np.concatenate([np.arange(start, stop) for start, stop, _ in blocks]) - first
        return None if sets is None else sets[places], numbers[places]
    found = [lookup(start, stop) for start, stop, _ in blocks]
    numbers = np.concatenate([part for _, part in found])
    known = [part for part, _ in found if part is not None]
    return np.concatenate(known) if known else None, numbers


def _fetched(planned: Iterator[_Planned], ahead: int) -> Generator[tuple[_Planned, bytes | Exception], None, None]:
    """Reads the bytes of pieces, in threads if some are read ahead."""
    if not ahead:
        for plan in planned:
            yield plan, plan.reader.fetch(plan.piece)
        return
    waiting: deque[tuple[_Planned, Future[bytes | Exception]]] = deque()
    held = 0  # bytes of the pieces that wait: `ahead` large pieces, or fewer if samples are larger than those
    with FetchThreads(ahead) as threads:
        while True:
            while len(waiting) <= ahead and held < ahead * LARGEST_REMOTE_PIECE:
                if (another := next(planned, None)) is None:
                    break
                waiting.append((another, threads.fetch(another.reader, another.piece)))
                held += another.size
            if not waiting:
                return
            plan, future = waiting.popleft()
            held -= plan.size
            yield plan, result_of(future, plan.reader, plan.piece)
