"""One 512-byte tar header block to a `Header` (ustar, GNU, PAX and old V7), and the records of PAX headers.

The layout is that of POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header", and of the GNU tar
manual, "Basic Tar Format".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
NO_PAYLOAD = frozenset(b"123456")  # types of entries whose size counts no bytes that follow: links, folders and devices

# Solaris ACLs and attributes, GNU's folder listings, extended headers, parts of volumes, labels and sparse members.
_SPECIAL = NO_PAYLOAD | frozenset(b"AEDKLMSVXgx")
REGULAR = frozenset(range(256)) - _SPECIAL  # regular files; POSIX: what is of an unknown type is read as one
DIRECTORY = ord("5")
HARD_LINK = ord("1")
SPARSE = ord("S")
MULTI_VOLUME = ord("M")
VOLUME_LABEL = ord("V")
_FILES = REGULAR | {HARD_LINK, SPARSE}
LONG_NAME = ord("L")
LONG_LINK = ord("K")
GLOBAL_PAX = ord("g")
PAX_HEADER = b"x"
PAX = frozenset(b"xX")
EXTENSIONS = PAX | {LONG_NAME, LONG_LINK, GLOBAL_PAX}  # headers that describe the entry after them, or all

# Some programs write the size of a link's target, or of a folder's list, where nothing follows: all readers know it.
_NEVER_SIZED = frozenset({HARD_LINK, DIRECTORY})
_LARGEST_NUMBER = (1 << 63) - 1

#: What a type flag stands for, in the words that skipped members are counted by.
HEADER_WORDS = {
    ord("2"): "symbolic link",
    ord("3"): "character device",
    ord("4"): "block device",
    DIRECTORY: "directory",
    ord("6"): "FIFO",
}


class HeaderError(ValueError):
    """A block is not a valid tar header; the message says why."""


class Header(NamedTuple):
    """The fields of a header block that reading needs: the name has ustar's prefix, the size is in bytes."""

    name: bytes
    size: int
    kind: int
    link: bytes


def padding(size: int) -> int:
    """The number of bytes that fill a payload up to a whole block."""
    return -size % BLOCK


def is_file(kind: int) -> bool:
    """Returns whether entries of a type have content that could be a field: hard links and sparse files too."""
    return kind in _FILES


def text(raw: bytes) -> str:
    r"""Decodes a name: UTF-8, other bytes as ``\xNN``, so that the result can be printed, written and compared."""
    return raw.decode("utf-8", "backslashreplace")


def parse_number(field: bytes) -> int:
    """Reads a number field: octal digits, base 256 where the first byte is 0x80 or 0xff (GNU), or NULs for 0."""
    if field[0] in (0x80, 0xFF):
        number = int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
        if abs(number) > _LARGEST_NUMBER:
            raise HeaderError(f"the number {field!r} is out of range")
        return number
    digits = field.partition(b"\0")[0].strip()
    if not digits.strip(b"01234567") and (digits or not field.strip(b"\0")):
        return int(digits or b"0", 8)
    raise HeaderError(f"{field!r} is not an octal number")


def parse_header(block: bytes) -> Header:
    """Parses a header block after checking its checksum."""
    field = block[148:156]
    if field[0] >= 0x80:
        raise HeaderError(f"the checksum {field!r} is not an octal number")
    stored = parse_number(field)
    total = byte_sum(block) - sum(field) + 8 * 32  # the field itself counts as eight blanks
    if stored != total:
        high = sum(byte > 127 for byte in block[:148] + block[156:])
        if stored != total - 256 * high:  # the sum of signed bytes, as some old tars wrote it
            raise HeaderError(f"the header says checksum {stored}, its bytes give {total}")
    kind = block[156]
    size = parse_number(block[124:136])
    if size < 0:
        raise HeaderError(f"the size is negative: {size}")
    link = block[157:257].partition(b"\0")[0]
    return Header(full_name(block), 0 if kind in _NEVER_SIZED else size, kind, link)


def begins_a_tar(block: bytes) -> bool:
    """Returns whether 512 bytes are the first of a tar archive, maybe an empty one."""
    try:
        return len(block) >= BLOCK and bool(parse_header(block))
    except HeaderError:
        return not block.strip(b"\0")


def long_name(content: bytes, size: int) -> bytes:
    """Reads a GNU long name, which ends at a NUL."""
    name = content.partition(b"\0")[0]
    if not name:
        raise HeaderError("an empty long name")
    if len(name) > size:
        raise HeaderError(f"a long name that goes on after its size of {size:,} bytes")
    return name


def full_name(block: bytes) -> bytes:
    """The name in a header block; POSIX's ustar has a second field for the front part of a long one."""
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        return block[345:500].partition(b"\0")[0] + b"/" + name
    return name


def byte_sum(block: bytes) -> int:
    """Sums the bytes of a header block."""
    # adler32's low half is 1 + the byte sum modulo 65521, computed in C; half a block sums to 65,280 at most
    return (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2


_SPARSE = frozenset(f"GNU.sparse.{name}" for name in ("major", "map", "size", "realsize"))
# All that reading looks at. What else a global header says would be carried along for each of the entries after it.
RELEVANT = _SPARSE | {"path", "linkpath", "size", "GNU.sparse.minor", "GNU.sparse.name", "GNU.sparse.numblocks"}
_PAIR = ("GNU.sparse.offset", "GNU.sparse.numbytes")


def parse_records(data: bytes) -> dict[str, bytes]:
    r"""Parses the records ``length keyword=value\n`` of an extended header: values by keyword, the last of each.

    Only a sparse map of version 0.0 repeats keywords with a meaning: it is joined into ``GNU.sparse.map``, as version
    0.1 writes it.

    Example:
        >>> parse_records(b"18 path=d/a.b.jpg\n")
        {'path': b'd/a.b.jpg'}
    """
    records: dict[str, bytes] = {}
    pairs: list[bytes] = []
    for keyword, value, _ in each_record(data):
        records[keyword] = value
        if keyword in _PAIR:
            if keyword != _PAIR[len(pairs) % 2] or b"," in value:
                raise HeaderError(f"the sparse map has a {keyword} without its partner")
            pairs.append(value)
    if pairs:
        records["GNU.sparse.map"] = b",".join(pairs)
    return records


def each_record(data: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Yields keyword, value and end of each record of an extended header, as `parse_records` takes it."""
    position = 0
    while position < len(data) and data[position]:
        digits, blank, _ = data[position : position + 20].partition(b" ")
        end = position + int(digits) if blank and digits.isdigit() else 0
        keyword, equals, value = data[position + len(digits) + 1 : end].partition(b"=")
        is_sound = equals and keyword and not keyword[:1].isspace()
        if not is_sound or end > len(data) or data[end - 1 : end] != b"\n":
            raise HeaderError(f"malformed PAX record {data[position : position + 40]!r}")
        yield keyword.decode("utf-8", "backslashreplace"), value[:-1], end
        position = end


def record_number(records: dict[str, bytes], keyword: str) -> int | None:
    """The decimal number of a record, None where there is none."""
    value = records.get(keyword)
    if value is not None and (not value.isdigit() or len(value) > 19 or int(value) > _LARGEST_NUMBER):
        raise HeaderError(f"PAX record {keyword}={value[:40]!r} is not a size")
    return None if value is None else int(value)


def is_sparse(records: dict[str, bytes]) -> bool:
    """Returns whether the records describe a sparse member, in any of GNU tar's three PAX versions."""
    return not _SPARSE.isdisjoint(records)


def begins_elsewhere(records: dict[str, bytes]) -> bool:
    """Returns whether the records are those of a part of a member that begins in another volume."""
    return "GNU.volume.offset" in records or "GNU.volume.filename" in records


def says_more(records: dict[str, bytes]) -> bool:
    """Returns whether the records say more than a plain name and dates."""
    is_odd = b"\0" in records.get("path", b"") or "GNU.sparse.name" in records or begins_elsewhere(records)
    return is_odd or "size" in records or is_sparse(records)
