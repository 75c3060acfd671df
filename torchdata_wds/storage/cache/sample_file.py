"""Samples as rows of a SQLite file, which gets its final name only when it is complete.

While it is written, the file is named ``<name>.part`` and locked by its writer. The part of a dead writer is never
read; the next writer starts over. The finished file has two tables: ``samples`` (``number`` from 0 without gaps,
``crc`` of the data by ``zlib.crc32``, ``data``) and ``facts`` (``name``, ``value``): the number of samples
(``samples``), whether the source had ended (``ended``), whether a sample contains pickles (``pickles``), how many files
share the samples of the source (``shares``), and a checksum of these (``crc``). SQLite's ``application_id`` and
``user_version`` identify the format and its version.
"""

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from torchdata_wds.errors import CacheError
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.targets.base import open_unfinished, sync_file, sync_folder

if TYPE_CHECKING:
    import sqlite3

#: The suffix of an incomplete file, and the size of SQLite's header.
PART, HEADER_SIZE = ".part", 100
_MAGIC = b"SQLite format 3\0"

#: The ``application_id`` and ``user_version`` in SQLite's header.
_APPLICATION, _VERSION = int.from_bytes(b"WdsS", "big"), 1

#: Problems with a file, and what to do about them.
_UNUSABLE = "cannot be used: {}. Otherwise, choose another file"
_DAMAGED = "is damaged: {}. Delete it, and the next pass makes it again"
_UNWRITABLE = "cannot be written: {}. Free some space there, or choose a file in a folder with write permission"

#: A file with other tables is refused: views, for example, could compute forever.
_SCHEMA = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER)",
    "CREATE TABLE samples (number INTEGER PRIMARY KEY, crc INTEGER, data BLOB)",
)

_SETTINGS = (
    "page_size = 16384",
    f"application_id = {_APPLICATION}",
    f"user_version = {_VERSION}",
    # An incomplete file is never used, so a journal and waiting for the disk would be a waste.
    "journal_mode = OFF",
    "synchronous = OFF",
    "locking_mode = EXCLUSIVE",
)

#: The samples or bytes of a transaction. Large ones are fast; none is open while the consumer has a sample.
_BATCH_COUNT, _BATCH_BYTES = 1000, 4 << 20

#: A generous bound on what SQLite stores besides the data of a row.
_ROW_OVERHEAD = 1000


class SampleFacts(NamedTuple):
    """The facts in a finished file, as listed above."""

    samples: int
    ended: bool
    pickles: bool
    shares: int = 1


class SampleReader(contextlib.AbstractContextManager["SampleReader"]):
    """A finished file, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _failing(path, _DAMAGED), contextlib.ExitStack() as stack:
            # It never changes: no locks are needed, and a forked process inherits none.
            self._connection = _connect(path, "mode=ro&immutable=1")
            stack.callback(self.close)
            found = self._connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name")
            if tuple(sql for (sql,) in found) != _SCHEMA:
                raise _error(path, _DAMAGED, "it has other tables than those of cache_samples")
            facts = dict(self._connection.execute("SELECT name, value FROM facts"))
            known = [(name, facts.pop(name, None)) for name in SampleFacts._fields]
            is_sound = all(type(value) is int for _, value in known) and facts == {"crc": _checksum(known)}
            if not is_sound:
                raise _error(path, _DAMAGED, "it does not say how many samples it has")
            stack.pop_all()
        samples, ended, pickles, shares = (value for _, value in known)
        self.facts = SampleFacts(samples, bool(ended), bool(pickles), shares)

    def rows(self, limit: int | None = None) -> Iterator[bytes]:
        """Yields at most `limit` samples, in the order written; raises CacheError if one is missing or damaged."""
        expected = self.facts.samples if limit is None else min(limit, self.facts.samples)
        query = "SELECT number, crc, data FROM samples ORDER BY number LIMIT ?"
        position = 0
        with _failing(self.path, _DAMAGED):
            for number, crc, data in self._connection.execute(query, (expected,)):
                if number != position or not isinstance(data, bytes) or zlib.crc32(data) != crc:
                    break
                yield data
                position += 1
        if position < expected:
            raise _error(self.path, _DAMAGED, f"sample {position:,} of {self.facts.samples:,} is missing or damaged")

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_samples(path: Path) -> SampleReader | None:
    """Opens a finished file; returns None if there is none; raises CacheError if it is damaged or of another kind."""
    with _failing(path, _UNUSABLE):
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise _error(path, _UNUSABLE, "it is a folder or a device; add the name of a file")
    try:
        head = _head_of(path)
        if not is_ours(head):
            raise _error(path, _UNUSABLE, "it is not a file that cache_samples wrote, and is left as it is")
        if (version := int.from_bytes(head[60:64], "big")) != _VERSION:
            reason = f"it is of version {version}, expected {_VERSION}: delete it, and it is made again"
            raise _error(path, _UNUSABLE, reason)
        expected = int.from_bytes(head[16:18], "big") * int.from_bytes(head[28:32], "big")
        if status.st_size < expected:
            raise _error(path, _DAMAGED, f"it is cut off: expected {expected:,} bytes, found {status.st_size:,}")
        return SampleReader(path)
    except CacheError:
        if not path.exists():
            return None  # deleted in the meantime
        raise


def is_ours(head: bytes) -> bool:
    """Returns whether a file with these first bytes is a sample cache."""
    return head.startswith(_MAGIC) and head[68:72] == _APPLICATION.to_bytes(4, "big")


class SampleWriter:
    """A file being written: `finish` completes it, `abort` removes it; `max_bytes` limits the size of a sample."""

    def __init__(self, path: Path, file: LockedFile) -> None:
        self.path = path
        self._part = path.with_name(path.name + PART)
        self._file = file
        self._count = 0
        self._rows: list[tuple[int, int, bytes]] = []
        self._size = 0
        self._connection: sqlite3.Connection | None = None
        with _failing(path, _UNWRITABLE), contextlib.ExitStack() as stack:
            stack.callback(self.abort)
            self._connection = _connect(self._part, "vfs=unix-none")
            for statement in (*(f"PRAGMA {setting}" for setting in _SETTINGS), *_SCHEMA):
                self._connection.execute(statement)
            stack.pop_all()
        self.max_bytes = self._connection.getlimit(_sqlite3().SQLITE_LIMIT_LENGTH) - _ROW_OVERHEAD

    def append(self, data: bytes) -> None:
        """Adds a sample; raises CacheError if it cannot be written, for example on a full disk."""
        self._rows.append((self._count, zlib.crc32(data), data))
        self._count += 1
        self._size += len(data)
        if len(self._rows) >= _BATCH_COUNT or self._size >= _BATCH_BYTES:
            with _failing(self.path, _UNWRITABLE):
                self._flush()

    def finish(self, *, ended: bool, pickles: bool, shares: int = 1) -> bool:
        """Completes and renames the file; returns False if the name is taken by now, or the part was deleted."""
        assert self._connection is not None
        facts = SampleFacts(self._count, ended, pickles, shares)._asdict()
        rows = [(name, int(value)) for name, value in facts.items()]
        try:
            with _failing(self.path, _UNWRITABLE):
                self._flush()
                self._connection.executemany("INSERT INTO facts VALUES (?, ?)", [*rows, ("crc", _checksum(rows))])
                self._connection.close()
                sync_file(self._file.fileno())
                is_free = not os.path.lexists(self.path) and self._file.is_at(str(self._part))
                if is_free:
                    self._part.replace(self.path)
                    with contextlib.suppress(OSError):  # the file is complete anyway
                        sync_folder(self.path.parent)
        finally:
            self.abort()
        return is_free

    def abort(self) -> None:
        """Removes the file, unless it is finished."""
        if self._connection is not None:
            # No transaction is open, so this writes nothing, not even in a forked child.
            self._connection.close()
        if not self._file.closed:
            with contextlib.suppress(OSError):
                if self._file.is_at(str(self._part)):
                    self._part.unlink()
            self._file.close()

    def _flush(self) -> None:
        assert self._connection is not None
        rows, self._rows, self._size = self._rows, [], 0
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
        self._connection.execute("COMMIT")


def begin_samples(path: Path) -> SampleWriter | None:
    """Creates the part of a file, whose final name must be absolute, and its folder; replaces that of a dead process.

    Returns None if a living process, or another iteration in this one, is writing the file.
    """
    part = path.with_name(path.name + PART)

    def check(file: int) -> None:
        head = os.pread(file, HEADER_SIZE, 0) if stat.S_ISREG(os.fstat(file).st_mode) else b"?"
        # After a power failure the first bytes may be zeros.
        if head.strip(b"\0") and not is_ours(head):
            raise _error(part, _UNUSABLE, "it is not what cache_samples would leave there, and is left as it is")

    with _failing(path, _UNWRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_unfinished(part, check)
    return None if file is None else SampleWriter(path, file)


def open_or_begin(path: Path) -> tuple[SampleReader | None, SampleWriter | None]:
    """Opens a finished file, or begins it; returns two None if another writer has begun it."""
    if (reader := open_samples(path)) is not None or (writer := begin_samples(path)) is None:
        return reader, None
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abort)
        # Another process may have finished it before this one got the lock.
        if (reader := open_samples(path)) is None:
            stack.pop_all()
            return None, writer
    return reader, None


def _head_of(path: Path) -> bytes:
    with _failing(path, _UNUSABLE), path.open("rb") as file:
        return file.read(HEADER_SIZE)


def _checksum(rows: list[tuple[str, Any]]) -> int:
    return zlib.crc32(repr(rows).encode())


def _sqlite3() -> Any:
    """Imports SQLite, which some Pythons lack."""
    try:
        import sqlite3
    except ImportError as error:
        raise CacheError("cache_samples needs the sqlite3 module, which this Python was built without") from error
    return sqlite3


def _connect(path: Path, options: str) -> "sqlite3.Connection":
    """Opens a file with options as in SQLite's URIs."""
    # An iteration may continue in another thread; transactions begin and end explicitly.
    connection: sqlite3.Connection = _sqlite3().connect(
        f"file://{quote(os.fsencode(path.absolute()))}?{options}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    return connection


def _error(path: Path, what: str, reason: str) -> CacheError:
    return CacheError(f"the sample cache {path} {what.format(reason)}")


@contextlib.contextmanager
def _failing(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise
    except (OSError, _sqlite3().Error) as error:
        raise _error(path, what, getattr(error, "strerror", None) or str(error)) from error
