"""Which fields of samples a command takes, and under which names: ``--fields "jpg;png label=cls *.json"``."""

import argparse
import itertools
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torchdata_wds.cli.command import UsageError, choice, option, usage_checked
from torchdata_wds.cli.terminal import counted, say
from torchdata_wds.errors import DuplicateFieldError
from torchdata_wds.format.samples.field_items import parse_field_items
from torchdata_wds.pipes.samples.field_specs import missing_field, name_sample

Missing = Literal["error", "skip", "empty"]  # what to do with a sample that lacks a chosen field
_ALWAYS = ("__key__", "__url__")


class FieldChoices:
    """Chooses fields of samples.

    `spec` has items separated by blanks. ``jpg;png`` (or ``jpg,png``) is the first of them that the sample has,
    ``new=old;older`` (or ``new:old,older``) the same under a new name, ``*.json`` all fields that match. ``__key__``
    and ``__url__`` can be columns of tables; everywhere, a new name makes them fields of text. `columns` has one name
    for each item. Where an item finds nothing, ``missing="skip"`` leaves the sample out, ``"empty"`` gives it an empty
    field; both are counted.
    """

    def __init__(self, spec: str, *, missing: Missing = "error") -> None:
        self._items = parse_field_items(spec)
        self.columns = [item.column for item in self._items]
        self.missing = missing
        self.left_out = self.left_empty = 0

    def choose(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns ``__key__``, ``__url__`` and the chosen fields, or None if the sample is left out."""
        if (found := self._find(sample)) is None:
            return None
        chosen = {name: sample[name] for name in _ALWAYS if name in sample}
        for name, value in itertools.chain.from_iterable(found):
            if name in chosen and name not in _ALWAYS:
                which, place = name_sample(sample)
                raise DuplicateFieldError(
                    f"two items of the list of fields give {which} a field {name!r}; rename one of them, as new=old",
                    **place,
                    field=name,
                )
            chosen[name] = value
        return chosen

    def row(self, sample: Mapping[str, Any]) -> list[Any] | None:
        """Returns a value for each of `columns`, b"" for an empty one; None if the sample is left out."""
        if (found := self._find(sample)) is None:
            return None
        for column, fields in zip(self.columns, found, strict=True):
            if len(fields) > 1:
                which, place = name_sample(sample)
                raise DuplicateFieldError(
                    f"{which} has {len(fields)} fields that match {column!r}, and a table has one column for "
                    f"them: {[name for name, _ in fields]}. Name the one that is meant",
                    **place,
                    field=column,
                )
        return [fields[0][1] if fields else b"" for fields in found]

    def _find(self, sample: Mapping[str, Any]) -> list[list[tuple[str, Any]]] | None:
        """Returns the fields of each item with their new names; None if the sample is left out."""
        found = []
        for item in self._items:
            fields = [(new, sample[name]) for new, name in item.find(sample)]
            if item.new is not None:  # a key that becomes a field of its own is text in it
                fields = [(new, value.encode() if isinstance(value, str) else value) for new, value in fields]
            if not fields:
                if self.missing == "error":
                    raise missing_field(sample, item.names)
                if self.missing == "skip":
                    self.left_out += 1
                    return None
                self.left_empty += 1
                fields = [] if item.is_glob else [(item.new or item.names[0], b"")]
            found.append(fields)
        return found


def add_field_arguments(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds ``--fields`` and ``--missing``."""
    group = parser.add_argument_group("fields")
    text = "fields, separated by blanks: 'jpg;png' (the first that is there), new=old, '*.json'"
    option(group, "-f --fields", "SPEC", text, required=required)
    text = "a sample without such a field: stop, leave it out, or take it as empty (default: error)"
    choice(group, "--missing", get_args(Missing), text, "error")


def field_choices(arguments: argparse.Namespace) -> FieldChoices | None:
    """Returns the choice of ``--fields``; None takes all fields."""
    if arguments.fields is None:
        if arguments.missing != "error":
            raise UsageError("--missing needs --fields, which says what may be missing")
        return None
    with usage_checked():
        return FieldChoices(arguments.fields, missing=arguments.missing)


def tell_choices(choices: FieldChoices | None) -> None:
    """Says how many samples were left out, and how many fields were left empty."""
    if choices is not None and choices.left_out:
        say(f"left out {counted(choices.left_out, 'sample')} without the fields (--missing skip)")
    if choices is not None and choices.left_empty:
        say(f"left {counted(choices.left_empty, 'missing field')} empty (--missing empty)")
