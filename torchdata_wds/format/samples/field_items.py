"""A list of fields as text: ``"jpg;png label=cls *.json"``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torchdata_wds.format.samples.names import is_metadata

_GLOB_SIGNS = frozenset("*?[")


class FieldItem(NamedTuple):
    """One item of a list of fields."""

    column: str  # how it is called in a table's header
    names: tuple[str, ...]  # the alternatives, of which the first that is there counts; for a glob, the glob
    new: str | None  # the name that the field gets, if it is renamed
    is_glob: bool  # whether all fields that match are meant

    def find(self, sample: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the fields of a sample that are meant, each with the name that it gets.

        Example:
            >>> [item.find({"png": b"P", "seg.png": b"S"}) for item in parse_field_items("image=jpg;png *.png cls")]
            [[('image', 'png')], [('png', 'png'), ('seg.png', 'seg.png')], []]
        """
        if self.is_glob:
            names = [name for name in sample if not name.startswith("__") and matches_glob(name, self.names[0])]
            return [(name, name) for name in names]
        name = next((name for name in self.names if name in sample), None)
        return [] if name is None else [(self.new or name, name)]


def matches_glob(field: str, glob: str) -> bool:
    """Returns whether a field matches a glob, which may be written with or without a leading dot."""
    return fnmatchcase(field, glob) or fnmatchcase("." + field, glob)


def parse_field_items(spec: str) -> list[FieldItem]:
    """Parses items that are separated by blanks.

    ``jpg;png`` (or ``jpg,png``) is the first of them that the sample has, ``new=old;older`` (or ``new:old,older``) the
    same under a new name, ``*.json`` all fields that match. A leading dot is dropped.
    """
    items = [_parse(item) for item in spec.split()]
    if not items:
        raise ValueError("a list of fields is empty; write it as 'jpg;png cls'")
    for column, count in Counter(item.column for item in items).items():
        if count > 1:
            raise ValueError(f"{column!r} comes twice in the list of fields {spec!r}")
    return items


def _parse(item: str) -> FieldItem:
    new, sign, old = item.partition("=") if "=" in item else item.partition(":")
    if sign and not new.removeprefix("."):
        raise _malformed(item, "there is no new name before the sign")
    names = tuple(name.removeprefix(".") for name in (old if sign else item).replace(",", ";").split(";"))
    if not all(names):
        raise _malformed(item, "one of the names is empty")
    is_glob = any(not _GLOB_SIGNS.isdisjoint(name) for name in names)
    if is_glob and (sign or len(names) > 1):
        raise _malformed(item, "a glob takes all that match: it has neither alternatives nor a new name")
    if not sign:
        return FieldItem(item, names, None, is_glob)
    new = new.removeprefix(".")
    if is_metadata(new):
        raise _malformed(item, f"{new!r} is the library's own, and no field can be called so")
    return FieldItem(new, names, new, is_glob)


def _malformed(item: str, why: str) -> ValueError:
    return ValueError(f"cannot read {item!r} in a list of fields: {why}. Write jpg;png, new=old or *.json")
