"""A window of an archive to the members that lie whole in it, all at once: headers are checked as columns of an array.

Only what every tar writer of today writes is taken: regular files with ustar magic, plain octal numbers and a right
checksum, and before them long names and PAX records that change nothing but the name. `find_members` never decides that
something is wrong: whatever it does not take is left to `TarEntries`, which tells damage from the unusual.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np

from torchdata_wds.format import headers, pax
from torchdata_wds.format.headers import BLOCK, HeaderError, full_name, text

__all__ = ["Window", "find_members", "without_members"]

_WORDS = BLOCK // 8
_MAGIC = int.from_bytes(b"usta", "little")  # the four bytes at 257 of each header
_PLAIN_FILE = ord("0")
_TELLS_MORE = re.compile(rb"size|GNU\.|\0")  # a quick look: most records are dates
_OCTAL_PLACES = 8 ** np.arange(10, -1, -1, dtype=np.int64)

Array = np.ndarray[Any, Any]


class Window:
    """The members of a window, in columns.

    Args:
        data: The window: blocks of an archive, the last one perhaps cut.
        begins: Where each member's first header lies, extended ones included; these and all others are byte offsets
            in the window.
        starts: Where its payload begins.
        ends: Where its payload ends.
        nexts: Where the next entry's header lies.
        names: Its name.
    """

    def __init__(
        self, data: bytes, begins: list[int], starts: list[int], ends: list[int], nexts: list[int], names: list[str]
    ) -> None:
        self.data = data
        self.begins = begins
        self.starts = starts
        self.ends = ends
        self.nexts = nexts
        self.names = names
        # Rows whose next row is not right behind them: something else lies between, or a tar inside the member.
        self._breaks = [] if nexts[:-1] == begins[1:] else _find_breaks(begins, nexts)
        self._breaks.append(len(begins) - 1)

    def run_at(self, position: int) -> tuple[int, int]:
        """Finds the members one right behind the other from a position on: the first row, and the one behind the last.

        An entry must begin at the position, or the rows are those of a tar inside a member.
        """
        first = bisect_left(self.begins, position)
        if first == len(self.begins) or self.begins[first] != position:
            return 0, 0
        return first, self._breaks[bisect_left(self._breaks, first)] + 1


def _find_breaks(begins: list[int], nexts: list[int]) -> list[int]:
    return [row for row, begin in enumerate(begins[1:]) if begin != nexts[row]]


def without_members(data: bytes) -> Window:
    """A window in which nothing was found."""
    return Window(data, [], [], [], [], [])


def find_members(data: bytes) -> Window:
    """Finds the members that lie whole in a window, and those of tars inside them.

    Args:
        data: Part of an archive that begins at an entry.

    Example:
        >>> import tarfile
        >>> header = tarfile.TarInfo("a.txt").tobuf()
        >>> find_members(header + header[:100]).names
        ['a.txt']
    """
    blocks = len(data) // BLOCK
    if not blocks:
        return without_members(data)
    magics: Array = np.ndarray((blocks,), "<u4", data, 257, (BLOCK,))
    rows = np.flatnonzero(magics == _MAGIC)
    if not len(rows):
        return without_members(data)
    words: Array = np.frombuffer(data, np.uint64, blocks * _WORDS).reshape(blocks, _WORDS)
    heads: Array = words.take(rows, axis=0).view(np.uint8)
    sizes, sound = _octal(heads[:, 124:135], heads[:, 135:136])
    sound &= _has_right_sum(heads)
    begins = rows * BLOCK
    starts = begins + BLOCK
    ends = starts + sizes
    nexts = ends + -sizes % BLOCK
    sound &= nexts <= blocks * BLOCK
    kinds = heads[:, 156]
    files = np.flatnonzero(sound & (kinds == _PLAIN_FILE))
    extended = sound & (kinds > _PLAIN_FILE)
    tails = [column[extended].tolist() for column in (begins, starts, ends, nexts, kinds)]
    begins, starts, ends, nexts = (column[files].tolist() for column in (begins, starts, ends, nexts))
    names = _names(heads[files])
    _extend(data, begins, names, zip(*tails, strict=True))
    return _without_folders(Window(data, begins, starts, ends, nexts, names))


def _without_folders(window: Window) -> Window:
    """Leaves out members whose name ends in a slash: a folder, or a reason for a closer look."""
    if "/\n" not in "\n".join([*window.names, ""]):
        return window
    kept = [row for row, name in enumerate(window.names) if not name.endswith("/")]
    begins, starts, ends, nexts = (
        [column[row] for row in kept] for column in (window.begins, window.starts, window.ends, window.nexts)
    )
    return Window(window.data, begins, starts, ends, nexts, [window.names[row] for row in kept])


def _octal(digits: Array, behind: Array) -> tuple[Array, Array]:
    """Reads fields of octal digits, and tells in which rows they are nothing but digits, blanks and NULs behind."""
    values = digits - np.uint8(ord("0"))  # below "0" it wraps to large numbers
    valid: Array = (values < 8).all(axis=1) & ((behind == 0) | (behind == ord(" "))).all(axis=1)
    return values @ _OCTAL_PLACES[-values.shape[1] :], valid


def _has_right_sum(heads: Array) -> Array:
    field = heads[:, 148:156]
    stored, valid = _octal(field[:, :6], field[:, 6:])
    total = heads.sum(axis=1, dtype=np.int32) - field.sum(axis=1, dtype=np.int32) + 8 * ord(" ")
    valid &= total == stored
    return valid


def _names(heads: Array) -> list[str]:
    raw = np.ascontiguousarray(heads[:, :100]).view("S100").ravel().tolist()
    joined = text(b"\n".join(raw))
    names = joined.split("\n")
    if len(names) != len(raw) or "\0" in joined:
        names = [text(name.partition(b"\0")[0]) for name in raw]
    for row in np.flatnonzero(heads[:, 345]).tolist():
        names[row] = text(full_name(heads[row].tobytes()))
    return names


def _extend(data: bytes, begins: list[int], names: list[str], extended: Iterable[tuple[int, ...]]) -> None:
    """Lets members begin with the extended headers right before them, and have the names that those give.

    A member keeps its own begin if its extended header says more, or if it has several: no walk over the entries comes
    to it there.
    """
    before: dict[int, tuple[int, dict[str, bytes]]] = {}  # where the next header lies: the entry's begin and records
    for begin, start, end, behind, kind in extended:
        records = _read_records(kind, data[start:behind], end - start)
        if before.pop(begin, None) is None and records is not None:
            before[behind] = begin, records
    for row, begin in enumerate(begins if before else ()):
        if begin in before:
            begins[row], own = before[begin]
            names[row] = text(own["path"]) if own.get("path") else names[row]


def _read_records(kind: int, content: bytes, size: int) -> dict[str, bytes] | None:
    """Reads what an extended header says; None where it is none, is damaged, or says more than a name or dates."""
    try:
        if kind == headers.LONG_NAME:
            return {"path": headers.long_name(content, size)}
        if kind not in headers.PAX:
            return None
        data = content[:size]
        records = pax.parse_records(data)
    except HeaderError:
        return None
    return None if _TELLS_MORE.search(data) and pax.says_more(records) else records
