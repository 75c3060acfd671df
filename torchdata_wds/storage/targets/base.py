"""What all targets share: a shard that is being written, finished once, and gone for good if it is not finished.

A target holds what can do damage when it is let go of in the wrong way: the input of a command that would take its end
for the end of the shard, or a lock. So a target that nobody finished is aborted when it is collected and when its
process ends, in worker processes too, and a forked child lets go of its copies at once, harming nothing.

Files and names that outlive a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing.util
import os
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NoReturn

from torchdata_wds.errors import Advice, ShardOpenError
from torchdata_wds.storage.urls import mask_url

__all__ = ["FileTarget", "ShardTarget", "Unique", "cannot_write", "sync_file", "sync_folder"]


# The targets of this process that are neither committed nor aborted.
_unfinished: weakref.WeakSet[ShardTarget] = weakref.WeakSet()


class Unique:
    """Something of which a copy would do damage: pickling and copying are refused."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: open it in the process that writes the shard"
        )


class ShardTarget(Unique, ABC):
    """A shard that is being written: a backend writes `_write`, `_commit` and `_release`.

    Args:
        url: Where the shard goes, as given.
    """

    _is_open = False

    def __init__(self, url: str) -> None:
        self.url = url
        self._shard = mask_url(url)
        self._owner = os.getpid()
        self._position = 0
        self._is_open = True
        _remember(self)

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Writes all of the data.

        Raises:
            ShardOpenError: if it cannot be written. The target is then aborted: nothing can be missing in a shard that
                is committed.
        """
        self._check_usable()
        try:
            view = memoryview(data)
            self._write(view if view.format == "B" and view.ndim == 1 and view.contiguous else memoryview(bytes(view)))
        except BaseException:
            self.abort()
            raise

    def commit(self) -> None:
        """Makes the shard appear under its final name.

        Raises:
            ShardOpenError: if it cannot, or if an earlier write has failed. The target is then aborted.
        """
        self._check_usable()
        try:
            self._commit()
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        _unfinished.discard(self)
        self._release(owned=True)

    def abort(self) -> None:
        """Lets go of everything; the shard never appears under its final name. Quiet, at any time."""
        if self._is_open:
            self._is_open = False
            _unfinished.discard(self)
            self._release(owned=self._owner == os.getpid())

    def __del__(self) -> None:
        self.abort()

    @abstractmethod
    def _write(self, view: memoryview) -> None:
        """Writes all of it and counts it in `_position`."""

    @abstractmethod
    def _commit(self) -> None:
        """Finishes the shard; `_release` follows in any case."""

    def _release(self, *, owned: bool) -> None:
        """Closes what is open, quietly. Unless `owned`, this is a forked child's copy: the rest is the parent's."""

    def _check_usable(self) -> None:
        if self._owner != os.getpid():
            raise cannot_write(
                self._shard, f"it was opened in process {self._owner}; open it in the process that writes it"
            )
        if not self._is_open:
            raise cannot_write(self._shard, "it was committed, aborted, or has failed before; open it again")


class FileTarget(ShardTarget):
    """A target that fills a local file, which is created when the first byte comes: a backend writes `_create`."""

    _file = -1

    @abstractmethod
    def _create(self) -> int:
        """Makes the file and gives its descriptor."""

    def _cure(self) -> str:
        """What to do where the file cannot be written."""
        return "free some space or write elsewhere"

    def _ensure_created(self) -> None:
        if self._file < 0:
            self._file = self._create()

    def _write(self, view: memoryview) -> None:
        self._ensure_created()
        try:
            while view:
                count = os.write(self._file, view)
                self._position += count
                view = view[count:]
        except OSError as error:
            raise ShardOpenError(
                f"shard {self._shard} cannot be written at byte {self._position:,}: {error.strerror or error}; "
                f"{self._cure()}",
                shard=self._shard,
            ) from error


#: For a shard that is there already.
REPLACE_OR_RENAME = Advice(
    "pass overwrite=True, another pattern, or start_shard='next'", "pass --force, or another name"
)


def cannot_write(shard: str, reason: str, advice: Advice | str = "") -> ShardOpenError:
    """Makes the error that a shard cannot be written, and why.

    Example:
        >>> cannot_write("x.tar", "it is a folder")
        ShardOpenError('cannot write shard x.tar: it is a folder')
    """
    return ShardOpenError(f"cannot write shard {shard}: {reason}", shard=shard, advice=advice)


class _Registration:
    """In which process `_abort_all` is registered to run at the end."""

    process = 0


def _remember(target: ShardTarget) -> None:
    _unfinished.add(target)
    if _Registration.process != os.getpid():
        _Registration.process = os.getpid()
        # Unlike atexit, this runs at the end of multiprocessing's workers as well.
        multiprocessing.util.Finalize(None, _abort_all, exitpriority=10)


def _abort_all() -> None:
    for target in list(_unfinished):
        target.abort()


# In a forked child the targets are not its own: abort only closes. It must do that at once, for a command's input ends
# only when its last copy is closed.
os.register_at_fork(after_in_child=_abort_all)

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
