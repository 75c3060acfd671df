"""What ``energon prepare`` of Megatron Energon 7 writes: ``.nv-meta``, and an index of offsets beside each shard."""

import argparse
import json
import re
import sqlite3
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.cli.card.card_files import CardFile
from torchdata_wds.cli.card.front_matter import yaml_lines
from torchdata_wds.cli.card.set_facts import SetFacts, ShardFacts
from torchdata_wds.cli.command import UsageError
from torchdata_wds.errors import WdsError
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.index.foreign import energon_name
from torchdata_wds.format.samples.names import split_name

META = ".nv-meta"
_PARTS = ("train", "val", "test")
_PART_OF = {"validation": "val"}  # energon's word for a split
_MODULE = "megatron.energon"
_CRUDE = "CrudeWebdataset"
_BETWEEN = re.compile(r",(?=\w+=)")
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
_ROWS = tuple(f"SELECT * FROM {table} ORDER BY rowid" for table in ("samples", "sample_parts"))


class SampleType(NamedTuple):
    """A sample class of energon, and the field of the shards that each of its own is taken from."""

    name: str
    fields: dict[str, str]


def parse_sample_type(text: str) -> SampleType:
    """Parses ``--energon-sample``: ``CaptioningSample:image=jpg,png,caption=json[text]``."""
    name, _, rest = text.partition(":")
    pairs = [item.partition("=") for item in _BETWEEN.split(rest)]
    if not name.isidentifier() or not all(field.isidentifier() and source for field, _, source in pairs):
        expected = "expected TYPE:FIELD=NAME,..., such as CaptioningSample:image=jpg,caption=txt"
        raise argparse.ArgumentTypeError(f"{expected}, not {text!r:.80}")
    return SampleType(name, {field: source for field, _, source in pairs})


def energon_files(
    facts: SetFacts, folder: Path, sample_type: SampleType | None, ratio: Sequence[float] | None
) -> list[CardFile]:
    """Returns the files that make energon read the shards of a folder."""
    shards = sorted(facts.shards, key=lambda shard: shard.path)
    indexes = {shard.path: _index_of(shard) for shard in shards}
    database = _database(list(indexes.values()))
    parts = _split_parts(facts, ratio)
    info = {"shard_counts": {shard.path: shard.samples for shard in shards}}
    contents = {
        "dataset.yaml": _yaml(_definition(facts, sample_type)),
        "split.yaml": _yaml({"split_parts": parts, "exclude": []}),
        ".info.json": json.dumps(info, indent=2).encode(),
        "index.uuid": _identity(database),
    }
    meta = folder / META
    files = [CardFile(f"{META}/{name}", meta / name, content) for name, content in contents.items()]
    files.append(CardFile(f"{META}/index.sqlite", meta / "index.sqlite", database, same=_same_rows))
    for path, index in indexes.items():
        name = energon_name(path)
        files.append(CardFile(name, folder / name, _offsets(index)))
    return files


def _index_of(shard: ShardFacts) -> ShardIndex:
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


def _split_parts(facts: SetFacts, ratio: Sequence[float] | None) -> dict[str, list[str]]:
    """Returns the shards of each split: those of the card, or by ratio in their order, as energon divides them."""
    if ratio is None:
        splits = facts.by_split().items()
        return {_PART_OF.get(split, split): [shard.path for shard in shards] for split, shards in splits}
    paths = sorted(shard.path for shard in facts.shards)
    parts = {}
    start, total = 0, 0.0
    for name, share in zip(_PARTS, ratio, strict=True):
        total += share / sum(ratio)
        stop = int(len(paths) * total)
        parts[name] = paths[start:stop]
        start = stop
    return parts


def _definition(facts: SetFacts, sample_type: SampleType | None) -> dict[str, Any]:
    if sample_type is None:
        return {"__module__": _MODULE, "__class__": _CRUDE}
    for field, source in sample_type.fields.items():
        for name in source.split(","):
            if name.partition("[")[0] not in facts.fields:
                there = ", ".join(sorted(facts.fields))
                raise UsageError(f"--energon-sample: no sample has a field {name!r} for {field}; there are {there}")
    return {"sample_type": {"__module__": _MODULE, "__class__": sample_type.name}, "field_map": sample_type.fields}


def _yaml(value: Mapping[str, Any]) -> bytes:
    return "".join(f"{line}\n" for line in yaml_lines(value)).encode()


def _offsets(index: ShardIndex) -> bytes:
    """Returns where each sample begins and the last one ends, as the bytes of energon's ``.tar.idx``."""
    numbers = [sample.start for sample in index]
    return struct.pack(f"<{len(numbers) + 1}Q", *numbers, index[-1].stop)


def _database(indexes: Sequence[ShardIndex]) -> bytes:
    """Returns ``index.sqlite``: where each sample and each of its fields lies, and in which shard."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_TABLES)
        for number, index in enumerate(indexes):
            try:
                database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", _sample_rows(number, index))
            except sqlite3.IntegrityError:
                raise _reappearing(indexes[: number + 1]) from None
            database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", _part_rows(number, index))
        database.executescript(_INDEXES)
        return database.serialize()


def _sample_rows(shard: int, index: ShardIndex) -> Iterator[tuple[int, str, int, int, int]]:
    samples = iter(index)
    sample = next(samples)
    for number, following in enumerate(samples):
        # what lies between two samples, as a README, is read with the first
        yield shard, _key_of(sample.members[0].name), number, sample.start, following.start - sample.start
        sample = following
    yield shard, _key_of(sample.members[0].name), len(index) - 1, sample.start, sample.stop - sample.start


def _part_rows(shard: int, index: ShardIndex) -> Iterator[tuple[int, int, str, int | None, int | None]]:
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


def _reappearing(indexes: Iterable[ShardIndex]) -> WdsError:
    seen: dict[str, str] = {}
    for index in indexes:
        for sample in index:
            key = _key_of(sample.members[0].name)
            if key in seen:
                where = f"in {seen[key]} and in {index.header.shard}"
                what = f"energon needs each key once in the whole data set, and {key!r} is {where}"
                return WdsError(f"{what}. Write the shards with new keys: wds cat --rekey '{{shard}}/{{key}}'", key=key)
            seen[key] = index.header.shard
    raise AssertionError("no key comes twice")


def _identity(database: bytes) -> bytes:
    """Returns a UUID that changes with the samples, and only with them."""
    digest = blake2b(digest_size=16)
    for rows in _rows_of(database):
        digest.update(repr(rows).encode("utf-8", "surrogatepass"))
    return str(uuid.UUID(bytes=digest.digest(), version=4)).encode()


def _same_rows(there: bytes, wanted: bytes) -> bool:
    try:
        return _rows_of(there) == _rows_of(wanted)
    except sqlite3.Error:
        return False


def _rows_of(data: bytes) -> list[list[tuple[Any, ...]]]:
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(data)
        return [database.execute(query).fetchall() for query in _ROWS]
