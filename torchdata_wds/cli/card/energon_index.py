"""Energon's indexes: ``index.sqlite`` of all samples and their fields, and the offsets beside each shard."""

import sqlite3
import struct
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torchdata_wds.cli.card.set_facts import ShardFacts
from torchdata_wds.errors import WdsError
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.samples.names import split_name

_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL UNIQUE,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER
);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""
_INSERTS = tuple(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)" for table in ("samples", "sample_parts"))
_ROWS = tuple(f"SELECT * FROM {table} ORDER BY rowid" for table in ("samples", "sample_parts"))
_WHERE = "SELECT tar_file_id FROM samples WHERE sample_key = ?"
_Row = tuple[Any, ...]


class EnergonIndex:
    """Collects the places of samples, shard after shard, in a temporary file; a context manager, which deletes it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wds-card-")
        self.path = Path(self._folder.name) / "index.sqlite"
        self.offsets: dict[str, bytes] = {}  # of each shard, the content of its .tar.idx
        self._digest = blake2b(digest_size=16)
        self._database = sqlite3.connect(self.path)
        self._database.execute("PRAGMA journal_mode=OFF")
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.executescript(_TABLES)

    def __enter__(self) -> "EnergonIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        self._folder.cleanup()

    def add(self, shard: ShardFacts) -> None:
        """Adds the samples of a shard; raises WdsError if energon could not read them."""
        index = _readable(shard)
        number = len(self.offsets)
        for insert, rows in zip(_INSERTS, (_sample_rows(number, index), _part_rows(number, index)), strict=True):
            row: _Row = ()
            try:
                self._database.executemany(insert, (row := digested for digested in self._digested(rows)))
            except sqlite3.IntegrityError:
                raise self._reappearing(row[1], shard.path) from None
        starts = [sample.start for sample in index]
        self.offsets[shard.path] = struct.pack(f"<{len(starts) + 1}Q", *starts, index[-1].stop)

    def _digested(self, rows: Iterator[_Row]) -> Iterator[_Row]:
        for row in rows:
            self._digest.update(repr(row).encode("utf-8", "surrogatepass"))
            yield row

    def finish(self) -> uuid.UUID:
        """Completes the file; returns a UUID that changes with the samples, and only with them."""
        self._database.commit()
        self._database.executescript(_INDEXES)
        return uuid.UUID(bytes=self._digest.digest(), version=4)

    def equals(self, path: Path) -> bool:
        """Returns whether another database has the same rows."""
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as there:
                return all(_same(self._database.execute(query), there.execute(query)) for query in _ROWS)
        except sqlite3.Error:
            return False

    def _reappearing(self, key: str, path: str) -> WdsError:
        (number,) = self._database.execute(_WHERE, (key,)).fetchone()
        first = [*self.offsets, path][number]
        what = f"energon needs each key once in the whole data set, and {key!r} is in {first} and in {path}"
        return WdsError(f"{what}. Write the shards with new keys: wds cat --rekey '{{shard}}/{{key}}'", key=key)


def _same(first: Iterator[_Row], second: Iterator[_Row]) -> bool:
    return all(row == next(second, None) for row in first) and next(second, None) is None


def _readable(shard: ShardFacts) -> ShardIndex:
    """Returns the index of a shard that energon can read."""
    index = shard.kept_index
    assert index is not None
    if not shard.path.endswith(".tar") or index.header.compressed:
        why = "it reads only uncompressed files named *.tar"
    elif index.header.special:
        why = f"it has {' and '.join(index.header.special).replace('_', ' ')}. Write it anew, with 'wds cat'"
    elif not shard.samples:
        why = "it has no sample"
    elif "{" in shard.path or "}" in shard.path:
        why = "its name has braces"
    else:
        return index
    raise WdsError(f"energon cannot read shard {shard.path}: {why}", shard=shard.path)


def _sample_rows(shard: int, index: ShardIndex) -> Iterator[_Row]:
    samples = iter(index)
    sample = next(samples)
    for number, following in enumerate(samples):
        # what lies between two samples, as a README, is read with the first
        yield shard, _key_of(sample.members[0].name), number, sample.start, following.start - sample.start
        sample = following
    yield shard, _key_of(sample.members[0].name), len(index) - 1, sample.start, sample.stop - sample.start


def _part_rows(shard: int, index: ShardIndex) -> Iterator[_Row]:
    for number, sample in enumerate(index):
        for name, offset, size in sample.members:
            pair = split_name(name)
            assert pair is not None
            yield shard, number, pair[1], offset, size


def _key_of(name: str) -> str:
    """Returns the key of a member in energon's words, which keep a leading ``./``."""
    pair = split_name(name)
    assert pair is not None
    return f"./{pair[0]}" if name.startswith("./") else pair[0]
