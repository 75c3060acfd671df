"""``tsv`` and ``json``: fields as a table, and as lines of JSON."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from torchdata_wds.cli.arguments import table
from torchdata_wds.cli.arguments.fields import add_field_arguments, field_choices, tell_choices
from torchdata_wds.cli.arguments.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.arguments.outputs import write_line
from torchdata_wds.cli.command import Command, counted, say
from torchdata_wds.cli.tables.cells import Binary, escape_cell, write_cell
from torchdata_wds.cli.tables.json_lines import JsonBinary, JsonLines, StoredField
from torchdata_wds.errors import DecodingError
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.pipes.samples.field_specs import name_sample
from torchdata_wds.storage import mask_url

_KEY, _URL = "__key__", "__url__"


def _add_tsv_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_field_arguments(parser, required=True)
    table.count(parser)
    table.flag(parser, "--no-key", "leave out the first column, __key__")
    table.flag(parser, "--no-header", "leave out the first line, the columns' names")
    text = r"bytes that are not UTF-8: stop, write \xe9, or 'base64:' and the Base64 of all (default: error)"
    table.choice(parser, "--binary", get_args(Binary), text, "error")


def _run_tsv(arguments: argparse.Namespace) -> int:
    choices = field_choices(arguments)
    assert choices is not None
    columns, binary = choices.columns, arguments.binary
    has_key = not arguments.no_key and _KEY not in columns
    reader = SampleReader(arguments)

    def line_of(sample: dict[str, Any]) -> str | None:
        values = choices.row(sample)
        if values is None:
            return None
        cells = [escape_cell(sample[_KEY])] * has_key
        for column, value in zip(columns, values, strict=True):
            try:
                if isinstance(value, str):
                    cells.append(escape_cell(mask_url(value) if column == _URL else value))
                else:
                    cells.append(write_cell(value, binary))
            except ValueError as error:
                name, place = name_sample(sample)
                raise DecodingError(
                    f"field {column!r} of {name} is not text: {error}. Leave the field out, or pass --binary escape "
                    "or --binary base64",
                    **place,
                    field=column,
                ) from error
        return "\t".join(cells)

    if not arguments.no_header:
        write_line("\t".join(map(escape_cell, [_KEY] * has_key + columns)))
    for line in reader.taken(line_of, arguments.count):
        write_line(line)
    tell_choices(choices)
    return reader.finish()


def _add_json_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_field_arguments(parser)
    table.count(parser)
    table.flag(parser, "--no-key", "leave out __key__")
    text = 'what JSON cannot hold: written as {"base64": ...}, or left out (default: base64)'
    table.choice(parser, "--binary", get_args(JsonBinary), text, "base64")


def _run_json(arguments: argparse.Namespace) -> int:
    choices = field_choices(arguments)
    has_url = choices is not None and _URL in choices.columns
    reader = SampleReader(arguments)
    lines = JsonLines(arguments.binary)

    def line_of(sample: dict[str, Any]) -> bytes | None:
        stored = {name: value if is_metadata(name) else StoredField(name, value) for name, value in sample.items()}
        chosen = stored if choices is None else choices.choose(stored)
        if chosen is None:
            return None
        metadata = {} if arguments.no_key else {_KEY: sample[_KEY]}
        if has_url:
            metadata[_URL] = mask_url(sample[_URL])
        return lines({**metadata, **{name: value or None for name, value in chosen.items() if not is_metadata(name)}})

    for line in reader.taken(line_of, arguments.count):
        write_line(line)
    tell_choices(choices)
    if lines.skipped:
        say(f"left out {counted(lines.skipped, 'field')} that JSON cannot hold (--binary skip)")
    return reader.finish()


TSV_COMMAND = Command(
    "write chosen fields as a table: a line per sample, tabs between the fields",
    _add_tsv_arguments,
    _run_tsv,
    """
    wds tsv -f "cls txt" -c 10 train-000000.tar
    wds tsv -f "cls" --no-header 'train-{000000..000003}.tar' | cut -f 2 | sort | uniq -c
    """,
)

JSON_COMMAND = Command(
    "write samples, or chosen fields of them, as lines of JSON",
    _add_json_arguments,
    _run_json,
    """
    wds json -f "cls json" -c 10 train-000000.tar
    wds json -f "*.json label=cls" --missing empty 'train-{000000..000003}.tar' > labels.jsonl
    """,
)
