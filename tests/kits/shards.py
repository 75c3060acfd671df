"""Shards for tests, made with the standard library's tarfile or by hand: never with the code under test."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

Members = Iterable[tuple[str, bytes]]

END = bytes(1024)


def tar_bytes(members: Members, *, tar_format: int = tarfile.USTAR_FORMAT, end: bytes = END) -> bytes:
    """An archive of regular files, with exactly `end` behind the last member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        size = tar.offset
    return out.getvalue()[:size] + end


def write_tar(path: Path, members: Members, **options: Any) -> str:
    """Writes `tar_bytes` to a file and returns its path as a str."""
    path.write_bytes(tar_bytes(members, **options))
    return str(path)


def sample_members(key: str, **fields: bytes) -> list[tuple[str, bytes]]:
    """The members of one sample, in the order of the fields."""
    return [(f"{key}.{field}", data) for field, data in fields.items()]


def text_samples(prefix: str, count: int) -> list[tuple[str, bytes]]:
    """Members txt, json and cls of `count` samples whose keys begin with `prefix`."""
    members: list[tuple[str, bytes]] = []
    for number in range(count):
        members += sample_members(
            f"{prefix}{number:05d}",
            txt=f"text of {prefix}{number:05d}".encode(),
            json=json.dumps({"number": number}).encode(),
            cls=str(number % 10).encode(),
        )
    return members


def write_text_shards(folder: Path, sizes: Iterable[int]) -> list[str]:
    """One text shard per size (0 gives a valid empty shard); returns their paths in order."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_tar(folder / f"shard-{index:06d}.tar", text_samples(f"s{index}-", size))
        for index, size in enumerate(sizes)
    ]


def text_keys(sizes: Iterable[int]) -> list[str]:
    """The keys that `write_text_shards` wrote, in order."""
    return [f"s{index}-{number:05d}" for index, size in enumerate(sizes) for number in range(size)]


def keys_of(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of samples in their order."""
    return [sample["__key__"] for sample in samples]


def jpeg_bytes(number: int, size: tuple[int, int] = (16, 12), mode: str = "RGB") -> bytes:
    """A small JPEG whose colour depends on `number`."""
    colour: Any = number * 37 % 256 if mode == "L" else tuple(number * step % 256 for step in (37, 59, 83))
    return image_file(Image.new(mode, size, colour), "JPEG", quality=90)


def image_file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def image_samples(prefix: str, count: int) -> list[tuple[str, bytes]]:
    """Members jpg, json and cls of `count` samples."""
    members: list[tuple[str, bytes]] = []
    for number in range(count):
        members += sample_members(
            f"{prefix}{number:05d}",
            jpg=jpeg_bytes(number),
            json=json.dumps({"number": number}).encode(),
            cls=str(number % 10).encode(),
        )
    return members


def grouped(members: Members) -> dict[str, dict[str, bytes]]:
    """What a plain reading of the members gives: key -> field -> bytes, for names with one dot rule and no folder."""
    samples: dict[str, dict[str, bytes]] = {}
    for name, data in members:
        key, _, field = name.partition(".")
        samples.setdefault(key, {})[field] = data
    return samples


def without_meta(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a sample, without __key__ and __url__."""
    return {field: value for field, value in sample.items() if not field.startswith("__")}
