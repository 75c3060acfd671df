"""``demo``: reads shards as a training loop does, and checks that every sample comes exactly once."""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import storage
from torchdata_wds.cli.command import Command, UsageError, counted, say, whole_number
from torchdata_wds.cli.demo.scan import Contents, SampleId, scan_shard
from torchdata_wds.cli.demo.shards import SIZES, keep_shards, write_shards
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import Progress
from torchdata_wds.codecs import IMAGE_FIELDS
from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.handlers import warn_and_continue
from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.pipes.samples.collate import wds_collate
from torchdata_wds.pipes.shards.list_shards import ShardListerIterDataPipe
from torchdata_wds.program_interrupts import armed

__all__ = ["COMMAND", "augment", "build_pipe"]


_BATCH = 64

_BUFFER, _BUFFER_BYTES = 1000, 256 << 20  # users' samples may be large

_SIDE = 96

_NAMED = 5  # how many lost or doubled samples are named


class Epoch(NamedTuple):
    """What one epoch gave.

    Attributes:
        samples: How often each sample came, by URL and key.
        seconds: From the start, with that of the workers, to the last batch.
        first: Seconds from the start to the first batch.
    """

    samples: Counter[SampleId]
    seconds: float
    first: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments."""
    parser.add_argument(
        "--shards",
        nargs="+",
        metavar="PATTERN",
        help="shards to read, with braces or globs; without it the demo writes its own to a temporary folder",
    )
    parser.add_argument(
        "--keep",
        metavar="NAME",
        help="keep the shards that the demo writes: NAME-000000.tar and so on, or 'folder/' for "
        "folder/train-000000.tar; they have images, classes and json, to try things with",
    )
    parser.add_argument("--force", action="store_true", help="replace what exists")
    parser.add_argument("--workers", type=whole_number, default=2, metavar="N", help="worker processes (default: 2)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo, and returns 1 if a sample was lost or doubled."""
    with armed(), contextlib.suppress(ImportError):  # compiled modules lose a KeyboardInterrupt while they are imported
        import torchdata_wds.workers.service  # noqa: F401
    if arguments.shards and arguments.keep is not None:
        raise UsageError("--keep is for the shards that the demo writes itself, and --shards names others")
    if arguments.force and arguments.keep is None:
        raise UsageError("--force is for the shards that --keep leaves")
    if arguments.shards:
        return check_epoch(arguments.shards, arguments.workers)
    if arguments.keep is not None:
        pattern = keep_shards(arguments.keep, overwrite=arguments.force)
        say(f"wrote {len(SIZES)} shards: {printable(pattern)}")
        return check_epoch([pattern], arguments.workers)
    with tempfile.TemporaryDirectory(prefix="torchdata_wds-") as folder:
        say(f"writing {len(SIZES)} shards to {folder}")
        return check_epoch([write_shards(Path(folder))], arguments.workers)


COMMAND = Command(
    "read shards as a training loop does and check that every sample comes exactly once",
    add_arguments,
    run,
    """
    wds demo --shards 'train-{000000..000003}.tar' --workers 2
    wds demo --keep trial
    """,
)


def check_epoch(patterns: Sequence[str], workers: int) -> int:
    """Reads an epoch and compares it with a plain scan of the shards; prints the result."""
    urls = list(storage.list_urls(patterns))
    if "-" in urls:
        raise ShardListError("the demo reads its shards twice, and standard input ('-') can be read only once")
    contents = scan(urls)
    epoch = read_epoch(build_pipe(patterns, contents.fields), workers, contents.samples.total())
    count = epoch.samples.total()
    for name, value in {
        "shards": f"{len(urls):,}",
        "workers": f"{workers:,}",
        "samples": f"{count:,}",
        "seconds": f"{epoch.seconds:,.2f}",
        "samples/s": f"{count / epoch.seconds:,.1f}",
        "MB/s": f"{contents.size / 1e6 / epoch.seconds:,.2f}",
        "time to first batch": f"{epoch.first:,.2f} s",
    }.items():
        print(f"{name:<20} {value}")
    return report(contents.samples, epoch.samples)


def scan(urls: Sequence[str]) -> Contents:
    """Finds out what the shards hold.

    Raises:
        ShardFormatError: if that is not a single sample.
    """
    contents = Contents()
    with Progress("shards scanned", len(urls)) as progress:
        for url in urls:
            contents.add(url, scan_shard(url))
            progress.advance()
    if not contents.samples:
        raise ShardFormatError(
            f"no samples in {counted(len(urls), 'shard')}: a sample is made of files named key.extension, "
            "such as 0001.jpg"
        )
    return contents


def build_pipe(patterns: Sequence[str], fields: Counter[str]) -> WdsPipe[Any]:
    """Builds the demo's graph: the usual one, with stages for images and labels where there are such fields."""
    images = [field for field in fields if field.rpartition(".")[2] in IMAGE_FIELDS]
    chosen = [";".join(images)] if images else []
    if "cls" in fields:
        chosen.append("cls")
    pipe: WdsPipe[Any] = (
        ShardListerIterDataPipe(IterableWrapper([list(patterns)]))
        .shuffle()
        .sharding_filter()
        .load_wds_shards()
        .group_by_key()
        .wds_shuffle(_BUFFER, max_bytes=_BUFFER_BYTES)
    )
    if chosen:
        pipe = pipe.wds_decode("pil", only=[*images, "cls"], handler=warn_and_continue)
    pipe = pipe.wds_to_tuple("__url__", "__key__", *chosen, missing="none")
    if images:
        pipe = pipe.wds_map_tuple(None, None, augment)
    return pipe.batch(_BATCH).collate(wds_collate)


def augment(image: Image.Image | None) -> torch.Tensor | None:
    """Mirrors every second image and makes all of one size; a sample without image keeps None."""
    if image is None:
        return None
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    pixels = np.asarray(image.resize((_SIDE, _SIDE)), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_epoch(pipe: WdsPipe[Any], workers: int, total: int) -> Epoch:
    """Reads one epoch through DataLoader2, or through torch's own DataLoader where there is no torchdata."""
    samples: Counter[SampleId] = Counter()
    first = 0.0
    with _loader(pipe, workers) as loader, Progress("samples", total) as bar:
        start = time.perf_counter()
        for urls, keys, *_ in loader:
            first = first or time.perf_counter() - start
            samples.update(zip(urls, keys, strict=True))
            bar.advance(len(keys))
        seconds = time.perf_counter() - start
    return Epoch(samples, seconds, first)


@contextlib.contextmanager
def _loader(pipe: WdsPipe[Any], workers: int) -> Iterator[Iterable[Any]]:
    try:
        from torchdata_wds.workers.service import DataLoader2, WorkersReadingService
    except ImportError as error:
        say(f"torchdata cannot be imported ({error.__cause__ or error}): reading through torch.utils.data.DataLoader")
        # batches are those that the graph makes in the workers
        yield DataLoader(pipe, batch_size=None, num_workers=workers)
        return
    with DataLoader2(pipe, reading_service=WorkersReadingService(workers)) as loader:
        yield loader


def report(expected: Counter[SampleId], found: Counter[SampleId]) -> int:
    """Prints whether every sample came exactly once, and which did not; returns the exit status."""
    wrong = {"lost": expected - found, "doubled": found - expected}
    for outcome, samples in wrong.items():
        if not samples:
            continue
        print(f"{samples.total():,} of {counted(expected.total(), 'sample')} {outcome}:")
        named = sorted(samples.elements())[:_NAMED]
        for url, key in named:
            print(f"  {key} of {storage.mask_url(url)}")
        if samples.total() > len(named):
            print(f"  and {samples.total() - len(named):,} more")
    if not any(wrong.values()):
        print("every sample came exactly once")
    return 1 if any(wrong.values()) else 0
