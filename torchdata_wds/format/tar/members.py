"""What the tar reader takes and yields: a stream, members, and the marks between them."""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self


class ShardMember(NamedTuple):
    """One regular file of a shard, read whole.

    Attributes:
        url: The shard, as it was listed.
        name: The member's name in the archive. It is data: never write to it as a path.
        data: The member's content.
        visit: Counts the loader's openings: two readings of one shard differ in it.
    """

    url: str
    name: str
    data: bytes
    visit: int = 0


class LocatedUrl(str):
    """The URL of a shard that is read from a local copy, in its members: as it was listed, with the copy's path."""

    __slots__ = ("local_path", "url")

    url: str  # as it was listed: a str, or one of a subclass that says more
    local_path: str

    def __new__(cls, url: str, local_path: str) -> Self:
        """Makes a str of the URL."""
        made = super().__new__(cls, url)
        made.url, made.local_path = url, local_path
        return made

    def __reduce__(self) -> tuple[type[LocatedUrl], tuple[str, str]]:
        return LocatedUrl, (self.url, self.local_path)


class PassedMember(NamedTuple):
    """A member that is not delivered, chosen away or cut: its name still tells where the sample before it ended."""

    name: str
    size: int = 0  # of its content, if it is not cut


class FailedMember(NamedTuple):
    """A member of a sample whose content could not be read: the sample is wrong, the stream goes on."""

    url: str
    name: str
    error: Exception


class Mark(Enum):
    """What a reader says between members, for those who must know where samples may not go on."""

    END = "the archive's end marker: the sample before it is complete"
    BROKEN = "the shard failed: the sample before it is not complete"


class MemberRun(NamedTuple):
    """Consecutive members of one reading of a shard, in columns, not yet cut out of what was read."""

    url: str
    data: bytes  # of the archive
    names: Sequence[str]
    starts: Sequence[int]  # where in `data` each member's content begins
    ends: Sequence[int]
    visit: int  # as in `ShardMember`
    keys: Sequence[str] = ()  # with the fields, once the names are split
    fields: Sequence[str] = ()

    def members(self) -> Iterator[ShardMember]:
        """Cuts the members out."""
        for name, start, end in zip(self.names, self.starts, self.ends, strict=True):
            yield ShardMember(self.url, name, self.data[start:end], self.visit)

    def rows(self, first: int, last: int) -> Self:
        """Returns the members from the first to the one before the last."""
        url, data, names, starts, ends, visit, keys, fields = self
        rows = slice(first, last)
        return type(self)(url, data, names[rows], starts[rows], ends[rows], visit, keys[rows], fields[rows])

    def parts(self) -> Iterator[tuple[str, str, bytes]]:
        """Yields field, name and content of each member."""
        for field, name, start, end in zip(self.fields, self.names, self.starts, self.ends, strict=True):
            yield field, name, self.data[start:end]


Single = ShardMember | PassedMember | FailedMember | Mark  # what a reader gives for one member, or between two

#: What a reader gives to those who group: members, many at once where they are small, and what lies between them.
Unit = Single | MemberRun


def singles(units: Iterable[Unit]) -> Iterator[Single]:
    """Cuts the members out of all runs."""
    for unit in units:
        if isinstance(unit, MemberRun):
            yield from unit.members()
        else:
            yield unit


SMALLEST_GAP = 64 << 10  # what is shorter lies in the stream's buffer, or soon will


class ByteSource(Protocol):
    """What the reader needs of a stream: forward reading, short only at the end."""

    def read(self, size: int, /) -> bytes:
        """Reads exactly `size` bytes, fewer only at the end of the stream."""


def gather(read: Callable[[int], bytes], pieces: list[bytes], missing: int, patience: float = math.inf) -> bool:
    """Adds to `pieces` what a source gives, for `patience` seconds at most; returns whether the source has ended."""
    begun = time.monotonic()
    while missing > 0 and (not pieces or time.monotonic() - begun < patience):
        piece = read(missing)
        if not piece:
            return True
        pieces.append(piece)
        missing -= len(piece)
    return False


def gap_seeker(stream: Any) -> Callable[[int], bool] | None:
    """Returns a function that passes over all of the next n bytes or none, without reading; None if it never could.

    A seek past the end of a file succeeds, and would hide that the file was cut: there nothing is passed over, and the
    caller, who reads on, notices the cut.
    """
    if not (isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO) and stream.raw.seekable()):
        return None
    file_size = os.fstat(stream.fileno()).st_size

    def pass_over(size: int) -> bool:
        if size < SMALLEST_GAP or stream.tell() + size > file_size:
            return False
        stream.seek(size, io.SEEK_CUR)
        return True

    return pass_over
