"""Tar archives made block by block: headers as no well-behaved program writes them."""

from collections.abc import Callable, Mapping

END = bytes(1024)
USTAR, GNU, V7 = b"ustar\x0000", b"ustar  \0", bytes(8)


def sum_field(total: int) -> bytes:
    """A checksum as most programs write it."""
    return b"%06o\0 " % total


def block(
    name: bytes,
    size: int = 0,
    kind: bytes = b"0",
    *,
    link: bytes = b"",
    prefix: bytes = b"",
    magic: bytes = USTAR,
    size_field: bytes | None = None,
    fields: Mapping[int, bytes] | None = None,
    checksum: Callable[[int], bytes] = sum_field,
) -> bytes:
    """A header block with a right checksum; `fields` are written over it by their places."""
    made = bytearray(512)
    places = {
        0: name,
        100: b"0000644\0",
        108: b"0000000\0",
        116: b"0000000\0",
        124: b"%011o\0" % size if size_field is None else size_field,
        136: b"00000000000\0",
        156: kind,
        157: link,
        257: magic,
        345: prefix,
        **(fields or {}),
        148: b" " * 8,
    }
    for place, raw in places.items():
        made[place : place + len(raw)] = raw
    made[148:156] = checksum(sum(made))
    return bytes(made)


def filled(data: bytes) -> bytes:
    """The data, filled up to whole blocks."""
    return data + bytes(-len(data) % 512)


def member(name: bytes, data: bytes, kind: bytes = b"0", **options: object) -> bytes:
    """A header and its content."""
    return block(name, len(data), kind, **options) + filled(data)  # type: ignore[arg-type]


def record(keyword: str, value: bytes | str) -> bytes:
    """A PAX record, its own length counted in."""
    rest = b" %s=%s\n" % (keyword.encode(), value if isinstance(value, bytes) else value.encode())
    size = len(rest)
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


def pax(*records: tuple[str, bytes | str], kind: bytes = b"x") -> bytes:
    """A PAX header."""
    return member(b"PaxHeaders/x", b"".join(record(*pair) for pair in records), kind)


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    """GNU's header of a long name, or of a long link with kind "K"."""
    return member(b"././@LongLink", name + b"\0", kind, magic=GNU)


def pax_sparse(pieces: list[tuple[int, int]], size: int, stored: bytes, version: str = "0.1") -> bytes:
    """A sparse member a.bin in one of the PAX formats."""
    numbers = [number for piece in pieces for number in piece]
    records: list[tuple[str, bytes | str]] = [
        ("GNU.sparse.size", str(size)),
        ("GNU.sparse.numblocks", str(len(pieces))),
    ]
    if version == "1.0":
        records = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", str(size))]
        lines = [len(pieces), *numbers]
        stored = filled("".join(f"{number}\n" for number in lines).encode()) + stored
    elif version == "0.1":
        records.append(("GNU.sparse.map", ",".join(map(str, numbers))))
    else:
        keywords = ("GNU.sparse.offset", "GNU.sparse.numbytes")
        records += [(keywords[place % 2], str(number)) for place, number in enumerate(numbers)]
    return pax(*records, ("GNU.sparse.name", "a.bin")) + member(b"GNUSparseFile.0/a.bin", stored)


def old_sparse(pieces: list[tuple[int, int]], size: int, stored: bytes) -> bytes:
    """A sparse member a.bin in GNU's old format."""
    pairs = [b"%011o\0%011o\0" % piece for piece in pieces]
    fields = {386: b"".join(pairs[:4]), 482: bytes([len(pairs) > 4]), 483: b"%011o\0" % size}
    made = block(b"a.bin", len(stored), b"S", magic=GNU, fields=fields)
    for place in range(4, len(pairs), 21):
        more = place + 21 < len(pairs)
        made += b"".join(pairs[place : place + 21]).ljust(504, b"\0") + bytes([more]) + bytes(7)
    return made + filled(stored)
