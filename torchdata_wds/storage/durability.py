"""Files and names that outlive a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

__all__ = ["sync_file", "sync_folder"]

# What file systems answer that have nothing to do, such as a FIFO's or some in memory.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def sync_file(file: int) -> None:
    """Makes the bytes of an open file durable, where its file system can.

    Raises:
        OSError: if writing them fails.
    """
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable, where it may be opened.

    Raises:
        OSError: if writing them fails.
    """
    file = None
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if file is not None:
        try:
            sync_file(file)
        finally:
            os.close(file)
