"""The files in a cache folder: locks, unfinished and finished copies, and their removal.

All state is in files and in the system's locks on them, which are released when their process ends, even if it is
killed. The process that makes a copy ``x.tar`` holds a lock on ``x.tar.lock`` and fills ``x.tar.<unique>.part``, whose
name it writes into the lock file; an exclusive lock on the part means that more bytes will follow. The complete part is
renamed to ``x.tar``. Readers of a finished copy hold a shared lock on it.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.cache.names import LOCK, PART, is_own_name
from torchdata_wds.storage.locks import LockedFile, lock

#: The lock file, one per folder, that is held while copies are counted and removed; no copy has a lock of this name.
ROOM = PART + LOCK

#: The outcome of removing a file; a file that was replaced counts as gone.
Removal = Literal["removed", "in use", "gone"]
_MARK = "user.torchdata_wds"
_DIGEST_MARK = "user.torchdata_wds.sha256"
_TAG_MARK = "user.torchdata_wds.tag"

#: The modification time that marks a complete file that will not be kept.
_SEAL = 1_000_000_000
UNIQUE = re.compile(rf"\.\d+-[0-9a-f]{{8}}{re.escape(PART)}$")

#: The age in seconds at which an abandoned part is removed, even if its shard is not read again.
OLD_SECONDS = 24 * 3600.0


@dataclass
class CopyLock:
    """The lock of one copy: the process that has it may make the copy."""

    path: str
    file: LockedFile | None  # None where locks are not supported: processes may make a copy twice, in separate parts

    @classmethod
    def acquire(cls, path: str) -> Self | None:
        """Takes the lock of a copy; returns None if another process has it; raises OSError if it cannot be created."""
        name = path + LOCK
        while True:
            file = LockedFile(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
            with contextlib.ExitStack() as stack:
                stack.callback(file.close)
                taken = lock(file.fileno())
                if taken is None:
                    remove_empty(name, file)
                    return cls(path, None)
                if not taken:
                    return None
                # Its last holder may have removed the file after it was opened here: then try again with a new one.
                if file.is_at(name):
                    stack.pop_all()
                    return cls(path, file)

    @staticmethod
    def _part_of(path: str) -> str:
        """The path of the file that the holder of a copy's lock fills; a FileNotFoundError if there is none (yet)."""
        with open(path + LOCK, "rb") as file:  # noqa: PTH123
            name = os.fsdecode(file.read(4096))
        if not name.endswith(PART):
            raise FileNotFoundError(name)
        return os.path.join(os.path.dirname(path), name)  # noqa: PTH118, PTH120

    @staticmethod
    def open_part(path: str) -> LockedFile | None:
        """Opens the part that the holder of a copy's lock fills; returns None if there is none (yet)."""
        try:
            part = LockedFile(os.open(CopyLock._part_of(path), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        if part.lock(shared=True):  # no process fills it
            part.close()
            return None
        return part

    @staticmethod
    def progress_of(path: str) -> tuple[int, int] | None:
        """Returns the inode and size of the part that the holder of a copy's lock fills."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(CopyLock._part_of(path))  # noqa: PTH116
            return status.st_ino, status.st_size
        return None

    def create_part(self) -> tuple[str, LockedFile]:
        """Creates the part for a copy, locked exclusively; removes older parts of this copy and abandoned others."""
        if self.file is not None:
            os.ftruncate(self.file.fileno(), 0)
        folder, base = os.path.split(self.path)
        for left in os.listdir(folder):  # noqa: PTH208 - strs here, as in all of this module
            if (found := UNIQUE.search(left)) is not None:
                path = os.path.join(folder, left)  # noqa: PTH118
                with contextlib.suppress(OSError):
                    if (self.file is not None and left[: found.start()] == base) or _is_abandoned(path):
                        os.unlink(path)  # noqa: PTH108
        name = f"{base}.{os.getpid()}-{secrets.token_hex(4)}{PART}"
        part = os.path.join(folder, name)  # noqa: PTH118
        # In append mode, the size shows after the next write that another program has cut the file. A write at a
        # position would leave a hole of zeros and the expected size.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = LockedFile(os.open(part, flags, 0o666))
        try:
            lock(file.fileno())
            if self.file is not None:
                os.pwrite(self.file.fileno(), os.fsencode(name), 0)
        except BaseException:
            file.close()
            os.unlink(part)  # noqa: PTH108
            raise
        return part, file

    def release(self) -> None:
        """Releases the lock and removes its file; does nothing in a forked child."""
        if self.file is not None and not self.file.closed:
            with contextlib.suppress(OSError):
                if self.file.is_at(self.path + LOCK):  # else the folder was cleared, and this may be another's lock
                    os.unlink(self.path + LOCK)  # noqa: PTH108
            self.file.close()


def remove_empty(name: str, file: LockedFile) -> None:
    """Removes a lock file that cannot be locked, unless it contains a name: then a machine that can lock it uses it."""
    with contextlib.suppress(OSError):
        if not os.fstat(file.fileno()).st_size and file.is_at(name):
            os.unlink(name)  # noqa: PTH108


def _is_abandoned(part: str) -> bool:
    """Returns whether a part is old and no process fills it."""
    if os.stat(part).st_mtime > time.time() - OLD_SECONDS:  # noqa: PTH116
        return False
    with LockedFile(os.open(part, os.O_RDONLY | os.O_CLOEXEC)) as file:
        return file.lock(shared=True)


def open_copy(path: str) -> LockedFile:
    """Opens a finished copy, with a shared lock where possible, and sets its access time, which orders eviction."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    copy = LockedFile(file)
    copy.lock(shared=True)
    with contextlib.suppress(OSError):
        os.utime(file, ns=(max(time.time_ns(), status.st_atime_ns), status.st_mtime_ns))
    return copy


def seal(file: int) -> None:
    """Marks an open file as complete, for its readers, although it will not be kept."""
    with contextlib.suppress(OSError):
        os.utime(file, ns=(_SEAL, _SEAL))


def is_sealed(file: int) -> bool:
    """Returns whether an open file was marked by `seal`."""
    return os.fstat(file).st_mtime_ns == _SEAL


def mark_as_ours(file: int, digest: str, size: int | str = "") -> None:
    """Stores the digest of a copy's URL, and its final size, as an extended attribute if the file system has these."""
    _set_note(file, _MARK, digest, size)


def note_tag(file: int, tag: str) -> None:
    """Stores the ETag of the shard that a copy was made of, as `mark_as_ours` stores its digest."""
    if tag and " " not in tag:
        _set_note(file, _TAG_MARK, tag, "")


def tag_of(file: int) -> str:
    """Returns the ETag of the shard that an open copy was made of; "" if it is not known."""
    return _note_of(file, _TAG_MARK)[0]


def mark_of(file: int | str) -> str | None:
    """Returns the digest of a copy's URL; None if this package did not make the file, or its size has changed since."""
    digest, size = _note_of(file, _MARK)
    with contextlib.suppress(FileNotFoundError):
        if not size or size == str(os.stat(file).st_size):  # noqa: PTH116 - maybe a descriptor
            return digest or None
    return None


def is_of_other_size(file: int) -> bool:
    """Returns whether an open copy is known to have changed its size since it was made."""
    return _note_of(file, _MARK)[1] not in ("", str(os.fstat(file).st_size))


def is_of_size(file: int, size: int) -> bool:
    """Returns whether an open file has a size, and is known to have no more to come."""
    return _note_of(file, _MARK)[1] == str(size) and os.fstat(file).st_size == size


def _set_note(file: int, name: str, digest: str, rest: object) -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setxattr(file, name, f"{digest} {rest}".strip().encode())


def _note_of(file: int | str, name: str) -> tuple[str, str]:
    """Returns the digest and the rest of a note on a file; "" for each that is missing."""
    with contextlib.suppress(OSError, AttributeError):
        digest, _, rest = os.getxattr(file, name).decode(errors="replace").partition(" ")
        return digest, rest
    return "", ""


class ShardFacts(NamedTuple):
    """A stored shard according to its index, where known: size in bytes, SHA-256 in hexadecimal digits, and tag."""

    bytes: int | None = None
    sha256: str | None = None
    tag: str = ""  # of its `StoredVersion`

    def difference(self, file: int) -> str:
        """Returns how an open file differs, such as ``10 bytes, and not 20``, or "". Computes its digest only once."""
        size = os.fstat(file).st_size
        if self.bytes is not None and size != self.bytes:
            return f"{size:,} bytes, and not {self.bytes:,}"
        if difference := StoredVersion(size, self.tag).difference(StoredVersion(size, tag_of(file))):
            return difference
        if self.sha256 is not None and (found := _digest_of(file)) != self.sha256.lower():
            _digests.clear()  # a file that replaces this one may get the same inode
            return f"the SHA-256 {found}, and not {self.sha256}"
        return ""


#: Digests computed or read by this process, by device, inode, size and modification time.
_digests: dict[tuple[int, int, int, int], str] = {}
_MOST_DIGESTS = 100_000


def _digest_of(file: int) -> str:
    """Returns the SHA-256 of an open file; a note on the file keeps it until the file changes."""
    status = os.fstat(file)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if key in _digests:
        return _digests[key]
    stamp = f"{status.st_size} {status.st_mtime_ns}"
    found, noted = _note_of(file, _DIGEST_MARK)
    if noted != stamp:
        with open(os.dup(file), "rb", buffering=0) as copy:  # noqa: PTH123 - a descriptor
            copy.seek(0)
            found = hashlib.file_digest(copy, "sha256").hexdigest()
        _set_note(file, _DIGEST_MARK, found, stamp)
    if len(_digests) >= _MOST_DIGESTS:
        _digests.clear()
    _digests[key] = found
    return found


def copies_in(folder: str, *, deep: bool) -> Iterator[tuple[int, int, str]]:
    """Yields the time of last use, size and path of each finished copy that this package made."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if deep:
                    yield from copies_in(entry.path, deep=True)
            elif not entry.name.endswith((PART, LOCK)) and (is_own_name(entry.name) or mark_of(entry.path)):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_atime_ns, status.st_size, entry.path


def remove_unlocked(path: str) -> Removal:
    """Removes a file unless it is locked; raises OSError if it cannot be removed."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        opened = os.open(path, os.O_RDWR | flags)  # NFS allows exclusive locks only on writable descriptors
    except FileNotFoundError:
        return "gone"
    except PermissionError:
        opened = os.open(path, os.O_RDONLY | flags)
    with LockedFile(opened) as file:
        if not file.lock():
            return "in use"
        if not file.is_at(path):
            return "gone"
        os.unlink(path)  # noqa: PTH108
    return "removed"
