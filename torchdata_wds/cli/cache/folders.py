"""What caches have left in a folder: copies of shards, files of samples, and what their makers need or have left over.

Only files that caches make are looked at: copies by their names or the mark that they have, files of samples by their
first bytes, and ``.part`` and ``.lock`` files by the forms of their names.
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

__all__ = ["CacheFile", "Removal", "check_file", "choose_old", "list_cache", "remove_file"]


State = Literal["whole", "being made", "left over"]

#: An unfinished file that was changed so few seconds ago may not have its lock yet.
_NEW_SECONDS = 1.0


class CacheFile(NamedTuple):
    """One file of a cache.

    Attributes:
        path: Its path.
        kind: ``"shard"``, ``"samples"``, or ``"lock"`` for the lock of a copy.
        state: ``"whole"`` for what is finished, ``"being made"`` by a process that lives, or ``"left over"`` by one
            that was killed.
        size: Its size in bytes.
        used: When it was last used, or changed where it is not finished, in seconds since 1970.
    """

    path: str
    kind: Literal["shard", "samples", "lock"]
    state: State
    size: int
    used: float


def list_cache(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[CacheFile]:
    """Lists the files of the caches in a folder, by their names.

    Args:
        folder: The folder.
        recursive: Whether to look into its folders as well, where copies are named by host and path.

    Raises:
        CacheError: if it cannot be read, or has other files and none of a cache.

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
            f"{root} is no folder of a cache: none of the {others:,} files and folders in it is that of cache_shards "
            "or cache_samples. Name the folder that those have; copies that are named by host and path lie in folders "
            "inside it, which are looked into only if that is asked for (recursive)"
        )
    return sorted(files)


def check_file(file: CacheFile, check_copy: Callable[[str, str], None]) -> str | None:
    """Reads a finished file of a cache to its end.

    Args:
        file: The file.
        check_copy: Raises for a path and URL that are not those of a whole shard.

    Returns:
        What is wrong with it; None if nothing is, or it has gone meanwhile.
    """
    try:
        with _unused(file.path):
            if file.kind == "samples":
                _check_samples(Path(file.path))
            else:
                _check_size(file.path)
                check_copy(file.path, file.path)
    except (WdsError, OSError) as error:
        return cli_message(error) if os.path.lexists(file.path) else None
    return None


def choose_old(
    files: Iterable[CacheFile], *, older_than: float | None = None, max_bytes: float | None = None, now: float
) -> list[CacheFile]:
    """Chooses which files of a cache to remove: what is left over in any case, of the others those used longest ago.

    Args:
        files: The files.
        older_than: Choose finished ones that were not used for so many seconds; None chooses by `max_bytes` alone.
        max_bytes: Choose until the rest takes no more bytes; None chooses by `older_than` alone. Without either all
            finished ones are chosen.
        now: The time, in seconds since 1970.

    Returns:
        The chosen ones, those that were not used for longest first.

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
    """Removes a file of a cache, unless another process makes or reads it.

    Args:
        file: The file.

    Returns:
        What became of it: ``"removed"``, ``"in use"``, or ``"gone"`` where it was not there any more, or is another
        one by now.

    Raises:
        CacheError: if it cannot be removed.
    """
    try:
        if file.kind == "lock":
            return _remove_lock(file.path)
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
    """What an entry of a folder is to a cache; None for what is not one's."""
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
    """Tells whether somebody has the lock of an unfinished file; one that is new may be about to get it."""
    if abs(time.time() - status.st_mtime) < _NEW_SECONDS:
        return "being made"
    with LockedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        is_free = file.lock(shared=True)
        # Without locks only the time tells that nobody fills it any more.
        is_young = not file.has_locks and time.time() - status.st_mtime < OLD_SECONDS
        return "left over" if is_free and not is_young else "being made"


def _read(path: str, size: int) -> bytes:
    """Reads the beginning of a file without a trace of it, where the system allows that: its use is what counts."""
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
    """Tells whether a ``.lock`` file is that of a copy: it is empty, or has the name of the copy's part in it."""
    base = os.path.basename(path).removesuffix(LOCK)  # noqa: PTH119 - a str, as in all of this module
    content = os.fsdecode(_read(path, 4096))
    if not content:
        return is_own_name(base)
    found = UNIQUE.search(content)
    return found is not None and content[: found.start()] == base


def _remove_part(path: str) -> Removal:
    """Removes what the maker of a copy has left; the lock of the copy keeps others from making it meanwhile."""
    found = UNIQUE.search(path)
    lock = CopyLock.acquire(path[: found.start()] if found else path)
    if lock is None:
        return "in use"
    try:
        return remove_unlocked(path)
    finally:
        lock.release()


def _remove_lock(path: str) -> Removal:
    if not os.path.lexists(path):
        return "gone"
    lock = CopyLock.acquire(path.removesuffix(LOCK))
    if lock is None:
        return "in use"
    lock.release()
    return "removed"


@contextlib.contextmanager
def _unused(path: str) -> Iterator[None]:
    """Lets a file look as if it had not been read: by its time of access the one unused for longest is found."""
    before = os.stat(path)  # noqa: PTH116
    yield
    with contextlib.suppress(OSError):
        if os.path.samestat(before, os.stat(path)):  # noqa: PTH116
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _check_size(path: str) -> None:
    with LockedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
        if is_of_other_size(file.fileno()):
            raise CacheError(f"the copy {path} has not the length any more with which it was made: it is cut")


def _check_samples(path: Path) -> None:
    reader = open_samples(path)
    if reader is None:
        return
    with reader:
        for _ in reader.rows():
            pass
