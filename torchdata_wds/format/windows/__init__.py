"""Finds the members of a window of an archive: all its headers are checked together, as columns of an array.

Only plain members are found: regular files with ustar magic, octal numbers and a right checksum, also after long names
and PAX records that change nothing but the name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from torchdata_wds.format.headers import BLOCK, PAX_HEADER, full_name, text
from torchdata_wds.format.windows.columns import Array, sizes_of
from torchdata_wds.format.windows.walking import PLAIN_FILE, Members, read_extension

_WORDS = BLOCK // 8
_MAGIC = int.from_bytes(b"usta", "little")  # the four bytes at 257 of each header
_PAX = PAX_HEADER[0]


@dataclass
class Window:
    """The members of a window, in columns; none by default."""

    data: bytes
    begins: Sequence[int] | Array = ()
    starts: Sequence[int] = ()
    ends: Sequence[int] = ()
    nexts: Sequence[int] | Array = ()
    names: Sequence[str] = ()
    lasts: Sequence[int] = ()  # the rows that the next one does not follow directly, but something else or an inner tar

    def members_at(self, position: int) -> Members:
        """Returns the adjacent members from a position on, where an entry must begin; none if no plain one does."""
        first = bisect_left(self.begins, position)
        if first == len(self.begins) or self.begins[first] != position:
            return Members((), (), (), position)
        rows = slice(first, self.lasts[bisect_left(self.lasts, first)] + 1)
        return Members(self.names[rows], self.starts[rows], self.ends[rows], int(self.nexts[rows.stop - 1]))


def find_members(data: bytes) -> Window:
    """Finds the members that lie whole in a window, which begins at an entry, and those of tars inside them."""
    blocks = len(data) // BLOCK
    magics: Array = np.ndarray((blocks,), "<u4", data, 257, (BLOCK,)) if blocks else np.zeros(0)
    rows = (magics == _MAGIC).nonzero()[0]
    if not len(rows):
        return Window(data)
    words: Array = np.frombuffer(data, "<u8", blocks * _WORDS).reshape(blocks, _WORDS)
    heads: Array = words.take(rows, axis=0)
    used: Array = np.bitwise_or.reduce(heads, axis=0)  # most words of a header are zero in all rows
    sizes, is_sound = sizes_of(heads, used)
    begins = rows * BLOCK
    starts = begins + BLOCK
    ends = starts + sizes
    nexts = ends + (-sizes & BLOCK - 1)
    is_sound &= nexts <= blocks * BLOCK
    kinds = heads.view(np.uint8)[:, 156]
    is_file = is_sound & (kinds == PLAIN_FILE)
    tails: list[tuple[int, ...]] = []
    if not is_file.all():
        is_extended = is_sound & (kinds > PLAIN_FILE)
        if is_extended.any():
            begins = _pass_dates(data, (begins, sizes, nexts), kinds == _PAX, is_file, is_extended)
            columns = (begins, starts, ends, nexts, kinds)
            tails = list(zip(*(column[is_extended].tolist() for column in columns), strict=True))
        files = is_file.nonzero()[0]
        begins, starts, ends, nexts = (column[files] for column in (begins, starts, ends, nexts))
        heads = heads.take(files, axis=0)
    names, have_folders = _names(heads, used)
    if tails:
        _extend(data, begins, names, tails)
    if tails or have_folders:
        kept = [row for row, name in enumerate(names) if not name.endswith("/")]
        begins, starts, ends, nexts = (column[kept] for column in (begins, starts, ends, nexts))
        names = [names[row] for row in kept]
    lasts = [*(nexts[:-1] != begins[1:]).nonzero()[0].tolist(), len(names) - 1]
    return Window(data, begins, starts.tolist(), ends.tolist(), nexts, names, lasts)


_DATES = [int.from_bytes(b" %ctime" % kind, "little") for kind in b"mca"]  # bytes 2 to 7 of a record
_TWO_BYTES, _BYTE, _ZERO = np.uint64(16), np.uint64(8), np.uint64(ord("0"))
_LOW = np.uint64(0xFF)
_EQUALS, _NEWLINE = b"=\n"


def _pass_dates(
    data: bytes, places: tuple[Array, Array, Array], is_pax: Array, is_file: Array, is_extended: Array
) -> Array:
    """Lets files begin with the PAX headers right before them that hold nothing but dates; returns all begins.

    `places` are where headers begin, the sizes of what follows, and where the next header is. Those PAX headers are
    taken out of `is_extended`.
    """
    begins, sizes, nexts = places
    follows = nexts[:-1] == begins[1:]
    taken = is_pax[:-1] & is_extended[:-1] & is_file[1:] & follows & (sizes[:-1] > 0) & (sizes[:-1] <= BLOCK)
    taken[1:] &= ~(is_extended[:-2] & follows[:-1])  # several before one file
    rows = taken.nonzero()[0]
    if not len(rows):
        return begins
    starts = begins[rows] + BLOCK
    rows = rows[_are_dates(data, starts, starts + sizes[rows])]
    is_extended[rows] = False
    begins = begins.copy()
    begins[rows + 1] = begins[rows]
    return begins


def _are_dates(data: bytes, starts: Array, ends: Array) -> Array:
    """Returns which parts of the data are nothing but sound records of dates, of 10 to 99 bytes.

    A header must follow each part, since eight bytes are read at once.
    """
    octets: Array = np.frombuffer(data, np.uint8)
    words: Array = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))  # that begin at each byte
    are_dates = np.ones(len(starts), np.bool_)
    rows, positions = np.arange(len(starts)), starts
    while len(rows):
        heads = words[positions]
        tens, ones = (heads & _LOW) - _ZERO, (heads >> _BYTE & _LOW) - _ZERO  # below "0" they wrap to large numbers
        keywords = heads >> _TWO_BYTES
        is_date = (keywords == _DATES[0]) | (keywords == _DATES[1]) | (keywords == _DATES[2])
        is_date &= (tens - np.uint64(1) < 9) & (ones < 10)
        record_ends = positions + (tens * np.uint64(10) + ones).astype(np.int64)
        is_date &= (octets[positions + 8] == _EQUALS) & (record_ends <= ends)
        is_date &= octets[np.where(is_date, record_ends, 1) - 1] == _NEWLINE
        are_dates[rows] = is_date
        go_on = is_date & (record_ends < ends)
        rows, positions, ends = rows[go_on], record_ends[go_on], ends[go_on]
    return are_dates


_NAME = 12  # words of the name; its last four bytes are in another word
_PREFIX, _PREFIX_BIT = 345 // 8, 8 * (345 % 8)
_LINE_END = ord("\n") << 56  # after seven NULs, so that a NUL comes before each


def _names(heads: Array, used: Array) -> tuple[list[str], bool]:
    """Returns the names of members, and whether some may be those of folders; `used` has the bits set in any row."""
    filled = used[:_NAME].nonzero()[0]
    width = int(filled[-1]) + 1 if len(filled) else 0
    lines = np.empty((len(heads), width + 1), "<u8")
    lines[:, :width] = heads[:, :width]
    lines[:, width] = _LINE_END
    joined = text(lines.tobytes().translate(None, b"\0"))
    names = joined.split("\n")
    names.pop()
    are_zeros = lines.view(np.uint8).ravel() == 0
    # A NUL comes before something else once in each line, before its end; more often if a name goes on after a NUL.
    is_sound = np.count_nonzero(are_zeros[:-1] > are_zeros[1:]) == len(names) == len(heads)
    octets = heads.view(np.uint8)
    if not is_sound or int(used[_NAME]) & 0xFFFFFFFF:
        names = [text(line.tobytes().partition(b"\0")[0]) for line in octets[:, :100]]
        joined = ""
    if int(used[_PREFIX]) >> _PREFIX_BIT & 0xFF:
        for row in octets[:, 345].nonzero()[0].tolist():
            names[row] = text(full_name(octets[row].tobytes()))
        joined = ""
    return names, not joined or "/\n" in joined


def _extend(data: bytes, begins: Array, names: list[str], extended: Iterable[tuple[int, ...]]) -> None:
    """Lets members begin with the extended headers right before them, and have the names that those give."""
    # A member keeps its own begin if its header says more, or if it has several: no walk over the entries comes to it.
    before: dict[int, tuple[int, dict[str, bytes]]] = {}  # where the next header lies: the entry's begin and records
    for begin, start, end, after, kind in extended:
        records = read_extension(kind, data[start:after], end - start)
        if before.pop(begin, None) is None and records is not None:
            before[after] = begin, records
    for row, begin in enumerate(begins.tolist() if before else ()):
        if begin in before:
            begins[row], own = before[begin]
            names[row] = text(own["path"]) if own.get("path") else names[row]
