"""Samples of a window that need no closer look: nothing in their headers, names and sizes could be a finding."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, count, islice, pairwise
from operator import ne
from typing import Any, NamedTuple, Self

import numpy as np

from torchdata_wds.cli.validate.oddities import is_odd_number
from torchdata_wds.format import headers
from torchdata_wds.format.headers import BLOCK, padding
from torchdata_wds.format.samples.names import GroupingRules, split_names
from torchdata_wds.format.tar.fast import LookAhead
from torchdata_wds.format.tar.members import MemberRun

# Records with a value each. One whose value has line ends looks like several, which does no harm: all are different.
_RECORDS = re.compile(rb"(?:[0-9]+ (?!size=|GNU\.)[A-Za-z.]+=[^\n\0]+\n)+")
_KEYWORD = re.compile(rb"[0-9]+ ([A-Za-z.]+)=[^\n\0]+\n")
_OWNERS, _DATE, _SIZE, _SUM = slice(100, 124), slice(136, 148), slice(124, 136), slice(148, 156)
_OCTAL_PLACES = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_number = lru_cache(1000)(headers.parse_number)
Array = np.ndarray[Any, Any]


class Windows(LookAhead):
    """Gives runs of members; a single one is left to `TarEntries`, so that its headers can be looked at."""

    def _read_member(self, read: Callable[[int], bytes]) -> None:  # noqa: ARG002
        return None


class RunOfSamples(NamedTuple):
    """A run of members as samples, which its first and last members may share with those before and after."""

    run: MemberRun  # its fields as in samples
    begins: list[int]  # where in its data each member begins, and where the last one stops
    firsts: list[int]  # the row of each sample's first member, and that after the last sample
    is_plain: list[bool]  # for each sample, whether it is plainly sound

    @classmethod
    def of(cls, run: MemberRun, begin: int, rules: GroupingRules, seen: set[int], current: str | None) -> Self | None:
        """Makes it of a run that begins at a place of its data; None where a member belongs to no sample.

        `seen` are the hashes of the keys before, without that of the `current` sample, which may go on.
        """
        columns = split_names(run.names, rules.split)
        if columns is None:
            return None
        keys, fields = columns
        run = run._replace(keys=keys, fields=[field.lower() for field in fields] if rules.lowercase else fields)
        begins = [begin, *[end + padding(end) for end in run.ends]]
        firsts = [0, *compress(count(1), map(ne, keys, islice(keys, 1, None))), len(keys)]
        odd = _odd_rows(run, begins)
        is_plain = [not any(odd[first:last]) for first, last in pairwise(firsts)]
        is_plain[0] = is_plain[-1] = False
        if rules.on_reappearing != "allow":
            hashes = [hash(keys[first]) for first in firsts[:-1]]
            counts = Counter(hashes)
            if current is not None:
                counts[hash(current)] += 1
            if len(counts) < len(is_plain) + (current is not None) or not seen.isdisjoint(counts):
                is_plain = [
                    is_sound and counts[key] == 1 and key not in seen
                    for is_sound, key in zip(is_plain, hashes, strict=True)
                ]
        return cls(run, begins, firsts, is_plain)


def _odd_rows(run: MemberRun, begins: Sequence[int]) -> list[bool]:
    """Says which members may be odd: they, or two with the same key and field."""
    starts, ends = np.array(run.starts), np.array(run.ends)
    blocks: Array = np.frombuffer(run.data, np.uint8, len(run.data) // BLOCK * BLOCK).reshape(-1, BLOCK)
    heads = blocks.take(starts // BLOCK - 1, axis=0)
    odd = (starts == ends) | (heads[:, 156] != ord("0")) | ((heads[:, 345] != 0) & (heads[:, 262] != 0))
    odd |= _no_digits(heads[:, _SIZE], 11) | _no_digits(heads[:, _SUM], 6)
    rows: list[bool] = odd.tolist()
    for place, width in ((_OWNERS, 8), (_DATE, 12)):
        raw = np.ascontiguousarray(heads[:, place]).view(f"V{place.stop - place.start}").ravel().tolist()
        numbers = {number for number in set(raw) if any(map(is_odd_number, _cut(number, width)))}
        _mark(rows, raw, numbers)
    _mark(rows, run.fields, {field for field in set(run.fields) if "__" in field})
    names = "\n".join(("", *run.names))
    if "\n/" in names or ".." in names or "\\x" in names:
        _mark(rows, run.names, {name for name in run.names if name[0] == "/" or ".." in name or "\\x" in name})
    parts = list(zip(run.keys, run.fields, strict=True))
    if len(set(parts)) < len(parts):
        _mark(rows, parts, {part for part, number in Counter(parts).items() if number > 1})
    entries = np.array(begins)
    extended = starts - entries[:-1] > BLOCK
    if extended.any():
        extended &= ~_are_dated(blocks, entries[:-1] // BLOCK, starts // BLOCK)
        for row in extended.nonzero()[0].tolist():
            rows[row] |= not _is_plain_extension(run.data, begins[row], run.starts[row] - BLOCK)
    return rows


def _are_dated(blocks: Array, first: Array, content: Array) -> Array:
    """Says which members have one PAX header before their own, with one record, ``mtime``, and zeros after it."""
    dated: Array = content - first == 3
    rows = dated.nonzero()[0]
    heads, records = blocks.take(first[rows], axis=0), blocks.take(first[rows] + 1, axis=0)
    digits = records[:, :2] - np.uint8(ord("0"))
    sizes = digits @ np.array([10, 1])
    octal = (heads[:, 124:135] - np.uint8(ord("0"))) @ _OCTAL_PLACES
    is_plain = (heads[:, 156] == headers.PAX_HEADER[0]) & (digits < 10).all(axis=1) & (sizes > 9) & (octal == sizes)
    is_plain &= (records[:, 2:9] == np.frombuffer(b" mtime=", np.uint8)).all(axis=1)
    sizes[~is_plain] = 10
    is_plain &= records[np.arange(len(rows)), sizes - 1] == ord("\n")
    is_plain &= ~((records[:, :104] != 0) & (np.arange(104) >= sizes[:, np.newaxis])).any(axis=1)
    is_plain &= ~records[:, 104:].any(axis=1)
    dated[rows] = is_plain
    return dated


def _mark(rows: list[bool], values: Sequence[Any], odd: set[Any]) -> None:
    if odd:
        rows[:] = [is_odd or value in odd for is_odd, value in zip(rows, values, strict=True)]


def _no_digits(fields: Array, digits: int) -> Array:
    """Says which fields are not that many octal digits, then blanks or NULs."""
    rest = fields[:, digits:]
    odd: Array = (fields[:, :digits] - np.uint8(ord("0")) > 7).any(axis=1) | ((rest != 0) & (rest != ord(" "))).any(
        axis=1
    )
    return odd


def _cut(raw: bytes, width: int) -> Iterator[bytes]:
    return (raw[place : place + width] for place in range(0, len(raw), width))


def _is_plain_extension(data: bytes, begin: int, end: int) -> bool:
    """Returns whether there is one extended header: a long name, or records, all different and nothing after them."""
    kind, size = data[begin + 156], _number(data[begin + 124 : begin + 136])
    start = begin + BLOCK
    if kind not in (headers.LONG_NAME, headers.PAX_HEADER[0]) or start + size + padding(size) != end:
        return False
    if kind == headers.LONG_NAME:
        return True
    found = _RECORDS.match(data, start, start + size)
    if found is None or found.end() != start + size or data[start + size : end].strip(b"\0"):
        return False
    keywords = _KEYWORD.findall(data, start, start + size)
    return len(set(keywords)) == len(keywords)
