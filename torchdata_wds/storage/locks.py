"""Locks on open files, by ``flock``.

The system releases a lock when the process that holds it ends, even if it is killed. Some file systems have no locks
(Lustre without the mount option ``flock``, some network and FUSE mounts), and some Pythons lack ``fcntl``. The package
then works as if no other process existed. This is still safe: files get unique names and are renamed when complete.
"""

import contextlib
import errno
import io
import os
import weakref

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

_LOCKED = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


def lock(file: int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Locks an open file; returns False if another process has the lock, None if locks are not supported here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _LOCKED | _NO_LOCKS:
            raise
        return False if error.errno in _LOCKED else None
    return True


def unlock(file: int) -> None:
    """Releases a lock, which would otherwise last as long as a forked child's copy of the descriptor."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


# A forked child closes its copies of these, which would otherwise keep the locks for as long as it lives.
_open: "weakref.WeakSet[LockedFile]" = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


class LockedFile(io.FileIO):
    """An open file whose lock is released when it is closed, even if forked children have copies of the descriptor."""

    def __init__(self, file: int) -> None:
        super().__init__(file, "rb")
        self._owner = os.getpid()
        self.has_locks = True  # False once locking has failed for lack of support
        _open.add(self)

    def lock(self, *, shared: bool = False) -> bool:
        """Takes or converts the lock without waiting; returns False only if another process is known to hold it."""
        try:
            taken = lock(self.fileno(), shared=shared)
        except OSError:
            return False
        self.has_locks = taken is not None
        return taken is not False

    def close(self) -> None:
        """Closes the file; idempotent."""
        if not self.closed and self._owner == os.getpid():
            unlock(self.fileno())
        super().close()

    def leave(self) -> None:
        """Closes the file but keeps the lock, for another object with a duplicate of the descriptor."""
        super().close()

    def is_at(self, path: str) -> bool:
        """Returns whether a path leads to this file."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fileno()))  # noqa: PTH116 - a str
        except FileNotFoundError:
            return False
