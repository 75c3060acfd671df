"""Headers that other programs read in another way than we do, or that no writer of today writes.

``torchdata_wds/docs/tar-differences.md`` lists what GNU tar and Python's tarfile make of each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torchdata_wds.format.tar import headers
from torchdata_wds.format.tar import headers as pax
from torchdata_wds.format.tar.entries import TarEntry
from torchdata_wds.format.tar.headers import (
    BLOCK,
    DIRECTORY,
    HARD_LINK,
    REGULAR,
    full_name,
    is_file,
    parse_number,
    text,
)
from torchdata_wds.format.tar.sparse_maps import Segments

__all__ = ["odd_headers", "odd_pieces"]


_NUMBER = re.compile(rb" *[0-7]+[ \0]*|\0*|[\x80\xff].*", re.DOTALL)

_NUMBERS = {"mode": (100, 108), "owner": (108, 116), "group": (116, 124), "size": (124, 136), "date": (136, 148)}

_NUMBERS["checksum"] = (148, 156)

_KNOWN_FILES = frozenset(b"\x0007")

_LARGEST_OCTAL = 8**11 - 1

_REPEATED = {headers.LONG_NAME: "long names", headers.LONG_LINK: "long links"}

_PIECES_OF_MAPS = ("GNU.sparse.offset", "GNU.sparse.numbytes")

#: A word for an oddity, and a message that begins after the member's name.
Oddity = tuple[str, str]


def odd_headers(entry: TarEntry, blocks: Sequence[bytes]) -> Iterator[Oddity]:
    """Says what is odd about the headers of an entry.

    Args:
        entry: The entry.
        blocks: Its headers: each extended one as its block and its content, then its own block.

    Yields:
        A word for each oddity and a message.

    Example:
        >>> import tarfile
        >>> block = tarfile.TarInfo("a.txt/").tobuf(tarfile.USTAR_FORMAT)
        >>> [kind for kind, _ in odd_headers(TarEntry("a.txt/", ord("5"), 0, "", 0), [block])]
        ['folder-as-file']
    """
    extended, block = _divide(blocks)
    kinds = Counter("PAX headers" if kind in headers.PAX else _REPEATED[kind] for kind, _, _ in extended)
    for what, count in kinds.items():
        if count > 1:
            yield "repeated-header", f"has {count} {what}; only the last one counts, and for other programs the first"
    records: dict[str, bytes] = {}
    for kind, data, has_more in extended:
        if kind in headers.PAX:
            records = pax.parse_records(data)
            yield from _odd_records(data, has_more)
    long_names = [data.partition(b"\0")[0] for kind, data, _ in extended if kind == headers.LONG_NAME]
    if long_names and records.get("path", long_names[-1]) != long_names[-1]:
        yield "two-names", f"has two long names: {text(records['path'])!r} counts, not {text(long_names[-1])!r}"
    yield from _odd_sizes(records, block)
    yield from _odd_block(entry, block)


def odd_pieces(segments: Segments, size: int) -> Iterator[Oddity]:
    """Says what is odd about a right sparse map.

    Args:
        segments: The map.
        size: The bytes of the full content.
    """
    if any(length % BLOCK for _, length in segments[:-1]):
        yield "sparse-pieces", f"is sparse with pieces that are not whole blocks of {BLOCK} bytes: GNU tar misreads it"
    if (sum(segments[-1]) if segments else 0) < size:
        yield "sparse-end", "is sparse, and its map ends before its size: GNU tar gives less"


def _divide(blocks: Sequence[bytes]) -> tuple[list[tuple[int, bytes, bool]], bytes]:
    """Gives each extended header's type, its content and whether more follows it, and the entry's own block."""
    extended = []
    place = 0
    while blocks[place][156] in headers.EXTENSIONS:
        size = parse_number(blocks[place][124:136])
        content = blocks[place + 1]
        has_more = blocks[place][156] in headers.PAX and content[size:].strip(b"\0") != b""
        extended.append((blocks[place][156], content[:size], has_more))
        place += 2
    return extended, blocks[place]


def _odd_records(data: bytes, has_more: bool) -> Iterator[Oddity]:
    found = list(pax.each_record(data))
    repeated = Counter(keyword for keyword, _, _ in found if keyword not in _PIECES_OF_MAPS)
    for keyword, count in repeated.items():
        if count > 1:
            yield "repeated-record", f"has the PAX record {keyword!r} {count} times; the last one counts"
    for keyword, value, _ in found:
        if keyword in ("path", "linkpath", "GNU.sparse.name"):
            if b"\0" in value:
                yield "nul-in-name", f"has a NUL in its PAX record {keyword!r}: the name ends there"
            elif not value:
                yield "empty-record", f"has an empty PAX record {keyword!r}, which other programs take for its name"
    names = [keyword for keyword, _, _ in found if keyword in ("path", "GNU.sparse.name")]
    if len(set(names)) > 1 and names[-1] == "path":
        yield "two-names", "has a PAX path after its name as a sparse member; for other programs the path counts"
    if has_more or data[found[-1][2] if found else 0 :].strip(b"\0"):
        yield "bytes-after-records", "has other bytes after its PAX records"


def _odd_sizes(records: dict[str, bytes], block: bytes) -> Iterator[Oddity]:
    size = parse_number(block[124:136])
    other = pax.record_number({keyword: value for keyword, value in records.items() if value}, "size")
    if other is not None and other != size and other <= _LARGEST_OCTAL:
        yield "two-sizes", f"has {other:,} bytes by its PAX record and {size:,} by its header; the record counts"
    if block[156] == HARD_LINK and size:
        yield "sized-link", f"is a hard link with a size of {size:,} bytes; some programs expect content after it"


def _odd_block(entry: TarEntry, block: bytes) -> Iterator[Oddity]:
    kind, name = block[156], full_name(block)
    if entry.kind == DIRECTORY and (kind in _KNOWN_FILES - {0} or (kind == 0 and not name.endswith(b"/"))):
        yield "folder-as-file", "is a folder by the slash at its end, and a file by its type"
    if kind == 0 and is_file(entry.kind) and name.endswith(b"/"):
        yield "file-as-folder", f"is a folder by its short name {text(name)!r}, and a file by its long one"
    if kind in REGULAR - _KNOWN_FILES:
        yield "unknown-type", f"is of the unknown type {chr(kind)!r}; it is read as a file, as POSIX says"
    if block[345] and block[257:263] != b"ustar\0" and chr(kind) not in "SM":
        yield (
            "prefix",
            "has bytes at the place of a name's prefix in a header that is not ustar: others read a name there",
        )
    if entry.sparse is not None and block[257:263] != (b"ustar " if kind == headers.SPARSE else b"ustar\0"):
        yield (
            "sparse-magic",
            "is sparse by its type or its PAX records, in a header of another format: GNU tar misreads it",
        )
    for what, (start, stop) in _NUMBERS.items():
        if _NUMBER.fullmatch(block[start:stop]) is None:
            yield "odd-number", f"has {block[start:stop]!r} as its {what}, which other programs refuse"
