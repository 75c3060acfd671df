"""Arguments that choose fields, the same in all commands."""

from __future__ import annotations

import argparse
from typing import get_args

from torchdata_wds.pipes.field_choices import FieldChoices, Missing
from torchdata_wds.tools.command import UsageError
from torchdata_wds.tools.messages import counted, say

__all__ = ["add_field_arguments", "field_choices", "tell_choices"]


def add_field_arguments(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds ``--fields`` and ``--missing``."""
    group = parser.add_argument_group("fields")
    group.add_argument(
        "-f",
        "--fields",
        required=required,
        metavar="SPEC",
        help="fields, separated by blanks: 'jpg;png' (the first that is there), new=old, '*.json'",
    )
    group.add_argument(
        "--missing",
        choices=get_args(Missing),
        default="error",
        help="a sample without such a field: stop, leave it out, or take it as empty (default: error)",
    )


def field_choices(arguments: argparse.Namespace) -> FieldChoices | None:
    """Makes the choice that the arguments ask for; None takes all fields.

    Raises:
        UsageError: if the spec is wrong.
    """
    if arguments.fields is None:
        if arguments.missing != "error":
            raise UsageError("--missing needs --fields, which says what may be missing")
        return None
    try:
        return FieldChoices(arguments.fields, missing=arguments.missing)
    except ValueError as error:
        raise UsageError(str(error)) from error


def tell_choices(choices: FieldChoices | None) -> None:
    """Tells how many samples were left out as asked for, and how many fields left empty."""
    if choices is not None and choices.left_out:
        say(f"left out {counted(choices.left_out, 'sample')} without the fields (--missing skip)")
    if choices is not None and choices.left_empty:
        say(f"left {counted(choices.left_empty, 'missing field')} empty (--missing empty)")
