"""Small inputs for `test_small_inputs`: shards and fields, whole, mutated and hostile, made from a number.

As a program, ``python -m tests.kits.small_inputs FOLDER FIRST LAST``, it reads those of a range of numbers and prints
what each took.
"""

import bz2
import gzip
import io
import logging
import lzma
import random
import resource
import struct
import sys
import tarfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import zstandard
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WdsError, index_shard
from torchdata_wds.cli.validate.findings import ValidationRules
from torchdata_wds.cli.validate.shard_validation import ShardValidation
from torchdata_wds.codecs import Decoder, encode_sample

#: What a careful reader of strangers' shards sets.
LARGEST_MEMBER, LARGEST_FIELD, LARGEST_IMAGE = 64 << 20, 64 << 20, 16_000_000
#: The most bytes of an input.
LARGEST = 1 << 20

Random = random.Random
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
IMAGES = ("png", "jpg", "webp", "gif", "tiff", "bmp", "ppm", "ico", "jp2")
FIELDS = (
    *("txt", "cls", "json", "npy", "npz", "pth", "ten", "mp", "cbor", *IMAGES),
    *("txt.gz", "json.xz", "npy.zst", "bin.bz2", "gz"),
)


def values(rng: Random) -> dict[str, Any]:
    """A value for each type of field."""
    array = np.array(rng.choices(range(256), k=rng.choice((1, 12, 768))), np.uint8)
    image = np.resize(array, (rng.randint(1, 40), rng.randint(1, 40), 3))
    record = {"a": [1, 2.5, None, "x" * rng.randint(0, 50)], "b": {"c": rng.randint(0, 1 << 60)}}
    return {
        "txt": "text " * rng.randint(0, 2000),
        "cls": rng.randint(0, 1000),
        "npy": array,
        "npz": {"a": array, "b": array[:1]},
        "ten": [array],
        "pth": {"a": torch.from_numpy(array), "b": record},
        **dict.fromkeys(("json", "mp", "cbor"), record),
        **dict.fromkeys(IMAGES, image),
    }


def field_of(rng: Random, field: str) -> bytes:
    """A sound field."""
    name, _, suffix = field.rpartition(".")
    if suffix in COMPRESS:
        return COMPRESS[suffix](field_of(rng, name) if name in values(rng) else rng.randbytes(100))
    if field in ("gif", "ico", "jp2"):
        out = io.BytesIO()
        kind = {"gif": "GIF", "ico": "ICO", "jp2": "JPEG2000"}[field]
        PIL.Image.fromarray(np.resize(values(rng)["png"], (16, 16, 3))).save(out, kind)
        return out.getvalue()
    encoded = encode_sample({"__key__": "k", field: values(rng)[field]})[field]
    assert isinstance(encoded, bytes)
    return encoded


def mutated(rng: Random, data: bytes) -> bytes:
    """Bytes changed, removed, repeated, or put in between."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind <= 1 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[place : place + 8] = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(8), b"\x7f\xff\xff\xff"))
        elif kind == 3:
            del changed[place : place + rng.choice((1, 4, 512, len(changed)))]
        elif kind == 4:
            changed[place:place] = changed[place : place + rng.choice((4, 512, 4096))]
        else:
            changed[place:place] = rng.randbytes(rng.choice((1, 4, 512)))
    return bytes(changed[:LARGEST])


def header(name: str, size: int, kind: bytes = b"0", link: str = "") -> bytes:
    """A header block with a right checksum, whatever its size is."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT)[:512])
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[156:157] = kind
    block[157 : 157 + len(link)] = link.encode()
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def entry(name: str, data: bytes = b"", kind: bytes = b"0", link: str = "") -> bytes:
    return header(name, len(data), kind, link) + data + bytes(-len(data) % 512)


def record(keyword: str, value: str) -> bytes:
    length = len(keyword) + len(value) + 3
    while len(str(length)) + len(keyword) + len(value) + 3 != length:
        length = len(str(length)) + len(keyword) + len(value) + 3
    return f"{length} {keyword}={value}\n".encode()


def sound_shard(rng: Random) -> bytes:
    """An archive by tarfile, of fields of all types."""
    out = io.BytesIO()
    kind = rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for number in range(rng.randint(1, 12)):
            for field in rng.sample(FIELDS, rng.randint(1, 4)):
                data = field_of(rng, field)
                info = tarfile.TarInfo(("folder/" * rng.choice((0, 1, 13))) + f"{number:04d}.{field}")
                info.size, info.mtime = len(data), rng.choice((0, 1.5))
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()[:LARGEST]


def hostile_shard(rng: Random) -> bytes:
    """An archive that asks for much."""
    count = rng.choice((10, 200, 450))
    size = rng.choice((1 << 26, 1 << 30, 1 << 33, 1 << 62, (1 << 80) - 1))
    part = rng.choice((0, 5, 1000))
    sizes = "".join(f"{number * 100},1," for number in range(count)).rstrip(",")
    sparse = record("GNU.sparse.size", str(size)) + record("GNU.sparse.map", sizes)
    new_sparse = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
    new_sparse += record("GNU.sparse.realsize", str(size))
    kinds: list[Callable[[], bytes]] = [
        lambda: header("a.bin", size) + bytes(part),
        lambda: header("a", size, b"L") + bytes(part),
        lambda: header("x", size, b"x") + bytes(part),
        lambda: entry("x", record("size", str(size)), b"x") + entry("a.bin", bytes(part)),
        lambda: entry("x", sparse, b"x") + entry("a.bin", bytes(count)),
        lambda: entry("x", new_sparse, b"x") + entry("a.bin", b"1\n0\n" + str(size).encode() + b"\n"),
        lambda: entry("x", b"y" * 100, b"L") * count + entry("a.txt", b"x"),
        lambda: b"".join(entry("x", record(f"k{n}", "v"), b"g") for n in range(count)) + entry("a.txt", b"x") * count,
        lambda: b"".join(entry("x", record("path", "v" * n), b"x") for n in range(count)) + entry("a.txt", b"x"),
        lambda: entry("a.bin", bytes(200_000)) + b"".join(header(f"{n}.bin", 0, b"1", "a.bin") for n in range(count)),
        lambda: b"".join(header(f"{n}.bin", 0, b"1", f"{n + rng.choice((-1, 0, 1))}.bin") for n in range(count)),
        lambda: b"".join(header(f"{n}/", 0, b"5") for n in range(count)),
        lambda: entry("a.txt", b"x") + bytes(512) * count,
        lambda: (entry("a.txt", b"x") + bytes(1024)) * count,
    ]
    return (rng.choice(kinds)() + rng.choice((b"", bytes(1024))))[:LARGEST]


def compressed_shard(rng: Random) -> bytes:
    """A shard in one or two layers, in parts, among empty streams; or zeros without end."""
    compress = COMPRESS[rng.choice(list(COMPRESS))]
    shard = rng.choice((sound_shard, hostile_shard))(rng)
    which = rng.randrange(7)
    if which == 0:
        return compress(compress(shard))
    if which == 1:
        cut = rng.randrange(len(shard) + 1)
        return compress(shard[:cut]) + compress(b"") * rng.choice((1, 1000)) + compress(shard[cut:])
    if which == 2:
        return (compress(b"") * 60_000)[: LARGEST - 1000] + compress(shard)[:1000]
    if which == 3:
        return compress(bytes(1024) + bytes(rng.choice((10, 300)) << 20))
    if which == 4:
        return compress(header("a.bin", 500 << 20) + bytes(100 << 20))
    if which == 5:
        return compress((entry("x", b"y" * 500, b"L") * 3 + entry("a.txt", b"x")) * 20_000)
    return compress(shard)


def npy(shape: str, body: bytes = b"", descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return out.getvalue()


def png(width: int, height: int, rows: int, depth: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = zlib.compress((b"\0" + bytes((width * 3 * depth + 7) // 8)) * rows)
    head = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def hostile_field(rng: Random) -> tuple[str, bytes]:
    """A field that asks for much."""
    large = rng.choice((1 << 28, 1 << 31, 1 << 40, 1 << 62))
    count = rng.choice((1000, 100_000, 500_000))
    claim = struct.pack(">Q", large)
    suffix = rng.choice(list(COMPRESS))
    number = b"\x8a\x08" + struct.pack("<q", large)
    kinds: list[Callable[[], tuple[str, bytes]]] = [
        lambda: ("npy", npy(f"({large},)", bytes(100))),
        lambda: ("npy", npy("(1,)", b"", "[" * 900 + "]" * 900)),
        lambda: ("npz", zipped("a.npy", npy(f"({large},)", bytes(rng.choice((100, 200 << 20)))))),
        lambda: ("pth", zipped("archive/data.pkl", b"\x80\x02cbuiltins\nbytearray\n(" + number + b"tR.")),
        lambda: ("pth", zipped("archive/data.pkl", b"\x80\x02ctorch\nTensor\n(" + number + b"tR.")),
        lambda: ("pth", zipped("archive/data.pkl", b"\x80\x02" + b"]" * count + b"a" * (count - 1) + b".")),
        lambda: ("ten", b"~TenBin~" + struct.pack("<q", large)),
        lambda: ("mp", (b"\xdd" + struct.pack(">I", count)) * rng.choice((1, 500)) + b"\xc0" * count),
        lambda: ("mp", b"\x91" * count),
        lambda: ("cbor", b"\x81" * count),
        lambda: ("cbor", rng.choice((b"\x9b", b"\x5b", b"\x7b", b"\xbb")) + claim),
        lambda: ("cbor", (b"\x9a" + struct.pack(">I", count)) * 300),
        lambda: ("json", rng.choice((b"[", b'{"a":')) * (count // 5)),
        lambda: ("json", b"1" * count),
        lambda: ("cls", b"1" * count),
        lambda: ("png", png(*rng.choice(((3000, 3000, 3000, 8), (2000, 2000, 2000, 16), (60_000, 60_000, 1, 8))))),
        lambda: (f"txt.{suffix}", COMPRESS[suffix](bytes(rng.choice((1, 200)) << 20))),
        lambda: (f"txt.{suffix}", COMPRESS[suffix](b"") * (LARGEST // 60)),
        lambda: (f"txt.{suffix}.{suffix}", COMPRESS[suffix](COMPRESS[suffix](bytes(100 << 20)))),
    ]
    field, data = rng.choice(kinds)()
    return field, data[:LARGEST]


def run_shard(rng: Random, data: bytes, folder: Path) -> None:
    """Reads a shard in one of the ways in which shards are read."""
    path = folder / "x.tar"
    path.write_bytes(data)
    way = rng.randrange(6)
    if way == 0:
        list(ShardValidation(str(path), ValidationRules(max_member_bytes=LARGEST_MEMBER)))
        return
    if way == 1:
        index_shard(path, to=False)
        return
    source: Any = [str(path), str(path), f"pipe:cat {path}", ("x.tar", io.BytesIO(data))][way - 2]
    select = "*.txt *.json" if way == 3 else None
    pipe = IterableWrapper([source], deepcopy=False).load_wds_shards(select=select, max_member_bytes=LARGEST_MEMBER)
    for _ in pipe.group_by_key().wds_decode("rgb8", max_bytes=LARGEST_FIELD):
        pass


def run(seed: int, folder: Path) -> tuple[str, str]:
    """Reads the input of a number; gives what it was, and what came of it."""
    rng = Random(seed)
    which = rng.randrange(8)
    if which < 4:
        what = ("sound", "hostile", "compressed", "compressed")[which]
        data = (sound_shard, hostile_shard, compressed_shard, compressed_shard)[which](rng)
        data = mutated(rng, data) if data and rng.random() < 0.6 else data
        work: Callable[[], Any] = partial(run_shard, rng, data, folder)
    else:
        field = rng.choice(FIELDS)
        field, data = hostile_field(rng) if which == 4 else (field, field_of(rng, field))
        what = field
        data = mutated(rng, data) if data and rng.random() < 0.7 else data
        spec = rng.choice(("pil", "rgb8", "torchrgb", "l8", "rgba"))
        work = partial(Decoder(spec, max_bytes=LARGEST_FIELD), {"__key__": "k", field: data})
    meter = Meter()
    try:
        work()
        outcome = "read"
    except WdsError as error:
        # handlers never skip a lack of memory: a small input must not look like one
        outcome = f"FAULT: {error}" if isinstance(error.__cause__, MemoryError) else type(error).__name__
    except BaseException as error:
        outcome = f"FAULT: {type(error).__name__}: {error}"
    return what, f"{meter.seconds():.3f} {meter.megabytes():.0f} {' '.join(outcome.split())[:300]}"


class Meter:
    """What was spent since it was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._rss = self._kilobytes("VmRSS")
        self._begun = time.process_time()

    def seconds(self) -> float:
        """Processor time."""
        return time.process_time() - self._begun

    def megabytes(self) -> float:
        """The most memory that was in use at a time, more than at the beginning."""
        return max(0, self._kilobytes("VmHWM") - self._rss) / 1024

    @staticmethod
    def _kilobytes(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
        raise LookupError(name)


def tell_all(first: int, last: int, folder: Path) -> None:
    """Reads all inputs of a range, and writes a line before and after each."""
    for seed in range(first, last):
        sys.stdout.write(f"{seed} begun\n")
        sys.stdout.flush()
        what, outcome = run(seed, folder)
        sys.stdout.write(f"{seed} {what} {outcome}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    PIL.Image.MAX_IMAGE_PIXELS = LARGEST_IMAGE
    place = Path(sys.argv[1])
    for seed in range(-20, 0):
        run(seed, place)  # what is imported at first use is no part of an input
    used = resource.getrusage(resource.RUSAGE_SELF)
    number = int(sys.argv[3]) - int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 20 + number, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    tell_all(int(sys.argv[2]), int(sys.argv[3]), place)
