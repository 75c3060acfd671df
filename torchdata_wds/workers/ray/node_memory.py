"""Passes large data from an actor to the main process on the same node, in segments as between local processes.

An object in Ray's store takes 3.4 ms of CPU time besides the copy, whatever its size; a message that only says where
the data lies takes 1.2 ms. Ray cannot send descriptors: the main process opens a segment through ``/proc/<pid>/fd``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.workers.processes.shared_memory import (
    MEMORY_NAME,
    Limits,
    Segment,
    SegmentPool,
    SegmentTable,
    Span,
    open_memory_file,
)


class Meeting(NamedTuple):
    """How an actor finds out whether it shares memory with the main process: by a token in a file of that."""

    node: str  # the id of its node
    process: int
    descriptor: int
    token: bytes

    def is_here(self, node: str) -> bool:
        """Returns whether this process is on the same node, and each of both can open the other's files."""
        # The node is compared too, since clusters for tests have several nodes on one machine. Containers of one node
        # may number their processes apart, so that another process has that number here: it has no such token.
        # What that has under the descriptor may be a pipe, whose data would be taken from it.
        path = path_of(self.process, self.descriptor)
        with suppress(OSError):
            is_own = node == self.node and Path(f"/proc/{self.process}").stat().st_uid == os.geteuid()
            return (
                is_own and str(path.readlink()).startswith(f"/memfd:{MEMORY_NAME}") and path.read_bytes() == self.token
            )
        return False


class MeetingPoint:
    """The main process's end of a `meeting`, which holds until `close`."""

    def __init__(self, node: str) -> None:
        token = secrets.token_bytes(16)
        descriptor = open_memory_file(len(token))
        os.pwrite(descriptor, token, 0)
        self.meeting = Meeting(node, os.getpid(), descriptor, token)

    def close(self) -> None:
        """Closes the file."""
        os.close(self.meeting.descriptor)


class ActorMemory:
    """The segments of an actor."""

    def __init__(self, limits: Limits) -> None:
        self._segments = SegmentPool(limits)
        self.lend = self._segments.lend

    def store(self, pieces: Iterable[memoryview]) -> tuple[list[Any], list[Segment]]:
        """Puts data into segments; returns the parts of each `Span` (or the piece, if all are in use) and segments."""
        places, segments = self._segments.store(pieces)
        return [tuple(place) if isinstance(place, Span) else place for place in places], segments

    def begin(self, missed: Iterable[Sequence[Segment]]) -> None:
        """Prepares for another stream, without the segments of messages that do not arrive."""
        for segments in missed:
            for segment in segments:
                segment.give_up()
        self._segments.trim()


def told(segments: Iterable[Segment]) -> list[tuple[int, int, int]]:
    """Returns what a message says about each segment that it uses: its number, serial and descriptor."""
    return [(segment.number, segment.serial, segment.descriptor) for segment in segments]


class MappedMemory:
    """The segments of an actor, as the main process sees them."""

    def __init__(self, limits: Limits) -> None:
        self._table = SegmentTable(limits)
        self._kept = limits.kept
        self._serials: dict[int, int] = {}  # of the segments in the table

    def trim(self) -> None:
        """Drops segments that only an unusual epoch needed."""
        self._table.trim()
        self._serials = {number: serial for number, serial in self._serials.items() if number < self._kept}

    def lease(self, process: int, segments: Sequence[tuple[int, int, int]]) -> dict[int, memoryview]:
        """Returns the memory of segments of a process; raises an OSError if that does not let this one open them."""
        for number, serial, descriptor in segments:
            if self._serials.get(number) != serial:
                self._table.add(number, os.open(path_of(process, descriptor), os.O_RDWR))
                self._serials[number] = serial
        return {number: self._table.lease(number) for number, _, _ in segments}


def path_of(process: int, descriptor: int) -> Path:
    """Returns where Linux shows an open file of a process."""
    return Path(f"/proc/{process}/fd/{descriptor}")
