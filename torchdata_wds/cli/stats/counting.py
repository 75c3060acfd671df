"""Counts samples by shard, in processes, and adds up the shards in order: exact for any number of processes."""

import argparse
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.cli.inputs import SampleReader, list_inputs
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.stats.keys import KeyTally
from torchdata_wds.cli.stats.tallies import LONGEST_LABEL, FieldTally, Place
from torchdata_wds.cli.terminal import Progress, message_of, say
from torchdata_wds.cli.validate.findings import FieldSets
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

MOST_FIELDS = 10_000  # data with ever new fields must not fill the memory
_NO_DIGEST = bytes(16)

Digests = np.ndarray[Any, np.dtype[np.uint64]]  # two columns: 128 bits for each sample


class ShardTally:
    """Counts the samples of one shard."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.samples = self.bytes = 0
        self.fields: dict[str, FieldTally] = {}
        self.other_fields = 0  # members of fields after the first `MOST_FIELDS`
        self.field_sets = FieldSets()
        self.keys = KeyTally(shard)
        self.contents: Digests = _digests([])
        self.largest: Digests = _digests([])  # of each sample's largest member; zeros if that is short
        self.left_out: Counter[str] = Counter()
        self.losses: list[str] = []

    def read(self, samples: Iterator[Mapping[str, Any]]) -> None:
        """Counts all samples of the shard."""
        keys: list[str] = []
        contents: list[bytes] = []
        largest: list[bytes] = []
        for sample in samples:
            keys.append(sample["__key__"])
            place = Place(self.shard, keys[-1])
            self.field_sets.add(sample, *place, 0)
            whole, size, main = sha256(), LONGEST_LABEL, _NO_DIGEST
            for name in sorted(sample):
                if is_metadata(name):
                    continue
                data = sample[name]
                self._count(name, data, place)
                digest = sha256(data).digest()
                whole.update(name.encode(errors="surrogatepass") + b"\0" + digest)
                if len(data) > size:
                    size, main = len(data), digest[:16]
            contents.append(whole.digest()[:16])
            largest.append(main)
        self.samples = len(keys)
        self.keys.take(keys)
        self.contents, self.largest = _digests(contents), _digests(largest)

    def _count(self, name: str, data: bytes, place: Place) -> None:
        self.bytes += len(data)
        if (field := self.fields.get(name)) is None:
            if len(self.fields) >= MOST_FIELDS:
                self.other_fields += 1
                return
            field = self.fields[name] = FieldTally(name)
        field.add(data, place)


def _digests(digests: Sequence[bytes]) -> Digests:
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


class ShardCounts(NamedTuple):
    """One shard in numbers."""

    shard: str  # the URL, credentials masked
    samples: int
    bytes: int  # of the members' contents


class DatasetTally:
    """The counts of all shards; memory grows by about 160 bytes a sample, mostly while duplicates are searched for."""

    def __init__(self) -> None:
        self.shards: list[ShardCounts] = []
        self.fields: dict[str, FieldTally] = {}
        self.other_fields = 0
        self.field_sets = FieldSets()
        self.keys: list[KeyTally] = []
        self.contents: list[Digests] = []
        self.largest: list[Digests] = []
        self.left_out: Counter[str] = Counter()
        self.lost = 0
        self.damaged: list[str] = []  # shards that lost something

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(shard.samples for shard in self.shards)

    def add(self, shard: ShardTally) -> None:
        """Adds the counts of the next shard."""
        self.shards.append(ShardCounts(shard.shard, shard.samples, shard.bytes))
        for name, field in shard.fields.items():
            if name in self.fields:
                self.fields[name].update(field)
            elif len(self.fields) < MOST_FIELDS:
                self.fields[name] = field
            else:
                self.other_fields += len(field.sizes)
        self.other_fields += shard.other_fields
        self.field_sets.update(shard.field_sets)
        self.keys.append(shard.keys)
        self.contents.append(shard.contents)
        self.largest.append(shard.largest)
        self.left_out.update(shard.left_out)
        self.lost += len(shard.losses)
        if shard.losses:
            self.damaged.append(shard.shard)


class _TallyReader(SampleReader):
    """Keeps the messages of what it skips: it may read in another process, which does not know of the progress bar."""

    def __init__(self, arguments: argparse.Namespace, urls: Sequence[str], *, hidden: bool) -> None:
        super().__init__(arguments, urls=urls, hidden=hidden)
        self.losses: list[str] = []

    def refuse(self, error: Exception) -> None:
        """Keeps what would be said about a sample that cannot be used, or raises the error."""
        if not self._skips:
            raise error
        self.losses.append(message_of(error))


def tally_shards(
    arguments: argparse.Namespace, urls: Sequence[str], processes: int
) -> Generator[ShardTally, None, None]:
    """Yields the counts of each shard that the arguments of `add_input_arguments` choose, in order."""
    if arguments.slice is not None:  # of the whole stream: only one process can count in it
        yield from _tally_stream(arguments, urls)
        return
    with closing(map_in_order(partial(_tally_shard, arguments), urls, 1 if STDIN in urls else processes)) as tallies:
        yield from tallies


def _tally_shard(arguments: argparse.Namespace, url: str) -> ShardTally:
    reader = _TallyReader(arguments, [url], hidden=True)
    tally = ShardTally(mask_url(url))
    with closing(iter(reader)) as samples:
        tally.read(samples)
    tally.left_out, tally.losses = reader.left_out(), reader.losses
    return tally


def _tally_stream(arguments: argparse.Namespace, urls: Sequence[str]) -> Generator[ShardTally, None, None]:
    """Yields the counts of each shard from which a slice of the whole stream takes samples."""
    reader = _TallyReader(arguments, urls, hidden=True)
    last: ShardTally | None = None
    with closing(iter(reader)) as samples:
        for url, group in groupby(samples, key=itemgetter("__url__")):
            if last is not None:
                yield last
            last = ShardTally(mask_url(url))
            last.read(group)
    if last is None and urls:
        last = ShardTally(mask_url(urls[0]))
    if last is not None:
        last.left_out, last.losses = reader.left_out(), reader.losses  # of all shards
        yield last


def count_dataset(arguments: argparse.Namespace, processes: int) -> DatasetTally:
    """Counts the samples that the arguments of `add_input_arguments` choose, and says what it skips.

    Raises:
        WdsError, OSError: at damage, unless the arguments skip it.
    """
    urls = list_inputs(arguments)
    tally = DatasetTally()
    with (
        closing(tally_shards(arguments, urls, processes)) as shards,
        Progress("shards", urls=urls) as progress,
    ):
        for shard in shards:
            for loss in shard.losses:
                say(f"skipped: {loss}")
            tally.add(shard)
            progress.advance(shard=shard.shard, samples=shard.samples)
    return tally
