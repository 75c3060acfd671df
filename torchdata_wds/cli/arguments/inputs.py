"""Arguments that say which samples are read, the same in all commands, and the reading of them."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import storage
from torchdata_wds.cli.command import (
    Part,
    UsageError,
    byte_size,
    counted,
    message_of,
    part_number,
    range_of,
    say,
    tell_left_out,
    tell_lost,
)
from torchdata_wds.cli.progress_bar import Progress, stdout_is_apart
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.dataset_files.trust import Origin, SpecPlace, folder_of, join_url
from torchdata_wds.format.index.slices import OpenSlice
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.option_types import KeyRule
from torchdata_wds.pipes.samples.group_by_key import KeyGrouperIterDataPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.storage.urls import STDIN, scheme_of

__all__ = [
    "SampleReader",
    "add_input_arguments",
    "add_shards_argument",
    "key_rule",
    "list_all_inputs",
    "list_inputs",
    "part_of",
    "tell_part",
]


T = TypeVar("T")

_SKIPPING = ("skip", "ignore")

_PROGRESS_STEP = 64


def add_input_arguments(
    parser: argparse.ArgumentParser, *, slices: bool = True, errors: bool = True, parts: bool = True
) -> None:
    """Adds the arguments of reading.

    Args:
        parser: The command's parser.
        slices: Whether samples can be chosen by number.
        errors: Whether to add ``--errors``.
        parts: Whether to add ``--part``.
    """
    add_shards_argument(parser, parts=parts)
    group = parser.add_argument_group("input")
    if slices:
        group.add_argument("--slice", type=range_of, metavar="LO:HI:STEP", help="which samples of the whole stream")
        group.add_argument("--shard-slice", type=range_of, metavar="LO:HI:STEP", help="which samples of each shard")
    if errors:
        group.add_argument(
            "--errors",
            choices=("stop", "skip"),
            default="stop",
            help="at damage: stop, or skip what is lost, tell it, and exit with 1 (default: stop)",
        )
    group.add_argument(
        "--keys",
        type=key_rule,
        default="first_dot",
        metavar="RULE",
        help="where names are split: first_dot, last_dot, or a regular expression with a group for key and field",
    )
    group.add_argument("--keep-case", action="store_true", help="do not lower-case fields")
    group.add_argument(
        "--on-duplicate", choices=("error", "first", "last"), default="error", help="a field that comes twice"
    )
    group.add_argument(
        "--on-reappearing", choices=("error", "warn", "allow"), default="error", help="a key that comes back later"
    )
    group.add_argument("--no-end-marker", action="store_true", help="take a shard without end marker as whole")
    group.add_argument("--concatenated", action="store_true", help="read on after an end marker")
    group.add_argument(
        "--max-member-bytes",
        type=byte_size,
        default=DEFAULT_MAX_MEMBER_BYTES,
        metavar="SIZE",
        help="the size of the largest member that is read, such as 500MB or 8GiB (default: 4GiB)",
    )


def add_shards_argument(parser: argparse.ArgumentParser, *, required: bool = False, parts: bool = True) -> None:
    """Adds the arguments that `list_inputs` takes.

    Args:
        parser: The command's parser.
        required: Whether there is no standard input to read where no shard is named.
        parts: Whether to add ``--part``.
    """
    parser.add_argument(
        "shards",
        nargs="+" if required else "*",
        metavar="SHARDS",
        help="paths and URLs with braces or globs, folders, '@list.txt' with one of these a line"
        + ("" if required else ", '-'; none is standard input"),
    )
    parser.add_argument("--allow-pipe", action="store_true", help="let lists (@list.txt) name commands")
    if not parts:
        parser.set_defaults(part=None)
        return
    parser.add_argument(
        "--part",
        type=part_number,
        metavar="I/N",
        help="take only part I, from 0, of N equal parts of the list of shards, as in the job of an array: "
        "$SLURM_ARRAY_TASK_ID/8",
    )


def key_rule(text: str) -> KeyRule:
    """Reads the argument ``--keys``.

    Raises:
        argparse.ArgumentTypeError: if it is neither a rule's name nor a regular expression with two groups.
    """
    if text in ("first_dot", "last_dot"):
        return text  # type: ignore[return-value]
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    if pattern.groups != 2:
        raise argparse.ArgumentTypeError(
            f"expected first_dot, last_dot, or a regular expression with two groups, key and field, not {text!r}"
        )
    return PatternRule(pattern)


class PatternRule:
    """Splits names by a regular expression that must match all of a name; other names belong to no sample."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def __call__(self, name: str) -> tuple[str, str] | None:
        found = self.pattern.fullmatch(name)
        return None if found is None or not (found[1] and found[2]) else (found[1], found[2])


def list_inputs(arguments: argparse.Namespace) -> list[str]:
    """Lists the shards that the arguments name, or the part of them that is asked for.

    Raises:
        UsageError: as `list_all_inputs` does.
        ShardListError: likewise.
        ShardOpenError: likewise.
        UnsafeDataError: likewise.
    """
    urls = list_all_inputs(arguments)
    tell_part(len(urls), arguments.part)
    return list(part_of(urls, arguments.part))


def part_of(items: Sequence[T], part: Part | None) -> Sequence[T]:
    """Takes one part of a list: consecutive items, so that the parts in order are the whole list.

    Example:
        >>> [part_of(["a", "b", "c"], Part(number, 2)) for number in (0, 1)]
        [['a'], ['b', 'c']]
    """
    if part is None:
        return items
    start, stop = (len(items) * number // part.total for number in (part.number, part.number + 1))
    return items[start:stop]


def tell_part(count: int, part: Part | None) -> None:
    """Says so if a part has none of the shards."""
    if part is not None and not part_of(range(count), part):
        say(f"part {part.number}/{part.total} has none of {counted(count, 'shard')}: nothing to do")


def list_all_inputs(arguments: argparse.Namespace) -> list[str]:
    """Lists the shards that the arguments name, whatever ``--part`` says; standard input if there are none.

    Raises:
        UsageError: if there is only standard input to take a part of.
        ShardListError: if a pattern gives nothing, or standard input comes twice.
        ShardOpenError: if a list cannot be read.
        UnsafeDataError: if a list has a line that would run something, unless that is allowed.
    """
    if arguments.part is not None and not arguments.shards:
        raise UsageError("--part takes a part of a list of shards: name the shards")
    patterns = list(_patterns(arguments.shards or [STDIN], arguments.allow_pipe))
    urls = [url for pattern in patterns for url in storage.list_urls(pattern)]
    if urls.count(STDIN) + arguments.shards.count("@-") > 1:
        raise ShardListError("standard input ('-') can be read only once")
    return urls


def _patterns(names: Sequence[str], allow_pipe: bool) -> Iterator[str]:
    for name in names:
        if name.startswith("@"):
            yield from _listed(name[1:], allow_pipe)
        else:
            # the library takes one letter for a str that stands where a list belongs
            yield name if len(name) > 1 or name == STDIN else f"./{name}"


def _listed(url: str, allow_pipe: bool) -> Iterator[str]:
    """Reads a list of patterns, which may be a stranger's.

    Relative names are those of the working directory, as for tar; of a list from another machine, what lies beside it.
    """
    with storage.open_shard(url) as stream:
        data = stream.read()
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShardListError(f"the list {storage.mask_url(url)} is not UTF-8 text: {error}") from error
    is_remote = scheme_of(url) not in ("", "file", STDIN)
    place = SpecPlace(Origin(f"list {storage.mask_url(url)}", trusted=allow_pipe, remote=is_remote))
    for number, line in enumerate(lines, 1):
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            place.at(f"line {number}").check_pattern(pattern)
            yield join_url(folder_of(url), pattern) if is_remote else pattern


class SampleReader:
    """Reads the samples that the arguments ask for, and keeps account of what is lost.

    Args:
        arguments: With those of `add_input_arguments`.
        urls: The shards; None lists them.
        read_ahead: As in ``load_wds_shards``.
        interleave: As in ``load_wds_shards``.
        hidden: Whether to show no progress.

    Attributes:
        urls: The shards.
        lost: How many shards and samples were lost so far.

    Raises:
        ShardListError: as `list_inputs` does.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        *,
        urls: Sequence[str] | None = None,
        read_ahead: int = 0,
        interleave: int = 1,
        hidden: bool = False,
    ) -> None:
        self.urls = list_inputs(arguments) if urls is None else list(urls)
        self.lost = 0
        self._skips = arguments.errors in _SKIPPING
        self._slice: slice = getattr(arguments, "slice", None) or slice(None)
        part: slice | None = getattr(arguments, "shard_slice", None)
        items: list[Any] = list(self.urls)
        if part is not None:
            items = [OpenSlice(url, part.start or 0, part.stop, part.step or 1) for url in self.urls]
        self._loader = ShardLoaderIterDataPipe(
            IterableWrapper(items, deepcopy=False),
            keys=arguments.keys,
            require_end_marker=not arguments.no_end_marker,
            concatenated=arguments.concatenated,
            max_member_bytes=int(arguments.max_member_bytes),
            read_ahead=read_ahead,
            interleave=interleave,
            handler=self._lose,
        )
        self._grouper = KeyGrouperIterDataPipe(
            self._loader,
            keys=arguments.keys,
            lowercase=not arguments.keep_case,
            on_duplicate=arguments.on_duplicate,
            on_reappearing=arguments.on_reappearing,
            handler=self._lose,
        )
        self._errors: Counter[str] = Counter()
        self._hidden = hidden or (getattr(arguments, "output", STDIN) == STDIN and not stdout_is_apart())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Reads the samples: ``__key__``, ``__url__`` and bytes by field.

        Raises:
            WdsError: at damage, unless it is to be skipped.
        """
        part = self._slice
        with (
            closing(iter(self._grouper)) as samples,  # type: ignore[type-var]
            Progress("samples", only_on_terminal=True, hidden=self._hidden) as progress,
        ):
            advance = progress.advance if progress.is_shown else None
            yield from _counted(islice(samples, part.start, part.stop, part.step), advance)

    def refuse(self, error: Exception) -> None:
        """Takes note of a sample that could not be used.

        Raises:
            Exception: the one given, unless such samples are to be skipped.
        """
        if not self._skips:
            raise error
        self.lost += 1
        say(f"skipped: {message_of(error)}")

    def left_out(self) -> Counter[str]:
        """Counts the members that belong to no sample, by the reason."""
        reasons = self._loader.skipped + self._grouper.skipped
        for name, count in self._errors.items():
            reasons[name] -= count
        return reasons

    def finish(self) -> int:
        """Tells what was left out, and gives the exit status: 1 if anything was lost."""
        tell_left_out(self.left_out())
        tell_lost(self.lost)
        return 1 if self.lost else 0

    def _lose(self, error: Exception) -> bool:
        self.refuse(error)
        self._errors[type(error).__name__] += 1
        return True


def _counted(samples: Iterator[dict[str, Any]], advance: Callable[[int], None] | None) -> Iterator[dict[str, Any]]:
    if advance is None:
        yield from samples
        return
    for number, sample in enumerate(samples, 1):
        yield sample
        if number % _PROGRESS_STEP == 0:
            advance(_PROGRESS_STEP)
