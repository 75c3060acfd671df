"""``first``: the content of one field, of the first sample that meets conditions."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchdata_wds.cli.arguments.fields import FieldChoices
from torchdata_wds.cli.arguments.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.arguments.outputs import check_one_output
from torchdata_wds.cli.arguments.shown_samples import taken, write_whole
from torchdata_wds.cli.command import Command, UsageError, counted, say
from torchdata_wds.cli.first.conditions import Condition
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.show.summaries import guess_text
from torchdata_wds.codecs.images.specs import IMAGE_FIELDS
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

__all__ = ["COMMAND"]


_IMAGES = ";".join(IMAGE_FIELDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_input_arguments(parser, parts=False)
    parser.add_argument(
        "-f",
        "--fields",
        default=_IMAGES,
        metavar="SPEC",
        help="the field, as 'jpg;png' (the first that is there) or '*.json' (default: an image)",
    )
    parser.add_argument(
        "-w",
        "--where",
        action="append",
        default=[],
        type=condition,
        metavar="CONDITION",
        help="as cls=3, json.label>=2, 'txt~*cat*' (a glob), with = != < <= > >= or ~; of several all must hold",
    )
    parser.add_argument("-o", "--output", default=STDIN, metavar="FILE", help="where to, by default standard output")
    parser.add_argument("--force", action="store_true", help="replace what exists")


def condition(text: str) -> Condition:
    """Reads the argument ``--where``.

    Raises:
        argparse.ArgumentTypeError: if it is no condition.
    """
    try:
        return Condition(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Writes the field's bytes."""
    check_one_output(arguments.output)
    try:
        choices = FieldChoices(arguments.fields, missing="skip")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if len(choices.columns) > 1 or is_metadata(choices.columns[0]):
        raise UsageError(
            f"--fields {arguments.fields!r} is not one field of a sample; of several the first that is there, as in "
            "'jpg;png'"
        )
    reader = SampleReader(arguments)
    conditions: list[Condition] = arguments.where
    seen = 0

    def take(sample: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal seen
        seen += 1
        return choices.choose(sample) if all(each.holds(sample) for each in conditions) else None

    for sample in taken(reader, take, 1):
        field, data = next((name, value) for name, value in sample.items() if not is_metadata(name))
        say(f"{printable(sample['__key__'])}.{printable(field)} of {printable(mask_url(sample['__url__']))}")
        _write(data, arguments)
        return reader.finish()
    say(_nothing(seen, conditions, choices))
    reader.finish()
    return 1


def _write(data: bytes, arguments: argparse.Namespace) -> None:
    if arguments.output != STDIN:
        write_whole([data], arguments.output, overwrite=arguments.force)
        return
    if sys.stdout.isatty() and guess_text(data, len(data)) is None:
        raise UsageError("this is binary, and would spoil the terminal: name a file with -o, or pipe it on")
    sys.stdout.buffer.write(data)


def _nothing(seen: int, conditions: list[Condition], choices: FieldChoices) -> str:
    text = f"nothing found in {counted(seen, 'sample')}"
    for each in conditions:
        if each.missed:
            text += f"; {counted(each.missed, 'has', 'have')} no {each.name!r}"
    if choices.left_out:
        lacking = counted(choices.left_out, "meets the conditions and has", "meet the conditions and have")
        text += f"; {lacking} no field {choices.columns[0]!r}"
    return text


COMMAND = Command(
    "write the content of one field, of the first sample that meets conditions",
    add_arguments,
    run,
    """
    wds first train-000000.tar > first.jpg
    wds first -f txt --where cls=3 'train-{000000..000003}.tar'
    wds first -f jpg --where 'json.number>=12' --where 'txt~picture*' -o found.jpg train-*.tar
    """,
)
