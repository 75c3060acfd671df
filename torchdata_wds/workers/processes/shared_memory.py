"""Shared memory in which a worker's large data reaches the main process: filled there, read here, used again.

New shared memory for every batch costs more than filling it: the system must find and clear each page in the worker,
and take it back from the main process. So a worker keeps its segments, and fills one again once nothing in the main
process refers to it. Each is a file without a name, whose descriptor the worker sends along the first time. The first
byte of a segment says whether the main process may be reading it: the worker sets it, the main process clears it.

A process that is forked meanwhile, from either side, sees the same memory and does not say when it is done with it. So
a segment whose data was in use at a fork is never filled again; the worker takes a new one instead. Forks are counted
twice, before and after each, since a fork takes time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

# Two counts, because other threads go on while handlers of a fork run: what begins or ends between the two counts to
# the fork as well.
_forks = {"begun": 0, "ended": 0}


os.register_at_fork(
    before=lambda: _forks.update(begun=_forks["begun"] + 1),
    after_in_parent=lambda: _forks.update(ended=_forks["ended"] + 1),
    after_in_child=lambda: _forks.update(ended=_forks["begun"]),
)


def fork_mark() -> int:
    """Returns a mark of this moment, for `has_forked_since`."""
    return _forks["begun"] if _forks["begun"] == _forks["ended"] else -1


def has_forked_since(mark: int) -> bool:
    """Returns whether a process may have been forked since a mark was made, and sees the memory of that time."""
    return mark != _forks["begun"] or _forks["begun"] != _forks["ended"]


# Bytes before the data of a segment: the first of them says whether it is in use, the rest aligns the data.
_HEADER = 64
_FREE, _IN_USE, _SEEN_BY_FORK = range(3)
_LEAST = 1 << 16
Array = np.ndarray[Any, np.dtype[np.uint8]]


class Limits(NamedTuple):
    """How many segments a worker may have at `most`, and how many of them are `kept` when an epoch ends."""

    most: int
    kept: int


class Span(NamedTuple):
    """Where data is in shared memory: the number of a segment, and the place in it."""

    segment: int
    start: int
    stop: int


class Segment:
    """One piece of shared memory, as the worker sees it; memory is only taken for bytes that are written."""

    descriptor = -1  # while there is none

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self._loan: weakref.ref[Array] | None = None
        self._loan_mark = fork_mark()
        self.descriptor = _open_file(_HEADER + capacity)
        self.memory = memoryview(mmap.mmap(self.descriptor, _HEADER + capacity))
        self.address = _address(self.memory)

    @property
    def is_free(self) -> bool:
        """Whether nothing refers to its data, in the worker or in the main process."""
        return self.memory[0] != _IN_USE and not self.is_lent

    @property
    def is_spent(self) -> bool:
        """Whether a process forked from the worker or the main process may still read it."""
        return self.memory[0] == _SEEN_BY_FORK or (self._loan is not None and has_forked_since(self._loan_mark))

    @property
    def is_lent(self) -> bool:
        """Whether something in the worker refers to its data."""
        return self._loan is not None and self._loan() is not None

    def lend(self, size: int) -> Array:
        """Returns an array of its first bytes; the segment is lent while that, or a view of it, lives."""
        array: Array = np.frombuffer(self.memory, np.uint8, size, _HEADER)
        self._loan = weakref.ref(array)
        self._loan_mark = fork_mark()
        return array

    def close_descriptor(self) -> None:
        """Closes the file once the main process has it; the memory stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()  # of one that was never sent


class SegmentPool:
    """The segments of a worker."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.most
        self._kept = limits.kept
        self._segments: list[Segment] = []
        # A batch may be stacked in one thread (prefetch) while another one is sent by a second.
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def lend(self, size: int) -> Array | None:
        """Returns an array of `size` bytes that need not be copied when it is sent, or None if too many are lent."""
        if os.getpid() != self._owner:  # a process forked from the worker, which would use the same memory
            return None
        with self._lock:
            if 2 * sum(segment.is_lent for segment in self._segments) >= self._most:
                return None
            return segment.lend(size) if (segment := self._take(size)) else None

    def store(self, pieces: Iterable[memoryview]) -> tuple[list[Span | memoryview], list[Segment]]:
        """Puts data into segments; returns the pieces' places (or the pieces, if all are in use) and segments."""
        with self._lock:
            places: list[Span | memoryview] = [self._span_of_lent(piece) or piece for piece in pieces]
            self._copy(places)
            segments = [self._segments[number] for number in {place.segment for place in places if type(place) is Span}]
            for segment in segments:
                segment.memory[0] = _IN_USE
        return places, segments

    def trim(self) -> None:
        """Drops segments that only an unusual epoch needed."""
        with self._lock:
            del self._segments[self._kept :]

    def _span_of_lent(self, piece: memoryview) -> Span | None:
        """Returns where a piece is if it was lent; data that the main process has read already is copied this time."""
        address = _address(piece)
        for segment in self._segments:
            start = address - segment.address
            if _HEADER <= start < _HEADER + segment.capacity:
                return None if segment.memory[0] != _FREE else Span(segment.number, start, start + piece.nbytes)
        return None

    def _copy(self, places: list[Span | memoryview]) -> None:
        """Copies the pieces that are not in a segment into one, and replaces them by their places."""
        # Each takes a whole number of headers, so that the next one is aligned as well: 100 bytes take 128.
        sizes = [-(-place.nbytes // _HEADER) * _HEADER if isinstance(place, memoryview) else 0 for place in places]
        segment = self._take(sum(sizes)) if any(sizes) else None
        if segment is None:
            return
        start = _HEADER
        for index, piece in enumerate(places):
            if isinstance(piece, memoryview):
                stop = start + piece.nbytes
                segment.memory[start:stop] = piece
                places[index] = Span(segment.number, start, stop)
                start += sizes[index]

    def _take(self, size: int) -> Segment | None:
        """Returns a free segment for `size` bytes, or None if all are in use."""
        free = [segment for segment in self._segments if segment.is_free]
        # The first one that will do, so that few are used over and over.
        for segment in free:
            if segment.capacity >= size and not segment.is_spent:
                return segment
        replaced = next((segment for segment in free if segment.is_spent), free[0] if free else None)
        number = len(self._segments) if replaced is None else replaced.number
        if number >= self._most:
            return None
        try:
            segment = Segment(number, max(1 << (size - 1).bit_length(), _LEAST))
        except OSError:
            return None
        self._segments[number : number + 1] = [segment]
        return segment


class SegmentTable:
    """The segments of one worker, as the main process sees them."""

    def __init__(self, limits: Limits) -> None:
        self._kept = limits.kept
        self._segments: dict[int, mmap.mmap] = {}

    def add(self, number: int, descriptor: int) -> None:
        """Maps a segment, in place of any other of that number, and closes the descriptor."""
        try:
            self._segments[number] = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def lease(self, number: int) -> memoryview:
        """Returns a segment; the worker may use it again when that and all views of it are gone."""
        segment = self._segments[number]
        array: Array = np.frombuffer(segment, np.uint8)
        # The array, because it can be watched, and because every view of the memory refers to it in the end.
        weakref.finalize(array, _give_back, segment, os.getpid(), fork_mark()).atexit = False
        return memoryview(array)  # type: ignore[arg-type]  # mypy does not know that it is a buffer

    def trim(self) -> None:
        """Drops what the worker dropped."""
        for number in [number for number in self._segments if number >= self._kept]:
            del self._segments[number]


def _give_back(segment: mmap.mmap, owner: int, mark: int) -> None:
    if os.getpid() == owner:  # a process forked from it has a copy of every reference
        segment[0] = _SEEN_BY_FORK if has_forked_since(mark) else _FREE


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _open_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("torchdata_wds")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
