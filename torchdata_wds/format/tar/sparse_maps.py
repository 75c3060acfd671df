"""Sparse maps: where the stored bytes of a sparse member lie in its full content.

GNU tar manual, "Storing Sparse Files": the old format has pairs of numbers in the header and in blocks after it, PAX
0.0 and 0.1 have them in records, and PAX 1.0 has lines of decimal numbers at the beginning of the stored bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from torchdata_wds.format.headers import BLOCK, HeaderError, padding, parse_number, record_number

#: What a map is read from: the blocks of an old GNU header, or PAX records.
SparseSource = list[bytes] | dict[str, bytes]
Segments = list[tuple[int, int]]  # offset in the full content and length of each piece that is stored, in their order
_PAIR = 24  # two numbers of twelve bytes
_MOST_PIECES = 1_000_000  # a few kilobytes can be unpacked to a map of many more
_LONGEST_NUMBER = 20  # digits, and the end of the line


def full_size(source: SparseSource) -> int:
    """Reads the size of the full content in bytes."""
    if isinstance(source, list):
        size = parse_number(source[0][483:495])
        if size < 0:
            raise HeaderError(f"the full size of a sparse member is negative: {size}")
        return size
    found = {record_number(source, f"GNU.sparse.{name}") for name in ("realsize", "size")} - {None}
    if len(found) != 1:
        raise HeaderError(f"a sparse member has {len(found)} full sizes instead of one")
    return found.pop() or 0


def locate(source: SparseSource, stored: bytes) -> tuple[Segments, int]:
    """Reads a map; returns the pieces, and where in the stored bytes they begin."""
    if isinstance(source, list):
        return _pairs(list(_old_numbers(source))), 0
    version = source.get("GNU.sparse.major", b"0"), source.get("GNU.sparse.minor")
    if version == (b"1", b"0"):
        numbers, end = _leading_numbers(stored)
        return _pairs(numbers), end
    if version not in ((b"0", None), (b"0", b"0"), (b"0", b"1")):
        raise HeaderError(f"the version {b'.'.join(part or b'?' for part in version)!r} of its map is unknown")
    if "GNU.sparse.map" not in source:
        raise HeaderError("it has no map")
    listed = source["GNU.sparse.map"]
    _check_count(listed.count(b",") // 2)
    segments = _pairs([_decimal(number) for number in listed.split(b",")])
    count = record_number(source, "GNU.sparse.numblocks")
    if count is not None and count != len(segments):
        raise HeaderError(f"its map has {len(segments):,} pieces instead of {count:,}")
    return segments, 0


def unpack(stored: bytes, begin: int, segments: Segments, size: int) -> bytes:
    r"""Puts the stored pieces at their places and zeros between them.

    Example:
        >>> unpack(b"abc", 0, [(1, 1), (4, 2)], 7)
        b'\x00a\x00\x00bc\x00'
    """
    at = total = 0
    for offset, length in segments:  # a map must say exactly one thing; pieces without bytes may stand anywhere
        if offset + length > size:
            raise HeaderError(f"its map has {length:,} bytes at {offset:,}, past its end at {size:,}")
        if length and offset < at:
            raise HeaderError(f"its map has a piece at {offset:,} after one that ends at {at:,}")
        if length:
            at = offset + length
            total += length
    if total != len(stored) - begin:
        raise HeaderError(f"its map tells of {total:,} stored bytes, and there are {len(stored) - begin:,}")
    content = io.BytesIO()
    with memoryview(stored) as view:
        for offset, length in segments:
            if length:
                content.seek(offset)
                content.write(view[begin : begin + length])
                begin += length
    if content.tell() < size:
        content.seek(size - 1)
        content.write(b"\0")
    return content.getvalue()


def _old_numbers(blocks: list[bytes]) -> Iterator[int]:
    """Reads the numbers of an old GNU map: four pairs in the header, 21 in each block after it."""
    is_over = False
    for row, block in enumerate(blocks):
        start, count = (0, 21) if row else (386, 4)
        for place in range(start, start + count * _PAIR, _PAIR):
            pair = block[place : place + _PAIR]
            if is_over and pair.strip(b"\0"):
                raise HeaderError("its map goes on after its end")
            is_over = is_over or not pair[12]
            if not is_over:
                yield parse_number(pair[:12])
                yield parse_number(pair[12:])


def _leading_numbers(stored: bytes) -> tuple[list[int], int]:
    """Reads the lines of a PAX 1.0 map; returns the numbers, and where the block of the last one ends."""
    numbers: list[int] = []
    at, count = 0, 1
    while len(numbers) < count:
        end = stored.find(b"\n", at, at + _LONGEST_NUMBER)
        number = _decimal(stored[at:end] if end >= 0 else stored[at : at + _LONGEST_NUMBER])
        if end < 0:
            raise HeaderError("its map is cut off")
        if not numbers:  # the first line says how many pieces follow
            _check_count(number)
            count += 2 * number
        numbers.append(number)
        at = end + 1
    end = at + padding(at)
    if end > len(stored):
        raise HeaderError(f"its map is cut off before the end of its block of {BLOCK} bytes")
    return numbers[1:], end


def _check_count(pieces: int) -> None:
    if pieces > _MOST_PIECES:
        raise HeaderError(f"its map has more than {_MOST_PIECES:,} pieces")


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) >= _LONGEST_NUMBER:
        raise HeaderError(f"{digits[:40]!r} in its map is not a number")
    return int(digits)


def _pairs(numbers: list[int]) -> Segments:
    if len(numbers) % 2:
        raise HeaderError("its map has an offset without a length")
    if numbers and min(numbers) < 0:
        raise HeaderError(f"its map has a negative number, {min(numbers):,}")
    return list(zip(numbers[::2], numbers[1::2], strict=True))
