"""Samples as rows of a SQLite file, which appears under its name only when it is complete.

While it is written, the file is ``<name>.part``, locked while its writer lives. A part that a dead writer left is never
read; the next writer starts over. The finished file has two tables: ``samples`` (``number`` from 0 without gaps,
``crc`` of the data by ``zlib.crc32``, ``data``) and ``facts`` (``name``, ``value``): the number of samples
(``samples``), whether the source had ended (``ended``), whether a sample holds pickles (``pickles``), how many files
share the samples of the source (``shares``), and a checksum of these (``crc``). SQLite's ``application_id`` and
``user_version`` identify the format and its version.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from torchdata_wds.errors import CacheError

if TYPE_CHECKING:
    import sqlite3
    from types import TracebackType
    from typing import Self

#: The ``application_id`` and ``user_version`` in SQLite's header, and the size of that header.
APPLICATION, VERSION, HEADER_SIZE = int.from_bytes(b"WdsS", "big"), 1, 100

#: A file with other tables is refused: views, for example, could compute forever.
SCHEMA = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER)",
    "CREATE TABLE samples (number INTEGER PRIMARY KEY, crc INTEGER, data BLOB)",
)

_MAGIC = b"SQLite format 3\0"


class SampleFacts(NamedTuple):
    """The facts that a finished file states: its number of samples and the others listed above."""

    samples: int
    ended: bool
    pickles: bool
    shares: int = 1

    def rows(self) -> list[tuple[str, int]]:
        """Returns the rows of the table of facts, including their checksum."""
        rows = [(name, int(value)) for name, value in self._asdict().items()]
        return [*rows, ("crc", zlib.crc32(repr(rows).encode()))]


class SampleReader:
    """A finished file, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path):
            # It never changes: no locks are needed, and a forked process inherits none.
            self._connection = connect(path, "mode=ro&immutable=1")
        try:
            with _reading(path):
                found = self._connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name")
                if tuple(sql for (sql,) in found) != SCHEMA:
                    raise _damaged(path, "it has other tables than those of cache_samples")
                facts = dict(self._connection.execute("SELECT name, value FROM facts"))
            samples, shares = (
                value if isinstance(value := facts.get(name), int) else 0 for name in ("samples", "shares")
            )
            self.facts = SampleFacts(samples, facts.get("ended") == 1, facts.get("pickles") == 1, shares)
            if dict(self.facts.rows()) != facts:
                raise _damaged(path, "it does not say how many samples it has")
        except BaseException:
            self.close()
            raise

    def rows(self, limit: int | None = None) -> Iterator[bytes]:
        """Yields at most `limit` samples in the order they were written; a CacheError if one is missing or damaged."""
        expected = self.facts.samples if limit is None else min(limit, self.facts.samples)
        query = "SELECT number, crc, data FROM samples ORDER BY number LIMIT ?"
        position = 0
        with _reading(self.path):
            for number, crc, data in self._connection.execute(query, (expected,)):
                if number != position or not isinstance(data, bytes) or zlib.crc32(data) != crc:
                    break
                yield data
                position += 1
        if position < expected:
            raise _damaged(self.path, f"sample {position:,} of {self.facts.samples:,} is missing or damaged")

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()


def open_samples(path: Path) -> SampleReader | None:
    """Opens a finished file; None if it does not exist.

    Raises:
        CacheError: if it is another kind of file, of another version, or damaged.

    Example:
        >>> open_samples(Path("no such file")) is None
        True
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise unusable(path, "it is a folder or a device; add the name of a file")
    try:
        return _open(path, status.st_size)
    except CacheError:
        if not path.exists():
            return None  # deleted in the meantime
        raise


def _open(path: Path, size: int) -> SampleReader:
    head = _head_of(path)
    if not is_ours(head):
        raise unusable(path, "it is not a file that cache_samples wrote, and is left as it is")
    version = int.from_bytes(head[60:64], "big")
    if version != VERSION:
        raise unusable(path, f"it is of version {version}, expected {VERSION}: delete it, and it is made again")
    expected = int.from_bytes(head[16:18], "big") * int.from_bytes(head[28:32], "big")
    if size < expected:
        raise _damaged(path, f"it is cut off: expected {expected:,} bytes, found {size:,}")
    return SampleReader(path)


def is_ours(head: bytes) -> bool:
    """Returns whether these are the first bytes of a sample cache."""
    return head.startswith(_MAGIC) and head[68:72] == APPLICATION.to_bytes(4, "big")


def _head_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEADER_SIZE)
    except OSError as error:
        raise unusable(path, error.strerror or str(error)) from error


def sqlite3_module() -> Any:
    """Imports SQLite, which not every Python has."""
    try:
        import sqlite3
    except ImportError as error:
        raise CacheError("cache_samples needs the sqlite3 module, which this Python was built without") from error
    return sqlite3


def connect(path: Path, options: str) -> sqlite3.Connection:
    """Opens a file with options in the form of SQLite's URIs."""
    # An iteration may continue in another thread; transactions begin and end explicitly.
    connection: sqlite3.Connection = sqlite3_module().connect(
        f"file://{quote(os.fsencode(path.absolute()))}?{options}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    return connection


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3_module().Error as error:
        raise _damaged(path, str(error)) from error


def unusable(path: Path, reason: str) -> CacheError:
    """Returns the error for a file of another kind, or one that cannot be read."""
    return CacheError(f"the sample cache {path} cannot be used: {reason}. Otherwise, choose another file")


def _damaged(path: Path, reason: str) -> CacheError:
    return CacheError(f"the sample cache {path} is damaged: {reason}. Delete it, and the next pass makes it again")
