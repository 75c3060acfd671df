"""The compressed bytes of a shard, as decoders take them, and the errors that name a place in them."""

import io
from collections.abc import Iterator

from torchdata_wds.errors import DOWNLOAD_AGAIN, Advice, ShardFormatError

#: The most memory for an xz stream, in bytes: four times the need of ``xz -9``. A small file can demand 4 GiB.
XZ_MEMORY_LIMIT = 256 << 20

#: The largest window of a zstd frame, in bytes; also the default limit of the command zstd.
ZSTD_MEMORY_LIMIT = 128 << 20

# The size of the buffer: two zstd blocks.
_BUFFER = 256 * 1024

# Small, because zlib copies its unused input at each step.
_CHUNK = 32 * 1024

# Smaller still at the start of a stream: a decoder copies what follows the end of its stream.
_FIRST_CHUNK = 512


class CompressedInput:
    """The compressed bytes of a source whose `readinto` puts in some bytes, and none only at the verified end."""

    def __init__(self, source: io.RawIOBase, shard: str) -> None:
        self.shard = shard
        self.format = "compressed"  # the name of the compression, for messages
        self.magics: tuple[bytes, ...] = ()  # the first bytes that a stream of this format may have
        self.target = memoryview(b"")  # a decoder may put its next piece there, and yield its length
        self._source = source
        self._buffer = memoryview(bytearray(_BUFFER))
        self._begin = self._end = 0  # of the bytes in the buffer that are not taken yet
        self._fetched = 0
        self._size = _CHUNK  # of the next piece

    def streams(self) -> Iterator[None]:
        """Yields at the start of each stream; a complete one may be followed only by more streams and zero padding."""
        yield
        while data := self.chunk():
            rest = bytes(data).lstrip(b"\0")
            if not rest:
                continue
            self.give_back(rest)
            head = self.peek(4)
            if not any(magic.startswith(head[: len(magic)]) for magic in self.magics):
                raise self._error(
                    f"has {head!r} at byte {self._position:,}, after the end of its {self.format} data: expected the "
                    f"end of the file, zero bytes or more {self.format} data. Was something appended to it?"
                )
            yield

    @property
    def held(self) -> memoryview:
        """The bytes that can be taken without waiting for the source; valid until more are fetched."""
        return self._buffer[self._begin : self._end]

    def take(self, size: int) -> memoryview:
        """Takes bytes that are held; they are valid until more are fetched."""
        begin = self._begin
        self._begin += size
        return self._buffer[begin : self._begin]

    def chunk(self) -> memoryview:
        """Takes some bytes, which are valid until more are fetched; none only at the end."""
        if self._begin == self._end:
            self._fetch()
        size, self._size = self._size, min(2 * self._size, _CHUNK)
        return self.take(min(size, self._end - self._begin))

    def rest(self) -> bytes:
        """Takes the bytes fetched so far, or fetches some; the caller reads what follows from the source itself."""
        if self._begin == self._end:
            self._fetch()
        return bytes(self.take(self._end - self._begin))

    def give_back(self, data: bytes) -> None:
        """Puts back the last bytes taken, which belong to the next stream."""
        # Usually they are still in the buffer: of 32,768 bytes 600 were taken and 88 come back, so 512 are taken now.
        # They are not if the decoder kept them from an earlier chunk, so they go in front of what is held.
        if len(data) <= self._begin:
            self._begin -= len(data)
        else:
            held = data + self.held
            self._buffer = memoryview(bytearray(held.ljust(_BUFFER)))
            self._begin, self._end = 0, len(held)
        self._size = _FIRST_CHUNK

    def hold(self, size: int) -> bool:
        """Fetches until `size` bytes are held; returns False if the input ends before."""
        while self._end - self._begin < size:
            if not self._fetch(size):
                return False
        return True

    def peek(self, size: int) -> bytes:
        """Returns the next bytes without taking them, fewer only at the end."""
        self.hold(size)
        return bytes(self.held[:size])

    def exactly(self, size: int) -> bytes:
        """Takes exactly `size` bytes; raises ShardFormatError if the input ends too early."""
        data = self.peek(size)
        self._begin += len(data)
        if len(data) < size:
            raise self.cut(f"{size - len(data):,} more bytes")
        return data

    def cut(self, expected: str) -> ShardFormatError:
        """Returns the error for a stream that ends too early."""
        ends = f"is cut off: its {self.format} data ends at byte {self._position:,} (compressed)"
        return self._error(f"{ends}, expected {expected}.", DOWNLOAD_AGAIN)

    def damaged(self, found: object) -> ShardFormatError:
        """Returns the error for data that does not decompress or fails its checksum."""
        if "Memory usage limit" in str(found):
            return self._error(
                f"takes more than {XZ_MEMORY_LIMIT >> 20} MiB of memory to decompress: its xz dictionary is larger. "
                "Compress it again with a preset of xz, or read it through 'pipe:xz -dc PATH'."
            )
        if "too much memory" in str(found):
            return self._error(
                f"takes more than {ZSTD_MEMORY_LIMIT >> 20} MiB of memory to decompress: its zstd window is larger. "
                "Compress it again with --long=27 at most, or read it through 'pipe:zstd -dc --long=31 PATH'."
            )
        wrong = f"is damaged: its {self.format} data is wrong before byte {self._position:,} (compressed)"
        return self._error(f"{wrong}: {found}.", DOWNLOAD_AGAIN)

    def _error(self, what: str, advice: Advice | str = "") -> ShardFormatError:
        return ShardFormatError(f"shard {self.shard} {what}", shard=self.shard, advice=advice, kind="compression")

    @property
    def _position(self) -> int:
        """The number of compressed bytes that the decoder has taken."""
        return self._fetched - (self._end - self._begin)

    def _fetch(self, size: int = 1) -> int:
        """Fetches more bytes, behind those that are held; `size` bytes must fit into the buffer."""
        if self._begin + size > len(self._buffer) or self._begin == self._end:
            held = self.held
            buffer = self._buffer if size <= len(self._buffer) else memoryview(bytearray(size))
            buffer[: len(held)] = held
            self._buffer, self._begin, self._end = buffer, 0, len(held)
        count = self._source.readinto(self._buffer[self._end :]) or 0
        self._end += count
        self._fetched += count
        return count
