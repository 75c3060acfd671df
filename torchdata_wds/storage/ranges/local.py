"""Byte ranges of local files, by ``pread``: no shared position, so threads and forked processes do not interfere."""

import errno
import os
import stat

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.meters import LOCAL_FILES, Meter
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.ranges.base import changed, ends_inside, stale
from torchdata_wds.storage.sources.local import open_file
from torchdata_wds.storage.urls import cannot_open, local_path


class LocalRanges:
    """An open file. Dropping the last reference closes it, so a thread that still reads is never interrupted."""

    __slots__ = ("_counts_links", "_descriptor", "_mtime", "_shard", "_size", "_version", "is_copy", "meter")

    def __init__(
        self, shard: str, descriptor: int, known: StoredVersion | None = None, *, counts_links: bool = True
    ) -> None:
        self._shard = shard
        self.meter = Meter(shard, LOCAL_FILES)
        self._descriptor = descriptor
        self._counts_links = counts_links  # whether a file without links was removed: not on each file system
        status = os.fstat(descriptor)
        self._mtime, self._size = status.st_mtime_ns, status.st_size
        self._version = known or StoredVersion.of_file(status)
        self.is_copy = known is not None  # a copy is never changed

    @classmethod
    def open(cls, place: Place) -> "LocalRanges":
        """Opens a local place; raises ShardOpenError unless it is a regular file."""
        status = file_status(place)
        if status is None:
            raise cannot_open(place.shown, "it is not a regular file, so its bytes cannot be read in any order")
        with open_file(place) as file:
            return cls(place.shown, os.dup(file.fileno()), counts_links=status.st_nlink > 0)

    def read(self, start: int, stop: int, version: StoredVersion | None) -> bytes:
        """Reads a range; raises StaleError if the file was removed or replaced."""
        try:
            data = os.pread(self._descriptor, stop - start, start)
            # After the bytes: a write that changed some of them has already changed the time.
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._failed(error, start) from error
        if status.st_mtime_ns != self._mtime or status.st_size != self._size or not status.st_nlink:
            if self.is_copy or (self._counts_links and not status.st_nlink):
                raise stale(self._shard)
            self._version = StoredVersion.of_file(status)  # first: another thread may compare the next line's values
            self._mtime, self._size = status.st_mtime_ns, status.st_size
        if version is not None and version != self._version and (difference := version.difference(self._version)):
            raise changed(self._shard, difference)
        return data if len(data) == stop - start else self._read_rest(data, start, stop)

    def version(self) -> StoredVersion:
        """Returns size and time of the file when it was last read."""
        return self._version

    def _read_rest(self, data: bytes, start: int, stop: int) -> bytes:
        """Continues a read that the system has cut short: Linux reads at most 2 GiB at once."""
        pieces, position = [data], start + len(data)
        while position < stop:
            try:
                piece = os.pread(self._descriptor, stop - position, position)
            except OSError as error:
                raise self._failed(error, position) from error
            if not piece:
                raise ends_inside(self._shard, position, start, stop)
            pieces.append(piece)
            position += len(piece)
        return b"".join(pieces)

    def _failed(self, error: OSError, position: int) -> Exception:
        if error.errno == errno.ESTALE:  # NFS: the file was removed or replaced by another machine
            return stale(self._shard)
        reason = error.strerror or error
        return ShardOpenError(f"shard {self._shard} failed at byte {position:,}: {reason}", shard=self._shard)

    def __del__(self) -> None:
        os.close(self._descriptor)


def file_status(place: Place) -> os.stat_result | None:
    """Returns the status of a regular file; None for a FIFO or device; raises ShardOpenError for others."""
    try:
        status = os.stat(local_path(place.url))  # noqa: PTH116 - a str
    except (OSError, ValueError):
        open_file(place).close()
        return None
    if stat.S_ISDIR(status.st_mode):
        open_file(place).close()
    return status if stat.S_ISREG(status.st_mode) else None
