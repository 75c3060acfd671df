"""What differs between an index and the one that its shard should have."""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from torchdata_wds.cli.terminal import counted
from torchdata_wds.format.index import IndexedSample, IndexHeader, ShardIndex
from torchdata_wds.format.index.columns import ShardColumns
from torchdata_wds.format.index.dataset import DatasetIndex, ShardEntry
from torchdata_wds.format.index.packed import COMPRESSED, SPECIAL
from torchdata_wds.storage.byte_streams import StoredVersion

MISSING, STALE, WRONG = "missing", "stale", "wrong"  # stale: of another version of the shard
Fault = tuple[str, str]  # one of these words, and what differs
_SHOWN = 60


def difference(found: ShardIndex, shard: ShardIndex, shown: str) -> Fault | None:
    """Returns the fault of an index and the first difference; `shard` is the index that the shard should have.

    What only one of them knows, such as the stored size of a remote shard, is not compared.

    Raises:
        ShardFormatError: if a line of the index is damaged.
    """
    one, other = found.header, shard.header
    if one.shard != other.shard:
        return WRONG, f"{shown} is the index of {one.shard!r:.{_SHOWN}}"
    if one.keys != other.keys:
        return WRONG, f"{shown} was made with --keys {one.keys}, not {other.keys}"
    if what := _change(_version(one), _version(other), one, other):
        return STALE, f"{shown} is of another version of the shard, which {what}"
    if None not in (one.special, other.special) and one.special != other.special:
        return WRONG, f"{shown} says that it has {_listed(one.special)}; it has {_listed(other.special)}"
    if one.samples != other.samples:
        return WRONG, f"{shown} has {counted(one.samples, 'sample')}; the shard has {other.samples:,}"
    for number, (was, now) in enumerate(zip(found, shard, strict=True)):
        if was[:3] != now[:3]:
            return WRONG, f"sample {number:,} is {_described(was)} in {shown}; {_described(now)} in the shard"
        if was != now:
            return WRONG, f"sample {number:,}, {_described(now)}, has other members in {shown}"
    return None


def packed_difference(found: DatasetIndex, shard: ShardColumns, keys: str, shown: str) -> Fault | None:
    """Returns the fault of a packed index of one shard and the first difference, as `difference`."""
    entry = found.shards[0]
    if found.keys != keys:
        return WRONG, f"{shown} was made with --keys {found.keys}, not {keys}"
    compressed, special = bool(shard.flags & COMPRESSED), bool(shard.flags & SPECIAL)
    other = ShardEntry(entry.url, entry.samples, shard.tar_bytes, shard.version, compressed, special)
    if what := _change(entry.version, other.version, entry, other):
        return STALE, f"{shown} is of another version of the shard, which {what}"
    if entry.special != special:
        return WRONG, f"{shown} is wrong about hard links and global headers"
    if entry.samples != (samples := len(shard.offsets) - 1):
        return WRONG, f"{shown} has {counted(entry.samples, 'sample')} of it; the shard has {samples:,}"
    offsets, checks = found.rows(0, 0, samples)
    for number in np.flatnonzero(offsets != shard.offsets)[:1]:
        place = f"the end of sample {number - 1:,}" if number == samples else f"sample {number:,}"
        return WRONG, f"{place} is at byte {offsets[number]:,} in {shown}; at {shard.offsets[number]:,} in the shard"
    if checks is not None and shard.hashes is not None:
        for number in np.flatnonzero(checks != shard.hashes.astype(np.uint32))[:1]:
            return WRONG, f"sample {number:,} has another key in {shown}"
    return None


def _version(header: IndexHeader) -> StoredVersion | None:
    return None if header.bytes is None else StoredVersion(header.bytes, header.tag or "")


def _change(
    was_stored: StoredVersion | None,
    is_stored: StoredVersion | None,
    was: IndexHeader | ShardEntry,
    now: IndexHeader | ShardEntry,
) -> str:
    """Describes what shows that a shard has changed; "" if nothing does."""
    if was_stored is not None and is_stored is not None and (what := was_stored.difference(is_stored)):
        return f"has {what}"
    if was.tar_bytes != now.tar_bytes:
        return f"has an archive of {now.tar_bytes:,} bytes, expected {was.tar_bytes:,}"
    is_compressed = "is compressed" if now.compressed else "is not compressed"
    return "" if was.compressed == now.compressed else f"{is_compressed} now"


def _listed(words: Sequence[str] | None) -> str:
    return " and ".join(words or ()).replace("_", " ") or "nothing special"


def _described(sample: IndexedSample) -> str:
    return f"{sample.key!r:.{_SHOWN}} at bytes {sample.start:,} to {sample.stop:,}"


def text_difference(found: bytes, expected: str, shown: str) -> Fault | None:
    """Returns the fault of an index of lines and the first line that differs."""
    lines = found.split(b"\n"), expected.encode().split(b"\n")
    for number, (one, other) in enumerate(zip_longest(*lines), 1):
        if one != other:
            was, now = ("missing" if line is None else repr(line)[1 : 1 + _SHOWN] for line in (one, other))
            return WRONG, f"line {number:,} of {shown} is {was}; expected {now}"
    return None
