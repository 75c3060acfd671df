"""What commands are made of: `Command`, types of arguments, and what the program says on standard error."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import paused
from torchdata_wds.errors import cli_message

PROGRAM = "wds"
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

    summary: str  # one line of the help
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]  # returns the exit status
    example: str = ""  # lines for a shell, shown at the end of the help


# ------------------------------------------------------------------------------------------------- types of arguments


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
        parts = (
            f"the parts are 0/{part.total} to {part.total - 1}/{part.total}" if part.total else "N must be 1 or more"
        )
        raise argparse.ArgumentTypeError(
            f"there is no part {text!r:.60}: {parts}, numbered from 0 like a job array of --array=0-7"
        )
    return part


def whole_number(text: str) -> int:
    """Reads an argument that is 0 or more."""
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, not {text!r:.60}")
    return int(text)


def positive_number(text: str) -> int:
    """Reads an argument that is 1 or more."""
    if not whole_number(text):
        raise argparse.ArgumentTypeError("expected a whole number, 1 or more, not 0")
    return int(text)


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
    if len(parts) > 3 or not all(part == "" or _is_number(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected lo:hi:step in whole numbers, 0 or more, not {text!r}")
    if text == "":
        raise argparse.ArgumentTypeError("expected lo:hi:step or a number, not ''")
    low, *rest = (int(part) if part else None for part in parts)
    if not rest:
        return slice(low, int(text) + 1)
    if rest[1:] == [0]:
        raise argparse.ArgumentTypeError(f"expected a step of 1 or more, not {text!r}")
    return slice(low, *rest)


# ----------------------------------------------------------------------------------------------------------- messages


def say(text: str, command: str = "") -> None:
    """Writes a message of one or more lines to standard error, with the command's name if it is its last.

    Names in it may be a stranger's: nothing in them moves the cursor. A closed standard error does not stop the work.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    with contextlib.suppress(BrokenPipeError), paused():
        print(f"{PROGRAM}{command and ' '}{command}: {lines}", file=sys.stderr, flush=True)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Writes a number with its noun: ``1 sample``, ``2,000 samples``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def tell_left_out(skipped: Counter[str]) -> None:
    """Says how many members belong to no sample, and why; samples that damage cut off are reported with the error."""
    for reason, count in sorted((+skipped).items()):
        if reason != "sample cut off by a broken shard":
            say(f"left out {counted(count, 'member that belongs', 'members that belong')} to no sample: {reason}")


def tell_lost(count: int) -> None:
    """Says how many shards or samples were lost."""
    if count:
        say(f"lost: {counted(count, 'shard or sample was', 'shards or samples were')} skipped (see above)")


def message_of(error: BaseException) -> str:
    """Returns an error's message for the command line, without the name of the pipe that torch appends."""
    text = cli_message(error).partition("\nThis exception is thrown by ")[0].strip()
    return text or type(error).__name__


def discard_output() -> None:
    """Discards what is left in the buffer of standard output, so that the interpreter's end does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(getattr(record, "cli_message", "") or record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Shows the library's warnings while it is entered."""
    logger = logging.getLogger("torchdata_wds")
    handler = _Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
