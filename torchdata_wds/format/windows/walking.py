"""Finds the members of a window by going from header to header, which pays off where there are few of them."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torchdata_wds.format import headers
from torchdata_wds.format.headers import BLOCK, HeaderError, byte_sum, full_name, text

PLAIN_FILE = ord("0")
_HEADER = struct.Struct("<148s8s356s")  # name, size and date; the checksum; the type and all after it
_NAME, _SIZE, _SIZE_END = 100, slice(124, 135), 135
_MAGIC, _PREFIX = slice(257 - 156, 261 - 156), 345 - 156  # in what begins with the type
_BLANKS = 8 * ord(" ")  # the checksum's own field counts as blanks
_TELLS_MORE = re.compile(rb"size|GNU\.|\0")  # a quick look at records that are not dates
_PAX = headers.PAX_HEADER[0]
# A header's only record.
_DATE = re.compile(rb"[1-9][0-9] [mac]time=[^\n]*\n")


def read_plain_header(block: bytes) -> tuple[str, int] | None:
    """Reads name and size from the header of a regular file; None where `TarEntries` must look at it."""
    if len(block) < BLOCK or block[156] != PLAIN_FILE:
        return None
    head, checksum, rest = _HEADER.unpack(block)
    digits = head[_SIZE]
    if rest[_MAGIC] != b"usta" or not digits.isdigit() or head[_SIZE_END] not in b"\0 ":
        return None
    total = (zlib.adler32(head) & 0xFFFF) + _rest_sum(rest)
    if checksum != b"%06o\0 " % total and not _is_right(checksum, total):
        return None
    name = full_name(block) if rest[_PREFIX] else head[:_NAME].partition(b"\0")[0]
    try:
        return None if name[-1:] == b"/" else (text(name), int(digits, 8))
    except ValueError:  # an 8 or a 9
        return None


@lru_cache(64)
def _rest_sum(rest: bytes) -> int:
    """Sums what follows the checksum, and the checksum's blanks, less the 1 that `zlib.adler32` adds to the head."""
    return byte_sum(rest) + _BLANKS - 1


class Members(NamedTuple):
    """Adjacent members of a window, in columns, and where the last of them ends with its padding."""

    names: Sequence[str]
    starts: Sequence[int]  # of their contents
    ends: Sequence[int]
    end: int


def walk_members(data: bytes, position: int = 0, largest: int = sys.maxsize) -> Members:
    """Finds members from an entry on, up to the first that is not plain, not whole, or larger than `largest` bytes."""
    names: list[bytes] = []
    starts: list[int] = []
    ends: list[int] = []
    own: dict[str, bytes] | None = None  # what the extended header right before says
    last, base = b"", 0  # what follows the checksum, which most headers of a shard have in common, and its sum
    passed, blocks_end = position, len(data) - len(data) % BLOCK
    unpack, adler32 = _HEADER.unpack_from, zlib.adler32
    while position < blocks_end:
        head, checksum, rest = unpack(data, position)
        if rest != last:
            if rest[_MAGIC] != b"usta":
                break
            last, base = rest, _rest_sum(rest)
        digits = head[_SIZE]  # from here on as in `read_plain_header`, inline, which is faster
        total = base + (adler32(head) & 0xFFFF)  # as in `byte_sum`
        if not digits.isdigit() or head[_SIZE_END] not in b"\0 ":
            break
        if checksum != b"%06o\0 " % total and not _is_right(checksum, total):
            break
        try:
            size = int(digits, 8)
        except ValueError:  # an 8 or a 9
            break
        start = position + BLOCK
        end = start + size
        position = end + (-size & BLOCK - 1)
        if position > blocks_end or size > largest:
            break
        if rest[0] != PLAIN_FILE:
            own = read_extension(rest[0], data[start:position], size) if own is None else None
            if own is None:
                break
            continue
        name = head[:_NAME].partition(b"\0")[0] if not rest[_PREFIX] else full_name(data[start - BLOCK : start])
        if own is not None:
            name, own = own.get("path") or name, None
        if name[-1:] == b"/":
            break
        names.append(name)
        starts.append(start)
        ends.append(end)
        passed = position
    return Members(text(b"\0".join(names)).split("\0") if names else (), starts, ends, passed)


def _is_right(checksum: bytes, total: int) -> bool:
    """Returns whether a field holds a checksum as tar programs write it: six or seven digits, then NULs or blanks."""
    return checksum.rstrip(b"\0 ") in (b"%06o" % total, b"%07o" % total)


def read_extension(kind: int, content: bytes, size: int) -> dict[str, bytes] | None:
    """Reads what an extended header says; None if it is another kind, damaged, or says more than a name or dates.

    Dates and other records that reading ignores may be missing.
    """
    try:
        if kind == _PAX and _DATE.fullmatch(content, 0, size) is not None and int(content[:2]) == size:
            return {}
        if kind == headers.LONG_NAME:
            return {"path": headers.long_name(content, size)}
        data = content[:size]
        records = headers.parse_records(data) if kind in headers.PAX else None
    except HeaderError:
        return None
    return None if records and _TELLS_MORE.search(data) and headers.says_more(records) else records
