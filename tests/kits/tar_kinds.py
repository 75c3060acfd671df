"""Archives with odd headers, by what is odd about them: drawn at random, from a seed."""

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.kits.tar_blocks import END, GNU, V7, block, filled, long_name, member, old_sparse, pax, pax_sparse

Draw = Callable[[Random], bytes]
"""Makes entries of an archive, whole blocks."""

ENDS = (".txt", ".jpg", ".seg.png", ".cls", ".json", "", ".")


def some_bytes(random: Random, most: int = 1300) -> bytes:
    """Content of any size, whole blocks among them."""
    return random.randbytes(random.choice([0, 1, 511, 512, 513, 1024, random.randrange(most)]))


def some_name(random: Random, most: int = 40) -> bytes:
    """A name without a slash at its end."""
    folder = random.choice(["", "", "./", "d/", "d.v1/e/", "../", "é/"])
    stem = "".join(random.choice("abcXYZ019_-+ é") for _ in range(random.randint(1, most)))
    raw = (folder + stem + random.choice(ENDS)).encode()
    return random.choice([raw, raw, raw, raw + b"\xff", raw.replace(b"a", b"\n"), b"\\x41" + raw])


def plain(random: Random) -> bytes:
    """A member as all programs read it."""
    name, data = some_name(random), some_bytes(random)
    short = name[:90]
    long = (b"long/" * random.randint(15, 40) + name)[-250:].lstrip(b"/")
    base_256 = b"\x80" + len(data).to_bytes(11, "big")
    return random.choice(
        [
            lambda: member(short, data),
            lambda: member(short, data, magic=GNU),
            lambda: member(short, data, magic=V7, kind=b"\0"),
            lambda: member(short, data, kind=b"7"),
            lambda: member(short, data, prefix=b"front/of/it"),
            lambda: block(short, size_field=base_256, magic=GNU) + filled(data),
            lambda: block(short, size_field=b"%12o" % len(data)) + filled(data),
            lambda: member(short, data, checksum=lambda total: b"%07o\0" % total),
            lambda: member(short, data, checksum=lambda total: b"%6o\0 " % total),
            lambda: long_name(long) + member(short, data, magic=GNU),
            lambda: pax(("path", long)) + member(short, data),
            lambda: pax(("mtime", "1.5"), ("path", name)) + member(b"short", data),
            lambda: pax(("size", str(len(data)))) + block(short) + filled(data),
            lambda: long_name(long) + pax(("size", str(len(data)))) + block(short) + filled(data),
            lambda: block(b"folder/", kind=b"5") + member(short, data),
            lambda: block(b"folder/", kind=b"\0", magic=V7) + member(short, data),
            lambda: block(b"link", kind=b"2", link=b"folder") + member(short, data),
            lambda: long_name(long, b"K") + block(b"link", kind=b"2", link=b"x") + member(short, data),
            lambda: block(b"fifo", kind=b"6") + member(short, data),
            lambda: block(b"label", kind=b"V") + member(short, data),
            lambda: member(b"first.txt", data) + block(b"second.txt", kind=b"1", link=b"first.txt"),
        ]
    )()


def whole_pieces(random: Random) -> tuple[list[tuple[int, int]], int, bytes]:
    """A sparse map as GNU tar writes it: whole blocks but for the last piece, and an empty one at the end."""
    pieces, at, stored = [], 0, b""
    for _ in range(random.choice([1, 2, 3, 4, 5, 30])):
        at += 512 * random.randint(1, 9)
        length = 512 * random.randint(1, 3)
        pieces.append((at, length))
        stored += random.randbytes(length)
        at += length
    return [*pieces, (at + 700, 0)], at + 700, stored


def sparse(pieces: list[tuple[int, int]], size: int, stored: bytes) -> Draw:
    """A sparse member in any format."""
    return lambda random: random.choice(
        [old_sparse, *(lambda *parts, v=version: pax_sparse(*parts, v) for version in ("0.0", "0.1", "1.0"))]
    )(pieces, size, stored)


def with_inner(entry: bytes) -> Draw:
    """An entry of 600 or 1,024 bytes whose content is a member, or is none."""
    return lambda _: entry + member(b"inner.txt", b"I")


def fixed(made: bytes) -> Draw:
    """Always the same entries."""
    return lambda _: made


def any_of(*choices: Draw) -> Draw:
    """One of several."""
    return lambda random: random.choice(choices)(random)


A, B = member(b"a.txt", b"A"), member(b"b.txt", b"B")
DATA = filled(b"A" * 8)


def sized(field: bytes) -> Draw:
    """A member of eight bytes by this size field."""
    return fixed(block(b"a.txt", size_field=field) + DATA)


def summed(write: Callable[[int], bytes]) -> Draw:
    """A member with this checksum."""
    return fixed(block(b"a.txt", 8, checksum=write) + DATA)


def sparse_records(*records: tuple[str, str]) -> bytes:
    """A member of ten bytes with some records of a sparse one."""
    return pax(*((f"GNU.sparse.{name}", value) for name, value in records)) + member(b"a.bin", b"0123456789")


def signed() -> bytes:
    """A header whose checksum is that of signed bytes."""
    made = bytearray(block(b"\xe9\xe9.txt", 8))
    made[148:156] = b"%06o\0 " % (sum(made[:148]) + sum(made[156:]) + 256 - 512)
    return bytes(made) + DATA


#: What all programs read as we do, odd as it is.
AGREED: list[Draw] = [
    plain,
    lambda random: sparse(*whole_pieces(random))(random),
    fixed(pax(("path", "one.txt"), ("path", "two.txt")) + A),
    with_inner(pax(("size", "1"), ("size", "600")) + block(b"a.txt")),
    with_inner(pax(("size", "600")) + block(b"a.txt")),
    fixed(pax(("size", "0")) + block(b"a.txt", 512)),
    fixed(pax(("path", "pax.txt")) + long_name(b"gnu.txt") + A),
    fixed(long_name(b"gnu.txt") + pax(("mtime", "1")) + A),
    fixed(long_name(b"one.txt\0two.txt") + A),
    fixed(pax(("comment", "x"), kind=b"g") + A),
    fixed(sparse_records(("name", "s.txt"))),
    with_inner(A + block(b"l.txt", 600, b"1", link=b"a.txt")),
    with_inner(block(b"d", 600, b"5")),
    with_inner(long_name(b"c.txt") + block(b"d/", 600)),
    sized(b"00000000010\0"),
    sized(b"        10 \0"),
    sized(b"10\0" + b"7777777\0\0"),
    sized(b"\t0000000010\0"),
    summed(lambda total: b"%05o\0xx" % total),
    fixed(signed()),
    fixed(block(b"a.txt", size_field=bytes(12))),
]

WHOLE = {386: b"%011o\0%011o\0" % (0, 512), 410: b"%011o\0%011o\0" % (1024, 0), 483: b"%011o\0" % 1024}
"""A map of one block and a hole, in GNU's old header."""
PAX_MAP = pax(("GNU.sparse.size", "1024"), ("GNU.sparse.numblocks", "2"), ("GNU.sparse.map", "0,512,1024,0"))

#: What is read differently, by the row of the table in docs/tar-differences.md.
DIFFERENT: dict[str, Draw] = {
    "content-after-links": any_of(
        *(with_inner(block(b"l", 600, kind, link=b"x")) for kind in (b"2", b"3", b"4", b"6")),
        *(with_inner(pax(("size", "600")) + block(b"l", 0, kind, link=b"x")) for kind in (b"2", b"3", b"4", b"6")),
        with_inner(pax(("size", "600")) + block(b"d", 0, b"5")),
        with_inner(A + pax(("size", "600")) + block(b"l", 0, b"1", link=b"a.txt")),
    ),
    "content-of-folders": any_of(
        with_inner(block(b"d/", 600)),
        with_inner(block(b"d/", 600, b"\0", magic=V7)),
        with_inner(long_name(b"d/") + block(b"d", 600)),
        with_inner(pax(("path", "d/")) + block(b"d", 600)),
        with_inner(block(b"", 600, prefix=b"d")),
    ),
    "files-with-a-slash": any_of(
        fixed(block(b"d/")),
        fixed(long_name(b"d/") + block(b"d", kind=b"\0")),
        fixed(pax(("path", "d/")) + block(b"d")),
        fixed(block(b"", prefix=b"d")),
    ),
    "slash-of-the-short-name": any_of(
        with_inner(long_name(b"c.txt") + block(b"d/", 600, b"\0")),
        with_inner(pax(("path", "c.txt")) + block(b"d/", 600, b"\0")),
    ),
    "several-headers": any_of(
        fixed(pax(("path", "one.txt")) + pax(("path", "two.txt")) + A),
        fixed(pax(("path", "one.txt")) + pax(("comment", "x")) + A),
        fixed(long_name(b"one.txt") + long_name(b"two.txt") + A),
        with_inner(pax(("size", "1")) + pax(("size", "600")) + block(b"a.txt")),
        fixed(pax(("path", "one.txt")) + long_name(b"gnu.txt") + pax(("path", "two.txt")) + A),
    ),
    "size-before-long-name": with_inner(pax(("size", "600")) + long_name(b"gnu.txt") + block(b"a.txt")),
    "pax-after-gnu": fixed(long_name(b"gnu.txt") + pax(("path", "pax.txt")) + A),
    "global-names": fixed(pax(("path", "all.txt"), kind=b"g") + long_name(b"gnu.txt") + A),
    "several-global-headers": fixed(pax(("path", "all.txt"), kind=b"g") + pax(("comment", "x"), kind=b"g") + A),
    "global-size": fixed(pax(("size", "1"), kind=b"g") + block(b"a.txt") + filled(b"A") + B),
    "bytes-after-headers": any_of(
        fixed(block(b"x", 16, b"x") + filled(b"16 path=one.txt\n16 path=two.txt\n") + A),
        fixed(block(b"x", 1, b"L", magic=GNU) + filled(b"gnu.txt\0") + A),
    ),
    "nul-in-pax-name": fixed(pax(("path", b"seen.txt\0hidden.txt")) + A),
    "empty-names": any_of(
        fixed(pax(("path", "")) + A),
        fixed(pax(("path", "one.txt"), ("path", "")) + A),
        fixed(pax(("path", b"\0hidden.txt")) + A),
        fixed(long_name(b"") + A),
    ),
    "prefix-without-ustar": any_of(
        *(fixed(member(b"a.txt", b"A", prefix=b"front", magic=magic)) for magic in (GNU, V7, b"ustar 00"))
    ),
    "unknown-types": any_of(*(fixed(member(b"a.txt", b"A" * 600, kind)) for kind in (b"Z", b"8", b"a", b"N", b"I"))),
    "solaris-types": any_of(*(fixed(member(b"a.txt", b"A" * 600, kind)) for kind in (b"A", b"E"))),
    "no-numbers": any_of(
        sized(b" " * 12),
        sized(b"00000000010x"),
        sized(b"0000010 xxxx"),
        sized(b"10 777777777"),
        sized(b"00000000018\0"),
        sized(b"-0000000010\0"),
        sized(b"\0" + b"0000000010\0"),
        sized(b"\0junkjunkjun"),
        sized(b"\xff" * 12),
        sized(b"\x80" + bytes(3) + b"\x80" + bytes(7)),
        sized(b"+I" + b" " * 10),
    ),
    "wrong-checksums": any_of(
        summed(lambda total: b"%06o\0 " % (total + 1)),
        summed(lambda total: b"%06o\0 " % (total + 65521)),
        summed(lambda total: b"\x80" + total.to_bytes(7, "big")),
        summed(lambda total: b"\0%06o\0" % total),
        summed(lambda total: b"%05o xx" % total),
    ),
    "odd-dates": any_of(*(fixed(block(b"a.txt", 8, fields={at: b"xxxxxxxx"}) + DATA) for at in (100, 136))),
    "no-pax-numbers": any_of(
        *(fixed(pax(("size", size)) + A) for size in ("", "+1", " 1", "1 ", "1.5", "0x1", str(1 << 63)))
    ),
    "no-pax-records": any_of(
        fixed(member(b"x", b"nonsense", b"x") + A),
        fixed(member(b"x", b"9999 path=one.txt\n", b"x") + A),
        fixed(member(b"x", b"17  path=one.txt\n", b"x") + A),
        fixed(member(b"x", b"16\tpath=one.txt\n", b"x") + A),
        fixed(member(b"x", b"11 =one.tx\n", b"x") + A),
    ),
    "wrong-sparse-maps": any_of(
        sparse([(0, 512), (300, 512)], 2000, bytes(1024)),
        sparse([(1024, 512), (0, 512)], 2000, bytes(1024)),
        sparse([(0, 512), (1024, 512)], 1200, b"A" * 1024),
        sparse([(0, 512)], 2000, b"A" * 1024),
        sparse([(0, 2048)], 2048, b"A" * 1024),
        fixed(sparse_records(("size", "10"), ("numblocks", "1"), ("map", "-5,10"))),
        fixed(sparse_records(("size", "20"), ("numblocks", "2"), ("map", "0,10,20"))),
        fixed(sparse_records(("size", "20"))),
        fixed(sparse_records(("realsize", "5"), ("size", "20"), ("numblocks", "1"), ("map", "0,10"))),
        fixed(sparse_records(("major", "2"), ("minor", "0"), ("realsize", "20"))),
        fixed(sparse_records(("size", "20"), ("map", "0,10"))),
    ),
    "sparse-pieces": any_of(
        sparse([(0, 5), (1000, 700), (2000, 0)], 2000, b"A" * 5 + b"B" * 700),
        sparse([(100, 600), (1000, 600), (2000, 0)], 2000, b"A" * 1200),
    ),
    "sparse-ends": any_of(sparse([(0, 512)], 2000, bytes(512)), sparse([(512, 10)], 600, b"A" * 10)),
    "sparse-magic": any_of(
        *(
            fixed(block(b"a.bin", 512, b"S", magic=magic, fields=WHOLE) + bytes(512))
            for magic in (b"ustar\x0000", b"ustar\0", V7)
        ),
        *(fixed(PAX_MAP + member(b"a.bin", bytes(512), magic=magic)) for magic in (GNU, V7)),
    ),
    "sparse-names": fixed(
        pax(
            *(("GNU.sparse.size", "700"), ("GNU.sparse.numblocks", "1"), ("GNU.sparse.map", "690,10")),
            *(("GNU.sparse.name", "a.bin"), ("path", "GNUSparseFile.1/a.bin")),
        )
        + member(b"a.bin", b"0123456789")
    ),
    "parts-of-volumes": any_of(
        fixed(member(b"a.bin", b"rest", b"M", fields={369: b"%011o\0" % 512, 483: b"%011o\0" % 516})),
        fixed(
            pax(("GNU.volume.filename", "a.bin"), ("GNU.volume.size", "4"), ("GNU.volume.offset", "512"), kind=b"g")
            + member(b"GNUFileParts/a.bin.2", b"rest")
        ),
    ),
    "links-to-nothing": fixed(block(b"l.txt", kind=b"1", link=b"nothing.txt")),
    "damage": any_of(
        fixed(A + b"x" * 512),
        lambda random: A + bytes(random.randrange(1, 255) for _ in range(512)) + B,
        fixed(A + bytes(1024) + B),
        fixed(A + bytes(512) + B),
        fixed(A + pax(("path", "b.txt")) + bytes(1024)),
    ),
}


def hand_made(random: Random, row: str | None) -> bytes:
    """An archive with entries of a row, or with such that all programs read alike, between plain ones."""
    odd = random.choice(AGREED) if row is None else DIFFERENT[row]
    before = [plain(random) for _ in range(random.randrange(3))]
    has_globals = row is not None and "global" in row
    after = [] if has_globals else [plain(random) for _ in range(random.randrange(3))]
    return b"".join([*before, odd(random), *after]) + END


def by_tarfile(random: Random) -> bytes:
    """An archive that Python's tarfile writes."""
    out = io.BytesIO()
    form = random.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    headers = {"comment": "é"} if random.random() < 0.2 else {}
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=headers) as tar:
        names = ["first.txt"]
        for _ in range(random.randint(1, 8)):
            name = some_name(random, random.choice([5, 40, 200])).decode("utf-8", "surrogateescape")
            info = tarfile.TarInfo(name)
            kinds = [tarfile.REGTYPE] * 6 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CONTTYPE]
            info.type = random.choice(kinds)
            info.mtime = random.choice([0, 1_700_000_000, 1.5])
            info.linkname = random.choice(names) if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            data = some_bytes(random) if info.isreg() else b""
            info.size = len(data)
            if info.islnk() and len(names) == 1:
                continue
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name that the format has no room for
                continue
            names += [name] if info.isreg() else []
            names = [known for known in names if known != "first.txt"] or names
    return out.getvalue()


def by_gnu_tar(random: Random, folder: Path) -> bytes:
    """An archive that GNU tar writes of files, folders, links and sparse files, in one of its formats."""
    folder.mkdir()
    names = ["first.txt"]
    for number in range(random.randint(1, 5)):
        name = f"{number}{some_name(random, random.choice([5, 20])).decode('utf-8', 'surrogateescape')}"
        names.append(name.replace("../", "").replace("\udcff", "x"))
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(some_bytes(random))
        if random.random() < 0.3:
            with path.open("r+b") as file:
                for place in range(0, random.randrange(1, 30) * 9_000, 9_000):
                    file.seek(4096 * (place // 1000))
                    file.write(random.randbytes(random.randint(1, 600)))
                file.truncate(random.choice([file.tell(), 400_000]))
    os.link(folder / "first.txt", folder / "second.txt")
    (folder / "link").symlink_to("first.txt")
    form = random.choice(["v7", "oldgnu", "gnu", "ustar", "pax", "pax"])
    options = [f"--format={form}", "--sort=name"]
    if form in ("oldgnu", "gnu", "pax"):
        options += random.choice([[], ["--sparse", "--hole-detection=raw"]])
    if form == "pax" and len(options) > 2:
        options.append(f"--sparse-version={random.choice(['0.0', '0.1', '1.0'])}")
    done = subprocess.run(["tar", *options, "-cf", "-", "."], cwd=folder, check=True, capture_output=True)
    return done.stdout


def volumes(folder: Path, form: str) -> list[bytes]:
    """The two volumes of an archive that GNU tar writes."""
    folder.mkdir()
    (folder / "a.bin").write_bytes(bytes(30_000))
    command = ["tar", f"--format={form}", "-M", "-L", "20", "-cf", "1.tar", "-f", "2.tar", "a.bin"]
    subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL)
    return [(folder / name).read_bytes() for name in ("1.tar", "2.tar")]
