"""A source that also looks ahead: reads windows of an archive, and gives out the members that lie whole in them.

Windows serve shards of small members, where the work per header counts; large members are read one by one, straight
into their own bytes. The choice is made here, by what the last window held.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import cast

from torchdata_wds.format.entries import ByteSource
from torchdata_wds.format.members import MemberRun
from torchdata_wds.format.windows import NO_MEMBERS, find_members

__all__ = ["LookAhead"]

#: The sizes of a window in bytes: the first one is small so that the first sample comes soon. 0 turns windows off.
SMALLEST_WINDOW, LARGEST_WINDOW = 1 << 16, 1 << 20
#: A window is worth its price while members take at most so many bytes on average.
LARGE_MEMBER = 1 << 16
#: After a window that was not worth it so many entries are read one by one; twice as many after the next, and so on.
FIRST_PAUSE, LONGEST_PAUSE = 128, 1024
#: Seconds after which a window is taken as far as it has come: the samples of a slow source do not wait for it to fill.
PATIENCE = 0.02


class LookAhead:
    """The bytes of an archive for `TarEntries`, and between two entries the members that need none of it.

    Args:
        stream: The archive. Windows are read only where it has ``read1``, which gives what one read of the source gave.
        url: The shard's URL, for the members.
        visit: As in `ShardMember`.
    """

    def __init__(self, stream: ByteSource, url: str, visit: int) -> None:
        self._stream = stream
        self._read1: Callable[[int], bytes] | None = getattr(stream, "read1", None) if LARGEST_WINDOW else None
        self._url = url
        self._visit = visit
        self._window = NO_MEMBERS
        self._position = 0  # in the window
        self._taken = 0  # members of the window
        self._size = SMALLEST_WINDOW
        self._pause = 0  # entries to come that are read one by one
        self._next_pause = FIRST_PAUSE
        self._failure: Exception | None = None

    def read(self, size: int, /) -> bytes:
        """Reads exactly `size` bytes, fewer only at the end of the stream."""
        data, position = self._window.data, self._position
        left = len(data) - position
        if left >= size:
            self._position = position + size
            return data[position : position + size]
        if self._pause or self._read1 is None:
            self._position = len(data)
            rest = self._stream.read(size - left)
            return data[position:] + rest if left else rest
        pieces = [data[position:]] if left else []
        self._position = len(data)
        self._gather(pieces, size - left)
        return _join(pieces)

    def take_run(self) -> MemberRun | None:
        """Gives the members that lie whole in the window from here, where an entry begins, on; None if there are none.

        Raises:
            ShardOpenError: if the source fails at once; a failure further on comes where the bytes before it end.
        """
        if self._position == len(self._window.data) and not self._look():
            return None
        window = self._window
        first, last = window.run_at(self._position)
        if first == last:
            return None
        length = window.nexts[last - 1] - self._position
        self._position += length
        self._taken += last - first
        rows = slice(first, last)
        names, starts, ends = window.names[rows], window.starts[rows], window.ends[rows]
        return MemberRun(self._url, window.data, names, starts, ends, length, self._visit)

    def _look(self) -> bool:
        """Reads the next window, if that is worth while."""
        if self._pause or self._read1 is None:
            self._pause = max(0, self._pause - 1)
            return False
        self._judge()
        pieces: list[bytes] = []
        if not self._pause:
            try:
                self._gather(pieces, self._size, PATIENCE)
            except Exception as error:
                if not pieces:
                    raise
                self._failure = error.with_traceback(None)
        self._window, self._position, self._taken = find_members(_join(pieces)), 0, 0
        return bool(pieces)

    def _judge(self) -> None:
        """Chooses the size of the next window, or a pause, by what the last one gave."""
        held = len(self._window.data)
        if held and self._taken * LARGE_MEMBER < held:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._size = SMALLEST_WINDOW
        elif held:
            self._next_pause = FIRST_PAUSE
            self._size = min(2 * self._size, LARGEST_WINDOW)

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
