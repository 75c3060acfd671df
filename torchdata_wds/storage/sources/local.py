"""Shards in local files, and from standard input (the URL ``-``)."""

import io
import multiprocessing
import os
import stat
import sys
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import ForeignSource, ends_before, wrap_source
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.decompression import HEAD_SIZE, may_be_compressed
from torchdata_wds.storage.meters import Meter
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.urls import STDIN, cannot_open, local_path, unexpanded

# Small: reads larger than the buffer bypass it.
_BUFFER_SIZE = 1 << 16


class LocalFile(io.FileIO):
    """A file whose read errors name the shard."""

    def __init__(self, path: str, shard: str) -> None:
        super().__init__(path, "rb")
        self._shard = shard
        self._meter: Meter | None = None

    def attach(self, meter: Meter) -> None:
        """Makes a meter count what `readinto` and `readall` read."""
        meter.byte = self.tell()
        self._meter = meter

    def readinto(self, buffer: Any, /) -> int:
        """Reads bytes; an error names the shard."""
        try:
            if self._meter is not None:
                return self._meter.read_into(super().readinto, buffer)
            return super().readinto(buffer) or 0
        except OSError as error:
            raise ShardOpenError(
                f"shard {self._shard} failed while it was read, before byte {self.tell():,}: {error.strerror or error}",
                shard=self._shard,
            ) from error

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to another byte, and tells the meter."""
        position = super().seek(position, whence)
        if self._meter is not None:
            self._meter.move(position)
        return position

    def readall(self) -> bytes:
        """Reads the rest."""
        return super().readall() if self._meter is None else self._meter.read(super().readall)


def open_local(place: Place, offset: int = 0) -> io.BufferedReader:
    """Opens a local path, verbatim, or a ``file:`` URL, percent-decoded."""
    file = open_file(place)
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or may_be_compressed(os.pread(file.fileno(), HEAD_SIZE, 0)):
            return wrap_source(file, place.shown, skip=offset)
        if offset > status.st_size:
            raise ends_before(place.shown, status.st_size, offset)
        file.seek(offset)
        return io.BufferedReader(file, _BUFFER_SIZE)
    except BaseException:
        file.close()
        raise


def open_file(place: Place) -> LocalFile:
    """Opens the stored bytes of a local place."""
    path = local_path(place.url)
    try:
        return LocalFile(path, place.shown)
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        if isinstance(error, IsADirectoryError):
            reason = "it is a folder; put .list_shards() before the loader to read its shards"
            if path.lower().endswith(SHARD_SUFFIXES):
                reason = f"it is a folder with the name of a shard; to read its shards, let .list_shards() list {path}/"
        elif isinstance(error, FileNotFoundError):
            advice = unexpanded(path)
            if not advice and path.startswith("~"):
                user = path[1:].partition("/")[0]
                advice = f", and there is no user {user!r} of this machine whose home it could be in"
            elif not advice and not os.path.isabs(path):  # noqa: PTH117 - a str
                advice = f" in {os.getcwd()}"  # noqa: PTH109
            reason = f"it does not exist{advice}"
        raise cannot_open(place.shown, reason) from masked_cause(error)


class StandardInput:
    """Whether standard input was opened as a shard; it can be read only once."""

    taken = False


def open_standard_input(place: Place, offset: int) -> io.BufferedReader:  # noqa: ARG001 - as all
    """Opens standard input, once, in the main process."""
    stream: Any = getattr(sys.stdin, "buffer", None)
    reason = ""
    if multiprocessing.parent_process() is not None:
        reason = "worker processes have no standard input of their own; read it with num_workers=0"
    elif StandardInput.taken:
        reason = "it was opened before, and can be read only once; write it to a file to read it twice"
    elif stream is None:
        reason = "this process has none"
    if reason:
        raise ShardOpenError(f"cannot open the shard '-' (standard input): {reason}", shard=STDIN)
    StandardInput.taken = True
    return wrap_source(ForeignSource(stream.read1, STDIN), STDIN, skip=offset)
