"""What decoders read from: compressed bytes in pieces or exact amounts, with the offset for messages."""

from __future__ import annotations

import io
from collections.abc import Callable

from torchdata_wds.errors import DOWNLOAD_AGAIN, Advice, ShardFormatError

# zlib copies the rest of its input at each step, so the pieces are small.
_CHUNK = 32 * 1024

# After a stream's end the pieces are small again: what a decoder does not use of one, it copies.
_FIRST_CHUNK = 512


class CompressedInput:
    """The compressed bytes of a source whose `read(n)` gives some, and none only at the verified end."""

    def __init__(self, source: io.RawIOBase, shard: str) -> None:
        self.shard = shard
        self.format = "compressed"  # the name of the compression, for messages
        self._source = source
        self._held = b""
        self._taken = 0  # how much of _held: slicing it at each step would copy it again and again
        self._fetched = 0
        self._size = _CHUNK  # of the next piece

    @property
    def position(self) -> int:
        """How many compressed bytes the decoder has taken."""
        return self._fetched - len(self._held) + self._taken

    def chunk(self) -> bytes:
        """Takes some bytes; none only at the end."""
        if self._taken == len(self._held):
            self._held, self._taken = self._fetch(), 0
        data = self._held[self._taken : self._taken + self._size]
        self._taken += len(data)
        self._size = min(2 * self._size, _CHUNK)
        return data

    def rest(self) -> bytes:
        """Takes all bytes fetched, or some if there are none; the rest is read from the source."""
        data = self._held[self._taken :]
        self._held, self._taken = b"", 0
        return data or self._fetch()

    def chunk_or_cut(self) -> bytes:
        """Takes some bytes of an incomplete stream; a ShardFormatError at the end."""
        data = self.chunk()
        if not data:
            raise self.cut(f"more {self.format} data")
        return data

    def give_back(self, data: bytes) -> None:
        """Puts back the last bytes taken, which belong to what follows."""
        if len(data) <= self._taken:
            self._taken -= len(data)
        else:
            self._held, self._taken = data + self._held[self._taken :], 0
        self._size = _FIRST_CHUNK

    def peek(self, size: int) -> bytes:
        """Returns the next bytes without taking them, fewer only at the end."""
        if self._taken + size > len(self._held):
            self._held, self._taken = self._held[self._taken :], 0
            while len(self._held) < size and (data := self._fetch()):
                self._held += data
        return self._held[self._taken : self._taken + size]

    def exactly(self, size: int) -> bytes:
        """Takes exactly `size` bytes; a ShardFormatError if the input ends before."""
        data = self.peek(size)
        self._taken += len(data)
        if len(data) < size:
            raise self.cut(f"{size - len(data):,} more bytes")
        return data

    def has_another(self, begins: Callable[[bytes], bool]) -> bool:
        """Skips zero padding after a complete stream and returns whether another one follows, and nothing else.

        `begins` says whether (up to 4) bytes can be the beginning of another stream.
        """
        while data := self.chunk():
            if rest := data.lstrip(b"\0"):
                self.give_back(rest)
                break
        head = self.peek(4)
        if not head or begins(head):
            return bool(head)
        raise self._error(
            f"has {head!r} at byte {self.position:,}, after the end of its {self.format} data: expected the end of the "
            f"file, zero bytes or more {self.format} data. Was something appended to it?"
        )

    def cut(self, expected: str) -> ShardFormatError:
        """Makes the error for a stream that ends too early."""
        ends = f"is cut off: its {self.format} data ends at byte {self.position:,} (compressed)"
        return self._error(f"{ends}, expected {expected}.", DOWNLOAD_AGAIN)

    def damaged(self, found: object) -> ShardFormatError:
        """Makes the error for data that does not decompress or fails its checksum."""
        wrong = f"is damaged: its {self.format} data is wrong before byte {self.position:,} (compressed)"
        return self._error(f"{wrong}: {found}.", DOWNLOAD_AGAIN)

    def _error(self, what: str, advice: Advice | str = "") -> ShardFormatError:
        return ShardFormatError(f"shard {self.shard} {what}", shard=self.shard, advice=advice, kind="compression")

    def _fetch(self) -> bytes:
        data = self._source.read(_CHUNK) or b""
        self._fetched += len(data)
        return data
