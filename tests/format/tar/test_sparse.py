"""Sparse members: four ways to write a map, and every way in which one can be wrong."""

import io
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.tar_blocks import END, GNU, block, filled, member, old_sparse, pax, pax_sparse
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import read_members

Write = Callable[[list[tuple[int, int]], int, bytes], bytes]

AFTER = member(b"b.txt", b"B")
WRITERS: dict[str, Write] = {
    "old GNU": old_sparse,
    "PAX 0.0": lambda pieces, size, stored: pax_sparse(pieces, size, stored, "0.0"),
    "PAX 0.1": lambda pieces, size, stored: pax_sparse(pieces, size, stored, "0.1"),
    "PAX 1.0": lambda pieces, size, stored: pax_sparse(pieces, size, stored, "1.0"),
}
pytestmark = pytest.mark.usefixtures("each_reader")


def read(archive: bytes) -> list[tuple[str, bytes]]:
    """The members of an archive."""
    return [(found.name, found.data) for found in read_members(io.BytesIO(archive), "x.tar")]


@pytest.mark.parametrize("form", WRITERS)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 700)), min_size=1, max_size=60), rest=st.integers(0, 9)
)
@settings(max_examples=10, deadline=None)
def test_read_members_fills_holes_when_a_map_is_right(form: str, gaps: list[tuple[int, int]], rest: int) -> None:
    """Holes are zeros, wherever pieces begin and end, in maps of one block and of several."""
    content, pieces, stored = b"", [], b""
    for number, (hole, length) in enumerate(gaps):
        piece = bytes([65 + number % 26]) * length
        pieces.append((len(content) + hole, length))
        content += bytes(hole) + piece
        stored += piece
    content += bytes(rest)
    archive = WRITERS[form](pieces, len(content), stored) + AFTER + END
    assert read(archive) == [("a.bin", content), ("b.txt", b"B")]


WRONG = {
    "overlapping": ([(0, 5), (3, 5)], 20, b"0123456789"),
    "out of order": ([(10, 5), (0, 5)], 20, b"0123456789"),
    "past the end": ([(0, 5), (4, 5)], 8, b"0123456789"),
    "an empty piece past the end": ([(0, 10), (21, 0)], 20, b"0123456789"),
    "fewer bytes than are stored": ([(0, 9)], 20, b"0123456789"),
    "more bytes than are stored": ([(0, 11)], 20, b"0123456789"),
}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("fault", WRONG)
def test_read_members_refuses_when_a_map_is_wrong(form: str, fault: str) -> None:
    """The error says which member of which shard is wrong, and where it begins."""
    archive = AFTER + WRITERS[form](*WRONG[fault]) + END
    with pytest.raises(
        ShardFormatError, match=r"x\.tar holds a damaged sparse member a\.bin: its map .* at byte 1,024"
    ) as caught:
        read(archive)
    assert caught.value.member == "a.bin"


def sparse_records(*records: tuple[str, str]) -> bytes:
    """A member of ten bytes with some records of a sparse one."""
    return pax(*((f"GNU.sparse.{name}", value) for name, value in records)) + member(b"a.bin", b"0123456789")


def lines(text: bytes) -> bytes:
    """A member whose content begins with a map of PAX 1.0."""
    version = pax(("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", "30"))
    return version + member(b"a.bin", filled(text) + b"0123456789")


def old_header(pairs: bytes, size: bytes = b"%011o\0" % 20) -> bytes:
    """A member without content in GNU's old format, with these bytes as map and full size."""
    return block(b"a.bin", 0, b"S", magic=GNU, fields={386: pairs, 483: size})


MALFORMED = {
    "negative": sparse_records(("size", "10"), ("map", "-5,10")),
    "negative, old": old_header(b"\xff" * 24),
    "negative full size, old": old_header(b"%011o\0%011o\0" % (0, 0), size=b"\xff" * 12),
    "odd": sparse_records(("size", "20"), ("map", "0,10,15")),
    "no numbers": sparse_records(("size", "20"), ("map", "0,ten")),
    "another count": sparse_records(("size", "20"), ("numblocks", "2"), ("map", "0,10")),
    "no map": sparse_records(("size", "20")),
    "no map but its version": sparse_records(("major", "0"), ("minor", "1"), ("realsize", "20")),
    "no full size": sparse_records(("map", "0,10")),
    "two full sizes": sparse_records(("realsize", "0"), ("size", "20"), ("map", "0,10")),
    "a full size beyond all numbers": sparse_records(("size", "9" * 19), ("map", "0,10")),
    "an unknown version": sparse_records(("major", "2"), ("minor", "0"), ("realsize", "20"), ("map", "0,10")),
    "offsets without lengths": sparse_records(("size", "20"), ("offset", "0"), ("offset", "5"), ("numbytes", "10")),
    "two maps": pax(("GNU.sparse.size", "20"), ("GNU.sparse.map", "0,10")) + old_sparse([(0, 10)], 20, b"0123456789"),
    "on a folder": pax(("GNU.sparse.size", "20"), ("GNU.sparse.map", "0,0")) + block(b"d", 0, b"5"),
    "on a hard link": pax(("GNU.sparse.size", "20"), ("GNU.sparse.map", "0,0")) + block(b"l", 0, b"1", link=b"b.txt"),
    "for all members": pax(("GNU.sparse.size", "10"), ("GNU.sparse.map", "0,10"), kind=b"g")
    + member(b"a.bin", b"0123456789"),
    "lines that are no numbers": lines(b"1\n 0\n10\n"),
    "fewer lines": lines(b"2\n0\n10\n"),
    "no lines": lines(b""),
    "a line that never ends": lines(b"1\n0\n" + b"1" * 508),
    "more after the last pair": old_header(b"%011o\0%011o\0" % (0, 0) + bytes(24) + b"1"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_read_members_refuses_when_a_map_is_malformed(fault: str) -> None:
    """Nothing else than `ShardFormatError` comes of it, and no member that is made up."""
    with pytest.raises(ShardFormatError, match=r"shard x\.tar .* at byte"):
        read(MALFORMED[fault] + END)


def test_read_members_takes_no_map_when_only_a_name_is_given() -> None:
    """GNU.sparse.name alone is a name, in every reader."""
    assert read(sparse_records(("name", "s.txt")) + END) == [("s.txt", b"0123456789")]


def test_read_members_reads_a_map_when_the_stored_size_has_a_record() -> None:
    """The record ``size`` is that of the stored bytes."""
    records = (("GNU.sparse.size", "20"), ("GNU.sparse.map", "10,10"), ("size", "10"))
    archive = pax(*records) + block(b"a.bin") + filled(b"0123456789") + END
    assert read(archive) == [("a.bin", bytes(10) + b"0123456789")]


@pytest.mark.parametrize("form", WRITERS)
def test_read_members_takes_linear_time_when_a_map_has_many_pieces(form: str) -> None:
    """20,000 pieces in 20 MB of holes, in a fraction of a second: quadratic work would take most of a minute."""
    pieces = [(1000 * number, 1) for number in range(20_000)]
    archive = WRITERS[form](pieces, 20_000_000, b"x" * 20_000) + END
    begun = time.process_time()
    ((_, content),) = read(archive)
    assert (len(content), content.count(b"x"), content[19_000_000]) == (20_000_000, 20_000, ord("x"))
    assert time.process_time() - begun < 15


def test_read_members_refuses_when_a_map_has_millions_of_pieces() -> None:
    """Empty pieces cost nothing in a compressed shard: their number is limited."""
    for archive in (sparse_records(("size", "10"), ("map", ",".join(["0"] * 2_000_004))), lines(b"1000001\n")):
        with pytest.raises(ShardFormatError, match="more than 1,000,000 pieces"):
            read(archive + END)


@pytest.mark.parametrize("form", WRITERS)
def test_read_members_refuses_when_the_full_size_is_above_a_limit(form: str) -> None:
    """The limit is on the full size; nothing of the content is read for it."""
    archive = WRITERS[form]([(0, 10)], 1001, b"0123456789") + END
    assert len(list(read_members(io.BytesIO(archive), "x.tar", max_member_bytes=1001))) == 1
    with pytest.raises(ShardFormatError, match=r"member a\.bin of 1,001 bytes, more than the limit of 1,000"):
        list(read_members(io.BytesIO(archive), "x.tar", max_member_bytes=1000))
