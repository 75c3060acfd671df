"""``tsv`` and ``json``: fields as a table, and as lines of JSON."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

from torchdata_wds.cli.arguments.fields import FieldChoices, add_field_arguments, field_choices, tell_choices
from torchdata_wds.cli.arguments.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.arguments.shown_samples import add_count_argument, taken, write_line
from torchdata_wds.cli.command import Command, counted, say
from torchdata_wds.cli.tables.cells import Binary, escape_cell, write_cell
from torchdata_wds.cli.tables.json_lines import JsonBinary, JsonLines, StoredField
from torchdata_wds.errors import DecodingError
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.pipes.samples.field_specs import name_sample
from torchdata_wds.storage import mask_url

__all__ = ["JSON_COMMAND", "TSV_COMMAND"]


_KEY, _URL = "__key__", "__url__"


def add_tsv_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``tsv``."""
    add_input_arguments(parser)
    add_field_arguments(parser, required=True)
    add_count_argument(parser)
    parser.add_argument("--no-key", action="store_true", help="leave out the first column, __key__")
    parser.add_argument("--no-header", action="store_true", help="leave out the first line, the columns' names")
    parser.add_argument(
        "--binary",
        choices=get_args(Binary),
        default="error",
        help=r"bytes that are not UTF-8: stop, write \xe9, or 'base64:' and the Base64 of all (default: error)",
    )


def run_tsv(arguments: argparse.Namespace) -> int:
    """Writes a table."""
    choices = field_choices(arguments)
    assert choices is not None
    has_key = not arguments.no_key and _KEY not in choices.columns
    reader = SampleReader(arguments)
    if not arguments.no_header:
        write_line("\t".join(map(escape_cell, [_KEY] * has_key + choices.columns)))
    for line in taken(reader, partial(_tsv_line, choices, has_key, arguments.binary), arguments.count):
        write_line(line)
    tell_choices(choices)
    return reader.finish()


def _tsv_line(choices: FieldChoices, has_key: bool, binary: Binary, sample: dict[str, Any]) -> str | None:
    values = choices.row(sample)
    if values is None:
        return None
    cells = [escape_cell(sample[_KEY])] * has_key
    for column, value in zip(choices.columns, values, strict=True):
        cells.append(_cell(value, column, binary, sample))
    return "\t".join(cells)


def _cell(value: Any, column: str, binary: Binary, sample: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return escape_cell(mask_url(value) if column == _URL else value)
    try:
        return write_cell(value, binary)
    except ValueError as error:
        name, place = name_sample(sample)
        raise DecodingError(
            f"field {column!r} of {name} is not text: {error}. Leave the field out, or pass --binary escape or "
            "--binary base64",
            **place,
            field=column,
        ) from error


def add_json_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``json``."""
    add_input_arguments(parser)
    add_field_arguments(parser)
    add_count_argument(parser)
    parser.add_argument("--no-key", action="store_true", help="leave out __key__")
    parser.add_argument(
        "--binary",
        choices=get_args(JsonBinary),
        default="base64",
        help='what JSON cannot hold: written as {"base64": ...}, or left out (default: base64)',
    )


def run_json(arguments: argparse.Namespace) -> int:
    """Writes lines of JSON."""
    choices = field_choices(arguments)
    reader = SampleReader(arguments)
    lines = JsonLines(binary=arguments.binary)
    for line in taken(reader, partial(_json_line, choices, lines, not arguments.no_key), arguments.count):
        write_line(line)
    tell_choices(choices)
    if lines.skipped:
        say(f"left out {counted(lines.skipped, 'field')} that JSON cannot hold (--binary skip)")
    return reader.finish()


def _json_line(choices: FieldChoices | None, lines: JsonLines, has_key: bool, sample: dict[str, Any]) -> bytes | None:
    stored = {name: value if is_metadata(name) else StoredField(name, value) for name, value in sample.items()}
    chosen = stored if choices is None else choices.choose(stored)
    if chosen is None:
        return None
    has_url = choices is not None and _URL in choices.columns
    metadata: dict[str, Any] = {_KEY: sample[_KEY]} if has_key else {}
    if has_url:
        metadata[_URL] = mask_url(sample[_URL])
    fields = {name: value or None for name, value in chosen.items() if not is_metadata(name)}
    return lines({**metadata, **fields})


TSV_COMMAND = Command(
    "write chosen fields as a table: a line per sample, tabs between the fields",
    add_tsv_arguments,
    run_tsv,
    """
    wds tsv -f "cls txt" -c 10 train-000000.tar
    wds tsv -f "cls" --no-header 'train-{000000..000003}.tar' | cut -f 2 | sort | uniq -c
    """,
)

JSON_COMMAND = Command(
    "write samples, or chosen fields of them, as lines of JSON",
    add_json_arguments,
    run_json,
    """
    wds json -f "cls json" -c 10 train-000000.tar
    wds json -f "*.json label=cls" --missing empty 'train-{000000..000003}.tar' > labels.jsonl
    """,
)
