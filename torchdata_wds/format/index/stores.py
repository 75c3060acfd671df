"""What a packed index is read from: a local file, or memory."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from torchdata_wds.errors import ShardFormatError, ShardOpenError

PACK_AGAIN = "Make it again with `wds index --pack`"


class Store(Protocol):
    """What a packed index is read from."""

    shown: str  # its name in messages
    size: int

    def read(self, start: int, size: int) -> bytes | memoryview:
        """Reads exactly `size` bytes; raises ShardFormatError if they are not there."""


class BytesStore:
    """A packed index in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, shown: str) -> None:
        self.data = data
        self.shown = shown
        self.size = len(data)
        self._view = memoryview(data).toreadonly()

    def read(self, start: int, size: int) -> memoryview:
        """Cuts the bytes out, without a copy."""
        return self._view[start : start + size]


class FileStore:
    """A packed index in a local file, which stays the same file when another one takes its name."""

    def __init__(self, path: str, shown: str) -> None:
        self.path = path
        self.shown = shown
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ShardOpenError(f"cannot open index {shown}: {error.strerror or error}", shard=shown) from error
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size

    def read(self, start: int, size: int) -> bytes:
        """Reads the bytes by position, which threads and forked children can do at once."""
        try:
            data = os.pread(self._file, size, start)
            while len(data) < size and (piece := os.pread(self._file, size - len(data), start + len(data))):
                data += piece
        except OSError as error:
            what = f"index {self.shown} cannot be read at byte {start:,}: {error.strerror or error}"
            raise ShardOpenError(what, shard=self.shown) from error
        if len(data) < size:
            raise damaged(self.shown, f"it was cut while it was open: byte {start + len(data):,} is missing")
        return data


def damaged(shown: str, what: str, how: str = "is damaged") -> ShardFormatError:
    """Returns the error for a packed index that cannot be read."""
    state = f"the packed index {shown} {how}" if how else f"the packed index {shown} cannot be read"
    return ShardFormatError(f"{state}: {what}. {PACK_AGAIN}", shard=shown, kind="index")
