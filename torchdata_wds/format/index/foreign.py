"""Indexes that other programs made: energon's ``.tar.idx``, the text of DALI's ``wds2idx``, counts of wids lists.

Energon's has a u64 for each sample, where it begins in the decompressed archive, and one for where the last one ends;
no keys. DALI's is ``v1.2 N``, then a line a sample: ``extension offset size name`` for each member, with the offset of
its content; ``v1.1`` is the same without names. Both split names at the first dot. Neither says which version of the
shard it is of, and both leave hard links out: by energon's index, a sample that begins with one lacks it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.format.headers import BLOCK, LONG_LINK, LONG_NAME, HeaderError, padding, parse_header
from torchdata_wds.format.index.columns import ShardColumns, key_check
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.packed import COMPRESSED, KEYED, Array
from torchdata_wds.format.index.sidecars import beside
from torchdata_wds.format.index.url_table import UrlTable
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.storage import is_decompressed, mask_url, open_shard
from torchdata_wds.storage.byte_streams import StoredVersion

_SUFFIX = ".idx"
_DALI = re.compile(rb"(v1\.[12]) (\d{1,18})\s*(?:\n|$)")
_LONGEST_NAME = 100  # bytes that fit into a header
_LARGEST = 1 << 62
_LOOKS = 4  # at members that may have long names: a shard is of one format


def foreign_urls(shard: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns where energon and DALI write the index of a shard by default.

    Example:
        >>> foreign_urls("d/x.tar")
        ('d/x.tar.idx', 'd/x.idx')
    """
    return beside(shard, energon_name), beside(shard, dali_name)


def energon_name(name: str) -> str:
    """Returns the name of energon's index of a shard."""
    return name + _SUFFIX


def dali_name(name: str) -> str:
    """Returns the name that DALI's own ``wds2idx`` gives the index of a shard: that up to its first dot counts."""
    dot = name.find(".", 1)
    return (name if dot < 0 else name[:dot]) + _SUFFIX


def load_foreign(
    url: str | os.PathLike[str],
    shard: str,
    *,
    version: StoredVersion | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> ShardColumns:
    """Reads an index of energon or DALI, for `DatasetIndex.of`.

    Args:
        url: The index.
        shard: The shard that it is of; some indexes of DALI cannot be read without a look into it.
        version: Which version of the shard there is now. The index must fit to its size.
        storage_options: Options by protocol, for both.

    Raises:
        ShardOpenError: if the index cannot be opened.
        ShardFormatError: if it is neither of the two, damaged, of another shard, or of no use.
    """
    with open_shard(url, storage_options=storage_options) as stream:
        data = stream.read()
    place = _Place(mask_url(url), shard, version, storage_options)
    return _read_dali(data, place) if _DALI.match(data) else _read_energon(data, place)


def check_counts(index: DatasetIndex, counts: Iterable[tuple[str, int]], source: str) -> None:
    """Compares an index with numbers of samples that another list of the shards gives, such as that of wids.

    Args:
        index: The index.
        counts: Shards by URL, which may have other folders, and the number of samples of each.
        source: Where they come from, in messages.

    Raises:
        ShardListError: if the list does not have a shard of the index, or gives another number.
    """
    pairs = list(counts)
    urls = [shard.url for shard in index.shards]
    places = UrlTable([url for url, _ in pairs], source, "number of samples").places(urls)
    for shard, place in zip(index.shards, places, strict=True):
        if shard.samples != (count := pairs[place][1]):
            raise ShardListError(
                f"{source} gives shard {mask_url(shard.url)} {count:,} samples, and it has {shard.samples:,}: the list "
                "is of another version of the shard, or counts otherwise. Correct it, or use the shards without it",
                shard=mask_url(shard.url),
            )


class _Place(NamedTuple):
    """An index and the shard that it should be of."""

    shown: str  # the index, in messages
    shard: str
    version: StoredVersion | None
    storage_options: Mapping[str, Mapping[str, Any]] | None

    def error(self, what: str) -> ShardFormatError:
        shown = mask_url(self.shard)
        message = f"index {self.shown} cannot be used for shard {shown}: {what}. Make one with index_shard"
        return ShardFormatError(message, shard=shown, kind="index")

    def columns(self, offsets: Array, hashes: Array | None) -> ShardColumns:
        """Makes columns, after a look at whether they can be of this shard."""
        last = int(offsets[-1])
        if not (offsets[:-1] < offsets[1:]).all() or (offsets % BLOCK).any():
            raise self.error("its offsets do not ascend, or are not multiples of 512")
        is_compressed = self._header_at(0)[1]
        if self.version is not None and last + BLOCK > self.version.size and not is_compressed:
            raise self.error(f"its last sample ends at byte {last:,}, and the shard has {self.version.size:,} bytes")
        flags = COMPRESSED * is_compressed | KEYED * (hashes is not None)
        return ShardColumns(self.shard, offsets, hashes, last + 2 * BLOCK, self.version, flags)

    def has_long_name(self, content: int) -> bool:
        """Whether the header before what an index takes for content is GNU's for a long name, which follows it."""
        return self._header_at(content - BLOCK)[0] in (LONG_NAME, LONG_LINK)

    def _header_at(self, offset: int) -> tuple[int, bool]:
        """Returns the type of the header at an offset of the shard, and whether it is stored compressed."""
        with open_shard(self.shard, offset=offset, storage_options=self.storage_options) as stream:
            block = stream.read(BLOCK)
            is_compressed = is_decompressed(stream)
        try:
            # the end marker of a shard without samples has no header
            return parse_header(block).kind if len(block) == BLOCK and any(block) else 0, is_compressed
        except HeaderError as error:
            raise self.error(f"the shard has no header at byte {offset:,}: {error}") from None


def _read_energon(data: bytes, place: _Place) -> ShardColumns:
    if not data or len(data) % 8:
        raise place.error(
            f"it has {len(data):,} bytes, no multiple of 8 as energon's .tar.idx, and does not begin as DALI's"
        )
    return place.columns(np.frombuffer(data, "<u8").astype(np.uint64), None)


class _Member(NamedTuple):
    """A member in DALI's index."""

    sample: str | None  # its key, or the number of its line where there are no names; None if it is of no sample
    content: int  # where DALI found its content
    size: int
    name: bytes


def _read_dali(data: bytes, place: _Place) -> ShardColumns:
    """Finds where samples begin: where the member before ends, so that extended headers go with their members."""
    members = list(_dali_members(data, place))
    stops = [member.content + member.size + padding(member.size) for member in members]
    starts = [0, *stops[:-1]]
    has_names = bool(members[0].name)
    doubtful: list[_Member] = []
    for member, before, start in zip(members, [None, *members], starts, strict=False):
        if member.content < start + BLOCK:
            raise place.error(f"its member at byte {member.content:,} lies inside the one before, which may be sparse")
        if has_names and len(member.name) >= _LONGEST_NAME:
            doubtful.append(member)
        elif before is not None and not has_names and member.content > start + BLOCK:
            doubtful.append(before)
    # DALI's tool takes GNU's header of a long name for the member's own, and the name for its content
    for member in doubtful[:_LOOKS]:
        if place.has_long_name(member.content):
            raise place.error(f"it has wrong offsets for long names as GNU tar writes them, at byte {member.content:,}")
    keys: list[str] = []
    offsets: list[int] = []
    ends: list[int] = []
    last = None
    for member, start, stop in zip(members, starts, stops, strict=True):
        if member.sample is None:
            continue
        if member.sample != last:
            last = member.sample
            keys.append(last)
            offsets.append(start)
            ends.append(stop)
        ends[-1] = stop
    # tar shows names with odd letters as it likes, \303\274 for example, which are not the names in the archive
    is_known = has_names and b"\\" not in data
    hashes = np.array([key_check(key) for key in keys], np.uint64) if is_known else None
    return place.columns(np.array([*offsets, *(ends or starts)[-1:]], np.uint64), hashes)


def _dali_members(data: bytes, place: _Place) -> Iterator[_Member]:
    head, *lines = data.split(b"\n")
    found = _DALI.match(head)
    if lines and not lines[-1]:
        lines.pop()
    if found is None or len(lines) != int(found[2]) or not lines:
        raise place.error(f"it has {len(lines):,} lines after its first, {head[:40]!r}")
    width = 4 if found[1] == b"v1.2" else 3
    for number, line in enumerate(lines):
        words = line.split()
        columns = [words[column::width] for column in range(width)]
        try:
            if not words or len(words) % width:
                raise ValueError("its words are not those of whole members")
            for _, content, size, *name in zip(*columns, strict=True):
                pair = split_name(str(name[0], "utf-8", "surrogateescape")) if name else (str(number),)
                begin, length = int(content), int(size)
                if not (0 <= begin < _LARGEST and 0 <= length < _LARGEST):
                    raise ValueError(f"no member can have {length:,} bytes from byte {begin:,} on")
                yield _Member(None if pair is None else pair[0], begin, length, name[0] if name else b"")
        except ValueError as error:
            raise place.error(f"line {number + 2:,} is damaged, or has names with blanks: {error}") from None
