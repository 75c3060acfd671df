"""Record shards: concatenated CBOR items or MessagePack values, read one by one.

Such a shard has no end marker: one that is cut between two records looks whole, unless its source knows its length or
its compression ends with a checksum.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torchdata_wds.errors import DOWNLOAD_AGAIN, SKIP_DAMAGED, Advice, DamageKind, ShardFormatError, ShardOpenError
from torchdata_wds.format.headers import BLOCK
from torchdata_wds.format.tar.file_kinds import describe_magic
from torchdata_wds.format.tar.members import gather
from torchdata_wds.storage import ByteStream

RecordFormat = Literal["cbor", "msgpack"]
DEFAULT_MAX_BYTES = 2**30  # what a record may have at most, unless ``max_bytes=`` says otherwise: 1 GiB
_PIECE = 1 << 16
_SMALL_PIECE = 1 << 12  # asked of a stream without ``read1``: where it fails, so much before may be lost
_MAX_WINDOW = 1 << 24  # so much of a record is put together from pieces before it is read as it announces itself
_PATIENCE = 0.02  # seconds after which a piece is taken as it is: records of a slow source do not wait for it to fill


def read_records(
    stream: ByteStream, shard: str, record_format: RecordFormat, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Iterator[Any]:
    """Reads the records of a shard in their order, one at a time in memory.

    Nothing in a record runs code. Types that CBOR has tags for (dates, decimals, sets and the like) become Python's;
    other tags and MessagePack's extension types stay ``CBORTag`` and ``ExtType``. `max_bytes` is the most that a record
    may have.
    """
    package, read = ("cbor2", _read_cbor) if record_format == "cbor" else ("msgpack", _read_msgpack)
    place = _Place(shard, record_format)
    try:
        library = importlib.import_module(package)
    except ImportError as error:
        need = f"the package {package}, which is not installed: pip install 'torchdata_wds[{record_format}]'"
        raise ShardOpenError(f"reading the records of shard {shard} needs {need}", shard=shard) from error
    yield from read(_Pieces(stream), place, library, max_bytes)


@dataclass
class _Place:
    """Where the reader is, for messages: in record `number`, which begins at byte `offset`."""

    shard: str
    record_format: RecordFormat
    offset: int = 0
    number: int = 0

    def move(self, size: int) -> None:
        self.offset += size
        self.number += 1

    def cut(self, size: int) -> ShardFormatError:
        begin, end = f"{self.offset:,}", f"{self.offset + size:,}"
        what = f"is cut off inside record {self.number:,}, which begins at byte {begin}: the shard ends at byte {end}."
        return self._error("cut", what, DOWNLOAD_AGAIN)

    def too_large(self, max_bytes: int) -> ShardFormatError:
        what = f"has a record {self.number:,} at byte {self.offset:,} of more than max_bytes={max_bytes:,} bytes"
        return self._error("too-large", f"{what}: either it is damaged, or the limit must be higher.")

    def damaged(self, cause: Exception) -> ShardFormatError:
        reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        what = f"is damaged: record {self.number:,}, which begins at byte {self.offset:,}, is no {self.record_format}"
        return self._error("bad-record", f"{what} ({reason}).", DOWNLOAD_AGAIN)

    def check_head(self, head: bytes) -> None:
        """Recognises shards of other kinds, whose bytes would pass for numbers."""
        if head.startswith(b"ustar", 257):
            raise self._error("bad-record", "is a tar archive, which .load_wds_shards() reads.")
        if len(head) >= BLOCK and not any(head[:BLOCK]):
            what = f"begins with {BLOCK} zero bytes: it is an empty tar archive, or was never written."
            raise self._error("bad-record", what)
        if kind := describe_magic(head):
            message = f"shard {self.shard} is no {self.record_format}. {kind}"
            raise ShardFormatError(message, shard=self.shard, kind="bad-record")
        text = head[:16]
        # In MessagePack each byte below 128 is a number by itself; in CBOR it may begin a text.
        is_text = len(text) == 16 and all(32 <= byte < 127 or byte in b"\t\n\r" for byte in text)
        if is_text and self.record_format == "msgpack":
            raise self._error("bad-record", f"is text, and no msgpack: it begins with {text!r}.")

    def _error(self, kind: DamageKind, what: str, advice: Advice = SKIP_DAMAGED) -> ShardFormatError:
        message = f"shard {self.shard} {what}"
        return ShardFormatError(message, shard=self.shard, advice=advice, kind=kind, offset=self.offset)


class _Pieces:
    """The bytes of a stream in pieces, as they come; what came before a failure is given before that is raised."""

    def __init__(self, stream: ByteStream) -> None:
        self._read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
        self._size = _PIECE if hasattr(stream, "read1") else _SMALL_PIECE
        self._failure: Exception | None = None
        self.is_over = False

    def next(self) -> bytes:
        """Returns the next piece, none at the end."""
        if self._failure is not None:
            raise self._failure
        pieces: list[bytes] = []
        try:
            self.is_over = gather(self._read, pieces, self._size, _PATIENCE)
        except Exception as error:
            if not pieces:
                raise
            self._failure = error.with_traceback(None)
        return b"".join(pieces)

    def more(self, size: int) -> bytes:
        """Returns at least `size` bytes, fewer if they do not come at once; a failure is left for the next call."""
        parts: list[bytes] = []
        missing = size
        try:
            while missing > 0:
                parts.append(self.next())
                missing -= len(parts[-1])
                if len(parts[-1]) < self._size:
                    break
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._failure = error.with_traceback(None)
        return b"".join(parts)


class _Item:
    """A record that is damaged, very large or slow to come, read in the sizes that it announces.

    The decoder calls it for every number, which takes its time. A record must not announce more than it may have.
    """

    def __init__(self, head: bytes, pieces: _Pieces, place: _Place, max_bytes: int) -> None:
        self.left = memoryview(head)  # what was read of the stream and not of the record
        self.taken = 0
        self.failure: Exception | None = None
        self._pieces = pieces
        self._place = place
        self._max_bytes = max_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False  # so that the decoder reads no further than the record goes

    def read(self, size: int, /) -> bytes:
        """Returns exactly `size` bytes, fewer at the end of the shard."""
        if self.taken + size > self._max_bytes:
            self.failure = self._place.too_large(self._max_bytes)
            raise self.failure
        parts: list[memoryview] = []
        missing = size
        while missing:
            if not self.left:
                try:
                    self.left = memoryview(self._pieces.next())
                except Exception as error:
                    self.failure = error
                    raise
                if not self.left:
                    self.failure = self._place.cut(self.taken + size - missing)
                    break
            part, self.left = self.left[:missing], self.left[missing:]
            parts.append(part)
            missing -= len(part)
        self.taken += size - missing
        return b"".join(parts)


def _read_cbor(pieces: _Pieces, place: _Place, cbor2: Any, max_bytes: int) -> Iterator[Any]:
    piece = pieces.next()
    place.check_head(piece)
    while piece:
        window = io.BytesIO(piece)
        position = 0
        is_cut = False
        while position < len(piece):
            try:
                record = cbor2.load(window)
            except Exception as error:  # noqa: BLE001 - cut off by the window's end, or damaged: it is read again
                is_cut = isinstance(error, cbor2.CBORDecodeEOF)
                break
            size = window.tell() - position
            if size > max_bytes:
                break
            place.move(size)
            position += size
            yield record
        piece = piece[position:]
        if is_cut and len(piece) <= min(_MAX_WINDOW, max_bytes):
            size = len(piece)
            piece += pieces.more(size)
            if len(piece) >= 2 * size or (pieces.is_over and len(piece) > size):
                continue
        if piece:
            item = _Item(piece, pieces, place, max_bytes)
            try:
                record = cbor2.load(item)
            except Exception as error:
                if item.failure is not None:
                    raise item.failure from item.failure.__cause__
                raise place.damaged(error) from error
            place.move(item.taken)
            yield record
            piece = bytes(item.left)
        piece = piece or pieces.next()


def _read_msgpack(pieces: _Pieces, place: _Place, msgpack: Any, max_bytes: int) -> Iterator[Any]:
    # The first reading only finds where a record ends: what it announces takes no memory there, and in the second
    # reading no more than it has.
    scanner = msgpack.Unpacker(max_buffer_size=0)
    held: list[bytes] = []
    size = 0
    while piece := pieces.next():
        if not place.number and not held:
            place.check_head(piece)
        held.append(piece)
        size += len(piece)
        scanner.feed(piece)
        data = b""
        position = 0
        while True:
            try:
                scanner.skip()
            except msgpack.OutOfData:
                break
            except Exception as error:
                raise place.damaged(error) from error
            length = scanner.tell() - place.offset
            if length > max_bytes:
                raise place.too_large(max_bytes)
            data = data or b"".join(held)
            try:
                content = memoryview(data)[position : position + length]
                record = msgpack.unpackb(content, raw=False, strict_map_key=False)
            except Exception as error:
                raise place.damaged(error) from error
            place.move(length)
            position += length
            yield record
        if data:
            held, size = [data[position:]], size - position
        if size > max_bytes:
            raise place.too_large(max_bytes)
    if size:
        raise place.cut(size)
