"""Archives of many kinds, whole and damaged, for readers that must find the same by windows and one by one."""

from random import Random

from tests.kits import tar_kinds
from tests.kits.tar_blocks import END, block, long_name, member, pax

DATES = (1, 1_700_000_000, 1_700_000_000.25)


def run_of_samples(random: Random, first: int) -> bytes:
    """Samples as writers leave them, each field in a member, now and then with one that is odd."""
    folder = random.choice(["", "", "./", "d/", "d.v1/", "x" * 95, "__meta__/", "/abs/", "../"])
    fields = random.choice(["cls txt", "TXT json seg.png", "txt TXT", "cls", "__key__", "a __b__"]).split()
    dates = random.choice(["none", "none", "same", "own", "twice"])
    made = b""
    for number in range(first, first + random.randrange(8)):
        for field in fields:
            name = f"{folder}{number:04d}.{field}".encode()
            data = tar_kinds.some_bytes(random) or random.choice([b"", b"A"])
            records = [("mtime", str(random.choice(DATES)))] if dates in ("own", "twice") else []
            records = [("mtime", "1.5")] if dates == "same" else records * (1 + (dates == "twice"))
            if len(name) > 100:
                made += random.choice([long_name(name), pax(("path", name), *records)]) + member(name[:100], data)
            else:
                made += (pax(*records) if records else b"") + member(name, data)
            if random.random() < 0.02:
                made += tar_kinds.plain(random)
    return made


def odd_archive(random: Random) -> bytes:
    """An archive: runs of samples, and entries of any kind between them; one of four is damaged."""
    pieces = []
    for _ in range(random.randint(1, 4)):
        pieces.append(run_of_samples(random, random.choice([0, 100, 200, 300])))
        if random.random() < 0.3:
            pieces.append(tar_kinds.DIFFERENT[random.choice(list(tar_kinds.DIFFERENT))](random))
        elif random.random() < 0.3:
            pieces.append(random.choice(tar_kinds.AGREED)(random))
        if random.random() < 0.1:
            pieces.append(block(b"link.txt", kind=b"1", link=random.choice([b"0001.cls", b"d/0100.txt", b"a.txt"])))
    archive = b"".join(pieces) + random.choice([END, END, END, b"", END + END, END + b"x"])
    if random.random() < 0.25 and archive:
        cut = random.randrange(len(archive))
        changed = bytes([archive[cut] ^ 1 << random.randrange(8)])
        archive = random.choice([archive[:cut], archive[:cut] + changed + archive[cut + 1 :]])
    return archive
