"""The byte stream that every backend returns, and the classes that turn a source into one.

A source is an `io.RawIOBase` whose `readinto` returns 0 only at a verified end, and raises if the source failed.
`wrap_source` adds decompression and a buffer. The Python code here runs once per buffer of 1 MiB; the many small reads
of the tar reader run in C, in `io.BufferedReader`.
"""

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.storage.compressed_input import CompressedInput
from torchdata_wds.storage.decompression import Decompression, find_decompression
from torchdata_wds.storage.meters import GIVEN_STREAMS, Meter
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause
from torchdata_wds.storage.urls import mask_url

BUFFER_SIZE = 1 << 20


class StoredVersion(NamedTuple):
    """The version of a shard, as its store reports it."""

    size: int  # in bytes, as stored
    tag: str = ""  # its entity tag (ETag); "" if there is none, or if it may change while the content does not

    @classmethod
    def of_file(cls, status: os.stat_result) -> "StoredVersion":
        """Returns the version of a local file; its tag is the time of its last change."""
        return cls(status.st_size, f"mtime-{status.st_mtime_ns}")

    def difference(self, now: "StoredVersion") -> str:
        """Describes what shows that a shard is no longer this version, such as ``10 bytes, expected 20``; else ""."""
        if self.size != now.size:
            return f"{now.size:,} bytes, expected {self.size:,}"
        if self.tag and now.tag and self.tag != now.tag and (kind := _kind_of(self.tag)) == _kind_of(now.tag):
            return f"the {kind} {now.tag.removeprefix(f'{kind}-')}, expected {self.tag.removeprefix(f'{kind}-')}"
        return ""


def _kind_of(tag: str) -> str:
    """Returns what a tag is: ``mtime`` of a local file, ``date`` of a web server (Last-Modified), or ETag."""
    kind = tag.partition("-")[0]
    return kind if kind in ("mtime", "date") else "ETag"


#: A shard as a forward-only stream of decompressed bytes. ``read(n)`` returns exactly n bytes unless the shard ends;
#: ``b""`` means that the end was reached and verified (exit status, length, checksums). If the source fails or the data
#: is damaged, everything before that is delivered first; then this read and every later one raise. Closing is
#: idempotent, and not an error before the end.
ByteStream = io.BufferedReader


class Source(io.RawIOBase):
    """Base of sources: a backend implements `fill` and `_close`."""

    def _close(self) -> None:
        """Releases the source's resources; called once."""

    def interrupt(self) -> None:
        """Makes a read that blocks in another thread end soon, if possible; the result of that read is discarded."""

    def stored_version(self) -> StoredVersion | None:
        """Returns the shard's size and tag, if the store has sent them with an earlier answer."""
        return None

    def stored_position(self) -> int:
        """Returns the byte of the stored shard at which reading goes on, if the source does not begin at 0."""
        return 0

    def readable(self) -> bool:
        """True."""
        return True

    def fill(self, view: memoryview) -> int:
        """Reads bytes into a buffer and returns how many; 0 only at the verified end."""
        raise NotImplementedError

    def readinto(self, buffer: Any, /) -> int:
        """Reads as `fill`."""
        return self.fill(memoryview(buffer))

    def close(self) -> None:
        """Releases all resources; idempotent."""
        if not self.closed:
            try:
                self._close()
            finally:
                super().close()


class ShardSource(Source):
    """The decompressed bytes of a source: detects compression at the first read, skips, and repeats a failure.

    `skip` is a number of decompressed bytes. A `plain` source starts inside the shard, so its first bytes say nothing
    about compression. Closing this closes the source.
    """

    def __init__(self, source: io.RawIOBase, shard: str, *, skip: int = 0, plain: bool = False) -> None:
        self.names: list[tuple[str, str]] = []  # other names of the shard for errors, each with why: see `naming`
        self.has_begun = plain  # whether compression has been looked for
        self.decompressed: Decompression | None = None  # the output, if the source is compressed
        self._source = source
        self._shard = shard
        self._skip = skip
        self._piece = memoryview(b"")  # the first bytes, if the source is not compressed
        self._position = 0
        self._ended = False
        self._failure: Exception | None = None

    def stored_version(self) -> StoredVersion | None:
        """Returns the source's version."""
        return stored_version(self._source)

    def fill(self, view: memoryview) -> int:
        """Reads decompressed bytes; after a failure, every call raises the same one."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._ended:
            return 0
        try:
            if self._skip:
                self._read_past()
            return self._read_into(view)
        except Exception as error:  # noqa: BLE001 - a foreign stream or client library may raise anything
            self._failure = _shard_error(error, self._shard, self._position)
            for name, why in self.names:
                if isinstance(self._failure, WdsError):
                    self._failure = _named(self._failure, name, why)
            raise self._failure from self._failure.__cause__

    def attach(self, meter: Meter) -> None:
        """Makes a meter count what is read from the source."""
        if isinstance(self._source, ShardSource):
            self._source.attach(meter)
        else:
            meter.byte = self._source.stored_position() if isinstance(self._source, Source) else 0
            self._source = _MeteredSource(self._source, meter)

    def interrupt(self) -> None:
        """Interrupts the source."""
        interrupt(self._source)

    def _read_into(self, view: memoryview) -> int:
        if not self.has_begun:
            self.has_begun = True
            data = CompressedInput(self._source, self._shard)
            self.decompressed = find_decompression(data)
            if self.decompressed is None:
                self._piece = memoryview(data.rest())
        if self.decompressed is not None:
            count = self.decompressed.fill(view)
        elif self._piece:
            count = min(len(view), len(self._piece))
            view[:count], self._piece = self._piece[:count], self._piece[count:]
        else:
            count = self._source.readinto(view) or 0
        self._ended = count == 0
        self._position += count
        return count

    def _read_past(self) -> None:
        scratch = memoryview(bytearray(min(self._skip, BUFFER_SIZE)))
        while self._skip:
            count = self._read_into(scratch[: self._skip])
            if not count:
                raise ends_before(self._shard, self._position, self._position + self._skip)
            self._skip -= count

    def _close(self) -> None:
        # An exception refers to the frames that raised it, and so to this object.
        self._failure = self.decompressed = None
        self._source.close()


class _MeteredSource(Source):
    """The stored bytes of a source, counted by a meter."""

    def __init__(self, source: io.RawIOBase, meter: Meter) -> None:
        self._source = source
        self._meter = meter

    def stored_version(self) -> StoredVersion | None:
        return stored_version(self._source)

    def fill(self, view: memoryview) -> int:
        return self._meter.read_into(self._source.readinto, view)

    def read(self, size: int = -1, /) -> bytes:
        return self._meter.read(self._source.read, size)

    def interrupt(self) -> None:
        interrupt(self._source)

    def _close(self) -> None:
        self._source.close()


class ForeignSource(Source):
    """A stream opened outside this package; only its `read` and `close` are used."""

    def __init__(self, read: Callable[[int], Any], shard: str, close: Callable[[], object] = lambda: None) -> None:
        self._read = read
        self._shard = shard
        self._close_stream = close

    def fill(self, view: memoryview) -> int:
        """Reads once, and checks the type and length of the result."""
        size = len(view)
        data = self._read(size)
        is_binary = isinstance(data, (bytes, bytearray, memoryview))
        if not is_binary or len(data) > size:
            raise ShardOpenError(
                f"the stream given for shard {self._shard} returned "
                f"{f'{len(data):,} bytes' if is_binary else type(data).__name__} for read({size}); "
                f"a binary, blocking stream (mode='rb') returns at most {size:,} bytes",
                shard=self._shard,
            )
        view[: len(data)] = data
        return len(data)

    def _close(self) -> None:
        # Either reading has verified the end, or the reader stopped early: an error here matters to neither.
        with contextlib.suppress(Exception):
            self._close_stream()


def wrap_source(source: io.RawIOBase, shard: str, *, skip: int = 0, plain: bool = False) -> io.BufferedReader:
    """Wraps a source as a `ByteStream`; takes the arguments of `ShardSource`."""
    return io.BufferedReader(ShardSource(source, shard, skip=skip, plain=plain), BUFFER_SIZE)


def wrap_stream(stream: Any, url: str) -> ByteStream:
    """Wraps any binary stream as a `ByteStream`. Its ``read(n)`` may return less; closing the result closes it."""
    shard = mask_url(url)
    if not callable(getattr(stream, "read", None)):
        raise TypeError(f"the stream for shard {shard} is a {type(stream).__name__} without read()")
    source = ShardSource(ForeignSource(stream.read, shard, lambda: stream.close()), shard)
    meter = Meter(shard, GIVEN_STREAMS)
    source.attach(meter)
    meter.opened()
    return io.BufferedReader(source, BUFFER_SIZE)


def open_metered(opening: Callable[[], ByteStream], shard: str) -> ByteStream:
    """Opens a stream, and counts the time and what is read from it; `shard` is its masked URL."""
    meter = Meter(shard)
    meter.begin()
    begin = time.perf_counter()
    try:
        stream = opening()
    except BaseException:
        meter.add(0, time.perf_counter() - begin)
        raise
    meter.opened(time.perf_counter() - begin)
    if (attach := getattr(stream.raw, "attach", None)) is not None:
        attach(meter)
    return stream


def stored_bytes(stream: ByteStream) -> io.RawIOBase:
    """Returns the stored, still compressed bytes of an unread stream of `open_shard`, which is unusable afterwards."""
    source = stream.detach()
    if isinstance(source, ShardSource):
        source.has_begun = True
    return source


def interrupt(stream: ByteStream | io.RawIOBase) -> None:
    """Makes a read that blocks in another thread end soon, if the source can."""
    source = getattr(stream, "raw", stream)
    if isinstance(source, Source):
        source.interrupt()


def stored_version(stream: ByteStream | io.RawIOBase) -> StoredVersion | None:
    """Returns a shard's size and tag, if its store has already sent them; makes no request."""
    source = getattr(stream, "raw", stream)
    return source.stored_version() if isinstance(source, Source) else None


def is_decompressed(stream: ByteStream) -> bool:
    """Returns whether a stream decompresses its source; known only after the first read."""
    source = getattr(stream, "raw", None)
    return isinstance(source, ShardSource) and source.decompressed is not None


@contextlib.contextmanager
def naming(url: str, why: str) -> Iterator[None]:
    """Adds to errors, which name the real location, the URL by which the shard was listed and why the two differ."""
    try:
        yield
    except WdsError as error:
        raise _named(error, url, why) from error


def open_named(opening: Callable[[], ByteStream], url: str, why: str) -> ByteStream:
    """Opens a stream under `naming`, which also applies to its later errors; those of a local file name its path."""
    with naming(url, why):
        stream = opening()
    source = getattr(stream, "raw", None)
    if isinstance(source, ShardSource):
        source.names.append((url, why))
    return stream


def ends_before(shard: str, size: int, offset: int) -> ShardFormatError:
    """Returns the error for a shard opened at an offset past its end."""
    return ShardFormatError(
        f"shard {shard} ends at byte {size:,}, before the offset {offset:,} that was asked for; "
        "is its index older than the shard?",
        kind="index",
        shard=shard,
    )


def _named(error: WdsError, url: str, why: str) -> WdsError:
    shard = mask_url(url)
    named = error.extended(f" ({why} shard {shard})", shard=shard)
    named.__cause__ = error
    return named


def _shard_error(error: Exception, shard: str, position: int) -> Exception:
    # Running out of memory is not the shard's fault: it must not look like a source that failed.
    if isinstance(error, (WdsError, MemoryError)):
        return error
    cure = ". Its stream was opened as text: open it with mode='rb'" if isinstance(error, UnicodeError) else ""
    failure = ShardOpenError(
        f"shard {shard} failed while it was read, after {position:,} bytes: "
        f"{type(error).__name__}: {mask_text(str(error))}{cure}",
        shard=shard,
    )
    failure.__cause__ = masked_cause(error)
    return failure
