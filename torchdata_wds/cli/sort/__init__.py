"""``sort``: samples in the order of a value, in bounded memory."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any, get_args

from torchdata_wds.cli.arguments import table
from torchdata_wds.cli.arguments.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.arguments.outputs import (
    SampleOutput,
    add_output_arguments,
    check_one_output,
    chosen_seed,
    copy_samples,
)
from torchdata_wds.cli.command import Command, UsageError, byte_size, counted, say, usage_checked
from torchdata_wds.cli.sort.keys import MissingValue, SortKey, SortType
from torchdata_wds.cli.sort.runs import sort_samples


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    table.option(parser, "-k --key", "FIELD", "the field to sort by (default: __key__)", default="__key__")
    text = "compare bytes, integers or numbers, or give an order that looks random (default: text)"
    table.choice(parser, "--type", get_args(SortType), text, "text")
    table.seed(parser, "--type shuffle")
    table.flag(parser, "--reverse", "the largest first; equal ones keep their order")
    text = "a sample without the field: stop, leave it out, or put it last (default: error)"
    table.choice(parser, "--missing", get_args(MissingValue), text, "error")
    text = "how much to keep in memory; more goes to temporary files (default: 1GiB)"
    table.option(parser, "--memory", "SIZE", text, byte_size, default=float(1 << 30))
    table.option(parser, "--tmpdir", "FOLDER", "where the temporary files go (default: the system's)")
    add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    check_one_output(arguments.output)
    is_shuffle = arguments.type == "shuffle"
    if arguments.seed is not None and not is_shuffle:
        raise UsageError("--seed needs --type shuffle, whose order it chooses")
    seed = chosen_seed(arguments.seed) if is_shuffle else 0
    with usage_checked():
        key = SortKey(arguments.key, arguments.type, seed=seed, missing=arguments.missing, reverse=arguments.reverse)
    reader = SampleReader(arguments)

    def entry_of(sample: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        value = key(sample)
        return None if value is None else (value, sample)

    with SampleOutput(arguments) as output, closing(reader.taken(entry_of)) as entries:
        ordered = sort_samples(entries, reverse=arguments.reverse, memory=arguments.memory, folder=arguments.tmpdir)
        with closing(ordered):
            copy_samples(ordered, output, reader)
    if key.left_out:
        say(f"left out {counted(key.left_out, 'sample')} without {' or '.join(key.fields)} (--missing skip)")
    return reader.finish()


COMMAND = Command(
    "sort samples by their key or a field, in bounded memory",
    _add_arguments,
    _run,
    """
    wds sort train-000000.tar -k cls --type int -o by-class.tar
    wds sort 'train-*.tar' --type shuffle --seed 1 --memory 100MB -o shuffled.tar
    """,
)
