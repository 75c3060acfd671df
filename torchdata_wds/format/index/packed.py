"""The packed index: one binary file for the samples of many shards, read in place.

All numbers are little-endian. The file is a header of 128 bytes, a table of shards, and columns of samples; each part
begins at a multiple of 8 bytes, the gaps are zeros. With S shards, T samples, K of them with a known key:

| part | type | holds |
|---|---|---|
| magic | 8 bytes | ``WDSINDEX`` |
| version | u32 | ``1`` |
| keys | u32 | 0 for ``first_dot``, 1 for ``last_dot`` |
| S, T, K | 3 u64 | |
| url bytes, tag bytes | 2 u64 | sizes of the two texts |
| digest | 8 bytes | of the whole index, over the digests of the shards |
| key check | 8 bytes | BLAKE2b of hashes and places |
| check | 8 bytes | BLAKE2b of the header, with zeros here, and of the table |
| zeros | | up to byte 128 |
| bounds | i64 [S + 1] | how many samples lie before each shard |
| tar bytes | u64 [S] | size of each archive, decompressed |
| stored bytes | i64 [S] | size of each shard as it is stored, -1 if not known |
| digests | u64 [S] | BLAKE2b of the base name, a zero byte, the offsets and the checks |
| url ends | u64 [S] | where each URL ends in the text |
| tag ends | u64 [S] | where each version tag ends in the text |
| flags | u8 [S] | 1: stored compressed, 2: special, 4: its keys are known |
| urls, tags | UTF-8 | |
| offsets | u64 [T + S] | of each shard: where its samples begin, and where the last one ends |
| hashes | u64 [K] | of the keys, in ascending order |
| places | u32 [K] | the number of the sample of each hash; u64 if T is 2**32 or more |
| checks | u32 [T] | low half of each sample's hash, 0 if not known; missing if K is 0 |

That is 24 bytes a sample. Rows are read by position (``pread``), never mapped: memory does not grow with what was read,
and a file that is cut while it is open is an error instead of a signal that ends the process.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from operator import lt
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import shard_name
from torchdata_wds.format.index.stores import PACK_AGAIN, Store, damaged

MAGIC = b"WDSINDEX"
VERSION = 1
KEY_RULES = ("first_dot", "last_dot")
COMPRESSED, SPECIAL, KEYED = 1, 2, 4
HEAD = struct.Struct("<8sIIQQQQQ8s8s8s")
HEAD_BYTES = 128
CHECK_AT = HEAD.size - 8
_STORED = {kind: np.dtype(f"<{kind}") for kind in ("u4", "u8")}
_IS_LITTLE = sys.byteorder == "little"
_BLOCK = 8192  # hashes read at once: among 10 million, a hash is seldom 4,000 places from where it is expected
_FEW_ROWS = 16
_UINT64S = [struct.Struct(f"<{count}Q") for count in range(_FEW_ROWS + 2)]
_UINT32S = [struct.Struct(f"<{count}I") for count in range(_FEW_ROWS + 1)]
Array = np.ndarray[Any, Any]


class PackedIndex:
    """A packed index that is open: its table in memory, its samples read from the store when they are asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        head = _read_head(store)
        self.keys = KEY_RULES[head.keys]
        self.digest: bytes = head.digest
        self._layout = layout = Layout.of(head)
        if store.size != layout.size:
            what = f"it has {store.size:,} bytes, and its header tells of {layout.size:,}"
            raise damaged(store.shown, f"{what}: it is {'cut off' if store.size < layout.size else 'too long'}")
        table = store.read(HEAD_BYTES, layout.offsets - HEAD_BYTES)
        if table_check(bytes(store.read(0, HEAD_BYTES)), table) != head.check:
            raise damaged(store.shown, "the check over its table of shards is wrong")
        shards = head.shards

        def column(start: int, kind: str, count: int = shards) -> Array:
            return np.frombuffer(table, np.dtype(kind), count, start - HEAD_BYTES)

        self.bounds = column(layout.bounds, "<i8", shards + 1).astype(np.int64)
        self.tar_bytes = column(layout.tar_bytes, "<u8")
        self.stored = column(layout.stored, "<i8")
        self.digests = column(layout.digests, "<u8")
        self.flags = column(layout.flags, "u1")
        self._url_ends = column(layout.url_ends, "<u8")
        self._tag_ends = column(layout.tag_ends, "<u8")
        self._texts = table, layout.urls - HEAD_BYTES, layout.tags - HEAD_BYTES
        self.known = head.known
        self.check = head.check
        self._key_check = head.key_check
        self._check_table(head)

    def _check_table(self, head: Head) -> None:
        """Looks for nonsense: a file may come from a stranger, whose checks are right."""
        columns = [(self.bounds, head.samples), (self._url_ends, head.url_bytes), (self._tag_ends, head.tag_bytes)]
        ascend = all(bool((ends[:-1] <= ends[1:]).all()) for ends, _ in columns)
        is_sane = ascend and all((ends.item(-1) if len(ends) else 0) == last for ends, last in columns)
        has_keys = (self.flags & KEYED) != 0
        if not is_sane or self.bounds.item(0) or np.diff(self.bounds)[has_keys].sum() != head.known:
            raise damaged(self.store.shown, "its table of shards makes no sense")

    def url(self, shard: int) -> str:
        """The URL of a shard, as it was listed when the index was made."""
        return self._text(self._texts[1], self._url_ends, shard)

    def tag(self, shard: int) -> str:
        """The tag of a shard's version."""
        return self._text(self._texts[2], self._tag_ends, shard)

    def _text(self, start: int, ends: Array, shard: int) -> str:
        first = int(ends[shard - 1]) if shard else 0
        return str(bytes(self._texts[0][start + first : start + int(ends[shard])]), "utf-8", "surrogateescape")

    def offsets(self, shard: int, first: int, stop: int) -> Array:
        """Where the samples of a shard begin, and the last one ends."""
        at = self.bounds.item(shard) + shard + first
        found = self._numbers(self._layout.offsets + 8 * at, "u8", stop - first + 1)
        most = self.tar_bytes.item(shard)
        if found.item(-1) > most or not (found[:-1] < found[1:]).all():
            what = f"the offsets of samples {first:,} to {stop:,} of shard {self.url(shard)} do not ascend to {most:,}"
            raise damaged(self.store.shown, what)
        return found

    def row_lists(self, shard: int, first: int, stop: int) -> tuple[list[int], list[int] | None]:
        """What `offsets` and `checks` return, as lists; for few rows without arrays, which cost more than the rows."""
        count = stop - first
        if count > _FEW_ROWS:
            checks = self.checks(shard, first, stop)
            return self.offsets(shard, first, stop).tolist(), None if checks is None else checks.tolist()
        at = self.bounds.item(shard) + first
        read, layout = self.store.read, self._layout
        offsets = _UINT64S[count + 1].unpack(read(layout.offsets + 8 * (at + shard), 8 * (count + 1)))
        if offsets[-1] > self.tar_bytes.item(shard) or not all(map(lt, offsets, offsets[1:])):
            self.offsets(shard, first, stop)  # which raises
        keyed = self.flags.item(shard) & KEYED
        return list(offsets), list(_UINT32S[count].unpack(read(layout.checks + 4 * at, 4 * count))) if keyed else None

    def checks(self, shard: int, first: int, stop: int) -> Array | None:
        """The low halves of the hashes of samples' keys; None where they are not known."""
        if not self.flags[shard] & KEYED:
            return None
        at = self.bounds.item(shard) + first
        return self._numbers(self._layout.checks + 4 * at, "u4", stop - first)

    def numbers_of(self, value: int) -> list[int]:
        """The numbers of the samples whose key has a hash, in ascending order."""
        low, high, found = 0, self.known, -1
        middle = value * self.known >> 64  # hashes are spread evenly: the first look finds the place nearly always
        while low < high:
            start = min(max(middle - _BLOCK // 2, low), max(high - _BLOCK, low))
            stop = min(start + _BLOCK, high)
            block = self._hashes(start, stop)
            if block[0] >= value and start > low:
                high = start + 1
            elif block[-1] < value:
                low = stop
            else:
                found = start + int(np.searchsorted(block, np.uint64(value)))
                break
            middle = (low + high) // 2
        numbers: list[int] = []
        while 0 <= found < self.known:
            stop = min(found + _BLOCK, self.known)
            same = int(np.searchsorted(self._hashes(found, stop), np.uint64(value), side="right"))
            numbers += self.places(found, found + same).tolist()
            found = stop if found + same == stop else -1
        numbers.sort()
        if numbers and numbers[-1] >= self.bounds.item(-1):
            raise damaged(self.store.shown, f"a key is of sample {numbers[-1]:,}, which there is not")
        return numbers

    def _hashes(self, start: int, stop: int) -> Array:
        return self._numbers(self._layout.hashes + 8 * start, "u8", stop - start)

    def places(self, start: int, stop: int) -> Array:
        """The numbers of the samples of some of the sorted hashes."""
        width = self._layout.place_bytes
        return self._numbers(self._layout.places + width * start, f"u{width}", stop - start)

    def verify(self) -> None:
        """Compares all rows with the digests in the table, and hashes and places with their check."""
        for shard, digest in enumerate(self.digests.tolist()):
            count = self.bounds.item(shard + 1) - self.bounds.item(shard)
            offsets, checks = self.offsets(shard, 0, count), self.checks(shard, 0, count)
            if shard_digest(shard_name(self.url(shard)), offsets, checks) != digest:
                raise damaged(self.store.shown, f"the rows of shard {self.url(shard)} are not those of its digest")
        if lookup_check(self._hashes(0, self.known), self.places(0, self.known)) != self._key_check:
            raise damaged(self.store.shown, "the check over the hashes of its keys is wrong")

    def all_hashes(self) -> Array:
        """The hashes of all keys, in the order of samples."""
        hashes = np.zeros(int(self.bounds[-1]), np.uint64)
        try:
            hashes[self.places(0, self.known)] = self._hashes(0, self.known)
        except IndexError as error:
            raise damaged(self.store.shown, f"a key is of a sample that there is not: {error}") from None
        return hashes

    def _numbers(self, start: int, kind: str, count: int) -> Array:
        stored = _STORED[kind]
        numbers = np.frombuffer(self.store.read(start, count * stored.itemsize), stored, count)
        return numbers if _IS_LITTLE else numbers.astype(stored.newbyteorder("="))


class Head(NamedTuple):
    """The header of a packed index."""

    magic: bytes
    version: int
    keys: int
    shards: int
    samples: int
    known: int
    url_bytes: int
    tag_bytes: int
    digest: bytes
    key_check: bytes
    check: bytes


class Layout(NamedTuple):
    """Where each part of a file begins, in bytes."""

    bounds: int
    tar_bytes: int
    stored: int
    digests: int
    url_ends: int
    tag_ends: int
    flags: int
    urls: int
    tags: int
    offsets: int
    hashes: int
    places: int
    checks: int
    size: int
    place_bytes: int  # of one place

    @classmethod
    def of(cls, head: Head) -> Layout:
        """Computes the layout from the counts in a header."""
        shards, samples, known = head.shards, head.samples, head.known
        place_bytes = 4 if samples < 1 << 32 else 8
        sizes = [8 * (shards + 1), *[8 * shards] * 5, shards, head.url_bytes, head.tag_bytes]
        sizes += [8 * (samples + shards), 8 * known, place_bytes * known, 4 * samples if known else 0]
        places = [HEAD_BYTES]
        for size in sizes:
            places.append(places[-1] + size + -size % 8)
        return cls._make([*places, place_bytes])


def shard_digest(name: str, offsets: Array, checks: Array | None) -> int:
    """The digest of one shard: of its base name, and of where its samples lie and what their keys are."""
    made = hashlib.blake2b(text_bytes(name) + b"\0", digest_size=8)
    made.update(np.ascontiguousarray(offsets, "<u8").data)
    if checks is not None:
        made.update(np.ascontiguousarray(checks, "<u4").data)
    return int.from_bytes(made.digest(), "little")


def digest_of(digests: Array) -> bytes:
    """The digest of shards in an order, from their own."""
    return hashlib.blake2b(np.ascontiguousarray(digests, "<u8").data, digest_size=8).digest()


def lookup_check(hashes: Array, places: Array) -> bytes:
    """The check over sorted hashes and their places."""
    made = hashlib.blake2b(np.ascontiguousarray(hashes, "<u8").data, digest_size=8)
    made.update(np.ascontiguousarray(places, places.dtype.newbyteorder("<")).data)
    return made.digest()


def text_bytes(text: str) -> bytes:
    """A text in UTF-8; bytes that names had instead of characters come out as they were."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # another lone surrogate, which no name on disk can have
        return text.encode("utf-8", "surrogatepass")


def table_check(head: bytes, table: Any) -> bytes:
    """The check over the header and the table of shards."""
    blank = head[:CHECK_AT] + bytes(8) + head[CHECK_AT + 8 :]
    made = hashlib.blake2b(blank, digest_size=8)
    made.update(table)
    return made.digest()


def _read_head(store: Store) -> Head:
    data = bytes(store.read(0, min(HEAD_BYTES, store.size)))
    if not data.startswith(MAGIC):
        what = f"{store.shown} is not a packed index of shards: its first bytes are {data[:16]!r}. {PACK_AGAIN}"
        raise ShardFormatError(what, shard=store.shown, kind="index")
    if len(data) < HEAD_BYTES:
        raise damaged(store.shown, f"it is cut off inside its header, after {len(data)} bytes")
    head = Head._make(HEAD.unpack_from(data))
    if head.version == VERSION << 24:
        raise damaged(store.shown, "its numbers are in the other byte order")
    if head.version != VERSION:
        raise damaged(store.shown, f"its version is {head.version}, and {VERSION} is the one that is known here", "")
    if head.keys >= len(KEY_RULES) or head.known > head.samples:
        raise damaged(store.shown, "its header makes no sense")
    return head
