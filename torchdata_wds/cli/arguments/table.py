"""The rows of a command's table of arguments, and those rows that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from torchdata_wds.cli.command import positive_number, whole_number

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


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


def force(parser: Parser) -> None:
    """Adds ``--force``."""
    flag(parser, "--force", "replace what exists")


def rekey(parser: Parser) -> None:
    """Adds ``--rekey``."""
    text = "new keys, from {number:09d} (for short: '#'), {key} and {shard}, as in '{shard}/{key}'"
    option(parser, "--rekey", "PATTERN", text)


def writing(parser: Parser) -> None:
    """Adds what all commands that write shards have: ``--force``, ``--compress``, ``--index`` and ``--rekey``."""
    force(parser)
    choice(parser, "--compress", ("gz", "bz2", "xz", "zst", "none"), "by default as the name's suffix says")
    flag(parser, "--index", "write an index beside each shard")
    rekey(parser)


def count(parser: Parser, default: str = "all") -> None:
    """Adds ``--count``."""
    option(parser, "-c --count", "N", f"how many samples at most (default: {default})", whole_number)


def parallel(parser: Parser, text: str, default: int = 1) -> None:
    """Adds ``--parallel``."""
    option(parser, "-p --parallel", "N", text, positive_number, default=default)


def seed(parser: Parser, owner: str) -> None:
    """Adds ``--seed`` of an argument that shuffles."""
    option(parser, "--seed", "SEED", f"of {owner}: the same seed gives the same order", whole_number)
