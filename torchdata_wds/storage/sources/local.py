"""Shards in local files.

A shard from standard input: the URL ``-``.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage.braces import unexpanded
from torchdata_wds.storage.byte_streams import Source, wrap_source
from torchdata_wds.storage.compression import HEAD_SIZE, is_compressed
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.urls import STDIN, local_path, mask_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["open_local", "open_standard_input"]


#: A read past what the buffer holds goes straight into its own bytes, but for less than the buffer's size at its end.
_BUFFER_SIZE = 1 << 16


class LocalFile(io.FileIO):
    """A file whose read errors name the shard."""

    def __init__(self, path: str, shard: str) -> None:
        super().__init__(path, "rb")
        self._shard = shard

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        try:
            return super().readinto(buffer) or 0
        except OSError as error:
            raise ShardOpenError(
                f"shard {self._shard} failed while it was read, before byte {self.tell():,}: {error.strerror or error}",
                shard=self._shard,
            ) from error


def open_local(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:  # noqa: ARG001 - one signature
    """Opens a local path, verbatim, or a ``file:`` URL, percent-decoded.

    Raises:
        ShardOpenError: if there is no such file, it is a folder, or it may not be read.
        ShardFormatError: if it ends before the offset.
    """
    shard = mask_url(url)
    file = _open(local_path(url), shard)
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or _begins_compressed(file):
            return wrap_source(file, shard, skip=offset)
        if offset > status.st_size:
            raise ShardFormatError(
                f"shard {shard} ends at byte {status.st_size:,}, before the offset {offset:,} that was asked for; "
                "is its index older than the shard?",
                shard=shard,
                kind="index",
            )
        file.seek(offset)
        return io.BufferedReader(file, _BUFFER_SIZE)
    except BaseException:
        file.close()
        raise


def _begins_compressed(file: LocalFile) -> bool:
    # As short as no magic may be the beginning of one: the slow path looks closer.
    head = file.read(HEAD_SIZE)
    file.seek(0)
    return is_compressed(head) or len(head) < HEAD_SIZE


def _open(path: str, shard: str) -> LocalFile:
    try:
        return LocalFile(path, shard)
    except FileNotFoundError as error:
        raise ShardOpenError(
            f"cannot open shard {shard}: it does not exist{_cure(path)}", shard=shard
        ) from masked_cause(error)
    except IsADirectoryError as error:
        raise ShardOpenError(
            f"cannot open shard {shard}: it is a folder; put .list_shards() before the loader to read its shards",
            shard=shard,
        ) from masked_cause(error)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ShardOpenError(f"cannot open shard {shard}: {reason}", shard=shard) from masked_cause(error)


def _cure(path: str) -> str:
    if pattern := unexpanded(path):
        return pattern
    if path.startswith("~"):
        return f", and there is no user {path[1:].partition('/')[0]!r} of this machine whose home it could be in"
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"  # noqa: PTH109, PTH117 - a str, not a Path


class StandardInput(Source):
    """Reads standard input; closing leaves the process's own stream open."""

    #: Whether a shard was read from it: what is read is gone.
    taken = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def take(self, size: int) -> bytes:
        data: bytes = self._stream.read1(size)
        return data


def open_standard_input(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:  # noqa: ARG001 - as all
    """Opens standard input, once, in the main process.

    Raises:
        ShardOpenError: in a worker process, the second time, or if there is no standard input.
    """
    if multiprocessing.parent_process() is not None:
        raise _error("worker processes have no standard input of their own; read it with num_workers=0")
    if StandardInput.taken:
        raise _error("it was opened before, and what was read from it is gone; write it to a file to read it twice")
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise _error("this process has none")
    StandardInput.taken = True
    return wrap_source(StandardInput(stream), STDIN, skip=offset)


def _error(reason: str) -> ShardOpenError:
    return ShardOpenError(f"cannot open the shard '-' (standard input): {reason}", shard=STDIN)
