"""The shards that are read: made once, always the same, by the standard library's tar headers.

    python benchmarks/shards.py [--quick] [--folder FOLDER]

makes all of them beforehand. A shard is written under another name first, so an interrupted run leaves none half made.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import json
import os
import random
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from PIL import Image

__all__ = ["DEFAULT_FOLDER", "KINDS", "Kind", "Shards", "make_shards", "write_whole"]

DEFAULT_FOLDER = Path(tempfile.gettempdir()) / "torchdata_wds_bench"
WORDS = ("a", "photo", "of", "one", "small", "brown", "dog", "running", "over", "the", "wet", "grass", "near", "river")
SIDE = 400  # pixels of an image
QUALITY = 88  # gives JPEG files of about 50 KB
MTIME = 1_700_000_000.25

Fields = dict[str, bytes]  # in the order in which they stand in the shard


class Kind(NamedTuple):
    """One kind of shards.

    Attributes:
        fields: Makes the fields of a sample from its number.
        shards: How many shards.
        samples: How many samples in each.
        quick: How many samples in each with `--quick`.
        pax: Whether every member has a PAX header with its time in fractions, as webdataset's TarWriter writes it.
        compression: "gz", "zst" or none.
    """

    fields: Callable[[int], Fields]
    shards: int
    samples: int
    quick: int
    pax: bool = False
    compression: str = ""


class Shards(NamedTuple):
    """Shards that exist.

    Attributes:
        paths: Where they are.
        samples: How many samples they have together.
        size: Bytes of all of them, uncompressed.
    """

    paths: list[Path]
    samples: int
    size: int

    @property
    def pattern(self) -> str:
        """All of them as one brace pattern."""
        name = self.paths[0].name.replace("000000", f"{{000000..{len(self.paths) - 1:06d}}}")
        return str(self.paths[0].with_name(name))

    @property
    def compression(self) -> str:
        """How they are compressed: "gz", "zst" or not at all."""
        return self.paths[0].suffix[1:].removeprefix("tar")


def text_fields(number: int) -> Fields:
    """A caption of 200 bytes, JSON of 100 bytes and a class of one digit."""
    rng = random.Random(number)
    caption = " ".join(rng.choices(WORDS, k=80))
    record = {"id": number, "width": rng.randrange(200, 2000), "url": ""}
    record["url"] = f"https://example.org/{rng.getrandbits(512):0128x}"[: 100 - len(json.dumps(record))]
    return {"cls": b"%d" % (number % 10), "json": json.dumps(record).encode(), "txt": caption.encode()[:200]}


def image_fields(number: int) -> Fields:
    """A JPEG of about 50 KB, JSON and a class."""
    fields = text_fields(number)
    return {"cls": fields["cls"], "jpg": make_jpeg(number, SIDE, SIDE, noise=12), "json": fields["json"]}


def make_jpeg(number: int, width: int, height: int, noise: int) -> bytes:
    """Smooth shapes under fine noise, which compress as photos do."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = rng.integers(-noise, noise + 1, (height, width, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


_jpeg_again = cache(make_jpeg)


def sized_fields(number: int, *, width: int, height: int) -> Fields:
    """A JPEG of one size, of which there are 200 different ones, and a class."""
    return {"cls": b"%d" % (number % 10), "jpg": _jpeg_again(number % 200, width, height, noise=8)}


def sized(width: int, height: int, samples: int) -> Kind:
    """Shards of JPEGs of one size."""
    return Kind(partial(sized_fields, width=width, height=height), 4, samples, 16)


def big_fields(number: int) -> Fields:
    """1 MB that no compression makes smaller, and a class."""
    return {"bin": random.Random(number).randbytes(1_000_000), "cls": b"%d" % (number % 10)}


def middling_fields(number: int) -> Fields:
    """100 KB, and a class."""
    return {"bin": random.Random(number).randbytes(100_000), "cls": b"%d" % (number % 10)}


def photo_fields(number: int) -> Fields:
    """50 KB that no compression makes smaller, as a JPEG, and a class."""
    rng = random.Random(number)
    return {"jpg": rng.randbytes(50_000 + rng.randrange(-5_000, 5_000)), "cls": b"%d" % (number % 10)}


KINDS = {
    "text": Kind(text_fields, 4, 10_000, 60),
    "text, pax": Kind(text_fields, 4, 10_000, 60, pax=True),
    "text.tar.gz": Kind(text_fields, 4, 10_000, 60, compression="gz"),
    "text.tar.zst": Kind(text_fields, 4, 10_000, 60, compression="zst"),
    "images": Kind(image_fields, 4, 500, 10),
    "big": Kind(big_fields, 2, 200, 5),
    "1 GB": Kind(middling_fields, 1, 10_000, 500),
    "photos": Kind(photo_fields, 24, 100, 6),
    "one of many": Kind(text_fields, 1, 1_000, 50),
    "tiny": Kind(text_fields, 1, 2, 2),
    "million texts": Kind(text_fields, 5, 240_000, 120),
    "JPEG 400x400": sized(400, 400, 1_600),
    "JPEG 500x375": sized(500, 375, 1_600),
    "JPEG 1000x750": sized(1000, 750, 800),
    "JPEG 1024x768": sized(1024, 768, 800),
}


def make_shards(name: str, folder: Path, *, quick: bool) -> Shards:
    """Makes the shards of a kind in a folder, or finds them there."""
    kind = KINDS[name]
    samples = kind.quick if quick else kind.samples
    suffix = f".tar.{kind.compression}".rstrip(".")
    stem = re.sub(r"\W+", "-", name.removesuffix(suffix))
    paths = [folder / f"{stem}-{samples}" / f"{stem}-{number:06d}{suffix}" for number in range(kind.shards)]
    for number, path in enumerate(paths):
        if not path.exists():
            numbers = range(number * samples, (number + 1) * samples)
            write_whole(path, partial(_write, kind, numbers))
    return Shards(paths, samples * kind.shards, sum(map(_uncompressed_size, paths)))


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Writes a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".unfinished-", delete=False) as file:
        try:
            write(cast("IO[bytes]", file))
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)


def _write(kind: Kind, numbers: range, file: IO[bytes]) -> None:
    if kind.compression == "gz":
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
            compressed.writelines(_blocks(kind, numbers))
    elif kind.compression == "zst":
        file.write(_zstandard().ZstdCompressor(3, write_checksum=True).compress(b"".join(_blocks(kind, numbers))))
    else:
        file.writelines(_blocks(kind, numbers))


def _blocks(kind: Kind, numbers: range) -> Iterator[bytes]:
    """The parts of a tar file: header and padded data of each member, and the end mark."""
    for number in numbers:
        for extension, data in kind.fields(number).items():
            info = tarfile.TarInfo(f"{number:08d}.{extension}")
            info.size, info.mode, info.uname, info.gname = len(data), 0o444, "bigdata", "bigdata"
            info.mtime = MTIME + number if kind.pax else int(MTIME)  # type: ignore[assignment]  # fractions are fine
            yield info.tobuf(tarfile.PAX_FORMAT if kind.pax else tarfile.USTAR_FORMAT)
            yield data
            yield bytes(-len(data) % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _zstandard() -> Any:
    return importlib.import_module("zstandard")


def _uncompressed_size(path: Path) -> int:
    if path.suffix not in (".gz", ".zst"):
        return path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".zst":
            return int(_zstandard().frame_content_size(file.read(32)))
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(), "little")


def main() -> None:
    """Makes all shards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small ones")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where (default: %(default)s)")
    arguments = parser.parse_args()
    for name in KINDS:
        shards = make_shards(name, arguments.folder, quick=arguments.quick)
        print(f"{name}: {shards.samples:,} samples, {shards.size / 1e6:,.1f} MB, {shards.pattern}")


if __name__ == "__main__":
    main()
