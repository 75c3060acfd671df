"""PAX extended header records (POSIX.1-2017, pax, "pax Extended Header")."""

from __future__ import annotations

from collections.abc import Iterator

from torchdata_wds.format.headers import HeaderError

__all__ = [
    "begins_elsewhere",
    "describes_payload",
    "each_record",
    "is_sparse",
    "parse_records",
    "record_number",
    "relevant",
    "says_more",
]

_SPARSE = frozenset(f"GNU.sparse.{name}" for name in ("major", "map", "size", "realsize"))
# All that reading looks at. What else a global header says would be carried along for each of the entries after it.
_RELEVANT = _SPARSE | {"path", "linkpath", "size", "GNU.sparse.minor", "GNU.sparse.name", "GNU.sparse.numblocks"}
_PAIR = ("GNU.sparse.offset", "GNU.sparse.numbytes")
_LARGEST_NUMBER = (1 << 63) - 1


def parse_records(data: bytes) -> dict[str, bytes]:
    r"""Parses the records ``length keyword=value\n`` of an extended header.

    Args:
        data: The header's payload.

    Returns:
        Values by keyword; of a repeated keyword the last. Only a sparse map of version 0.0 repeats them with a
        meaning: it is joined into ``GNU.sparse.map``, as version 0.1 writes it.

    Raises:
        HeaderError: if a record is malformed.

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
    """Yields keyword, value and end of each record of an extended header, as `parse_records` takes it.

    Raises:
        HeaderError: if a record is malformed.
    """
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


def relevant(records: dict[str, bytes]) -> dict[str, bytes]:
    """Keeps only the records that say where a member's content lies and what it is called."""
    return {keyword: value for keyword, value in records.items() if keyword in _RELEVANT}


def record_number(records: dict[str, bytes], keyword: str) -> int | None:
    """The decimal number of a record, None where there is none.

    Raises:
        HeaderError: if the value is no number.
    """
    value = records.get(keyword)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 19 or int(value) > _LARGEST_NUMBER:
        raise HeaderError(f"PAX record {keyword}={value[:40]!r} is no size")
    return int(value)


def is_sparse(records: dict[str, bytes]) -> bool:
    """Returns whether the records describe a sparse member, in any of GNU tar's three PAX versions."""
    return not _SPARSE.isdisjoint(records)


def begins_elsewhere(records: dict[str, bytes]) -> bool:
    """Returns whether the records are those of a part of a member that begins in another volume."""
    return "GNU.volume.offset" in records or "GNU.volume.filename" in records


def describes_payload(records: dict[str, bytes]) -> bool:
    """Returns whether the records say how large the payload is or what it stands for, not only a name or dates."""
    return "size" in records or is_sparse(records)


def says_more(records: dict[str, bytes]) -> bool:
    """Returns whether the records say more than a plain name and dates."""
    is_odd = b"\0" in records.get("path", b"") or "GNU.sparse.name" in records or begins_elsewhere(records)
    return is_odd or describes_payload(records)
