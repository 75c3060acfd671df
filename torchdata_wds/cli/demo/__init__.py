"""Read shards as a training loop does and check that every sample comes exactly once.

wds demo --shards 'train-{000000..000003}.tar' --workers 2
wds demo --keep trial
"""

import argparse
import contextlib
import io
import itertools
import json
import lzma
import os
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from torchdata_wds import storage
from torchdata_wds.cli.command import Command, UsageError, add_force, option, whole_number
from torchdata_wds.cli.terminal import Progress, counted, printable, say
from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.format.tar import read_members
from torchdata_wds.program_interrupts import armed
from torchdata_wds.storage.urls import is_local, local_path, mask_url

_NAMED = 5  # how many lost or doubled samples are named

#: Samples in each of the demo's own shards: uneven, so that the workers' parts differ in length.
SIZES = (131, 64, 97, 150, 12, 118, 83, 129)
_NAME = "train"
_SIGNS = frozenset("{}*?[]")  # of patterns
_WIDTH, _HEIGHT, _CLASSES = 160, 120, 10
_NOT_FOR_TARFILE = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "shards to read, with braces or globs (default: the demo writes its own to a temporary folder)"
    option(parser, "--shards", "PATTERN", text, nargs="+")
    text = "keep the shards that the demo writes: NAME-000000.tar and so on, or 'folder/' for folder/train-000000.tar; "
    option(parser, "--keep", "NAME", text + "they contain images, classes and json to experiment with")
    add_force(parser)
    option(parser, "--workers", "N", "worker processes (default: 2)", whole_number, default=2)


def _run(arguments: argparse.Namespace) -> int:
    with armed():  # compiled modules lose a KeyboardInterrupt while they are imported
        import torchdata_wds.cli.demo.epoch  # noqa: F401
    if arguments.shards and arguments.keep is not None:
        raise UsageError("--keep is for shards that the demo writes, but --shards names existing ones")
    if arguments.force and arguments.keep is None:
        raise UsageError("--force needs --keep, whose shards it replaces")
    if arguments.keep is not None:
        arguments.shards = [keep_shards(arguments.keep, overwrite=arguments.force)]
        say(f"wrote {len(SIZES)} shards: {printable(arguments.shards[0])}")
    if arguments.shards:
        return check_epoch(arguments.shards, arguments.workers)
    with tempfile.TemporaryDirectory(prefix="torchdata_wds-") as folder:
        say(f"writing {len(SIZES)} shards to {folder}")
        return check_epoch([write_shards(Path(folder))], arguments.workers)


def check_epoch(patterns: Sequence[str], workers: int) -> int:
    """Reads an epoch, compares it with a plain scan of the shards, and prints the result; returns the exit status."""
    from torchdata_wds.cli.demo import epoch

    urls = list(storage.list_urls(patterns))
    if "-" in urls:
        raise ShardListError("the demo reads its shards twice, and standard input ('-') can be read only once")
    expected, fields, size = scan(urls)
    if not expected:
        rule = "a sample is made of files named key.extension, such as 0001.jpg"
        raise ShardFormatError(f"no samples in {counted(len(urls), 'shard')}: {rule}")
    found, seconds, first = epoch.read_epoch(epoch.build_pipe(patterns, fields), workers, expected.total())
    for name, value in {
        "shards": f"{len(urls):,}",
        "workers": f"{workers:,}",
        "samples": f"{found.total():,}",
        "seconds": f"{seconds:,.2f}",
        "samples/s": f"{found.total() / seconds:,.1f}",
        "MB/s": f"{size / 1e6 / seconds:,.2f}",
        "time to first batch": f"{first:,.2f} s",
    }.items():
        print(f"{name:<20} {value}")
    return report(expected, found)


def scan(urls: Sequence[str]) -> tuple[Counter[tuple[str, str]], Counter[str], int]:
    """Counts how often each sample (URL, key) occurs in shards, the members of each field, and the bytes of all."""
    samples: Counter[tuple[str, str]] = Counter()
    fields: Counter[str] = Counter()
    total = 0
    with Progress("shards", urls=urls, summarizes=True) as progress:
        for url in urls:
            last = None
            for name, size in _members_of(url):
                if (parts := split_name(name)) is not None:
                    key, extension = parts
                    samples[url, key] += key != last  # members of one sample are neighbours
                    last = key
                    fields[extension.lower()] += 1
                    total += size
            progress.advance(shard=url)
    say(f"scanned {counted(len(urls), 'shard')}")
    return samples, fields, total


def _members_of(url: str) -> list[tuple[str, int]]:
    """Lists the names and sizes of a shard's regular members, in order: by tarfile, as an independent reader."""
    if os.path.isfile(url):  # noqa: PTH113 - a name that is too long is not a file
        with (
            contextlib.suppress(*_NOT_FOR_TARFILE),
            tarfile.open(url, "r|*", encoding="utf-8", errors="backslashreplace") as tar,
        ):
            return [(info.name, info.size) for info in tar if info.isreg() or info.islnk()]
    with storage.open_shard(url) as stream:
        return [(member.name, len(member.data)) for member in read_members(stream, url)]


def report(expected: Counter[tuple[str, str]], found: Counter[tuple[str, str]]) -> int:
    """Prints whether every sample came exactly once, and which did not; returns the exit status."""
    wrong = {"lost": expected - found, "doubled": found - expected}
    for outcome, samples in wrong.items():
        if samples:
            print(f"{samples.total():,} of {counted(expected.total(), 'sample')} {outcome}:")
        for url, key in sorted(samples.elements())[:_NAMED]:
            print(f"  {key} of {mask_url(url)}")
        if samples.total() > _NAMED:
            print(f"  and {samples.total() - _NAMED:,} more")
    if not any(wrong.values()):
        print("every sample came exactly once")
    return 1 if any(wrong.values()) else 0


def keep_shards(name: str, *, overwrite: bool = False) -> str:
    """Writes the shards to a permanent place, all of them or none, and returns the pattern that lists them."""
    if not is_local(name) or not name or not _SIGNS.isdisjoint(name):
        expected = f"a local folder, or a prefix of names, without {' '.join(sorted(_SIGNS))}"
        raise UsageError(f"--keep takes {expected}; not {mask_url(name)!r}")
    path = Path(local_path(name))
    if name.endswith("/") or path.is_dir():
        path /= _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = [path.with_name(f"{path.name}-{index:06d}.tar") for index in range(len(SIZES))]
    there = [target for target in targets if os.path.lexists(target)]
    if there and not overwrite:
        raise FileExistsError(f"{there[0]} already exists: pass another name, or --force to replace it")
    # written to a folder next to their place and renamed at the end: an interrupted demo leaves none of them
    with tempfile.TemporaryDirectory(prefix=".wds-demo-", dir=path.parent) as folder:
        pattern = write_shards(Path(folder), path.name)
        for target in targets:
            Path(folder, target.name).replace(target)
    return str(path.with_name(Path(pattern).name))


def write_shards(folder: Path, name: str = _NAME) -> str:
    """Writes shards of images, classes and json to a folder with the standard library; returns their pattern."""
    numbers = itertools.count()
    for index, size in enumerate(SIZES):
        with tarfile.open(folder / f"{name}-{index:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in itertools.islice(numbers, size):
                label = number % _CLASSES
                fields = {"cls": str(label).encode(), "jpg": _make_jpeg(number)}
                fields["json"] = json.dumps({"number": number, "label": label}).encode()
                for field, data in fields.items():
                    info = tarfile.TarInfo(f"sample-{number:06d}.{field}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return f"{folder / name}-{{000000..{len(SIZES) - 1:06d}}}.tar"


def _make_jpeg(number: int) -> bytes:
    """Returns a smooth image with some noise: coarse random colours, enlarged."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + rng.integers(-8, 9, smooth.shape, dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


COMMAND = Command(__doc__, _add_arguments, _run)
