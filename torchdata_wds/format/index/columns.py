"""The samples of shards in columns, and the packed index that is made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import ShardIndex, shard_name
from torchdata_wds.format.index.packed import (
    CHECK_AT,
    COMPRESSED,
    HEAD,
    HEAD_BYTES,
    KEY_RULES,
    KEYED,
    MAGIC,
    SPECIAL,
    VERSION,
    Array,
    Head,
    Layout,
    digest_of,
    lookup_check,
    shard_digest,
    table_check,
    text_bytes,
)
from torchdata_wds.format.index.url_table import public_url
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.byte_streams import StoredVersion

_ROWS = 1000  # lines of an index that are parsed at once
_Parsed = tuple[Sequence[str], Sequence[int], Sequence[int], Sequence[Sequence[Any]]]


class ShardColumns(NamedTuple):
    """What an index knows of one shard: where each sample begins and the last one ends, and the hashes of the keys."""

    url: str
    offsets: Array  # uint64 [samples + 1]
    hashes: Array | None  # uint64 [samples], or None if the keys are not known
    tar_bytes: int
    version: StoredVersion | None = None
    flags: int = 0
    keys: str = KEY_RULES[0]  # by which rule names are split

    @classmethod
    def of(cls, url: str, index: ShardIndex) -> ShardColumns:
        """Takes the columns out of the index of a shard."""
        header = index.header
        keys, first, last, members = _parsed(index)
        try:
            hashes = np.array([key_check(key) for key in keys], np.uint64)
            starts, stops = np.array(first, np.uint64), np.array(last, np.uint64)
        except OverflowError as error:
            raise _senseless(url, str(error)) from error
        ends = np.append(starts[1:], np.uint64(header.tar_bytes))[: len(stops)]
        if not ((starts < stops) & (stops <= ends)).all():
            raise _senseless(url, "its samples do not follow each other inside the archive")
        version = None if header.bytes is None else StoredVersion(header.bytes, header.tag or "")
        flags = KEYED | COMPRESSED * header.compressed | SPECIAL * _is_special(header.special, first, members)
        offsets = np.append(starts, stops[-1:] if keys else np.uint64(0)).astype(np.uint64)
        return cls(url, offsets, hashes, header.tar_bytes, version, flags, header.keys)


class Columns(NamedTuple):
    """All that a packed index holds, in arrays: one row a shard, or one a sample."""

    keys: str  # by which rule names are split
    urls: Sequence[str]
    counts: Array  # samples of each shard
    tar_bytes: Array
    stored: Array  # sizes, -1 where not known
    tags: Sequence[str]
    flags: Array
    offsets: Array  # uint64 [samples + shards]
    hashes: Array  # uint64 [samples], of the keys; anything in shards without the flag KEYED

    @classmethod
    def of(cls, keys: str, shards: Sequence[ShardColumns]) -> Columns:
        """Puts shards one after the other."""
        counts = [len(shard.offsets) - 1 for shard in shards]
        hashes = [np.zeros(count, np.uint64) for count in counts]
        versions = [shard.version for shard in shards]
        return cls(
            keys,
            [shard.url for shard in shards],
            np.array(counts, np.int64),
            np.array([shard.tar_bytes for shard in shards], np.uint64),
            np.array([-1 if version is None else version.size for version in versions], np.int64),
            ["" if version is None else version.tag for version in versions],
            np.array([shard.flags for shard in shards], np.uint8),
            _joined(shard.offsets for shard in shards),
            _joined(made if shard.hashes is None else shard.hashes for shard, made in zip(shards, hashes, strict=True)),
        )


def key_check(key: str) -> int:
    """Returns the hash of a key, 64 bits, by which an index finds samples and readers check what they read.

    Example:
        >>> f"{key_check('a'):016x}"
        '2f42665b399ef840'
    """
    return int.from_bytes(hashlib.blake2b(text_bytes(key), digest_size=8).digest(), "little")


def pack(columns: Columns) -> bytearray:
    """Makes the bytes of a packed index; URLs are stored as `public_url` gives them."""
    columns = columns._replace(urls=list(map(public_url, columns.urls)))
    counts = np.asarray(columns.counts, np.int64)
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    is_known = np.repeat((columns.flags & KEYED) != 0, counts)
    urls, tags = ([text_bytes(text) for text in texts] for texts in (columns.urls, columns.tags))
    head = Head(
        MAGIC,
        VERSION,
        KEY_RULES.index(columns.keys),
        len(urls),
        int(bounds[-1]),
        int(is_known.sum()),
        sum(map(len, urls)),
        sum(map(len, tags)),
        bytes(8),
        bytes(8),
        bytes(8),
    )
    layout = Layout.of(head)
    image = bytearray(layout.size)

    def put(start: int, kind: str, values: Any) -> Array:
        place = np.frombuffer(image, np.dtype(kind), len(values), start)
        place[:] = values
        return place

    put(layout.bounds, "<i8", bounds)
    put(layout.tar_bytes, "<u8", columns.tar_bytes)
    put(layout.stored, "<i8", columns.stored)
    put(layout.url_ends, "<u8", np.cumsum([len(url) for url in urls], dtype=np.uint64))
    put(layout.tag_ends, "<u8", np.cumsum([len(tag) for tag in tags], dtype=np.uint64))
    put(layout.flags, "u1", columns.flags)
    put(layout.urls, "u1", np.frombuffer(b"".join(urls), np.uint8))
    put(layout.tags, "u1", np.frombuffer(b"".join(tags), np.uint8))
    offsets = put(layout.offsets, "<u8", columns.offsets)
    checks, hashes, places = np.empty(0, np.uint32), np.empty(0, np.uint64), np.empty(0, f"<u{layout.place_bytes}")
    if head.known:
        checks = put(layout.checks, "<u4", np.where(is_known, columns.hashes, 0).astype(np.uint32))
        numbers = np.flatnonzero(is_known)
        numbers = numbers[np.argsort(columns.hashes[numbers], kind="stable")]
        hashes = put(layout.hashes, "<u8", columns.hashes[numbers])
        places = put(layout.places, f"<u{layout.place_bytes}", numbers)
    digests = put(layout.digests, "<u8", list(_shard_digests(columns, bounds, offsets, checks)))
    head = head._replace(digest=digest_of(digests), key_check=lookup_check(hashes, places))
    image[: HEAD.size] = HEAD.pack(*head)
    table = memoryview(image)[HEAD_BYTES : layout.offsets]
    image[CHECK_AT : CHECK_AT + 8] = table_check(bytes(image[:HEAD_BYTES]), table)
    return image


def _shard_digests(columns: Columns, bounds: Array, offsets: Array, checks: Array) -> Iterator[int]:
    for shard, url in enumerate(columns.urls):
        first, stop = int(bounds[shard]), int(bounds[shard + 1])
        has_keys = columns.flags[shard] & KEYED
        own_offsets = offsets[first + shard : stop + shard + 1]
        yield shard_digest(shard_name(url), own_offsets, checks[first:stop] if has_keys else None)


def _joined(parts: Iterator[Array]) -> Array:
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _parsed(index: ShardIndex) -> _Parsed:
    """Parses the rows of an index to keys, starts, stops and members, many at once: that takes a fourth of the time."""
    lines = index.dump().split(b"\n")[1:-1]
    rows: list[list[Any]] = []
    try:
        for first in range(0, len(lines), _ROWS):
            rows += json.loads(b"[" + b",".join(lines[first : first + _ROWS]) + b"]")
        if len(rows) == len(lines):
            parsed = tuple(zip(*rows, strict=True)) if rows else ((), (), (), ())
            kinds = [set(map(type, column)) for column in parsed]
            if not rows or (kinds == [{str}, {int}, {int}, {list}] and all(parsed[3])):
                return cast("_Parsed", parsed)
    except (ValueError, TypeError, RecursionError):
        pass
    samples = list(index)  # which says what is wrong
    return tuple(zip(*samples, strict=True))  # type: ignore[return-value]


def _is_special(words: Sequence[str] | None, starts: Sequence[int], members: Sequence[Sequence[Any]]) -> bool:
    if words is not None:
        return not {"hard_links", "global_headers"}.isdisjoint(words)
    # an older index does not say it: a link has its content before its own sample, mostly
    places = ((start, offset) for start, own in zip(starts, members, strict=True) for _, offset, _ in own)
    return any(offset is not None and offset < start for start, offset in places)


def _senseless(url: str, why: str) -> ShardFormatError:
    shown = mask_url(url)
    what = f"the index of shard {shown} is damaged: {why}. Make it again with index_shard"
    return ShardFormatError(what, shard=shown, kind="index")
