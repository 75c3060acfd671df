"""``sort``: samples in the order of a value, in bounded memory."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Literal, get_args

from torchdata_wds.cli import outputs
from torchdata_wds.cli.command import Command, UsageError, add_seed, byte_size, choice, flag, option, usage_checked
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.sort.runs import sort_samples
from torchdata_wds.cli.terminal import counted, say
from torchdata_wds.codecs.values.text import without_bom
from torchdata_wds.errors import DecodingError
from torchdata_wds.pipes.samples.field_specs import alternatives, find_field, missing_field, name_sample

SortType = Literal["text", "int", "float", "shuffle"]

#: What to do with a sample that lacks the field to sort by.
MissingValue = Literal["error", "skip", "last"]
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_SHOWN = 40


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    option(parser, "-k --key", "FIELD", "the field to sort by (default: __key__)", default="__key__")
    text = "compare bytes, integers or numbers, or give an order that looks random (default: text)"
    choice(parser, "--type", get_args(SortType), text, "text")
    add_seed(parser, "--type shuffle")
    flag(parser, "--reverse", "the largest first; equal ones keep their order")
    text = "a sample without the field: stop, leave it out, or put it last (default: error)"
    choice(parser, "--missing", get_args(MissingValue), text, "error")
    text = "how much to keep in memory; more goes to temporary files (default: 1GiB)"
    option(parser, "--memory", "SIZE", text, byte_size, default=float(1 << 30))
    option(parser, "--tmpdir", "FOLDER", "where the temporary files go (default: the system's)")
    outputs.add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    outputs.check_one_output(arguments.output)
    is_shuffle = arguments.type == "shuffle"
    if arguments.seed is not None and not is_shuffle:
        raise UsageError("--seed needs --type shuffle, whose order it chooses")
    seed = outputs.chosen_seed(arguments.seed) if is_shuffle else 0
    with usage_checked():
        key = SortKey(arguments.key, arguments.type, seed=seed, missing=arguments.missing, reverse=arguments.reverse)
    reader = SampleReader(arguments)

    def entry_of(sample: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        value = key(sample)
        return None if value is None else (value, sample)

    with outputs.SampleOutput(arguments) as output, closing(reader.taken(entry_of)) as entries:
        ordered = sort_samples(entries, reverse=arguments.reverse, memory=arguments.memory, folder=arguments.tmpdir)
        with closing(ordered):
            outputs.copy_samples(ordered, output, reader)
    if key.left_out:
        say(f"left out {counted(key.left_out, 'sample')} without {' or '.join(key.fields)} (--missing skip)")
    return reader.finish()


class SortKey:
    """Returns what samples are sorted by. One object serves one sort, whose samples it counts.

    Args:
        field: The field with the value, or ``__key__``; of several separated by ``;``, the first that is there.
        kind: ``"text"`` compares bytes, which for UTF-8 is the order of code points; ``"int"`` takes integers of any
            size, ``"float"`` numbers from -inf to inf. ``"shuffle"`` gives an order that looks random and depends only
            on the seed and each sample's value and ``__key__``; samples that share both are told apart by their number
            in the stream.
        missing: ``"skip"`` leaves a sample without the field out, ``"last"`` puts it after all others.
        reverse: Whether the sort goes from the largest to the smallest, which ``"last"`` must know.

    Raises:
        ValueError: if the field is malformed.

    Example:
        >>> sample = {"__key__": "a", "cls": b" 12"}
        >>> SortKey("cls", "int")(sample), SortKey("cls")(sample)
        (12, b' 12')
    """

    def __init__(
        self,
        field: str = "__key__",
        kind: SortType = "text",
        *,
        seed: int = 0,
        missing: MissingValue = "error",
        reverse: bool = False,
    ) -> None:
        self.fields = [name.removeprefix(".") for name in alternatives(field)]
        self.left_out = 0
        self._missing = missing
        self._read = _READERS[kind]
        self._seeded = blake2b(b"%d\0" % seed, digest_size=16) if kind == "shuffle" else None
        self._number = 0
        self._ranks = (1, 0) if reverse else (0, 1)  # of samples with a value, and of those without

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """Returns a sample's value, which can be compared with all others; None if the sample is left out."""
        field = find_field(sample, self.fields)
        if field is None:
            if self._missing == "error":
                raise missing_field(sample, self.fields)
            if self._missing == "last":
                return (self._ranks[1],)
            self.left_out += 1
            return None
        data = _as_bytes(sample[field])
        try:
            value = self._read(data)
        except ValueError as error:
            found = sample[field]
            rest = "" if len(found) <= _SHOWN else f" and {len(found) - _SHOWN:,} more bytes"
            which, place = name_sample(sample)
            raise DecodingError(
                f"{which} cannot be sorted by field {field!r}, which is {error}: found {found[:_SHOWN]!r}{rest}. Sort "
                "it as text, or leave such samples out",
                **place,
                field=field,
            ) from error
        if self._seeded is not None:
            value = self._place(data, _as_bytes(sample.get("__key__", "")))
        return value if self._missing != "last" else (self._ranks[0], value)

    def _place(self, value: bytes, key: bytes) -> bytes:
        """Returns the next sample's place in the shuffle: the digest of its value and key, then that of its number."""
        assert self._seeded is not None
        own, numbered = self._seeded.copy(), self._seeded.copy()
        # the length keeps value "ab" with key "c" apart from "a" with "bc"
        own.update(b"%d:%b%b" % (len(value), value, key))
        numbered.update(b"#%d" % self._number)
        self._number += 1
        return own.digest() + numbered.digest()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _read_int(data: bytes) -> int | Decimal:
    digits = without_bom(data.strip()).strip()
    if not _INTEGER.fullmatch(digits):
        raise ValueError("not an integer, such as 7 or -1")
    try:
        return int(digits)
    except ValueError:  # more digits than int() takes, whose time grows with their square
        return Decimal(digits.decode())


def _read_float(data: bytes) -> float:
    text = without_bom(data.strip())
    try:
        number = math.nan if b"_" in text else float(text)
    except ValueError:
        raise ValueError("not a number, such as 0.5 or -1e3") from None
    if math.isnan(number):
        raise ValueError("not a number that has a place in an order")
    return number


_READERS: dict[str, Callable[[bytes], Any]] = {"text": bytes, "int": _read_int, "float": _read_float, "shuffle": bytes}

COMMAND = Command(
    "sort samples by their key or a field, in bounded memory",
    _add_arguments,
    _run,
    """
    wds sort train-000000.tar -k cls --type int -o by-class.tar
    wds sort 'train-*.tar' --type shuffle --seed 1 --memory 100MB -o shuffled.tar
    """,
)
