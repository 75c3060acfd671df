"""Write one field of the first sample that meets the conditions.

wds first train-000000.tar > first.jpg
wds first -f txt --where cls=3 'train-{000000..000003}.tar'
wds first -f jpg --where 'json.number>=12' --where 'txt~picture*' -o found.jpg train-*.tar
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from torchdata_wds.cli.command import Command, UsageError, add_force, option
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.outputs import field_choices, one_output, write_whole
from torchdata_wds.cli.tables import unfold
from torchdata_wds.cli.terminal import counted, guess_text, printable, say
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS
from torchdata_wds.codecs.values.text import write_json
from torchdata_wds.errors import SampleError
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.pipes.samples.field_specs import name_sample
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

_CONDITION = re.compile(r"([^=!<>~]+)(!=|<=|>=|==|=|<|>|~)(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_FLOAT = re.compile(r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf)")
_ORDERS = {"<": lt, "<=": le, ">": gt, ">=": ge}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {"=": eq, "==": eq, "!=": ne, "~": fnmatchcase, **_ORDERS}
_NOTHING = object()


class Condition:
    """A comparison of a field with a value, such as ``cls=3``; no part of it is evaluated as code.

    The field is decoded by its name; ``.name`` and ``.0`` after it select items of json, msgpack and cbor values. If
    both sides are numbers, they are compared as numbers (``07`` equals 7). Booleans and null are compared as ``true``,
    ``false`` and ``null``, lists, tensors and dicts as compact JSON, and everything else as text, by code point and
    without surrounding blanks. A number never equals a text, and neither is smaller. A sample without the field or
    value never meets the condition, and is counted in ``missed``.
    """

    def __init__(self, text: str) -> None:
        found = _CONDITION.fullmatch(text)
        if found is None or not found[1].strip():
            expected = "expected a field, one of = != < <= > >= ~ and a value, as in cls=3"
            raise argparse.ArgumentTypeError(f"cannot read the condition {text!r}: {expected}")
        self.name, self.missed = found[1].strip().removeprefix("."), 0
        self._sign, self._value = found[2], found[3].strip()
        self._number = _to_number(self._value)
        self._decode = Decoder()

    def holds(self, sample: Mapping[str, Any]) -> bool:
        """Returns whether a sample meets the condition; raises SampleError if its value cannot be compared."""
        if (value := self._find(sample)) is _NOTHING:
            self.missed += 1
            return False
        text = self._text(value, sample)
        compare, number = _COMPARISONS[self._sign], _to_number(text)
        if self._sign != "~" and number is not None and self._number is not None:
            return compare(number, self._number)
        if self._sign in _ORDERS and (number is None) != (self._number is None):
            return False
        return compare(text, self._value)

    def _find(self, sample: Mapping[str, Any]) -> Any:
        """Returns the value: the longest prefix of the name that is a field, then the rest as a path into it."""
        parts = self.name.split(".")
        counts = range(len(parts), 0, -1)
        count = next((count for count in counts if ".".join(parts[:count]) in sample), None)
        if count is None:
            return _NOTHING
        field = ".".join(parts[:count])
        place = {name: sample[name] for name in ("__key__", "__url__") if name in sample}
        value = self._decode({**place, field: sample[field]})[field]
        for part in parts[count:]:
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list | tuple) and _INTEGER.fullmatch(part) and 0 <= int(part) < len(value):
                value = value[int(part)]
            else:
                return _NOTHING
        return value

    def _text(self, value: Any, sample: Mapping[str, Any]) -> str:
        try:
            if isinstance(value, bytes):
                value = value.decode()
            return value.strip() if isinstance(value, str) else write_json(unfold(value)).decode()
        except (TypeError, ValueError, RuntimeError) as error:
            name, place = name_sample(sample)
            what = f"{self.name!r} of {name} is neither text nor a number nor JSON, and cannot be compared with"
            raise SampleError(f"{what} {self._value!r}: {error}", **place, field=self.name) from error


def _to_number(text: str) -> int | float | None:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, parts=False)
    text = "the field, such as 'jpg;png' (the first that exists) or '*.json' (default: an image)"
    option(parser, "-f --fields", "SPEC", text, default=";".join(IMAGE_FIELDS))
    parser.set_defaults(missing="skip")
    text = "such as cls=3, json.label>=2 or 'txt~*cat*' (a glob), with = != < <= > >= or ~; several must all hold"
    option(parser, "-w --where", "CONDITION", text, Condition, action="append", default=[])
    option(parser, "-o --output", "FILE", "where to write (default: standard output)", one_output, default=STDIN)
    add_force(parser)


def _run(arguments: argparse.Namespace) -> int:
    choices = field_choices(arguments)
    if len(choices.columns) > 1 or is_metadata(choices.columns[0]):
        what = f"--fields {arguments.fields!r} is not one field of a sample"
        raise UsageError(f"{what}; for the first of several that exists, write 'jpg;png'")
    reader = SampleReader(arguments)
    conditions: list[Condition] = arguments.where
    seen = 0

    def take(sample: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal seen
        seen += 1
        return choices.choose(sample) if all(each.holds(sample) for each in conditions) else None

    for sample in reader.taken(take, 1):
        field, data = next((name, value) for name, value in sample.items() if not is_metadata(name))
        say(f"{printable(sample['__key__'])}.{printable(field)} of {printable(mask_url(sample['__url__']))}")
        if arguments.output != STDIN:
            write_whole([data], arguments.output, overwrite=arguments.force)
        elif sys.stdout.isatty() and guess_text(data, len(data)) is None:
            raise UsageError("refusing to write binary data to a terminal: use -o FILE, or pipe it to another program")
        else:
            sys.stdout.buffer.write(data)
        return reader.finish()
    text = f"nothing found in {counted(seen, 'sample')}"
    for each in conditions:
        if each.missed:
            text += f"; {counted(each.missed, 'has', 'have')} no {each.name!r}"
    if choices.left_out:
        lacking = counted(choices.left_out, "meets the conditions and has", "meet the conditions and have")
        text += f"; {lacking} no field {choices.columns[0]!r}"
    say(text)
    reader.finish()
    return 1


COMMAND = Command(__doc__, _add_arguments, _run)
