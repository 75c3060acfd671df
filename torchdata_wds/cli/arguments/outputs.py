"""Arguments that say where samples go, the same in all commands, and the writing of them.

Seeds of commands that shuffle.
"""

from __future__ import annotations

import argparse
import posixpath
import secrets
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from torchdata_wds.cli.arguments.inputs import SampleReader
from torchdata_wds.cli.command import UsageError, say
from torchdata_wds.cli.map.target_names import BRACES
from torchdata_wds.errors import ReappearingKeyError, SampleError
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN, scheme_of
from torchdata_wds.writers.tar_writer import TarWriter

__all__ = [
    "SampleOutput",
    "add_output_arguments",
    "add_rekey_argument",
    "check_not_terminal",
    "check_one_output",
    "check_rekey",
    "copy_samples",
    "rekeyed",
    "chosen_seed",
]


COMPRESSIONS = ("gz", "bz2", "xz", "zst", "none")

_PLACES = ("number", "key", "shard")


def add_output_arguments(
    parser: argparse.ArgumentParser, what: str = "a path, a URL that can be written, or '-' (the default)"
) -> None:
    """Adds the arguments of writing an archive.

    Args:
        parser: The command's parser.
        what: Help for ``--output``.
    """
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", default=STDIN, metavar="SHARD", help=what)
    group.add_argument("--force", action="store_true", help="replace what exists")
    group.add_argument("--compress", choices=COMPRESSIONS, help="by default as the name's suffix says")
    group.add_argument("--index", action="store_true", help="write an index beside the shard")
    add_rekey_argument(group)


def add_rekey_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds ``--rekey``."""
    parser.add_argument(
        "--rekey",
        metavar="PATTERN",
        help="new keys, from {number:09d} (for short: '#'), {key} and {shard}, as in '{shard}/{key}'",
    )


def check_not_terminal(output: str) -> None:
    """Sees to it that no archive is written to a terminal.

    Raises:
        UsageError: if that is where standard output goes.
    """
    if output == STDIN and sys.stdout.isatty():
        raise UsageError(
            "refusing to write an archive to a terminal: use -o FILE, or pipe the output to another program"
        )


def check_one_output(output: str) -> None:
    """Sees to it that a command with one output is not asked for one a shard.

    Raises:
        UsageError: if the name has something in braces.
    """
    if scheme_of(output) != "pipe" and (found := BRACES.search(output)) is not None:
        raise UsageError(
            f"{found[0]} in the output {mask_url(output)!r} is not filled in: this command writes one file. "
            "'wds proc' and 'wds map' write one for each shard, 'wds split' numbered ones"
        )


class SampleOutput:
    """One archive of samples whose fields are bytes; after an exception there is no whole one.

    Args:
        arguments: With those of `add_output_arguments`.

    Attributes:
        count: How many samples were written.

    Raises:
        UsageError: if the arguments do not fit together.
        ShardOpenError: if it exists or cannot be written.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        check_not_terminal(arguments.output)
        self.count = 0
        self._rekey = None if arguments.rekey is None else Rekeying(arguments.rekey)
        try:
            self._writer = TarWriter(
                arguments.output,
                encoder=False,
                compress=False if arguments.compress == "none" else arguments.compress,
                lowercase=not getattr(arguments, "keep_case", False),
                index=arguments.index,
                overwrite=arguments.force,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error

    def write(self, sample: Mapping[str, Any]) -> None:
        """Adds a sample: whole, or not at all.

        Raises:
            SampleError: if it could not be read back.
            ShardOpenError: if the destination fails.
        """
        if self._rekey is not None:
            sample = self._rekey(sample, self.count)
        try:
            self._writer.write(sample)
        except SampleError as error:
            if type(error) is not ReappearingKeyError and (type(error) is not SampleError or error.field is not None):
                raise
            said = str(error).removesuffix(".")
            raise type(error)(
                f"{said}. New keys (--rekey '{{shard}}/{{key}}' or --rekey '#') keep such samples.", **_place(error)
            ) from error
        self.count += 1

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)


def _place(error: SampleError) -> dict[str, str | None]:
    return {"shard": error.shard, "member": error.member, "key": error.key, "field": error.field}


def copy_samples(samples: Iterable[Mapping[str, Any]], output: SampleOutput, reader: SampleReader) -> None:
    """Writes samples; one that cannot be written is the reader's to refuse.

    Raises:
        SampleError: if one could not be read back, unless such samples are to be skipped.
    """
    for sample in samples:
        try:
            output.write(sample)
        except SampleError as error:
            reader.refuse(error)


def check_rekey(pattern: str | None) -> None:
    """Checks a pattern before anything is read.

    Raises:
        UsageError: as `Rekeying` does.
    """
    if pattern is not None:
        Rekeying(pattern)


class Rekeying:
    """Gives samples new keys.

    Args:
        pattern: With ``{number}``, ``{key}`` or ``{shard}`` (the base name up to its first dot), in the syntax of
            `str.format`; ``#`` is ``{number:09d}``.

    Raises:
        UsageError: if it has none of the first two, which tell samples apart, or something else.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern.replace("#", "{number:09d}")
        try:
            places = [name for _, name, _, _ in string.Formatter().parse(self._pattern) if name is not None]
            self._pattern.format(number=0, key="a", shard="x")
        except (ValueError, LookupError, AttributeError, OverflowError, MemoryError) as error:
            raise UsageError(f"--rekey {pattern!r} is not a pattern for keys: {error}") from error
        if not set(places) <= set(_PLACES) or {"number", "key"}.isdisjoint(places):
            raise UsageError(f"--rekey {pattern!r} needs {{number}} or {{key}}, and takes {{shard}} besides")

    def __call__(self, sample: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Gives a copy of a sample with its new key."""
        shard = posixpath.basename(mask_url(str(sample.get("__url__", "")))).partition(".")[0]
        key = self._pattern.format(number=number, key=sample["__key__"], shard=shard)
        return {**sample, "__key__": key}


def rekeyed(samples: Iterable[Mapping[str, Any]], pattern: str | None) -> Iterator[Mapping[str, Any]]:
    """Gives samples new keys, numbered from 0; None leaves them as they are.

    Raises:
        UsageError: as `Rekeying` does.
    """
    rekey = None if pattern is None else Rekeying(pattern)
    for number, sample in enumerate(samples):
        yield sample if rekey is None else rekey(sample, number)


_BITS = 32


def chosen_seed(seed: int | None) -> int:
    """Gives the seed that is asked for, or else a new one, and says which, so that the order can be had again."""
    if seed is not None:
        return seed
    seed = secrets.randbits(_BITS)
    say(f"shuffling with --seed {seed}")
    return seed
