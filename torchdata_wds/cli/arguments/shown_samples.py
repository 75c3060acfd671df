"""What the commands that look into shards have in common: the samples that they show, and lines on standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from typing import Any, TypeVar

from torchdata_wds.cli.arguments.inputs import SampleReader
from torchdata_wds.cli.command import whole_number
from torchdata_wds.errors import SampleError, ShardOpenError, UnsafeDataError
from torchdata_wds.storage import open_target, remove_target
from torchdata_wds.storage.targets.local import PARTIAL
from torchdata_wds.storage.urls import scheme_of

__all__ = ["add_count_argument", "taken", "write_line", "write_whole"]


T = TypeVar("T")


def add_count_argument(parser: argparse.ArgumentParser, default: str = "all") -> None:
    """Adds ``--count``."""
    parser.add_argument(
        "-c", "--count", type=whole_number, metavar="N", help=f"how many samples at most (default: {default})"
    )


def taken(
    reader: SampleReader, take: Callable[[dict[str, Any]], T | None], count: int | None = None
) -> Generator[T, None, None]:
    """Gives what is taken of each sample, and reads no further than it must.

    Args:
        reader: Reads the samples, and is told of those that cannot be taken.
        take: Gives something for a sample, or None to pass it over.
        count: How many at most.

    Yields:
        What `take` gives.

    Raises:
        SampleError: where `take` raises it, unless such samples are to be skipped.
        UnsafeDataError: likewise.
    """
    if count == 0:
        return
    given = 0
    with closing(iter(reader)) as samples:  # type: ignore[type-var]
        for sample in samples:
            try:
                result = take(sample)
            except (SampleError, UnsafeDataError) as error:
                reader.refuse(error)
                continue
            if result is None:
                continue
            yield result
            given += 1
            if given == count:
                return


def write_line(line: str | bytes) -> None:
    """Writes a line to standard output: UTF-8 whatever the locale is, and at once if somebody looks at it."""
    sys.stdout.buffer.write((line.encode() if isinstance(line, str) else line) + b"\n")
    if sys.stdout.isatty():
        sys.stdout.buffer.flush()


def write_whole(pieces: Iterable[bytes], url: str, *, overwrite: bool) -> None:
    """Writes a file that appears only when it is whole.

    Args:
        pieces: Its content, asked for once it is sure that the file can be written.
        url: A path, or a URL that can be written.
        overwrite: Whether to replace what exists.

    Raises:
        ShardOpenError: if it exists or cannot be written.
    """
    target = open_target(url, overwrite=overwrite)
    is_given = False  # whether it is the target's turn: what it says of its own failure is where the rest is
    try:
        for piece in pieces:
            is_given = True
            target.write(piece)
            is_given = False
    except BaseException as error:
        target.abort()
        if scheme_of(url) in ("", "file") and not (is_given and isinstance(error, ShardOpenError)):
            with suppress(ShardOpenError):  # half a picture or page is of no use
                remove_target(url + PARTIAL)
        raise
    target.commit()
