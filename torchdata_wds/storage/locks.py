"""Locks on open files, by ``flock``.

Locks end with the process that holds them, however it ends. Not every file system has them (Lustre without the mount
option ``flock``, some network and FUSE mounts), nor every Python (some lack ``fcntl``). Without them, all goes on as if
no other process were there: files get unique names and are renamed when whole, so that nothing wrong is ever read.
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
    """Locks an open file; returns False if another process has the lock, None if there are no locks here."""
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
    """Releases a lock, which a copy of the descriptor in a forked child would keep otherwise."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


# A forked child closes its copies of these, which would keep the locks for as long as it lives.
_open: "weakref.WeakSet[LockedFile]" = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


class LockedFile(io.FileIO):
    """An open file with a lock that ends with it, and not with the last copy that forked children have of it."""

    def __init__(self, file: int) -> None:
        super().__init__(file, "rb")
        self._owner = os.getpid()
        self.has_locks = True  # whether the file system has locks, as far as this file has found out
        _open.add(self)

    def lock(self, *, shared: bool = False) -> bool:
        """Takes or changes the lock without waiting; returns whether no other process is known to have it."""
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
        """Closes the file and leaves its lock to another object that was made of a copy of the descriptor."""
        super().close()

    def is_at(self, path: str) -> bool:
        """Returns whether a path is that of this file."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fileno()))  # noqa: PTH116 - a str
        except FileNotFoundError:
            return False
