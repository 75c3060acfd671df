"""What commands are made of: `Command`, and the rows and types of their arguments."""

import argparse
import contextlib
import functools
import posixpath
import re
import string
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchdata_wds.storage import mask_url

Parser = argparse.ArgumentParser | argparse._ArgumentGroup
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?) ?([kmgt]?i?)b?", re.IGNORECASE)
_MOST_DIGITS = 18  # sys.maxsize has 19


class UsageError(Exception):
    """Arguments that are each valid, but not together."""


@contextlib.contextmanager
def usage_checked() -> Iterator[None]:
    """Turns a ValueError about arguments into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


class Command(NamedTuple):
    """One command; `torchdata_wds.cli.main.COMMANDS` has a row for each."""

    text: str | None  # its module's docstring: a summary, and in a paragraph of its own an example for a shell
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]  # returns the exit status

    @property
    def summary(self) -> str:
        """One line of the help."""
        line = (self.text or "").partition("\n")[0]
        return line[:1].lower() + line[1:].rstrip(".")

    @property
    def example(self) -> str:
        """Lines for a shell."""
        return textwrap.dedent((self.text or "").partition("\n\n")[2].partition("\n\n")[0]).strip()


def flag(parser: Parser, names: str, text: str) -> None:
    """Adds an argument that is there or not; its names are separated by blanks."""
    parser.add_argument(*names.split(), action="store_true", help=text)


def option(
    parser: Parser, names: str, metavar: str, text: str, kind: Callable[[str], Any] = str, **settings: Any
) -> None:
    """Adds an argument with a value, which `kind` reads; `settings` are argparse's."""
    parser.add_argument(*names.split(), metavar=metavar, help=text, type=kind, **settings)


def choice(parser: Parser, names: str, values: Sequence[str], text: str, default: str | None = None) -> None:
    """Adds an argument that is one of several words."""
    parser.add_argument(*names.split(), choices=values, default=default, help=text)


def add_force(parser: Parser) -> None:
    """Adds ``--force``."""
    flag(parser, "--force", "replace what exists")


def add_rekey(parser: Parser) -> None:
    """Adds ``--rekey``."""
    text = "new keys, from {number:09d} (for short: '#'), {key} and {shard}, as in '{shard}/{key}'"
    option(parser, "--rekey", "PATTERN", text, Rekeying)


def add_writing(parser: Parser) -> None:
    """Adds what all commands that write shards have: ``--force``, ``--compress``, ``--index`` and ``--rekey``."""
    add_force(parser)
    choice(parser, "--compress", ("gz", "bz2", "xz", "zst", "none"), "by default as the name's suffix says")
    flag(parser, "--index", "write an index beside each shard")
    add_rekey(parser)


def add_count(parser: Parser, default: str = "all") -> None:
    """Adds ``--count``."""
    option(parser, "-c --count", "N", f"how many samples at most (default: {default})", whole_number)


def add_parallel(parser: Parser, text: str, default: int = 1) -> None:
    """Adds ``--parallel``."""
    option(parser, "-p --parallel", "N", text, positive_number, default=default)


def add_seed(parser: Parser, owner: str) -> None:
    """Adds ``--seed`` of an argument that shuffles."""
    option(parser, "--seed", "SEED", f"of {owner}: the same seed gives the same order", whole_number)


class Part(NamedTuple):
    """Part `number`, from 0, of `total` parts of a list."""

    number: int
    total: int


def part_number(text: str) -> Part:
    """Reads the argument ``--part``: ``I/N``, from ``0/N``."""
    number, _, total = text.partition("/")
    if not _is_number(number) or not _is_number(total):
        raise argparse.ArgumentTypeError(f"expected I/N in whole numbers, such as 0/8, not {text!r:.60}")
    part = Part(int(number), int(total))
    if part.number >= part.total:
        parts = f"the parts are 0/{part.total} to {part.total - 1}/{part.total}"
        there = f"{parts if part.total else 'N must be 1 or more'}, numbered from 0 like a job array of --array=0-7"
        raise argparse.ArgumentTypeError(f"there is no part {text!r:.60}: {there}")
    return part


def whole_number(text: str, least: int = 0) -> int:
    """Reads an argument that is 0 or more."""
    if not _is_number(text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, not {text!r:.60}")
    return int(text)


positive_number = functools.partial(whole_number, least=1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def byte_size(text: str) -> float:
    """Reads a number of bytes, such as ``1e9``, ``500MB`` or ``2GiB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]) or found[2].lower() not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size in bytes such as 1e9, 500MB or 2GiB, not {text!r}")
    return float(found[1]) * _UNITS[found[2].lower()]


def range_of(text: str) -> slice:
    """Reads ``lo:hi:step``, each optional, or one number; all count from the start, as a stream's end is not known."""
    parts = text.split(":")
    if not text or len(parts) > 3 or not all(part == "" or _is_number(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected lo:hi:step or a number, whole and 0 or more, not {text!r}")
    low, *rest = (int(part) if part else None for part in parts)
    if rest[1:] == [0]:
        raise argparse.ArgumentTypeError(f"expected a step of 1 or more, not {text!r}")
    return slice(low, *rest) if rest else slice(low, int(text) + 1)


class Rekeying:
    """Gives samples new keys by a pattern with ``{number}`` or ``{key}``, and ``{shard}``: the argument ``--rekey``."""

    def __init__(self, text: str) -> None:
        self.pattern = text.replace("#", "{number:09d}")
        try:
            places = {name for _, name, _, _ in string.Formatter().parse(self.pattern) if name is not None}
            self.pattern.format(number=0, key="a", shard="x")
        except (ValueError, LookupError, AttributeError, OverflowError, MemoryError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a pattern for keys: {error}") from error
        if not places <= {"number", "key", "shard"} or not places & {"number", "key"}:
            raise argparse.ArgumentTypeError(f"{text!r} needs {{number}} or {{key}}, and takes {{shard}} in addition")

    def __call__(self, sample: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Returns a copy of a sample with its new key."""
        shard = posixpath.basename(mask_url(str(sample.get("__url__", "")))).partition(".")[0]
        key = self.pattern.format(number=number, key=sample["__key__"], shard=shard)
        return {**sample, "__key__": key}
