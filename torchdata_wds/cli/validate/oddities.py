"""Headers and names that loaders skip, that other programs read differently, or that no current writer makes.

``torchdata_wds/docs/tar-differences.md`` lists how GNU tar and Python's tarfile read each.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torchdata_wds.format import headers
from torchdata_wds.format.headers import BLOCK, DIRECTORY, HARD_LINK, full_name, is_file, parse_number, text
from torchdata_wds.format.samples.names import skip_reason, split_name
from torchdata_wds.format.tar.entries import TarEntry
from torchdata_wds.format.tar.sparse_maps import Segments

_NUMBER = re.compile(rb" *[0-7]+[ \0]*|\0*|[\x80\xff].*", re.DOTALL)
_FIELDS = {"mode": (100, 108), "owner": (108, 116), "group": (116, 124), "size": (124, 136), "date": (136, 148)}
_NUMBERS = {what: slice(*place) for what, place in {**_FIELDS, "checksum": (148, 156)}.items()}
_KNOWN_FILES = frozenset(b"\x0007")
_LARGEST_OCTAL = 8**11 - 1
_REPEATED = {headers.LONG_NAME: "long names", headers.LONG_LINK: "long links"}
_PIECES_OF_MAPS = ("GNU.sparse.offset", "GNU.sparse.numbytes")

_REASONS = {
    "macOS metadata": "macOS writes such files next to the real ones",
    "metadata": "names that begin with a part of the form __x__ belong to no sample",
    "hidden file": "its name begins with a dot",
    "empty extension": "nothing follows the dot",
    "no extension": "a field is what follows a dot",
}

#: A word for an oddity, and a message.
Oddity = tuple[str, str]


def odd_headers(entry: TarEntry, blocks: Sequence[bytes]) -> Iterator[Oddity]:
    """Reports what is odd about an entry's headers: each extended one as block and content, then its own block."""
    # A member with a GNU long name and a PAX header has five blocks: the long name's header and content, the PAX
    # header and content, its own header. Byte 156 of a header is the type, bytes 124 to 136 are the size.
    extended = []
    place = 0
    while blocks[place][156] in headers.EXTENSIONS:
        kind, content = blocks[place][156], blocks[place + 1]
        size = parse_number(blocks[place][124:136])
        extended.append((kind, content[:size], kind in headers.PAX and content[size:].strip(b"\0") != b""))
        place += 2
    block = blocks[place]
    kinds = Counter("PAX headers" if kind in headers.PAX else _REPEATED[kind] for kind, _, _ in extended)
    for what, count in kinds.items():
        if count > 1:
            yield "repeated-header", f"has {count} {what}; only the last one counts, but in other programs the first"
    records: dict[str, bytes] = {}
    for kind, data, has_more in extended:
        if kind in headers.PAX:
            records = headers.parse_records(data)
            yield from _odd_records(data, has_more)
    long_names = [data.partition(b"\0")[0] for kind, data, _ in extended if kind == headers.LONG_NAME]
    if long_names and records.get("path", long_names[-1]) != long_names[-1]:
        yield "two-names", f"has two long names: {text(records['path'])!r} counts, not {text(long_names[-1])!r}"
    size = parse_number(block[124:136])
    # from 8 GiB on, the size does not fit into the header's 11 octal digits, and may rightly be in the record only
    other = headers.record_number({keyword: value for keyword, value in records.items() if value}, "size")
    if other is not None and other != size and other <= _LARGEST_OCTAL:
        yield "two-sizes", f"has {other:,} bytes by its PAX record and {size:,} by its header; the record counts"
    if block[156] == HARD_LINK and size:
        yield "sized-link", f"is a hard link with a size of {size:,} bytes; some programs expect content after it"
    yield from _odd_block(entry, block)


def _odd_records(data: bytes, has_more: bool) -> Iterator[Oddity]:
    found = list(headers.each_record(data))
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


def _odd_block(entry: TarEntry, block: bytes) -> Iterator[Oddity]:
    kind, name, magic = block[156], full_name(block), block[257:263]
    if entry.kind == DIRECTORY and (kind in _KNOWN_FILES - {0} or (kind == 0 and not name.endswith(b"/"))):
        yield "folder-as-file", "is a folder by the slash at its end, and a file by its type"
    if kind == 0 and is_file(entry.kind) and name.endswith(b"/"):
        yield "file-as-folder", f"is a folder by its short name {text(name)!r}, and a file by its long one"
    if kind in headers.REGULAR - _KNOWN_FILES:
        yield "unknown-type", f"is of the unknown type {chr(kind)!r}; it is read as a file, as POSIX says"
    if block[345] and magic != b"ustar\0" and chr(kind) not in "SM":
        what = "has bytes at the place of a name's prefix in a header that is not ustar: others read a name there"
        yield "prefix", what
    if entry.sparse is not None and magic != (b"ustar " if kind == headers.SPARSE else b"ustar\0"):
        what = "is sparse by its type or its PAX records, in a header of another format: GNU tar misreads it"
        yield "sparse-magic", what
    for what, place in _NUMBERS.items():
        if is_odd_number(block[place]):
            yield "odd-number", f"has {block[place]!r} as its {what}, which other programs refuse"


def is_odd_number(field: bytes) -> bool:
    """Returns whether a number field of a header is one that other programs refuse."""
    return _NUMBER.fullmatch(field) is None


def odd_pieces(segments: Segments, size: int) -> Iterator[Oddity]:
    """Reports what is odd about a valid sparse map of a content of `size` bytes."""
    if any(length % BLOCK for _, length in segments[:-1]):
        what = f"is sparse with pieces that are not whole blocks of {BLOCK} bytes: GNU tar misreads it"
        yield "sparse-pieces", what
    if (sum(segments[-1]) if segments else 0) < size:
        yield "sparse-end", "is sparse, and its map ends before its size: GNU tar reads less"


def odd_kind(entry: TarEntry) -> Oddity | None:
    """Describes an entry that is neither a file nor a folder."""
    word = headers.HEADER_WORDS.get(entry.kind)
    if is_file(entry.kind) or word == "directory":
        return None
    if word is None:
        return "unknown-entry", f"member {entry.name} is of the unknown type {chr(entry.kind)!r} and is passed over"
    target = f" to {entry.link}" if entry.link else ""
    return word.lower().replace(" ", "-"), f"member {entry.name} is a {word}{target} and is passed over"


def odd_name(name: str, has_key: bool, blocks: Sequence[bytes]) -> Iterator[Oddity]:
    """Reports what is odd about a member's name, which its header `blocks` hold as it was written."""
    if not has_key and split_name(name) is not None:
        yield "no-key", f"member {name} belongs to no sample by the rule for keys, and is passed over"
    elif not has_key:
        reason = skip_reason(name)
        message = f"member {name} belongs to no sample and is passed over: {_REASONS[reason]}"
        yield reason.lower().replace(" ", "-"), message
    if name.startswith("/"):
        yield "absolute-name", f"member {name} has an absolute path as its name, and its key cannot be written again"
    if ".." in name.split("/"):
        yield "parent-folder", f"member {name} has a part '..' in its name, and its key cannot be written again"
    # A backslash may be the name's own: only one that is not in the headers was put there by decoding.
    if "\\x" in name and blocks and name.encode() not in b"".join(blocks) and name.encode() != full_name(blocks[-1]):
        yield "not-utf-8", f"member {name} has a name that is not UTF-8: its other bytes are written as \\xNN"
