"""Passes a worker's large data to the main process in shared memory, in segments that are used again.

Allocating shared memory for every batch costs more than filling it: the system must find and clear each page for the
worker, and take it back from the main process. So a worker keeps its segments. Each is an unnamed file, whose
descriptor the worker sends along the first time.

A worker may fill a segment again once nothing in either process refers to its data. The worker marks the first byte of
a segment as in use when it sends it; the main process clears that when the last reference to the data is gone. If a
process was forked meanwhile, on either side, the fork sees the same memory and cannot report when it is done: the
worker then replaces the segment by a new one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

# Two counts, because a fork takes time and other threads keep running: any use of a segment that begins or ends between
# the two counts overlaps the fork.
_forks = {"begun": 0, "ended": 0}


os.register_at_fork(
    before=lambda: _forks.update(begun=_forks["begun"] + 1),
    after_in_parent=lambda: _forks.update(ended=_forks["ended"] + 1),
    after_in_child=lambda: _forks.update(ended=_forks["begun"]),
)


def fork_mark() -> int:
    """Returns a mark of the present, for `has_forked_since`."""
    return _forks["begun"] if _forks["begun"] == _forks["ended"] else -1


def has_forked_since(mark: int) -> bool:
    """Returns whether a process that sees the same memory may have been forked since a mark was made."""
    return mark != _forks["begun"] or _forks["begun"] != _forks["ended"]


# Bytes before the data of a segment: the first is its state, the rest aligns the data.
_HEADER = 64
_FREE, _IN_USE, _SEEN_BY_FORK = range(3)
_LEAST = 1 << 16
MEMORY_NAME = "torchdata_wds"  # by which Linux shows these files
Array = np.ndarray[Any, np.dtype[np.uint8]]


#: How many segments of shared memory, and so open files, a set of workers may have while the main process holds many
#: batches; and how many segments, besides one for each message ahead, every worker may have in any case, and keeps.
_MOST_SEGMENTS = 128
_SPARE_SEGMENTS = 6


class Limits(NamedTuple):
    """How many segments a worker may have at `most`, and how many are `kept` when an epoch ends."""

    most: int
    kept: int

    @classmethod
    def of(cls, workers: int, ahead: int) -> Limits:
        """Returns the limits of each of some workers, which may run `ahead` messages ahead."""
        kept = ahead + _SPARE_SEGMENTS
        return cls(max(_MOST_SEGMENTS // workers, kept), kept)


class Span(NamedTuple):
    """The place of data in shared memory: a segment's number, and a range of bytes in it."""

    segment: int
    start: int
    stop: int


_serials = count()  # tell the segments of a process apart that have the same number one after the other


class Segment:
    """One piece of shared memory, as the worker sees it; only bytes that are written occupy memory."""

    descriptor = -1  # before the file is open
    _close = staticmethod(os.close)  # kept here, because Python clears the names of modules at exit

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.serial = next(_serials)
        self.capacity = capacity
        self._loan: weakref.ref[Array] | None = None
        self._loan_mark = fork_mark()
        self.descriptor = open_memory_file(_HEADER + capacity)
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
        """Returns an array of its first bytes; the segment is lent while the array, or a view of it, is alive."""
        array: Array = np.frombuffer(self.memory, np.uint8, size, _HEADER)
        self._loan = weakref.ref(array)
        self._loan_mark = fork_mark()
        return array

    def give_up(self) -> None:
        """Has it replaced before it is used again: it is not known whether the main process got the message with it."""
        self.memory[0] = _SEEN_BY_FORK

    def close_descriptor(self) -> None:
        """Closes the file once the main process has it; the memory stays mapped."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()  # if it was never sent


class SegmentPool:
    """The segments of a worker."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.most
        self._kept = limits.kept
        self._segments: list[Segment] = []
        # One thread (prefetch) may stack a batch while another sends an earlier one.
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def lend(self, size: int) -> Array | None:
        """Returns an array of `size` bytes that is sent without a copy; None if too many are lent."""
        if os.getpid() != self._owner:  # a process forked from the worker shares its memory
            return None
        with self._lock:
            if 2 * sum(segment.is_lent for segment in self._segments) >= self._most:
                return None
            return segment.lend(size) if (segment := self._take(size)) else None

    def store(self, pieces: Iterable[memoryview]) -> tuple[list[Span | memoryview], list[Segment]]:
        """Puts data into segments; returns their places (or the pieces, if all segments are in use) and segments."""
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
        """Returns where a segment holds a piece; None, so that it is copied, if none does or it was sent before."""
        address = _address(piece)
        for segment in self._segments:
            start = address - segment.address
            if _HEADER <= start < _HEADER + segment.capacity:
                return None if segment.memory[0] != _FREE else Span(segment.number, start, start + piece.nbytes)
        return None

    def _copy(self, places: list[Span | memoryview]) -> None:
        """Copies all pieces that are outside segments into one, and replaces them by their places."""
        # Each takes a multiple of 64 bytes, so that the next one is aligned too: 100 bytes take 128.
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
        # The first that fits, so that few segments are used over and over.
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
        """Maps a segment, replacing any earlier one of that number, and closes the descriptor."""
        try:
            self._segments[number] = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def lease(self, number: int) -> memoryview:
        """Returns a segment's memory; the worker may use it again once that and all views of it are gone."""
        segment = self._segments[number]
        # An array, because there are weak references to it, and every view of the memory keeps a reference to it.
        array: Array = np.frombuffer(segment, np.uint8)
        lease = _Lease(array, _give_back)
        lease.segment, lease.owner, lease.mark = segment, os.getpid(), fork_mark()
        _leases[id(lease)] = lease
        return memoryview(array)  # type: ignore[arg-type]  # mypy does not know that an array is a buffer

    def trim(self) -> None:
        """Drops the segments that the worker has dropped."""
        for number in [number for number in self._segments if number >= self._kept]:
            del self._segments[number]


class _Lease(weakref.ref[Array]):
    """Is called back when an array of a segment's memory is gone; ``weakref.finalize`` takes three times as long."""

    __slots__ = ("mark", "owner", "segment")
    segment: mmap.mmap
    owner: int
    mark: int


_leases: dict[int, _Lease] = {}  # by their id; a weak reference must outlive what it refers to


def _give_back(lease: _Lease) -> None:
    del _leases[id(lease)]
    if os.getpid() == lease.owner:  # a fork has copies of all references, and is called back too
        lease.segment[0] = _SEEN_BY_FORK if has_forked_since(lease.mark) else _FREE


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def open_memory_file(size: int) -> int:
    """Returns the descriptor of an unnamed file in memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(MEMORY_NAME)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
