"""What a card says about the shards: counts, fields and their sizes, from the indexes and headers."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchdata_wds.cli.card.splits import in_order
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import IndexedSample, ShardIndex
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.format.index.shard_lookup import existing_index
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.byte_streams import stored_bytes

FIRST = 5  # samples from which Hugging Face Datasets infers the fields


class FieldFacts(NamedTuple):
    """How many samples have a field, and the bytes of its content in all of them."""

    samples: int
    bytes: int


class ShardFacts(NamedTuple):
    """What is known of one shard."""

    url: str
    path: str  # as the card names it
    samples: int
    bytes: int | None  # as it is stored; None where the store does not say
    sha256: str | None
    fields: dict[str, FieldFacts]
    first: list[IndexedSample]
    kept_index: ShardIndex | None  # where it is wanted


class SetFacts:
    """What is known of all shards, and the split of each."""

    def __init__(self, shards: Sequence[ShardFacts], split_of: Mapping[str, str]) -> None:
        self.shards = shards
        self.split_of = split_of
        self.samples = sum(shard.samples for shard in shards)
        self.fields: dict[str, FieldFacts] = {}
        for shard in shards:
            for name, (samples, size) in shard.fields.items():
                before = self.fields.get(name, FieldFacts(0, 0))
                self.fields[name] = FieldFacts(before.samples + samples, before.bytes + size)

    @property
    def bytes(self) -> int | None:
        """The size of all shards as they are stored; None where that of one is not known."""
        return total_bytes(self.shards)

    def by_split(self) -> dict[str, list[ShardFacts]]:
        """Returns the shards of each split; the usual splits first."""
        splits: dict[str, list[ShardFacts]] = {split: [] for split in in_order(self.split_of.values())}
        for shard in self.shards:
            splits[self.split_of[shard.path]].append(shard)
        return splits


def total_bytes(shards: Sequence[ShardFacts]) -> int | None:
    """Adds the stored sizes of shards; returns None where one is not known."""
    sizes = [shard.bytes for shard in shards if shard.bytes is not None]
    return sum(sizes) if len(sizes) == len(shards) else None


def content_bytes(shards: Sequence[ShardFacts]) -> int:
    """Adds the sizes of all fields."""
    return sum(field.bytes for shard in shards for field in shard.fields.values())


def describe_shard(job: tuple[str, str], *, hashed: bool, indexed: bool) -> ShardFacts:
    """Describes a shard, given as its URL and its name in the card.

    The index beside it is used where it fits and says enough; otherwise the headers are read, and nothing is written.
    `hashed` adds the digest, for which the shard is read if its index has none; `indexed` keeps the index.
    """
    url, path = job
    index = existing_index(url, "first_dot")
    if index is not None and not (indexed and index.header.special is None):
        try:
            return _described(url, path, index, hashed, indexed)
        except ShardFormatError:
            pass  # a damaged line
    return _described(url, path, index_shard(url, to=False), hashed, indexed)


def _described(url: str, path: str, index: ShardIndex, hashed: bool, indexed: bool) -> ShardFacts:
    counts: dict[str, list[int]] = {}
    first = []
    for number, sample in enumerate(index):
        fields = sizes_of(sample)
        if number < FIRST:
            first.append(sample)
        for name, size in fields.items():
            count = counts.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += size
    header = index.header
    digest = (header.sha256 or _sha256(url)) if hashed else None
    facts = {name: FieldFacts(*count) for name, count in counts.items()}
    return ShardFacts(url, path, len(index), header.bytes, digest, facts, first, index if indexed else None)


def sizes_of(sample: IndexedSample) -> dict[str, int]:
    """Returns the sizes of the fields of a sample; the index has none for a sparse member, which counts as empty."""
    pairs = ((split_name(member.name), member.size) for member in sample.members)
    return {pair[1]: size or 0 for pair, size in pairs if pair is not None}


def _sha256(url: str) -> str:
    with stored_bytes(open_shard(url)) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
