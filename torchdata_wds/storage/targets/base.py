"""The base of all targets: a shard appears complete under its final name, or not at all.

Closing a target's resources in the wrong way does damage: a command would take the end of its input for the end of the
shard, or a lock would be lost. So an unfinished target is aborted when it is garbage-collected and when its process
ends, also in worker processes, and a forked child closes its copies at once, without effect on the shard.
"""

import contextlib
import errno
import multiprocessing.util
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torchdata_wds.errors import Advice, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.locks import LockedFile, lock
from torchdata_wds.storage.urls import mask_url

_runs_at_end: dict[Callable[[], None], int] = {}


def run_at_end(function: Callable[[], None]) -> None:
    """Registers a function, once per process, to run when this process ends; also in multiprocessing's workers."""
    if _runs_at_end.get(function) != os.getpid():
        _runs_at_end[function] = os.getpid()
        multiprocessing.util.Finalize(None, function, exitpriority=10)


class Unique:
    """Base of objects that refuse to be pickled or copied, because a copy would do damage."""

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"a {kind} cannot be pickled or copied: open it in the process that writes the shard")


class Target(Unique, ABC):
    """A shard being written; a backend implements `_write`, `_commit` and `_release`.

    Data comes in large pieces and is not buffered. The target belongs to the process that opened it: in a forked child
    it is closed, and using it is an error.
    """

    _is_open = False
    _is_bound = True  # to this process: aborted at its end, and refused in a forked child

    def __init__(self, url: str) -> None:
        self.url = url
        self.version: StoredVersion | None = None  # after the commit: which version of the shard it is, where known
        self._shard = mask_url(url)
        self._owner = os.getpid()
        self._position = 0
        self._is_open = True
        if self._is_bound:
            _unfinished.add(self)
            run_at_end(_abort_all)

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Writes all of the data; if that fails, aborts the target, so that no gap is committed."""
        self._check_usable()
        try:
            view = memoryview(data)
            if view.format != "B" or view.ndim != 1 or not view.contiguous:
                view = memoryview(bytes(view))
            while view:
                count = self._write(view)
                self._position += count
                view = view[count:]
        except BaseException:
            self.abort()
            raise

    def commit(self) -> None:
        """Makes the shard appear under its final name; if that fails, aborts the target."""
        self._check_usable()
        try:
            self._commit()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drops the shard, which then never appears under its final name; idempotent, and never raises."""
        if self._is_open:
            self._is_open = False
            _unfinished.discard(self)
            self._release(owned=self._owner == os.getpid())

    def __del__(self) -> None:
        self.abort()

    @abstractmethod
    def _write(self, view: memoryview) -> int:
        """Writes at least the start of the data, and returns how many bytes."""

    @abstractmethod
    def _commit(self) -> None:
        """Finishes the shard; `_release` is called afterwards in any case."""

    def _release(self, *, owned: bool) -> None:
        """Closes what is open, without raising. If not `owned`, this is a forked child's copy: only closes."""

    def _check_usable(self) -> None:
        if self._is_bound and self._owner != os.getpid():
            reason = f"it was opened in process {self._owner}; open it in the process that writes it"
            raise cannot_write(self._shard, reason)
        if not self._is_open:
            raise cannot_write(self._shard, "it was committed, aborted, or has failed before; open it again")


class FileTarget(Target):
    """A target that fills a local file, which `_create` makes at the first byte."""

    _file: LockedFile | None = None
    _advice = ""  # what to do if writing fails

    @abstractmethod
    def _create(self) -> LockedFile:
        """Makes the file."""

    def _created(self) -> LockedFile:
        if self._file is None:
            self._file = self._create()
        return self._file

    def _release(self, *, owned: bool) -> None:  # noqa: ARG002 - a forked child has closed it
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self, view: memoryview) -> int:
        file = self._created()
        try:
            return os.write(file.fileno(), view)
        except OSError as error:
            reason = f"cannot be written at byte {self._position:,}: {error.strerror or error}; {self._advice}"
            raise ShardOpenError(f"shard {self._shard} {reason}", shard=self._shard) from error


#: Advice for a shard that already exists.
REPLACE_OR_RENAME = Advice(
    "pass overwrite=True, another pattern, or start_shard='next'", "pass --force, or another name"
)


def cannot_write(shard: str, reason: str, advice: Advice | str = "") -> ShardOpenError:
    """Returns the error for a shard that cannot be written."""
    return ShardOpenError(f"cannot write {shard}: {reason}", shard=shard, advice=advice)


# The targets of this process that are neither committed nor aborted.
_unfinished: weakref.WeakSet[Target] = weakref.WeakSet()


def _abort_all() -> None:
    for target in list(_unfinished):
        target.abort()


# In a forked child, abort only closes. It must do so at once: a command's input ends only when all copies are closed.
os.register_at_fork(after_in_child=_abort_all)

#: The number of attempts to open a file that other processes keep renaming.
_OPENINGS = 100


def open_unfinished(path: Path, check: Callable[[int], None] | None = None) -> LockedFile | None:
    """Opens a file to be filled and then renamed; creates, locks and empties it.

    Returns None if a living writer, in this process or another one, is filling it. Raises OSError for a symbolic link,
    because emptying it would empty another file. Before the file is emptied, `check` may raise to keep its content.
    """
    access = os.O_WRONLY if check is None else os.O_RDWR  # permission to write does not imply permission to read
    for _ in range(_OPENINGS):
        file = LockedFile(os.open(path, access | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        with contextlib.ExitStack() as stack:
            stack.callback(file.close)
            if lock(file.fileno()) is False:
                return None
            status = os.fstat(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                # Before it was locked here, its last writer may have renamed the file, or died between link and unlink.
                # Then this file is the finished one, also under its final name, and must not be emptied.
                if os.path.samestat(status, path.lstat()):
                    if check is not None:
                        check(file.fileno())
                    if status.st_nlink == 1:
                        os.ftruncate(file.fileno(), 0)
                        stack.pop_all()
                        return file
                    path.unlink()
    raise OSError(f"other processes keep renaming {path}")


# The errors of files that cannot be synced, such as a FIFO or a file in memory.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def sync_file(file: int) -> None:
    """Makes the bytes of an open file durable, if its file system can; raises OSError if writing them failed."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, if it can be opened; raises OSError if writing them failed."""
    file = None
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if file is not None:
        try:
            sync_file(file)
        finally:
            os.close(file)
