"""The fast readers: many small members of a window at once, or one large member straight into its own bytes.

Large members are read without another copy; the last window decides which. Both take only plain members: regular files
with ustar magic, octal numbers and a right checksum; in a window also long names and PAX records that change nothing
but the name. Neither decides that something is wrong: what they do not take is left to `TarEntries`, which tells damage
from the unusual.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import cast

from torchdata_wds.format.headers import BLOCK, padding
from torchdata_wds.format.tar.members import ByteSource, MemberRun, PassedMember, ShardMember, gap_seeker, gather
from torchdata_wds.format.windows import Window, find_members
from torchdata_wds.format.windows.walking import read_plain_header, walk_members
from torchdata_wds.memory import keep_memory

Choose = Callable[[str], tuple[str, bool]]


# The sizes of a window in bytes: the first one is small so that the first sample comes soon, and each is at most
# `GROWTH` times as large as the one before it. `LARGEST_WINDOW = 0` turns windows off.
SMALLEST_WINDOW, LARGEST_WINDOW, GROWTH = 1 << 16, 3 << 19, 4
MANY_MEMBERS = 128  # a window that may hold as many is faster searched for all headers together than one by one
LARGE_MEMBER = 1 << 16  # windows pay off while members take at most this many bytes on average
FIRST_MEMBERS = 2  # how many members are read one by one at first: they show what follows
# How many members are read one by one after a window that did not pay off; twice as many after the next, and so on.
FIRST_PAUSE, LONGEST_PAUSE = 128, 1024
_LARGEST_READ = 16 << 20  # a header may lie about a size: larger members are read in pieces, as bytes arrive
# Seconds after which a window is taken as far as it has come: the samples of a slow source do not wait for it to fill.
PATIENCE = 0.02


class LookAhead:
    """The bytes of an archive for `TarEntries`, and between two entries the members that need none of it.

    Windows need ``read1`` of the stream. Members of more than `largest` bytes are left to `TarEntries`. `choose` gives
    a member's new name, and whether it is wanted: it is called for single members where the stream can seek past them
    (`chooses`); the caller calls it for runs.
    """

    def __init__(
        self, stream: ByteSource, url: str, visit: int, largest: int = sys.maxsize, choose: Choose | None = None
    ) -> None:
        keep_memory()
        self._seek = gap_seeker(stream)
        self._choose = None if self._seek is None else choose
        self.chooses = self._choose is not None
        self._stream = stream
        self._read1: Callable[[int], bytes] | None = getattr(stream, "read1", None) if LARGEST_WINDOW else None
        self._url = url
        self._visit = visit
        self._largest = largest
        self._largest_read = min(_LARGEST_READ, largest)
        self._window = Window(b"")
        self._position = 0  # in the window
        self._walks = False  # whether the members of the window are found one after the other
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
        if self._failure is not None:
            raise self._failure
        if self._pause or self._read1 is None:
            rest = self._stream.read(size - left)
            return data[position:] + rest if left else rest
        pieces = [data[position:]] if left else []
        gather(self._read1, pieces, size - left)  # which leaves nothing in the stream's own buffer
        return b"".join(pieces)

    def pass_over(self, size: int) -> bool:
        """Passes over the next bytes without reading them, where the stream can; else it passes over none."""
        beyond = size - (len(self._window.data) - self._position)
        if self._failure is not None or self._seek is None or not self._seek(beyond):
            return False
        self._position = len(self._window.data)
        return True

    def take(self) -> tuple[MemberRun | ShardMember | PassedMember, int] | None:
        """Gives the next members, where an entry begins, and how many bytes they take in the archive."""
        tail = b""
        if self._position < len(self._window.data):
            if (run := self._take_run()) is not None:
                return run
            tail = self._go_back()
            if not tail:
                return self._take_cut()
        if self._read1 is None:
            return None
        if not self._pause:  # the members since the last choice decide on the next window's size, or another pause
            if self._taken * LARGE_MEMBER < self._held:
                self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
                self._size = SMALLEST_WINDOW
                self._window, self._position = Window(b""), 0
            elif self._window.data:
                self._next_pause = FIRST_PAUSE
                self._size = min(GROWTH * self._size, LARGEST_WINDOW)
            # As many members of the last ones' size would fill the next window.
            self._walks = self._taken * self._size < (self._held + BLOCK) * MANY_MEMBERS
            self._held = self._taken = 0
        if self._pause:
            self._pause -= 1
            return self._read_member(self._stream.read)
        self._look(self._read1, tail)
        return self._take_run()

    def _take_run(self) -> tuple[MemberRun, int] | None:
        """Returns the members that lie whole in the window from here on."""
        window, position = self._window, self._position
        walks = self._walks
        found = walk_members(window.data, position, self._largest) if walks else window.members_at(position)
        names, starts, ends, self._position = found
        if not names:
            return None
        self._taken += len(names)
        return MemberRun(self._url, window.data, names, starts, ends, self._visit), self._position - position

    def _go_back(self) -> bytes:
        """Seeks back to what the window cuts, so that the next one begins with it; returns it, or nothing."""
        data, position = self._window.data, self._position
        is_file = self._seek is not None and self._failure is None
        is_window_next = not self._pause and self._taken * LARGE_MEMBER >= self._held
        is_short = position > 0 and 4 * position >= 3 * len(data)  # it is read twice
        if not (self._walks and is_file and is_window_next and is_short):
            return b""
        cast("io.BufferedReader", self._stream).seek(position - len(data), io.SEEK_CUR)
        self._position = len(data)
        return data[position:]

    def _take_cut(self) -> tuple[ShardMember | PassedMember, int] | None:
        """Reads a plain member that begins in the window and ends after it; None for anything else."""
        data, position = self._window.data, self._position
        found = read_plain_header(data[position : position + BLOCK])
        if found is None:
            return None
        length, left = found[1] + padding(found[1]), len(data) - position - BLOCK
        if length <= left or length > self._largest_read:
            return None
        self._held -= BLOCK + left  # which were counted with the window
        return self._read_member(self.read)

    def _read_member(self, read: Callable[[int], bytes]) -> tuple[ShardMember | PassedMember, int] | None:
        """Reads one member; leaves what was read to the plain reader if anything is unusual."""
        parts = [read(BLOCK)]
        found = read_plain_header(parts[0])
        chosen = None if found is None else self._chosen(found[0])
        if found is not None and chosen is not None:
            (name, is_wanted), size = chosen, found[1]
            fill = padding(size)
            length = BLOCK + size + fill
            is_passed = not is_wanted and self.pass_over(size + fill)
            if not is_passed and size <= self._largest_read:
                try:
                    parts.append(read(size))
                    if fill and len(parts[1]) == size:
                        parts.append(read(fill))
                except Exception as error:  # noqa: BLE001 - raised where the bytes before it end
                    self._failure = error.with_traceback(None)
            if is_passed or sum(map(len, parts)) == length:
                self._held += length
                self._taken += 1
                member = ShardMember(self._url, name, parts[1], self._visit) if is_wanted else PassedMember(name, size)
                return member, length
        self._window, self._position = Window(b"".join(parts)), 0
        return None

    def _chosen(self, name: str) -> tuple[str, bool] | None:
        """Returns a member's new name and whether it is wanted; None if choosing fails, as it will again later."""
        if self._choose is None:
            return name, True
        try:
            return self._choose(name)
        except Exception:  # noqa: BLE001 - raised when `TarEntries` has come there
            return None

    def _look(self, read: Callable[[int], bytes], tail: bytes) -> None:
        """Reads the next window; it begins with `tail`, which was read before."""
        if self._failure is not None:
            raise self._failure
        pieces: list[bytes] = []
        try:
            gather(read, pieces, self._size, PATIENCE)
            gather(read, pieces, len(tail) - sum(map(len, pieces)))  # all of the tail, however slow the file is
        except Exception as error:
            if not pieces and not tail:
                raise
            self._failure = error.with_traceback(None)
        data = b"".join(pieces)
        if not data.startswith(tail):  # the file has been changed, or fails
            data = tail + data[len(tail) :]
        self._window, self._position = Window(data) if self._walks else find_members(data), 0
        self._held = len(data)
        window = self._window
        places = zip(window.starts, window.ends, strict=True)
        if len(data) > self._largest and any(end - start > self._largest for start, end in places):
            self._window = Window(data)  # `TarEntries` refuses the member when its turn comes
