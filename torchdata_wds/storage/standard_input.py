"""A shard from standard input: the URL ``-``."""

from __future__ import annotations

import io
import multiprocessing
import sys
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.streams import Source, wrap_source
from torchdata_wds.storage.urls import STDIN

__all__ = ["open_standard_input"]


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
