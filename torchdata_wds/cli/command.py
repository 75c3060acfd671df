"""Building blocks of commands: `Command`, and helpers to add and parse arguments."""

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

#: A placeholder in a name.
BRACES = re.compile(r"\{[^{}]*\}")


class UsageError(Exception):
    """Raised for arguments that are valid on their own but not together."""


@contextlib.contextmanager
def usage_checked() -> Iterator[None]:
    """Turns a ValueError about arguments into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


class Command(NamedTuple):
    """One command; `torchdata_wds.cli.main.COMMANDS` lists them all."""

    text: str | None  # usually the module's docstring: a summary line, then a paragraph with a shell example
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]  # returns the exit status

    @property
    def summary(self) -> str:
        """The first line, for the list of commands."""
        line = (self.text or "").partition("\n")[0]
        return line[:1].lower() + line[1:].rstrip(".")

    @property
    def example(self) -> str:
        """The shell example."""
        return textwrap.dedent((self.text or "").partition("\n\n")[2].partition("\n\n")[0]).strip()


def flag(parser: Parser, names: str, text: str) -> None:
    """Adds a flag; its names are separated by spaces."""
    parser.add_argument(*names.split(), action="store_true", help=text)


def option(
    parser: Parser, names: str, metavar: str, text: str, kind: Callable[[str], Any] = str, **settings: Any
) -> None:
    """Adds an argument with a value that `kind` parses; `settings` go to argparse."""
    parser.add_argument(*names.split(), metavar=metavar, help=text, type=kind, **settings)


def choice(parser: Parser, names: str, values: Sequence[str], text: str, default: str | None = None) -> None:
    """Adds an option whose value is one of several words."""
    parser.add_argument(*names.split(), choices=values, default=default, help=text)


def add_force(parser: Parser) -> None:
    """Adds ``--force``."""
    flag(parser, "--force", "replace existing outputs")


def add_rekey(parser: Parser) -> None:
    """Adds ``--rekey``."""
    text = "new keys, made of {number:09d} (or '#' for short), {key} and {shard}, such as '{shard}/{key}'"
    option(parser, "--rekey", "PATTERN", text, Rekeying)


def add_writing(parser: Parser) -> None:
    """Adds the options of all commands that write shards: ``--force``, ``--compress``, ``--index`` and ``--rekey``."""
    add_force(parser)
    choice(parser, "--compress", ("gz", "bz2", "xz", "zst", "none"), "compression (default: by the name's suffix)")
    flag(parser, "--index", "write an index next to each shard")
    add_rekey(parser)


def add_count(parser: Parser, default: str = "all") -> None:
    """Adds ``--count``."""
    option(parser, "-c --count", "N", f"at most N samples (default: {default})", whole_number)


def add_parallel(parser: Parser, text: str, default: int = 1) -> None:
    """Adds ``--parallel``."""
    option(parser, "-p --parallel", "N", text, positive_number, default=default)


def add_seed(parser: Parser, owner: str) -> None:
    """Adds ``--seed`` for an option that shuffles."""
    option(parser, "--seed", "SEED", f"seed of {owner}: the same seed repeats the same order", whole_number)


class Part(NamedTuple):
    """Part `number`, from 0, of `total` parts of a list."""

    number: int
    total: int


def part_number(text: str) -> Part:
    """Parses ``--part``: ``I/N``, where I counts from 0."""
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
    """Parses a whole number that is not below `least`."""
    if not _is_number(text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, not {text!r:.60}")
    return int(text)


positive_number = functools.partial(whole_number, least=1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def byte_size(text: str) -> float:
    """Parses a number of bytes, such as ``1e9``, ``500MB`` or ``2GiB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]) or found[2].lower() not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size in bytes such as 1e9, 500MB or 2GiB, not {text!r}")
    return float(found[1]) * _UNITS[found[2].lower()]


def range_of(text: str) -> slice:
    """Parses ``lo:hi:step``, each optional, or one number; none is negative, as a stream's end is not known."""
    parts = text.split(":")
    if not text or len(parts) > 3 or not all(part == "" or _is_number(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected lo:hi:step or a number, whole and 0 or more, not {text!r}")
    low, *rest = (int(part) if part else None for part in parts)
    if rest[1:] == [0]:
        raise argparse.ArgumentTypeError(f"expected a step of 1 or more, not {text!r}")
    return slice(low, *rest) if rest else slice(low, int(text) + 1)


class Rekeying:
    """Makes new keys (``--rekey``) from a pattern with ``{number}`` or ``{key}``, and optionally ``{shard}``."""

    def __init__(self, text: str) -> None:
        self.pattern = text.replace("#", "{number:09d}")
        try:
            places = {name for _, name, _, _ in string.Formatter().parse(self.pattern) if name is not None}
            self.pattern.format(number=0, key="a", shard="x")
        except (ValueError, LookupError, AttributeError, OverflowError, MemoryError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a pattern for keys: {error}") from error
        if not places <= {"number", "key", "shard"} or not places & {"number", "key"}:
            raise argparse.ArgumentTypeError(f"{text!r} needs {{number}} or {{key}}; {{shard}} is optional")

    def __call__(self, sample: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Returns a copy of a sample with its new key."""
        shard = posixpath.basename(mask_url(str(sample.get("__url__", "")))).partition(".")[0]
        key = self.pattern.format(number=number, key=sample["__key__"], shard=shard)
        return {**sample, "__key__": key}
