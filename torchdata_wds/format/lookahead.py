"""A source that also looks ahead, and gives out members that need no closer look: the choice between the fast readers.

Windows serve shards of small members, where the work per header counts; large members are read one by one, straight
into their own bytes. The last window's content decides. Whatever neither of them takes is read by `TarEntries`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import cast

from torchdata_wds.format.direct import read_plain_header
from torchdata_wds.format.entries import ByteSource
from torchdata_wds.format.gaps import GapSeeker
from torchdata_wds.format.headers import BLOCK, padding
from torchdata_wds.format.members import MemberRun, PassedMember, ShardMember
from torchdata_wds.format.windows import Window, find_members, without_members

__all__ = ["LookAhead"]

#: The sizes of a window in bytes: the first one is small so that the first sample comes soon. 0 turns windows off.
SMALLEST_WINDOW, LARGEST_WINDOW = 1 << 16, 1 << 21
#: A window is worth its price while members take at most so many bytes on average.
LARGE_MEMBER = 1 << 16
#: So many members are read one by one at first: they show what follows.
FIRST_MEMBERS = 2
#: After a window that was not worth it so many members are read one by one; twice as many after the next, and so on.
FIRST_PAUSE, LONGEST_PAUSE = 128, 1024
#: A header may lie about a size: larger members are read in pieces, as bytes arrive.
_LARGEST_READ = 16 << 20
#: Seconds after which a window is taken as far as it has come: the samples of a slow source do not wait for it to fill.
PATIENCE = 0.02


class LookAhead:
    """The bytes of an archive for `TarEntries`, and between two entries the members that need none of it.

    Args:
        stream: The archive. Windows are read only where it has ``read1``, which gives what one read of the source gave.
        url: The shard's URL, for the members.
        visit: As in `ShardMember`.
        max_member_bytes: The size of the largest member that is given; larger ones are left to `TarEntries`.
        choose: Gives a member's new name, and whether it is wanted: what is not is passed over where the stream seeks.

    Attributes:
        chooses: Whether `choose` has been asked about single members; those of runs are the caller's to choose.
    """

    def __init__(
        self,
        stream: ByteSource,
        url: str,
        visit: int,
        *,
        max_member_bytes: int = sys.maxsize,
        choose: Callable[[str], tuple[str, bool]] | None = None,
    ) -> None:
        self._gaps = GapSeeker(stream)
        self._choose = choose if self._gaps.seeks else None
        self.chooses = self._choose is not None
        self._stream = stream
        self._read1: Callable[[int], bytes] | None = getattr(stream, "read1", None) if LARGEST_WINDOW else None
        self._url = url
        self._visit = visit
        self._largest = max_member_bytes
        self._window = without_members(b"")
        self._position = 0  # in the window
        self._held = 0  # bytes of the last window, or of members read one by one
        self._taken = 0  # their number
        self._size = SMALLEST_WINDOW
        self._pause = FIRST_MEMBERS if self._read1 is not None else 0  # members to come that are read one by one
        self._next_pause = FIRST_PAUSE
        self._failure: Exception | None = None

    def read(self, size: int, /) -> bytes:
        """Reads exactly `size` bytes, fewer only at the end of the stream."""
        data, position = self._window.data, self._position
        left = len(data) - position
        if left >= size:
            self._position = position + size
            return data[position : position + size]
        self._position = len(data)
        if (self._pause or self._read1 is None) and self._failure is None:
            rest = self._stream.read(size - left)
            return data[position:] + rest if left else rest
        pieces = [data[position:]] if left else []
        self._gather(pieces, size - left)
        return _join(pieces)

    def pass_over(self, size: int) -> bool:
        """Passes over the next bytes without reading them, where the stream can; else it passes over none."""
        beyond = size - (len(self._window.data) - self._position)
        if self._failure is not None or not self._gaps.pass_over(beyond):
            return False
        self._position = len(self._window.data)
        return True

    def take(self) -> tuple[MemberRun | ShardMember | PassedMember, int] | None:
        """Gives the next members, where an entry begins, and how many bytes they take in the archive.

        Returns:
            Members that need no closer look; None if the next entry does.

        Raises:
            ShardOpenError: if the source fails at once; a failure further on comes where the bytes before it end.
        """
        if self._position < len(self._window.data):
            return self._take_run()
        if self._read1 is None:
            return None
        if not self._pause:
            self._judge()
        if self._pause:
            self._pause -= 1
            return self._read_member()
        self._look()
        return self._take_run()

    def _take_run(self) -> tuple[MemberRun, int] | None:
        """Gives the members that lie whole in the window from here on."""
        window = self._window
        first, last = window.run_at(self._position)
        if first == last:
            return None
        length = window.nexts[last - 1] - self._position
        self._position += length
        self._taken += last - first
        rows = slice(first, last)
        names, starts, ends = window.names[rows], window.starts[rows], window.ends[rows]
        return MemberRun(self._url, window.data, names, starts, ends, self._visit), length

    def _read_member(self) -> tuple[ShardMember | PassedMember, int] | None:
        """Reads one member; gives back what was read where that does not go as it should."""
        parts = [self._stream.read(BLOCK)]
        found = read_plain_header(parts[0])
        if found is not None:
            name, size = found
            length = size + padding(size)
            is_wanted = True
            if self._choose is not None:
                name, is_wanted = self._choose(name)
            is_passed = not is_wanted and self._gaps.pass_over(length)
            if is_passed or (size <= min(_LARGEST_READ, self._largest) and self._read_content(parts, size)):
                self._held += size
                self._taken += 1
                member = ShardMember(self._url, name, parts[-1], self._visit) if is_wanted else PassedMember(name)
                return member, BLOCK + length
        self._window, self._position = without_members(b"".join(parts)), 0
        return None

    def _read_content(self, parts: list[bytes], size: int) -> bool:
        """Reads a member's content behind its header, and drops its padding; keeps all where something is missing."""
        fill = padding(size)
        try:
            parts.append(self._stream.read(size))
            if fill and len(parts[1]) == size:
                parts.append(self._stream.read(fill))
        except Exception as error:  # noqa: BLE001 - raised where the bytes before it end
            self._failure = error.with_traceback(None)
            return False
        if sum(map(len, parts)) < BLOCK + size + fill:
            return False
        del parts[2:]
        return True

    def _look(self) -> None:
        """Reads the next window."""
        pieces: list[bytes] = []
        try:
            self._gather(pieces, self._size, PATIENCE)
        except Exception as error:
            if not pieces:
                raise
            self._failure = error.with_traceback(None)
        self._window, self._position = find_members(_join(pieces)), 0
        if len(self._window.data) > self._largest:
            self._refuse_large(self._window)
        self._held = len(self._window.data)

    def _refuse_large(self, window: Window) -> None:
        """Leaves a window with a member that is too large to `TarEntries`, which says so when its turn comes."""
        if any(end - start > self._largest for start, end in zip(window.starts, window.ends, strict=True)):
            self._window = without_members(window.data)

    def _judge(self) -> None:
        """Chooses the size of the next window, or a pause, by the members seen since the last choice."""
        if self._taken * LARGE_MEMBER < self._held:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._size = SMALLEST_WINDOW
        elif self._window.data:
            self._next_pause = FIRST_PAUSE
            self._size = min(2 * self._size, LARGEST_WINDOW)
        self._held = self._taken = 0

    def _gather(self, pieces: list[bytes], missing: int, patience: float = math.inf) -> None:
        """Reads into `pieces` what the source gives, which leaves nothing behind in the stream's own buffer."""
        begun = time.monotonic()
        while missing and time.monotonic() - begun < patience:
            if self._failure is not None:
                raise self._failure
            piece = cast("Callable[[int], bytes]", self._read1)(missing)
            if not piece:
                return
            pieces.append(piece)
            missing -= len(piece)


def _join(pieces: list[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
