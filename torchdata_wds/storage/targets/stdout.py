"""A shard to standard output: the target ``-``."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.targets.base import ShardTarget

__all__ = ["open_standard_output"]


class StandardOutput(ShardTarget):
    """Writes to standard output, which stays open; what is written is written, also where the shard is aborted."""

    def __init__(self, url: str, stream: Any) -> None:
        super().__init__(url)
        self._stream = stream

    def _write(self, view: memoryview) -> None:
        try:
            while view:
                # An unbuffered stream (python -u) writes as much as it likes.
                count = self._stream.write(view) or 0
                self._position += count
                view = view[count:]
            # what lies in a buffer would be written once more by a process that is forked
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._failure(error) from error

    def _commit(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> ShardOpenError:
        return _error(f"it failed at about byte {self._position:,}: {error.strerror or error}")


def open_standard_output(url: str, overwrite: bool, options: StorageOptions) -> StandardOutput:  # noqa: ARG001 - as all
    """Takes standard output, in the main process.

    A reader that has gone away is a BrokenPipeError, as for any program that writes to a pipe.

    Raises:
        ShardOpenError: in a worker process, or if there is no standard output.
    """
    if multiprocessing.parent_process() is not None:
        raise _error("worker processes would mix their shards in it; write it in the main process, with num_workers=0")
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise _error("this process has none")
    # What was printed before comes before.
    sys.stdout.flush()
    return StandardOutput(url, stream)


def _error(reason: str) -> ShardOpenError:
    return ShardOpenError(f"cannot write the shard '-' (standard output): {reason}", shard="-")
