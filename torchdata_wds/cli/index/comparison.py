"""Comparison of the index of a shard with the shard, of which only the headers are read."""

import os
from itertools import zip_longest
from typing import Literal, NamedTuple

from torchdata_wds.cli.terminal import message_of
from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index import IndexedSample, ShardIndex, dali_index
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.urls import is_local, local_path

FAULTS = MISSING, STALE, WRONG = "missing", "stale", "wrong"  # stale: of another version of the shard
_SHOWN = 60


class Comparison(NamedTuple):
    """What is wrong with an index, and how; or why its shard could not be read."""

    fault: str | None = None  # one of `FAULTS`; None if the index is right
    what: str = ""
    failure: WdsError | None = None
    samples: int = 0  # of the shard


def compare_index(
    job: tuple[str, str], *, keys: Literal["first_dot", "last_dot"] = "first_dot", dali: bool = False
) -> Comparison:
    """Compares the index at a URL, ours or DALI's, with the shard; returns failures, does not raise them."""
    url, target = job
    try:
        index = index_shard(url, keys=keys, to=False)
        expected = dali_index(index) if dali else ""
    except WdsError as error:
        return Comparison(failure=error)
    shown = mask_url(target)
    fault: tuple[str, str] | None
    try:
        if is_local(target) and not os.path.lexists(local_path(target)):
            fault = MISSING, f"it has no index {shown}"
        elif dali:
            fault = _text_difference(_read(target), expected, shown)
        else:
            fault = difference(ShardIndex.load(target), index, shown)
    except ShardFormatError as error:
        fault = WRONG, message_of(error)
    except ShardOpenError as error:
        fault = MISSING, message_of(error)
    kind, what = fault or (None, "")
    return Comparison(kind, what, samples=len(index))


def difference(found: ShardIndex, shard: ShardIndex, shown: str) -> tuple[str, str] | None:
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
    sizes = [("archive", one.tar_bytes, other.tar_bytes), ("stored file", one.bytes, other.bytes)]
    for what, old, new in sizes:
        if None not in (old, new) and old != new:
            return STALE, f"{shown} is of another version, whose {what} has {old:,} bytes; it has {new:,} now"
    if one.compressed != other.compressed:
        stored = ("not compressed", "compressed")
        return STALE, f"{shown} is of a shard that is {stored[one.compressed]}; it is {stored[other.compressed]} now"
    if one.samples != other.samples:
        return WRONG, f"{shown} has {one.samples:,} samples; the shard has {other.samples:,}"
    for number, (was, now) in enumerate(zip(found, shard, strict=True)):
        if was[:3] != now[:3]:
            return WRONG, f"sample {number:,} is {_described(was)} in {shown}; {_described(now)} in the shard"
        if was != now:
            return WRONG, f"sample {number:,}, {_described(now)}, has other members in {shown}"
    return None


def _described(sample: IndexedSample) -> str:
    return f"{sample.key!r:.{_SHOWN}} at bytes {sample.start:,} to {sample.stop:,}"


def _text_difference(found: bytes, expected: str, shown: str) -> tuple[str, str] | None:
    lines = found.split(b"\n"), expected.encode().split(b"\n")
    for number, (one, other) in enumerate(zip_longest(*lines), 1):
        if one != other:
            was, now = ("missing" if line is None else repr(line)[1 : 1 + _SHOWN] for line in (one, other))
            return WRONG, f"line {number:,} of {shown} is {was}; expected {now}"
    return None


def _read(url: str) -> bytes:
    with open_shard(url) as stream:
        return stream.read()
