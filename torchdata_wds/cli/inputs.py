"""The input of commands: arguments that choose samples, the same in all commands, and reading them."""

import argparse
import functools
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, TypeVar

from torchdata_wds import storage
from torchdata_wds.cli.command import Part, UsageError, byte_size, choice, flag, option, part_number, range_of
from torchdata_wds.cli.terminal import Progress, counted, message_of, say, stdout_is_apart, tell_losses
from torchdata_wds.errors import SampleError, ShardListError, UnsafeDataError
from torchdata_wds.format.dataset_files.reading import Origin, SpecPlace, folder_of, join_url
from torchdata_wds.format.index.slices import OpenSlice
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.handlers import Asked
from torchdata_wds.option_types import KeyRule
from torchdata_wds.pipes.shards.shard_reading import Item, ShardReading
from torchdata_wds.storage.urls import STDIN, scheme_of

T = TypeVar("T")


def add_input_arguments(
    parser: argparse.ArgumentParser, *, slices: bool = True, errors: bool = True, parts: bool = True
) -> None:
    """Adds the arguments of `SampleReader`, with or without slices, ``--errors`` and ``--part``."""
    add_shards_argument(parser, parts=parts)
    group = parser.add_argument_group("input")
    if slices:
        option(group, "--slice", "LO:HI:STEP", "which samples of the whole stream", range_of)
        option(group, "--shard-slice", "LO:HI:STEP", "which samples of each shard", range_of)
    if errors:
        text = "on damage: stop, or skip what is lost, report it, and exit with 1 (default: stop)"
        choice(group, "--errors", ("stop", "skip"), text, "stop")
    text = "where names are split: first_dot (default), last_dot, or a regular expression with groups for key and field"
    option(group, "--keys", "RULE", text, _key_rule, default="first_dot")
    flag(group, "--keep-case", "do not convert field names to lower case")
    text = "if a sample has a field twice: fail, or keep the first or last (default: error)"
    choice(group, "--on-duplicate", ("error", "first", "last"), text, "error")
    text = "if a key comes back after other samples: fail, warn, or accept it (default: error)"
    choice(group, "--on-reappearing", ("error", "warn", "allow"), text, "error")
    flag(group, "--no-end-marker", "accept a shard without an end marker as complete")
    flag(group, "--concatenated", "continue reading after an end marker")
    text = "the size of the largest member to read, such as 500MB or 8GiB (default: 4GiB)"
    option(group, "--max-member-bytes", "SIZE", text, byte_size, default=DEFAULT_MAX_MEMBER_BYTES)


def add_shards_argument(parser: argparse.ArgumentParser, *, required: bool = False, parts: bool = True) -> None:
    """Adds the arguments of `list_inputs`; unless `required`, the default is standard input."""
    text = "paths and URLs with braces or globs, folders, '@list.txt' with one of these per line"
    text += "" if required else ", '-' (default: standard input)"
    option(parser, "shards", "SHARDS", text, nargs="+" if required else "*")
    flag(parser, "--allow-pipe", "allow commands (pipe:) in lists (@list.txt)")
    if not parts:
        parser.set_defaults(part=None)
        return
    text = "take only part I, from 0, of N equal parts of the list of shards; in a job array: "
    option(parser, "--part", "I/N", text + "$SLURM_ARRAY_TASK_ID/8", part_number)


def _key_rule(text: str) -> KeyRule:
    if text in ("first_dot", "last_dot"):
        return text  # type: ignore[return-value]
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    if pattern.groups != 2:
        expected = "expected first_dot, last_dot, or a regular expression with two groups, key and field"
        raise argparse.ArgumentTypeError(f"{expected}, not {text!r}")
    return functools.partial(_split_name, pattern)


def _split_name(pattern: re.Pattern[str], name: str) -> tuple[str, str] | None:
    """Splits a name that the pattern matches completely; other names belong to no sample."""
    found = pattern.fullmatch(name)
    return None if found is None or not (found[1] and found[2]) else (found[1], found[2])


def list_inputs(arguments: argparse.Namespace) -> list[str]:
    """Lists the shards that the arguments name, or the part of them that ``--part`` selects."""
    return list(part_of(list_all_inputs(arguments), arguments.part))


def part_of(items: Sequence[T], part: Part | None, noun: str = "shard") -> Sequence[T]:
    """Returns one part of a list, by default of shards, and reports an empty one; the parts in order make it up."""
    if part is None:
        return items
    # of 3 items in 2 parts, the first has [0:1] and the second [1:3]
    start, stop = (len(items) * number // part.total for number in (part.number, part.number + 1))
    if start == stop:
        say(f"part {part.number}/{part.total} has none of {counted(len(items), noun)}: nothing to do")
    return items[start:stop]


def list_all_inputs(arguments: argparse.Namespace) -> list[str]:
    """Lists the shards that the arguments name, regardless of ``--part``; standard input if they name none."""
    if arguments.part is not None and not arguments.shards:
        raise UsageError("--part takes a part of a list of shards: name the shards")
    patterns: list[str] = []
    for name in arguments.shards or [STDIN]:
        if name.startswith("@"):
            patterns += _read_list(name[1:], arguments.allow_pipe)
        else:
            # list_urls refuses a single letter: in the library it comes from a str passed as a list
            patterns.append(name if len(name) > 1 or name == STDIN else f"./{name}")
    urls = [url for pattern in patterns for url in storage.list_urls(pattern)]
    if urls.count(STDIN) + arguments.shards.count("@-") > 1:
        raise ShardListError("standard input ('-') can be read only once")
    return urls


def _read_list(url: str, allow_pipe: bool) -> Iterator[str]:
    """Reads a list of patterns, which may be untrusted; relative names in a remote list start at its folder."""
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
    """Reads the samples that the arguments of `add_input_arguments` choose, and counts what is lost.

    `urls` are the shards, by default those that the arguments name; `hidden` hides the progress; the other options are
    those of ``load_wds_shards``.
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
        self._skips = arguments.errors in ("skip", "ignore")
        self._slice: slice = getattr(arguments, "slice", None) or slice(None)
        self._shard_slice: slice | None = getattr(arguments, "shard_slice", None)
        self._reading = {"require_end_marker": not arguments.no_end_marker, "concatenated": arguments.concatenated}
        self._grouping = {
            "keys": arguments.keys,
            "lowercase": not arguments.keep_case,
            "on_duplicate": arguments.on_duplicate,
            "on_reappearing": arguments.on_reappearing,
        }
        self._max_member_bytes, self._lead, self._width = int(arguments.max_member_bytes), read_ahead, interleave
        self._skipped: Counter[str] = Counter()
        self._errors: set[str] = set()
        self.hidden = hidden or (getattr(arguments, "output", STDIN) == STDIN and not stdout_is_apart())

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        """Yields samples: ``__key__``, ``__url__`` and bytes by field; raises on damage unless it is skipped."""
        part = self._slice
        with closing(self._samples()) as samples, self._progress() as progress:
            yield from progress.over(islice(samples, part.start, part.stop, part.step))

    def _progress(self) -> Progress:
        part = self._slice
        if part == slice(None):
            return Progress("samples", urls=self.urls, skips=self._shard_slice is not None, hidden=self.hidden)
        total = None if part.stop is None else len(range(part.stop)[part])
        return Progress("samples", total, hidden=self.hidden)

    def _samples(self) -> Generator[dict[str, Any], None, None]:
        grouping = dict(self._grouping)
        reading = ShardReading(
            self._skipped,
            storage.StorageOptions(),
            grouping.pop("keys"),
            max_member_bytes=self._max_member_bytes,
            **self._reading,
        )
        items = (Item(self._slice_of(url) or url) for url in self.urls)
        ask = Asked(self._lose, self._skipped)
        return reading.samples(items, ask, lead=self._lead, width=self._width, **grouping)

    def _slice_of(self, url: str) -> OpenSlice | None:
        part = self._shard_slice
        return None if part is None else OpenSlice(url, part.start or 0, part.stop, part.step or 1)

    def taken(self, take: Callable[[dict[str, Any]], T | None], count: int | None = None) -> Generator[T, None, None]:
        """Yields at most `count` results of `take`, which returns None to skip a sample, and then stops reading."""
        if count == 0:
            return
        given = 0
        with closing(iter(self)) as samples:
            for sample in samples:
                try:
                    result = take(sample)
                except (SampleError, UnsafeDataError) as error:
                    self.refuse(error)
                    continue
                if result is None:
                    continue
                yield result
                given += 1
                if given == count:
                    return

    def refuse(self, error: Exception) -> None:
        """Counts and reports a sample that cannot be used, or raises the error unless such samples are skipped."""
        if not self._skips:
            raise error
        self.lost += 1
        say(f"skipped: {message_of(error)}")

    def left_out(self) -> Counter[str]:
        """Counts the members that belong to no sample, by reason."""
        # refused samples are counted too, by the error's name, and `refuse` has reported those
        return Counter({reason: count for reason, count in self._skipped.items() if reason not in self._errors})

    def finish(self) -> int:
        """Says what was left out and lost, and returns the exit status: 1 if anything was lost."""
        return tell_losses(self.left_out(), self.lost)

    def _lose(self, error: Exception) -> bool:
        self.refuse(error)
        self._errors.add(type(error).__name__)
        return True
