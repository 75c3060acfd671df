"""What a command of the command line is made of."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Command", "Part", "UsageError", "byte_size", "part_number", "positive_number", "range_of", "whole_number"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MOST_DIGITS = 18  # of sys.maxsize there are 19
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?) ?([kmgt]?i?)b?", re.IGNORECASE)


class UsageError(Exception):
    """Arguments that are right one by one, but not together."""


class Command(NamedTuple):
    """One command: each has a file of its own and a row in `torchdata_wds.tools.main.COMMANDS`.

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
