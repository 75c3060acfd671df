"""What a command of the command line is made of.

What the program says, on standard error.
"""

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

__all__ = [
    "Command",
    "Part",
    "UsageError",
    "byte_size",
    "part_number",
    "positive_number",
    "range_of",
    "whole_number",
    "PROGRAM",
    "counted",
    "in_our_words",
    "let_go_of_output",
    "logged",
    "message_of",
    "say",
    "tell_left_out",
    "tell_lost",
]


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_MOST_DIGITS = 18  # of sys.maxsize there are 19

_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?) ?([kmgt]?i?)b?", re.IGNORECASE)


class UsageError(Exception):
    """Arguments that are right one by one, but not together."""


class Command(NamedTuple):
    """One command: each has a file of its own and a row in `torchdata_wds.cli.main.COMMANDS`.

    Attributes:
        summary: What it does, in one line of the help.
        add_arguments: Adds its arguments to its parser.
        run: Does it, and returns the exit status.
        example: Lines for a shell, shown at the end of its help.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    example: str = ""


class Part(NamedTuple):
    """One of several parts of a list.

    Attributes:
        number: Which, from 0.
        total: How many there are.
    """

    number: int
    total: int


def part_number(text: str) -> Part:
    """Reads the argument ``--part``: ``I/N``, from ``0/N``.

    Raises:
        argparse.ArgumentTypeError: if it is not one of N parts.
    """
    number, _, total = text.partition("/")
    if not _is_number(number) or not _is_number(total):
        raise argparse.ArgumentTypeError(f"expected I/N in whole numbers, such as 0/8, not {text!r:.60}")
    if int(number) >= int(total):
        parts = f"the parts are 0/{int(total)} to {int(total) - 1}/{int(total)}" if int(total) else "0 parts are none"
        raise argparse.ArgumentTypeError(
            f"there is no part {text!r:.60}: {parts}, numbered from 0 like a job array of --array=0-7"
        )
    return Part(int(number), int(total))


def whole_number(text: str) -> int:
    """Reads an argument that is 0 or more.

    Raises:
        argparse.ArgumentTypeError: if it is not.
    """
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, not {text!r:.60}")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether it is a number that a count can have."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def positive_number(text: str) -> int:
    """Reads an argument that is 1 or more.

    Raises:
        argparse.ArgumentTypeError: if it is not.
    """
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError("expected a whole number, 1 or more, not 0")
    return number


def byte_size(text: str) -> float:
    """Reads a number of bytes: ``1e9``, ``500MB`` or ``2GiB``.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]) or found[2].lower() not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size in bytes such as 1e9, 500MB or 2GiB, not {text!r}")
    return float(found[1]) * _UNITS[found[2].lower()]


def range_of(text: str) -> slice:
    """Reads ``lo:hi:step``, each part of which may be left out; one number alone is one sample.

    Raises:
        argparse.ArgumentTypeError: if it is none: numbers count from the begin, since nobody knows where a stream ends.
    """
    parts = text.split(":")
    if not 1 <= len(parts) <= 3 or not all(part == "" or _is_number(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected lo:hi:step in whole numbers, 0 or more, not {text!r}")
    low, high, step = ([int(part) if part else None for part in parts] + [None, None])[:3]
    if len(parts) == 1:
        if low is None:
            raise argparse.ArgumentTypeError("expected lo:hi:step or a number, not ''")
        return slice(low, low + 1)
    if step == 0:
        raise argparse.ArgumentTypeError(f"expected a step of 1 or more, not {text!r}")
    return slice(low, high, step)


PROGRAM = "wds"

#: Options of the library that its messages advise, and the program's own words for them.
_WORDS = {
    "pass overwrite=True, another pattern, or start_shard='next'": "pass --force, or another name",
    "Pass overwrite=True to replace such files, or give each writer its own pattern": "Pass --force to replace it",
    "Rename it with rename= of load_wds_shards, or leave it out with select=": "Write the shard again without it",
    "overwrite=True": "--force",
    "allow_pipe=True": "--allow-pipe",
    "start_shard='next'": "--start",
    "max_bytes=": "--size ",
    "Raise max_member_bytes if you want it; otherwise leave the member out with select=": "Raise --max-member-bytes",
    "Leave it out with select=, or set max_member_bytes to what one member may take": "Try where there is more memory",
    "max_member_bytes=": "--max-member-bytes=",
    "keys= changes how names are read": "--keys changes how names are read",
    "handler=warn_and_continue": "--errors skip",
    "on_reappearing='allow'": "--on-reappearing allow",
    "on_duplicate='first' or 'last'": "--on-duplicate first or last",
    "lowercase=False": "--keep-case",
    "group_by_key(keys='last_dot')": "--keys last_dot",
    "require_end_marker=False": "--no-end-marker",
    "concatenated=True": "--concatenated",
}


def say(text: str, command: str = "") -> None:
    """Writes a message, whose names may be a stranger's: nothing in it moves the cursor.

    That nobody reads messages any more is no reason to stop.

    Args:
        text: One line, or several.
        command: Which command it is from, for its last words.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    with contextlib.suppress(BrokenPipeError), paused():
        print(f"{PROGRAM}{command and ' '}{command}: {lines}", file=sys.stderr, flush=True)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Writes a number with its noun.

    Example:
        >>> counted(1, "sample"), counted(2_000, "sample"), counted(0, "index", "indexes")
        ('1 sample', '2,000 samples', '0 indexes')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def tell_left_out(skipped: Counter[str]) -> None:
    """Tells how many members belong to no sample, and why; samples that damage has cut are told with the error."""
    for reason, count in sorted((+skipped).items()):
        if reason != "sample cut off by a broken shard":
            say(f"left out {counted(count, 'member that belongs', 'members that belong')} to no sample: {reason}")


def tell_lost(count: int) -> None:
    """Tells how many shards or samples were lost."""
    if count:
        say(f"lost: {counted(count, 'shard or sample was', 'shards or samples were')} skipped (see above)")


def in_our_words(text: str) -> str:
    """Puts the program's options where a message of the library advises those of a function."""
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text


def message_of(error: BaseException) -> str:
    """The error's own text, without the pipe that torch names behind it."""
    text = str(error).partition("\nThis exception is thrown by ")[0].strip()
    return in_our_words(text or type(error).__name__)


def let_go_of_output() -> None:
    """Sends what is left in the buffer of standard output nowhere, so that the interpreter's end does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(in_our_words(record.getMessage()))


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Lets warnings of the library be said, as long as it is entered."""
    logger = logging.getLogger("torchdata_wds")
    handler = _Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
