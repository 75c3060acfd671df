"""Which fields of samples a command takes, and under which names: ``"jpg;png cls label=cls2 *.json"``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from torchdata_wds.errors import DuplicateFieldError
from torchdata_wds.format.names import is_metadata
from torchdata_wds.pipes.field_specs import find_field, matching_fields, missing_field, name_sample

__all__ = ["FieldChoices", "Missing"]

#: What becomes of a sample without a field that was asked for.
Missing = Literal["error", "skip", "empty"]

_ALWAYS = ("__key__", "__url__")
_GLOB_SIGNS = frozenset("*?[")
_EMPTY = b""


class _Choice(NamedTuple):
    """One item of a spec.

    Attributes:
        column: How it is called in a table's header.
        names: The alternatives, the first that is there counts; for a glob, the glob.
        new: The name that the field gets, if it is renamed.
        is_glob: Whether all fields that match are meant.
    """

    column: str
    names: tuple[str, ...]
    new: str | None
    is_glob: bool


class FieldChoices:
    """Chooses fields of samples.

    Args:
        spec: Items separated by blanks. ``jpg;png`` (or ``jpg,png``) is the first of them that the sample has,
            ``new=old;older`` (or ``new:old,older``) the same under a new name, ``*.json`` all fields that match.
            ``__key__`` and ``__url__`` may be asked for by name in tables, and everywhere under a new name, as text.
        missing: What becomes of a sample in which an item finds nothing: ``"error"``; ``"skip"`` leaves the sample out;
            ``"empty"`` gives it an empty field.

    Attributes:
        columns: One name for each item, for the header of a table.
        left_out: How many samples were left out so far.
        left_empty: How many fields were left empty so far.

    Raises:
        ValueError: if the spec has no item, a malformed one, or two for one name.

    Example:
        >>> choices = FieldChoices("jpg;png label=cls")
        >>> choices.choose({"__key__": "a", "png": b"P", "cls": b"1", "txt": b"t"})
        {'__key__': 'a', 'png': b'P', 'label': b'1'}
        >>> choices.columns, choices.row({"__key__": "a", "jpg": b"J", "cls": b"1"})
        (['jpg;png', 'label'], [b'J', b'1'])
    """

    def __init__(self, spec: str, *, missing: Missing = "error") -> None:
        if missing not in get_args(Missing):
            raise ValueError(f"missing must be one of {', '.join(get_args(Missing))}, not {missing!r}")
        self._choices = [_parse(item) for item in spec.split()]
        if not self._choices:
            raise ValueError("a list of fields is empty; write it as 'jpg;png cls'")
        self.columns = [choice.column for choice in self._choices]
        for number, column in enumerate(self.columns):
            if column in self.columns[:number]:
                raise ValueError(f"{column!r} comes twice in the list of fields {spec!r}")
        self.missing = missing
        self.left_out = 0
        self.left_empty = 0

    def choose(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """Gives a sample with the chosen fields alone, besides ``__key__`` and ``__url__``.

        Returns:
            The sample, or None if it is left out.

        Raises:
            MissingFieldError: if a field is missing and that is an error.
            DuplicateFieldError: if two items give fields of one name.
        """
        chosen = {name: sample[name] for name in _ALWAYS if name in sample}
        for choice in self._choices:
            found = self._find(sample, choice)
            if found is None:
                return None
            for name, value in found:
                if name in chosen and name not in _ALWAYS:
                    raise _twice(sample, name)
                chosen[name] = value
        return chosen

    def row(self, sample: Mapping[str, Any]) -> list[Any] | None:
        """Gives the chosen values, one for each of `columns`; b"" for those that are left empty.

        Returns:
            The values, or None if the sample is left out.

        Raises:
            MissingFieldError: if a field is missing and that is an error.
            DuplicateFieldError: if several fields match a glob, for which there is one column.
        """
        values = []
        for choice in self._choices:
            found = self._find(sample, choice)
            if found is None:
                return None
            if len(found) > 1:
                raise _ambiguous(sample, choice, [name for name, _ in found])
            values.append(found[0][1] if found else _EMPTY)
        return values

    def _find(self, sample: Mapping[str, Any], choice: _Choice) -> list[tuple[str, Any]] | None:
        """The fields of one item with their new names; None if the sample is to be left out."""
        if choice.is_glob:
            found = [(name, sample[name]) for name in matching_fields(sample, choice.names)]
        else:
            name = find_field(sample, choice.names)
            found = [] if name is None else [(choice.new or name, _content(sample[name], choice.new))]
        if found:
            return found
        if self.missing == "error":
            raise missing_field(sample, choice.names)
        if self.missing == "skip":
            self.left_out += 1
            return None
        self.left_empty += 1
        return [] if choice.is_glob else [(choice.new or choice.names[0], _EMPTY)]


def _content(value: Any, new: str | None) -> Any:
    """A field's value; a key that becomes a field of its own is text in it."""
    return value.encode() if new is not None and isinstance(value, str) else value


def _parse(item: str) -> _Choice:
    new, names = _split(item)
    is_glob = any(not _GLOB_SIGNS.isdisjoint(name) for name in names)
    if is_glob and (new is not None or len(names) > 1):
        raise _malformed(item, "a glob takes all that match: it has neither alternatives nor a new name")
    if new is not None and is_metadata(new):
        raise _malformed(item, f"{new!r} is the library's own, and no field can be called so")
    return _Choice(item if new is None else new, names, new, is_glob)


def _split(item: str) -> tuple[str | None, tuple[str, ...]]:
    new, sign, old = item.partition("=") if "=" in item else item.partition(":")
    if sign and not new.removeprefix("."):
        raise _malformed(item, "there is no new name before the sign")
    names = tuple(_names(old if sign else item))
    if not all(names):
        raise _malformed(item, "one of the names is empty")
    return (new.removeprefix(".") if sign else None), names


def _names(text: str) -> Iterator[str]:
    """Takes alternatives apart; a name may have a leading dot, as in a file's name."""
    for name in text.replace(",", ";").split(";"):
        yield name.removeprefix(".")


def _malformed(item: str, why: str) -> ValueError:
    return ValueError(f"cannot read {item!r} in a list of fields: {why}. Write jpg;png, new=old or *.json")


def _twice(sample: Mapping[str, Any], name: str) -> DuplicateFieldError:
    which, place = name_sample(sample)
    return DuplicateFieldError(
        f"two items of the list of fields give {which} a field {name!r}; rename one of them, as new=old",
        **place,
        field=name,
    )


def _ambiguous(sample: Mapping[str, Any], choice: _Choice, names: list[str]) -> DuplicateFieldError:
    which, place = name_sample(sample)
    return DuplicateFieldError(
        f"{which} has {len(names)} fields that match {choice.column!r}, and a table has one column for them: {names}. "
        "Name the one that is meant",
        **place,
        field=choice.column,
    )
