"""What a command of the command line is made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Command", "whole_number"]


class Command(NamedTuple):
    """One command: each has a file of its own and a row in `torchdata_wds.tools.main.COMMANDS`.

    Attributes:
        summary: What it does, in one line of the help.
        add_arguments: Adds its arguments to its parser.
        run: Does it, and returns the exit status.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def whole_number(text: str) -> int:
    """Reads an argument that is 0 or more.

    Raises:
        argparse.ArgumentTypeError: if it is not.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, not {text!r}")
    return int(text)
