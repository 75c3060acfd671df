"""Bytes of a stream that are not needed: a local file is sought past them."""

from __future__ import annotations

import io
import os
from typing import Any

from torchdata_wds.format.tar.entries import ByteSource, TarEntries

#: What is shorter lies in the stream's buffer, or soon will.
SMALLEST_GAP = 64 << 10


class GapSeeker:
    """Passes over bytes without reading them, where a stream is a local file that is known to have them.

    A seek past the end of a file succeeds, and would hide that the file was cut: there nothing is passed over, and who
    reads on notices the cut.

    Attributes:
        seeks: Whether it is such a file at all.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.seeks = (
            isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO) and stream.raw.seekable()
        )
        self._size = os.fstat(stream.fileno()).st_size if self.seeks else 0

    def pass_over(self, size: int) -> bool:
        """Passes over all of the next bytes, or none: then they are to be read."""
        if size < SMALLEST_GAP or not self.seeks or self._stream.tell() + size > self._size:
            return False
        self._stream.seek(size, io.SEEK_CUR)
        return True


class HeaderScan(TarEntries):
    """Walks the entries of an archive for their headers: payloads are passed over as `GapSeeker` can."""

    def __init__(self, stream: ByteSource, shard: str, *, concatenated: bool = False) -> None:
        super().__init__(stream, shard, concatenated=concatenated)
        self._pass_over = GapSeeker(stream).pass_over
