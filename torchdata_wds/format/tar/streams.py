"""The stream that an archive is read from: forward only, but sought past what nobody wants in a local file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, Protocol

#: What is shorter lies in the stream's buffer, or soon will.
SMALLEST_GAP = 64 << 10


class ByteSource(Protocol):
    """What the reader needs of a stream: forward reading, short only at the end."""

    def read(self, size: int, /) -> bytes:
        """Reads exactly `size` bytes, fewer only at the end of the stream."""


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
