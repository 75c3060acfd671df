"""The files of caches in a folder: copies of shards, files of samples, and unfinished or left-over ones.

Other files are ignored: copies are known by their names or marks, files of samples by their first bytes, ``.part`` and
``.lock`` files by the form of their names.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from torchdata_wds.errors import CacheError, WdsError, cli_message
from torchdata_wds.storage.cache.locked_files import (
    OLD_SECONDS,
    ROOM,
    UNIQUE,
    CopyLock,
    Removal,
    is_of_other_size,
    mark_of,
    remove_unlocked,
)
from torchdata_wds.storage.cache.names import LOCK, PART, is_own_name
from torchdata_wds.storage.cache.sample_file import HEADER_SIZE, is_ours, open_samples
from torchdata_wds.storage.locks import LockedFile

State = Literal["whole", "being made", "left over"]

#: An unfinished file may not have its lock yet for this many seconds.
_NEW_SECONDS = 1.0


class CacheFile(NamedTuple):
    """One file of a cache; a lock is that of a copy."""

    path: str
    kind: Literal["shard", "samples", "lock"]
    state: State  # finished, in the hands of a living process, or left by a killed one
    size: int
    used: float  # when it was last used (or changed, if unfinished), in seconds since 1970


def list_cache(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[CacheFile]:
    """Lists the cache files in a folder by name; a CacheError if it has only other files.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("x-3566d554aa90429fdb966a5dc395f2a0.tar", "x.tar.17-0123abcd.part"):
        ...     _ = folder.joinpath(name).write_bytes(bytes(1024))
        ...     os.utime(folder / name, (0, 0))
        >>> [(file.kind, file.state, file.size) for file in list_cache(folder)]
        [('shard', 'whole', 1024), ('shard', 'left over', 1024)]
    """
    root = os.fspath(folder)
    files: list[CacheFile] = []
    others = 0
    try:
        for entry in _entries(root, recursive):
            try:
                file = _file_of(entry)
            except FileNotFoundError:
                continue
            except PermissionError:  # of another user, perhaps
                file = None
            if file is not None:
                files.append(file)
            elif entry.name != ROOM:
                others += 1
    except OSError as error:
        raise CacheError(f"the cache folder {root} cannot be read: {error.strerror or error}") from error
    if others and not files:
        raise CacheError(
            f"{root} is not a cache folder: none of the {others:,} files and folders in it is from cache_shards or "
            "cache_samples. Name the folder that those use; copies named by host and path lie in its subfolders, which "
            "are only searched on request (recursive)"
        )
    return sorted(files)


def check_file(file: CacheFile, check_copy: Callable[[str, str], None]) -> str | None:
    """Reads a finished file to its end; returns what is wrong with it, or None. `check_copy` raises for a bad shard."""
    try:
        with _unused(file.path):
            if file.kind == "samples":
                if (reader := open_samples(Path(file.path))) is not None:
                    with reader:
                        for _ in reader.rows():
                            pass
            else:
                with LockedFile(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)) as copy:
                    if is_of_other_size(copy.fileno()):
                        what = f"the copy {file.path} no longer has the length with which it was made: it is cut"
                        raise CacheError(what)
                check_copy(file.path, file.path)
    except (WdsError, OSError) as error:
        return cli_message(error) if os.path.lexists(file.path) else None
    return None


def choose_old(
    files: Iterable[CacheFile], *, older_than: float | None = None, max_bytes: float | None = None, now: float
) -> list[CacheFile]:
    """Chooses the files to remove: all left-over ones, then finished ones, the least recently used first.

    Finished files are chosen if they were not used for `older_than` seconds, or until the remaining ones take at most
    `max_bytes`; without either limit, all are.

    Example:
        >>> files = [CacheFile(str(day), "shard", "whole", 100, 86400.0 * day) for day in range(4)]
        >>> [file.path for file in choose_old(files, max_bytes=250, now=400000)]
        ['0', '1']
    """
    files = list(files)
    chosen = [file for file in files if file.state == "left over"]
    whole = sorted((file for file in files if file.state == "whole"), key=lambda file: file.used)
    total = sum(file.size for file in whole)
    for file in whole:
        is_old = older_than is not None and now - file.used > older_than
        is_too_much = max_bytes is not None and total > max_bytes
        if is_old or is_too_much or (older_than is None and max_bytes is None):
            chosen.append(file)
            total -= file.size
    return chosen


def remove_file(file: CacheFile) -> Removal:
    """Removes a file unless another process makes or reads it; it is gone if it no longer exists or was replaced."""
    try:
        if file.kind == "lock":
            if not os.path.lexists(file.path):
                return "gone"
            if (lock := CopyLock.acquire(file.path.removesuffix(LOCK))) is None:
                return "in use"
            lock.release()
            return "removed"
        if file.kind == "shard" and file.state == "left over":
            return _remove_part(file.path)
        return remove_unlocked(file.path)
    except FileNotFoundError:
        return "gone"
    except OSError as error:
        raise CacheError(f"{file.path} cannot be removed: {error.strerror or error}") from error


def _entries(folder: str, recursive: bool) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if recursive and entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path, recursive)
            else:
                yield entry


def _file_of(entry: os.DirEntry[str]) -> CacheFile | None:
    """Returns the cache file of a folder's entry; None if it is not one."""
    status = entry.stat(follow_symlinks=False)
    path, name, size = entry.path, entry.name, status.st_size
    if not stat.S_ISREG(status.st_mode) or name == ROOM:
        return None
    if name.endswith(LOCK):
        return CacheFile(path, "lock", _state(status, path), size, status.st_mtime) if _is_lock_of_copy(path) else None
    if UNIQUE.search(name):
        return CacheFile(path, "shard", _state(status, path), size, status.st_mtime)
    if not name.endswith(PART) and (is_own_name(name) or mark_of(path)):
        return CacheFile(path, "shard", "whole", size, status.st_atime)
    if is_ours(_read(path, HEADER_SIZE)):
        state: State = _state(status, path) if name.endswith(PART) else "whole"
        return CacheFile(path, "samples", state, size, max(status.st_atime, status.st_mtime))
    return None


def _state(status: os.stat_result, path: str) -> State:
    """Returns the state of an unfinished file by its lock, which a new file may not have yet."""
    if abs(time.time() - status.st_mtime) < _NEW_SECONDS:
        return "being made"
    with LockedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        is_free = file.lock(shared=True)
        # Without locks, only its age shows that nobody fills it any more.
        is_young = not file.has_locks and time.time() - status.st_mtime < OLD_SECONDS
        return "left over" if is_free and not is_young else "being made"


def _read(path: str, size: int) -> bytes:
    """Reads the beginning of a file, if possible without changing its time of access, which eviction goes by."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # of another user
        file = os.open(path, flags)
    try:
        return os.read(file, size)
    finally:
        os.close(file)


def _is_lock_of_copy(path: str) -> bool:
    """Returns whether a ``.lock`` file is that of a copy: it is empty, or contains the name of the copy's part."""
    base = os.path.basename(path).removesuffix(LOCK)  # noqa: PTH119 - a str, as in all of this module
    content = os.fsdecode(_read(path, 4096))
    if not content:
        return is_own_name(base)
    found = UNIQUE.search(content)
    return found is not None and content[: found.start()] == base


def _remove_part(path: str) -> Removal:
    """Removes the part of a dead process, holding the copy's lock so that no other process starts to make it."""
    found = UNIQUE.search(path)
    if (lock := CopyLock.acquire(path[: found.start()] if found else path)) is None:
        return "in use"
    try:
        return remove_unlocked(path)
    finally:
        lock.release()


@contextlib.contextmanager
def _unused(path: str) -> Iterator[None]:
    """Restores a file's time of access, by which eviction finds the least recently used."""
    before = os.stat(path)  # noqa: PTH116
    yield
    with contextlib.suppress(OSError):
        if os.path.samestat(before, os.stat(path)):  # noqa: PTH116
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
