"""``split``: samples in numbered shards."""

from __future__ import annotations

import argparse
import contextlib
import os
import posixpath
import sys
from contextlib import closing
from typing import Any

from torchdata_wds import storage
from torchdata_wds.cli.arguments.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.arguments.outputs import COMPRESSIONS, add_rekey_argument, rekeyed
from torchdata_wds.cli.arguments.shown_samples import write_line
from torchdata_wds.cli.command import (
    Command,
    UsageError,
    byte_size,
    counted,
    let_go_of_output,
    positive_number,
    say,
    whole_number,
)
from torchdata_wds.cli.progress_bar import stdout_is_apart
from torchdata_wds.cli.split.hook_command import HookCommand
from torchdata_wds.cli.split.numbered_names import number_of, numbered_pattern
from torchdata_wds.errors import ReappearingKeyError, SampleError, WdsError
from torchdata_wds.format.index import index_url
from torchdata_wds.format.shard_file import ShardInfo
from torchdata_wds.format.shard_names import ShardNames
from torchdata_wds.writers.shard_writer import ShardWriter

__all__ = ["COMMAND"]


_PLACES = ("path", "name", "folder", "shard", "count")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``split``."""
    add_input_arguments(parser)
    parser.add_argument(
        "-n", "--count", type=positive_number, default=100_000, metavar="N", help="samples in a shard (default: 100000)"
    )
    parser.add_argument(
        "-s",
        "--size",
        type=byte_size,
        default=1e9,
        metavar="BYTES",
        help="the most bytes of a shard before compression, headers counted (default: 1e9)",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="NAME",
        help="NAME gives NAME-000000.tar and so on; or a pattern with %%06d or {shard:06d}",
    )
    parser.add_argument("--start", type=first_number, default=0, metavar="N", help="number of the first, or 'next'")
    parser.add_argument("--max-shards", type=positive_number, metavar="N", help="stop when N shards are full")
    parser.add_argument(
        "--post",
        metavar="COMMAND",
        help="run this by sh for each finished shard, with {path}, {name}, {folder}, {shard} (the number), {count}",
    )
    parser.add_argument("--delete", action="store_true", help="remove each shard for which --post has succeeded")
    parser.add_argument("--force", action="store_true", help="replace what exists")
    parser.add_argument("--compress", choices=COMPRESSIONS, help="by default as the name's suffix says")
    parser.add_argument("--index", action="store_true", help="write an index beside each shard")
    add_rekey_argument(parser)


def first_number(text: str) -> int | str:
    """Reads the argument ``--start``.

    Raises:
        argparse.ArgumentTypeError: if it is neither a number nor ``next``.
    """
    return text if text == "next" else whole_number(text)


def run(arguments: argparse.Namespace) -> int:
    """Splits the samples, prints the finished shards, and returns the exit status."""
    if arguments.delete and arguments.post is None:
        raise UsageError("--delete removes shards for which --post has succeeded, and needs it")
    reader = SampleReader(arguments, hidden=not stdout_is_apart())  # paths are printed
    finished = Finished(arguments)
    if arguments.force:
        _check_apart(reader.urls, finished, arguments.max_shards)
    writer = _open_writer(arguments, finished)
    try:
        with writer, closing(iter(reader)) as samples:  # type: ignore[type-var]
            read = _write(rekeyed(samples, arguments.rekey), writer, reader)
            is_full = writer.is_full
    finally:
        say(
            f"finished {counted(finished.shards, 'shard')} with {counted(finished.samples, 'sample')} and "
            f"{counted(finished.bytes, 'byte')}"
        )
    if is_full:
        say(
            f"stopped after {counted(finished.shards, 'shard')}, as --max-shards asks for, without looking for more "
            f"samples. To go on: --start {finished.next_number} --slice {_rest(arguments.slice, read)}"
        )
        if arguments.rekey is not None and "{key" not in arguments.rekey:
            say("--rekey will number them from 0 again: give its pattern another beginning, or keys come twice")
    _tell_older(finished)
    return reader.finish()


COMMAND = Command(
    "write samples into numbered shards",
    add_arguments,
    run,
    """
    wds split 'train-{000000..000003}.tar' -n 15 -o small
    wds cat 'train-*.tar' | wds split -s 20kB -o 'part-%04d.tar' --max-shards 2 --post 'sha256sum {path}'
    """,
)


class Finished:
    """Takes account of each finished shard: prints it, and runs the command that is asked for.

    Args:
        arguments: Those of the command.

    Attributes:
        shards: How many there are.
        samples: How many samples they have.
        bytes: How many bytes.
        next_number: The number of the next.

    Raises:
        UsageError: if the arguments do not fit together.
        UnsafeDataError: for a command under ``WDS_SECURE=1``.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.shards = self.samples = self.bytes = 0
        compress = None if arguments.compress == "none" else arguments.compress
        try:
            self.names = ShardNames(numbered_pattern(arguments.output, compress))
            self._hook = None if arguments.post is None else HookCommand(arguments.post, _PLACES)
            if arguments.start == "next":
                self.names.check_listable()
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.next_number = self.names.next_number() if arguments.start == "next" else arguments.start
        self._deletes = arguments.delete
        self._has_index = arguments.index

    def __call__(self, shard: ShardInfo) -> None:
        """Takes account of one.

        Raises:
            ChildProcessError: if the command fails.
            ShardOpenError: if the shard cannot be removed.
        """
        number, self.next_number = self.next_number, self.next_number + 1
        self.shards += 1
        self.samples += shard.count
        self.bytes += shard.bytes
        _print(shard.path)
        if self._hook is not None:
            self._hook.run(_values(shard, number))
        if self._deletes and self._has_index:
            storage.remove_target(index_url(shard.path))
        if self._deletes:
            storage.remove_target(shard.path)


def _print(path: str) -> None:
    """Prints a path at once, for as long as somebody reads: the samples are written in any case."""
    try:
        write_line(os.fsencode(path))
        sys.stdout.flush()
    except BrokenPipeError:
        let_go_of_output()


def _check_apart(urls: list[str], finished: Finished, most: int | None) -> None:
    """Sees to it that no shard is replaced before it is read."""
    start = finished.next_number
    for url in urls:
        number = number_of(finished.names, url)
        if number is not None and start <= number and (most is None or number < start + most):
            raise UsageError(f"{storage.mask_url(url)} is read, and must not be replaced: give the output another name")


def _values(shard: ShardInfo, number: int) -> dict[str, Any]:
    folder, name = posixpath.split(shard.path)
    return dict(zip(_PLACES, (shard.path, name, folder or ".", number, shard.count), strict=True))


def _open_writer(arguments: argparse.Namespace, finished: Finished) -> ShardWriter:
    try:
        return ShardWriter(
            finished.names,
            max_count=arguments.count,
            max_bytes=arguments.size,
            start_shard=finished.next_number,
            max_shards=arguments.max_shards,
            post=finished,
            overwrite=arguments.force,
            encoder=False,
            compress=False if arguments.compress == "none" else arguments.compress,
            lowercase=not arguments.keep_case,
            index=arguments.index,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _write(samples: Any, writer: ShardWriter, reader: SampleReader) -> int:
    """Writes samples until there are no more, or the writer is full; tells how many were used."""
    used = 0
    for sample in samples:
        try:
            if not writer.write(sample):
                break
        except ReappearingKeyError as error:
            reader.refuse(ReappearingKeyError(f"{error}, as --rekey does", shard=error.shard, key=error.key))
        except SampleError as error:
            reader.refuse(error)
        used += 1
        if writer.is_full:
            break
    return used


def _tell_older(finished: Finished) -> None:
    """Tells of shards behind those that were written, which whoever reads them all would read too."""
    with contextlib.suppress(ValueError, WdsError):  # there is no folder to look into
        last = finished.names.next_number() - 1
        if last >= finished.next_number:
            name = storage.mask_url(finished.names.name(last))
            say(f"shards with higher numbers were there before, and are as they were, up to {name}")


def _rest(part: slice | None, used: int) -> str:
    """The ``--slice`` of the samples that were not used."""
    part = part or slice(None)
    step = part.step or 1
    text = f"{(part.start or 0) + used * step}:{'' if part.stop is None else part.stop}"
    return text if step == 1 else f"{text}:{step}"
