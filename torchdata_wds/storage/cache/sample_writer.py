"""Writes the files of samples that `sample_file` describes and reads."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchdata_wds.errors import CacheError
from torchdata_wds.storage.cache.sample_file import (
    APPLICATION,
    HEADER_SIZE,
    SCHEMA,
    VERSION,
    SampleFacts,
    SampleReader,
    connect,
    is_ours,
    open_samples,
    sqlite3_module,
    unusable,
)
from torchdata_wds.storage.locks import lock, unlock
from torchdata_wds.storage.targets.base import sync_file, sync_folder

if TYPE_CHECKING:
    import sqlite3

#: The suffix of an incomplete file.
PART = ".part"
_PAGE_SIZE = 16384

#: The samples or bytes of a transaction: large ones are fast, and none is open while a sample is out.
_BATCH_COUNT, _BATCH_BYTES = 1000, 4 << 20

#: A generous bound on what SQLite stores besides the data of a row.
_ROW_OVERHEAD = 1000

#: The number of attempts to open a part that other processes keep renaming.
_OPENINGS = 100


class SampleWriter:
    """A file that one process writes: `finish` completes it, `abort` removes it.

    Attributes:
        path: The file's final name.
        max_bytes: The largest size of a sample.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._part = _part_of(path)
        self._lock = lock
        self._owner = os.getpid()
        self._count = 0
        self._rows: list[tuple[int, int, bytes]] = []
        self._size = 0
        self._connection: sqlite3.Connection | None = None
        try:
            with _writing(path):
                self._connection = connect(self._part, "vfs=unix-none")
                self._create(self._connection)
        except BaseException:
            self.abort()
            raise
        self.max_bytes = self._connection.getlimit(sqlite3_module().SQLITE_LIMIT_LENGTH) - _ROW_OVERHEAD

    def append(self, data: bytes) -> None:
        """Adds a sample; a CacheError if it cannot be written, as on a full disk."""
        self._rows.append((self._count, zlib.crc32(data), data))
        self._count += 1
        self._size += len(data)
        if len(self._rows) >= _BATCH_COUNT or self._size >= _BATCH_BYTES:
            with _writing(self.path):
                self._flush()

    def finish(self, *, ended: bool, pickles: bool, shares: int = 1) -> bool:
        """Completes the file and gives it its name.

        Args:
            ended: Whether the source had no more.
            pickles: Whether a sample holds pickles.
            shares: How many files share the samples of the source.

        Returns:
            Whether that succeeded: False if the name is taken by now, or the part was deleted.

        Raises:
            CacheError: if it cannot be written.
        """
        connection = self._connection
        assert connection is not None
        facts = SampleFacts(self._count, ended, pickles, shares)
        try:
            with _writing(self.path):
                self._flush()
                connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.rows())
                connection.close()
                sync_file(self._lock)
                is_free = not os.path.lexists(self.path) and _is_at(self._lock, self._part)
                if is_free:
                    self._part.replace(self.path)
                    with contextlib.suppress(OSError):  # the file is complete all the same
                        sync_folder(self.path.parent)
        except BaseException:
            self.abort()
            raise
        if not is_free:
            self.abort()
        self._release()
        return is_free

    def abort(self) -> None:
        """Removes the file, unless it is finished."""
        if self._lock < 0:
            return
        if self._connection is not None:
            # No transaction is open: this writes nothing, not even in a forked child.
            self._connection.close()
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                if _is_at(self._lock, self._part):
                    self._part.unlink()
        self._release()

    def _create(self, connection: sqlite3.Connection) -> None:
        for pragma in (
            f"page_size = {_PAGE_SIZE}",
            f"application_id = {APPLICATION}",
            f"user_version = {VERSION}",
            # An incomplete file is never used, so that a journal and waiting for the disk would be wasted.
            "journal_mode = OFF",
            "synchronous = OFF",
            "locking_mode = EXCLUSIVE",
        ):
            connection.execute(f"PRAGMA {pragma}")
        for table in SCHEMA:
            connection.execute(table)

    def _flush(self) -> None:
        assert self._connection is not None
        rows, self._rows, self._size = self._rows, [], 0
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
        self._connection.execute("COMMIT")

    def _release(self) -> None:
        if self._lock < 0:
            return
        if self._owner == os.getpid():
            unlock(self._lock)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def begin_samples(path: Path) -> SampleWriter | None:
    """Begins a file with an absolute final name, and makes its folder; replaces the part of a dead process.

    Returns:
        None if a living process, or another iteration in this one, is writing it.

    Raises:
        CacheError: if it cannot be written there.
    """
    part = _part_of(path)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_OPENINGS):
            # No links: one would make this empty another file.
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                taken = _take(file, part)
            except BaseException:
                os.close(file)
                raise
            if taken:
                return SampleWriter(path, file)
            os.close(file)
            if taken is None:
                return None
    raise unusable(path, f"other processes keep renaming {part}")


def open_or_begin(path: Path) -> tuple[SampleReader | None, SampleWriter | None]:
    """Opens a finished file, or begins it; returns neither if it is being written."""
    reader = open_samples(path)
    writer = begin_samples(path) if reader is None else None
    if writer is None:
        return reader, None
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abort)
        # Another process may have finished it before this one got the lock.
        reader = open_samples(path)
        if reader is None:
            stack.pop_all()
            return None, writer
    return reader, None


def _take(file: int, part: Path) -> bool | None:
    """Locks and empties the file to be written; None if it is locked, False if it is no longer that file."""
    if lock(file) is False:
        return None
    if not _is_at(file, part):
        return False  # its writer has renamed it
    status = os.fstat(file)
    head = os.pread(file, HEADER_SIZE, 0) if stat.S_ISREG(status.st_mode) else b"?"
    # After a power failure the first bytes may be zeros.
    if head.strip(b"\0") and not is_ours(head):
        raise unusable(part, "it is not what cache_samples would leave there, and is left as it is")
    os.ftruncate(file, 0)
    return True


def _is_at(file: int, path: Path) -> bool:
    """Returns whether a path still is that of an open file."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise
    except (OSError, sqlite3_module().Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CacheError(
            f"the sample cache {path} cannot be written: {reason}. Free some space there, or choose a file in a folder "
            "with write permission"
        ) from error
