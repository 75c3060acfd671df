"""What a member is: names, kinds and sizes where headers say it twice, wrongly, or not as they should."""

import io
from collections import Counter
from collections.abc import Callable

import pytest

from tests.kits.tar_blocks import END, GNU, USTAR, V7, block, filled, long_name, member, pax, record
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import read_members
from torchdata_wds.format.windows import find_members
from torchdata_wds.format.windows.walking import read_plain_header, walk_members

pytestmark = pytest.mark.usefixtures("each_reader")

A, B, INNER = member(b"a.txt", b"A"), member(b"b.txt", b"B"), member(b"inner.txt", b"I")
"""INNER takes 1,024 bytes: as content of 600 bytes or more it is part of another member, else a member itself."""


def read(archive: bytes) -> list[tuple[str, int]]:
    """The names and sizes of an archive's members."""
    members = read_members(io.BytesIO(archive), "x.tar", reopen=lambda offset: io.BytesIO(archive[offset:]))
    return [(found.name, len(found.data)) for found in members]


NAMES = {
    "two PAX headers": (pax(("path", "one.txt")) + pax(("path", "two.txt")) + A, "two.txt"),
    "a PAX header before one that says nothing": (pax(("path", "one.txt")) + pax(("comment", "x")) + A, "a.txt"),
    "a record twice": (pax(("path", "one.txt"), ("path", "two.txt")) + A, "two.txt"),
    "two long names": (long_name(b"one.txt") + long_name(b"two.txt") + A, "two.txt"),
    "two long names around a long link": (
        long_name(b"one.txt") + long_name(b"x", b"K") + long_name(b"two.txt") + A,
        "two.txt",
    ),
    "a PAX path before a long name": (pax(("path", "pax.txt")) + long_name(b"gnu.txt") + A, "pax.txt"),
    "a long name before a PAX path": (long_name(b"gnu.txt") + pax(("path", "pax.txt")) + A, "pax.txt"),
    "a long name before other records": (long_name(b"gnu.txt") + pax(("mtime", "1.5")) + A, "gnu.txt"),
    "a long name after a global path": (pax(("path", "all.txt"), kind=b"g") + long_name(b"gnu.txt") + A, "all.txt"),
    "a NUL in a PAX path": (pax(("path", b"seen.txt\0hidden.txt")) + A, "seen.txt"),
    "a NUL in a global path": (pax(("path", b"seen.txt\0hidden.txt"), kind=b"g") + A, "seen.txt"),
    "a NUL in a long name": (long_name(b"seen.txt\0hidden.txt") + A, "seen.txt"),
    "an empty PAX path": (pax(("path", "")) + A, "a.txt"),
    "an empty PAX path after a global one": (pax(("path", "all.txt"), kind=b"g") + pax(("path", "")) + A, "a.txt"),
    "a PAX path in UTF-8": (pax(("path", "d/ä.txt")) + A, "d/ä.txt"),
    "the name of a sparse member": (pax(("path", "other.txt"), ("GNU.sparse.name", "s.txt")) + A, "s.txt"),
    "bytes after the records": (
        member(b"x", record("path", "one.txt") + bytes(9) + record("path", "two.txt"), b"x") + A,
        "one.txt",
    ),
    "records after the size of their header": (
        block(b"x", 16, b"x") + filled(record("path", "one.txt") + record("path", "two.txt")) + A,
        "one.txt",
    ),
    "a long name without a NUL": (block(b"x", 512, b"L") + b"n" * 512 + A, "n" * 512),
    "a prefix with another magic": (block(b"a.txt", prefix=b"front", magic=b"ustar 00"), "a.txt"),
    "a prefix in a GNU header": (block(b"a.txt", prefix=b"front", magic=GNU), "a.txt"),
    "a prefix in a V7 header": (block(b"a.txt", prefix=b"front", magic=V7), "a.txt"),
    "a prefix and any version": (block(b"a.txt", prefix=b"front", magic=b"ustar\0xx"), "front/a.txt"),
}


@pytest.mark.parametrize("case", NAMES)
def test_read_members_gives_the_name_that_gnu_tar_gives_when_headers_disagree(case: str) -> None:
    """Of two extended headers the last one counts, and PAX before GNU; names end at a NUL."""
    archive, name = NAMES[case]
    assert [found for found, _ in read(archive + END)] == [name]


SLASHES = {
    "a long name over a NUL type": long_name(b"c.txt") + block(b"d/", 600, b"\0") + INNER,
    "a long name over a file": long_name(b"c.txt") + block(b"d/", 600) + INNER,
    "a PAX path over a NUL type": pax(("path", "c.txt")) + block(b"d/", 600, b"\0") + INNER,
    "a PAX path over a V7 header": pax(("path", "c.txt")) + block(b"d/", 600, b"\0", magic=V7) + INNER,
    "a global path over a NUL type": pax(("path", "c.txt"), kind=b"g") + block(b"d/", 600, b"\0") + INNER,
}


@pytest.mark.parametrize("case", SLASHES)
def test_read_members_gives_a_file_when_only_the_short_name_ends_in_a_slash(case: str) -> None:
    """The name that counts decides what a member is."""
    assert read(SLASHES[case] + END) == [("c.txt", 600)]


FOLDERS: dict[str, Callable[[int], bytes]] = {
    "a NUL type": lambda size: block(b"d/", size, b"\0", magic=V7),
    "a NUL type with magic": lambda size: block(b"d/", size, b"\0"),
    "a file": lambda size: block(b"d/", size),
    "a GNU file": lambda size: block(b"d.txt//", size, magic=GNU),
    "a contiguous file": lambda size: block(b"d/", size, b"7"),
    "a long name": lambda size: long_name(b"d.txt/") + block(b"d", size),
    "a PAX path": lambda size: pax(("path", "d.txt/")) + block(b"d", size),
    "a prefix without a name": lambda size: block(b"", size, prefix=b"d.txt"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_read_members_gives_a_folder_when_the_name_ends_in_a_slash(case: str) -> None:
    """A folder has no content; one that has is read differently by every program, and so is an error."""
    skipped: Counter[str] = Counter()
    archive = B + FOLDERS[case](0) + INNER + END
    assert [found.name for found in read_members(io.BytesIO(archive), "x.tar", skipped=skipped)] == [
        "b.txt",
        "inner.txt",
    ]
    assert skipped == {"directory": 1}
    with pytest.raises(ShardFormatError, match=r"x\.tar is ambiguous: folder .* has 600 bytes .* at byte 1,024"):
        read(B + FOLDERS[case](600) + INNER + END)


@pytest.mark.parametrize("kind", [b"2", b"3", b"4", b"6"])
def test_read_members_refuses_when_a_link_or_device_has_content(kind: bytes) -> None:
    """Programs skip the bytes after it or read them as members."""
    for archive in (block(b"l", 600, kind, link=b"b.txt"), pax(("size", "600")) + block(b"l", 0, kind, link=b"b.txt")):
        with pytest.raises(ShardFormatError, match=r"is ambiguous: .* l has 600 bytes .* at byte 1,024"):
            read(B + archive + INNER + END)


@pytest.mark.parametrize(("kind", "found"), [(b"1", [("l.txt", 1)]), (b"5", [])])
def test_read_members_ignores_the_size_of_hard_links_and_folders_when_the_header_has_it(
    kind: bytes, found: list[tuple[str, int]]
) -> None:
    """All programs know that nothing follows; they do not agree on a size in a PAX record."""
    assert read(B + block(b"l.txt", 600, kind, link=b"b.txt") + INNER + END) == [("b.txt", 1), *found, ("inner.txt", 1)]
    with pytest.raises(ShardFormatError, match="is ambiguous"):
        read(B + pax(("size", "600")) + block(b"l.txt", 0, kind, link=b"b.txt") + INNER + END)


@pytest.mark.parametrize("kind", [b"\0", b"0", b"7", b"Z", b"8", b"a"])
def test_read_members_gives_a_file_when_the_type_is_not_known(kind: bytes) -> None:
    """POSIX: an unknown type is a regular file."""
    assert read(member(b"a.txt", bytes(600), kind) + B + END) == [("a.txt", 600), ("b.txt", 1)]


SIZES = {
    "a PAX size over a header without": (pax(("size", "600")) + block(b"a.txt") + INNER, 600),
    "a PAX size under that of the header": (pax(("size", "0")) + block(b"a.txt", 600), 0),
    "two PAX headers": (pax(("size", "1")) + pax(("size", "600")) + block(b"a.txt") + INNER, 600),
    "a record twice": (pax(("size", "1"), ("size", "600")) + block(b"a.txt") + INNER, 600),
    "a PAX size before a long name": (pax(("size", "600")) + long_name(b"a.txt") + block(b"x") + INNER, 600),
}


@pytest.mark.parametrize("case", SIZES)
def test_read_members_gives_the_size_that_gnu_tar_gives_when_headers_disagree(case: str) -> None:
    """PAX before the header, and the last record of the last header."""
    archive, size = SIZES[case]
    assert read(archive + B + END) == [("a.txt", size), ("b.txt", 1)]


FIELDS = {
    b"00000000010\0": 8,
    b"         10\0": 8,
    b"        10 \0": 8,
    b"000000000010": 8,
    b"10\0" + b"7777777\0\0": 8,
    b"\t0000000010\0": 8,
    b"\x80" + bytes(10) + b"\x08": 8,
    bytes(12): 0,
    b" " * 12: None,
    b"\0" + b"0000000010\0": None,
    b"\0junkjunkjun": None,
    b"00000000010x": None,
    b"0000010 xxxx": None,
    b"00000000018\0": None,
    b"-0000000010\0": None,
    b"1_000000000\0": None,
    b"+0000000010\0": None,
    b"0o000000010\0": None,
    b"\xff" * 12: None,
    b"\xfe" + b"\xff" * 11: None,
    b"\x81" + bytes(10) + b"\x08": None,
    b"\x80" + bytes(3) + b"\x80" + bytes(7): None,
    b"\x80" + bytes(2) + b"\x01" + bytes(7) + b"\x08": None,
}


@pytest.mark.parametrize("field", FIELDS)
def test_read_members_reads_a_size_as_gnu_tar_does_when_it_reads_it(field: bytes) -> None:
    """What GNU tar takes for no number is refused here."""
    archive = block(b"a.txt", size_field=field) + filled(b"A" * (FIELDS[field] or 0)) + B + END
    if FIELDS[field] is None:
        with pytest.raises(ShardFormatError, match="at byte 0"):
            read(archive)
    else:
        assert read(archive) == [("a.txt", FIELDS[field]), ("b.txt", 1)]


def numbers(form: bytes) -> Callable[[int], bytes]:
    """A way to write a checksum."""
    return lambda total: form % total


SUMS = {
    "plain": (numbers(b"%06o\0 "), True),
    "seven digits": (numbers(b"%07o\0"), True),
    "eight digits": (numbers(b"%08o"), True),
    "blanks before": (numbers(b"%6o\0 "), True),
    "bytes after a NUL": (numbers(b"%06o\0x"), True),
    "more by one": (lambda total: b"%06o\0 " % (total + 1), False),
    "more by 65,521": (lambda total: b"%06o\0 " % (total + 65521), False),
    "more by 65,536": (lambda total: b"%06o\0 " % (total + 65536), False),
    "less by 256": (lambda total: b"%06o\0 " % (total - 256), False),
    "letters after": (numbers(b"%06oxx"), False),
    "base 256": (lambda total: b"\x80" + total.to_bytes(7, "big"), False),
    "a sign": (numbers(b"+%06o\0"), False),
    "none": (lambda _: bytes(8), False),
}


@pytest.mark.parametrize("case", SUMS)
def test_read_members_compares_checksums_exactly(case: str) -> None:
    """A header is taken by all readers or by none."""
    write, is_right = SUMS[case]
    for name in (b"a.txt", b"\xff" * 96 + b".txt"):  # the second header sums to more than 65,521 less one
        archive = block(name, 0, checksum=write, prefix=b"\xfe" * 155) + END
        if is_right:
            assert len(read(archive)) == 1
        else:
            with pytest.raises(ShardFormatError, match="at byte 0"):
                read(archive)
            assert read_plain_header(archive[:512]) is None
            assert not find_members(archive).names


@pytest.mark.parametrize("form", [b"%06o\0 ", b"%06o \0", b"%07o\0", b"%07o "])
def test_windows_take_the_checksums_that_tar_programs_write(form: bytes) -> None:
    """Six digits, or seven as Rust's tar crate writes; headers of another form are left to the plain reader."""
    names = [b"%d.txt" % number for number in range(5)]
    archive = b"".join(block(name, checksum=numbers(form)) for name in names)
    expected = [name.decode() for name in names]
    assert find_members(archive).names == list(walk_members(archive).names) == expected
    other = block(b"b.txt", checksum=numbers(b"%08o"))
    assert find_members(archive + other).names == expected
    mixed = block(b"b.txt") + archive
    assert read(mixed + END) == [(name, 0) for name in ["b.txt", *expected]]
    assert read_plain_header(archive[:512]) == ("0.txt", 0)


def test_read_members_accepts_a_signed_checksum_when_an_old_tar_wrote_it() -> None:
    """Some old tars summed signed chars."""
    archive = block(b"caf\xe9.txt", checksum=lambda total: b"%06o\0 " % (total - 256)) + END
    assert read(archive) == [("caf\\xe9.txt", 0)]


def test_read_plain_header_takes_no_other_checksum_when_it_is_off_by_the_modulus() -> None:
    """A sum above 65,521 and one below it are told apart, both ways."""
    assert read_plain_header(block(b"\xff" * 96 + b".txt", prefix=b"\xff" * 155)) is not None
    wrong = block(b"\xff" * 96 + b".txt", prefix=b"\xff" * 155, checksum=lambda total: b"%06o\0 " % (total - 65521))
    assert read_plain_header(wrong) is None


REFUSED = {
    "an empty long name": (long_name(b"") + A, "an empty long name"),
    "a long name that goes on": (block(b"x", 1, b"L") + filled(b"gnu.txt\0") + A, "goes on after its size of 1 bytes"),
    "a PAX size that is empty": (pax(("size", "")) + A, "is not a size"),
    "a PAX size above all numbers": (pax(("size", str(1 << 63))) + A, "is not a size"),
    "a PAX size of thousands of digits": (pax(("size", "9" * 5000)) + A, "is not a size"),
    "a PAX size with a sign": (pax(("size", "+1")) + A, "is not a size"),
    "a blank before a keyword": (pax((" path", "one.txt")) + A, "malformed PAX record"),
    "a part of a GNU volume": (member(b"a.bin", b"rest", b"M"), "rest of member a.bin of another volume"),
    "a part of a POSIX volume": (
        pax(("GNU.volume.filename", "a.bin"), ("GNU.volume.size", "1"), ("GNU.volume.offset", "512"), kind=b"g")
        + member(b"GNUFileParts/a.bin.2", b"r"),
        "rest of member a.bin of another volume",
    ),
    "a part of a POSIX volume by its own header": (
        pax(("GNU.volume.offset", "512")) + member(b"GNUFileParts/a.bin.2", b"r"),
        "of another volume",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_members_refuses_when_headers_make_no_sense(case: str) -> None:
    """What would be read differently by each program, or is half a member, is an error with its place."""
    archive, says = REFUSED[case]
    with pytest.raises(ShardFormatError, match=rf"shard x\.tar .*{says}.* at byte"):
        read(archive + END)


def test_read_members_takes_the_label_of_a_volume_for_no_part() -> None:
    """``tar --label`` writes a record, too."""
    assert read(pax(("GNU.volume.label", "backup"), kind=b"g") + A + END) == [("a.txt", 1)]


def test_read_members_reads_long_names_of_all_magics() -> None:
    """Extended headers are known by their type alone."""
    for magic in (USTAR, GNU, V7):
        archive = (
            member(b"x", b"one.txt\0", b"L", magic=magic)
            + A
            + member(b"x", record("path", "two.txt"), b"x", magic=magic)
        )
        assert [name for name, _ in read(archive + B + END)] == ["one.txt", "two.txt"]
