"""PAX extended header records (POSIX.1-2017, pax, "pax Extended Header")."""

from __future__ import annotations

from torchdata_wds.format.headers import HeaderError

__all__ = ["describes_payload", "is_sparse", "parse_records", "record_number", "relevant", "sparse_size"]

# All that reading looks at. What else a global header says would be carried along for each of the entries after it.
_RELEVANT = frozenset(
    ["path", "linkpath", "size"]
    + [f"GNU.sparse.{name}" for name in ("major", "minor", "name", "realsize", "size", "map")]
    + [f"GNU.sparse.{name}" for name in ("numblocks", "offset", "numbytes")]
)


def parse_records(data: bytes) -> dict[str, bytes]:
    r"""Parses the records ``length keyword=value\n`` of an extended header.

    Args:
        data: The header's payload.

    Returns:
        Values by keyword; of a repeated keyword the last.

    Raises:
        HeaderError: if a record is malformed.

    Example:
        >>> parse_records(b"18 path=d/a.b.jpg\n")
        {'path': b'd/a.b.jpg'}
    """
    records: dict[str, bytes] = {}
    position = 0
    while position < len(data) and data[position]:
        digits, blank, _ = data[position : position + 20].partition(b" ")
        end = position + int(digits) if blank and digits.isdigit() else 0
        keyword, equals, value = data[position + len(digits) + 1 : end].partition(b"=")
        if not equals or not keyword or end > len(data) or data[end - 1 : end] != b"\n":
            raise HeaderError(f"malformed PAX record {data[position : position + 40]!r}")
        records[keyword.decode("utf-8", "backslashreplace")] = value[:-1]
        position = end
    return records


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
    if not value.isdigit() or len(value) > 19:
        raise HeaderError(f"PAX record {keyword}={value!r} is no size")
    return int(value)


def is_sparse(records: dict[str, bytes]) -> bool:
    """Tells whether the records describe a sparse member, in any of GNU tar's three PAX versions."""
    return any(keyword.startswith("GNU.sparse.") for keyword in records)


def describes_payload(records: dict[str, bytes]) -> bool:
    """Tells whether the records say how large the payload is or what it stands for, not only a name or dates."""
    return "size" in records or is_sparse(records)


def sparse_size(records: dict[str, bytes]) -> int | None:
    """The full size of a sparse member in bytes."""
    size = record_number(records, "GNU.sparse.realsize")
    return record_number(records, "GNU.sparse.size") if size is None else size
