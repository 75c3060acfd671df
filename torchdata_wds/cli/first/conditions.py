"""Conditions on samples, as people type them: ``cls=3``, ``json.label>=2``, ``txt~*cat*``."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from torchdata_wds.cli.tables.json_lines import unfold
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.values.json import write_json
from torchdata_wds.errors import SampleError
from torchdata_wds.pipes.samples.field_specs import name_sample

__all__ = ["Condition"]


_CONDITION = re.compile(r"([^=!<>~]+)(!=|<=|>=|==|=|<|>|~)(.*)", re.DOTALL)

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")

_FLOAT = re.compile(r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf)")

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_NOTHING = object()


class Condition:
    """A comparison of a field with a value; nothing in it is evaluated as a program.

    The field is decoded by its name. Behind it, ``.name`` and ``.0`` go into what json, msgpack and cbor hold. Numbers
    are compared as numbers wherever both sides are (``07`` is 7), truth values and null as ``true``, ``false`` and
    ``null``, all else as text by its code points, without blanks around it, lists, tensors and dicts as compact JSON.
    A number and a text are unequal, and neither is smaller. A sample that has no such field or value does not meet the
    condition, whatever it is.

    Args:
        text: A field, one of ``= != < <= > >=`` or ``~`` (matches the glob that follows), and a value.

    Attributes:
        name: The field and the path into it; ``__key__`` and ``__url__`` are fields here.
        sign: The comparison.
        value: What is compared with.
        missed: How many samples had no such field or value so far.

    Raises:
        ValueError: if it is no such condition.

    Example:
        >>> condition = Condition("json.label>=3")
        >>> condition.holds({"__key__": "a", "json": b'{"label": 3}'}), condition.holds({"__key__": "b", "cls": b"9"})
        (True, False)
    """

    def __init__(self, text: str) -> None:
        found = _CONDITION.fullmatch(text)
        if found is None or not found[1].strip():
            raise ValueError(
                f"cannot read the condition {text!r}: expected a field, one of = != < <= > >= ~ and a value, as in "
                "cls=3"
            )
        self.name = found[1].strip().removeprefix(".")
        self.sign = found[2].replace("==", "=")
        self.value = found[3].strip()
        self.missed = 0
        self._number = _to_number(self.value)
        self._decode = Decoder()

    def holds(self, sample: Mapping[str, Any]) -> bool:
        """Tells whether a sample meets the condition.

        Args:
            sample: With bytes, or decoded values, by field.

        Raises:
            DecodingError: if the field does not decode.
            SampleError: if it holds what cannot be compared, such as an image.
        """
        value = self._find(sample)
        if value is _NOTHING:
            self.missed += 1
            return False
        text = self._text(value, sample)
        if self.sign == "~":
            return fnmatch.fnmatchcase(text, self.value)
        compare = _COMPARISONS[self.sign]
        number = _to_number(text)
        if number is not None and self._number is not None:
            return compare(number, self._number)
        if self.sign not in ("=", "!=") and (number is None) != (self._number is None):
            return False
        return compare(text, self.value)

    def __repr__(self) -> str:
        return f"Condition({self.name + self.sign + self.value!r})"

    def _find(self, sample: Mapping[str, Any]) -> Any:
        """Finds the value: the longest beginning of the name that is a field, then the path into it."""
        parts = self.name.split(".")
        for count in range(len(parts), 0, -1):
            field = ".".join(parts[:count])
            if field in sample:
                place = {name: sample[name] for name in ("__key__", "__url__") if name in sample}
                return _follow(self._decode({**place, field: sample[field]})[field], parts[count:])
        return _NOTHING

    def _text(self, value: Any, sample: Mapping[str, Any]) -> str:
        try:
            if isinstance(value, bytes):
                value = value.decode()
            return value.strip() if isinstance(value, str) else write_json(unfold(value)).decode()
        except (TypeError, ValueError, RuntimeError) as error:
            name, place = name_sample(sample)
            raise SampleError(
                f"{self.name!r} of {name} is neither text nor a number nor JSON, and cannot be compared with "
                f"{self.value!r}: {error}",
                **place,
                field=self.name,
            ) from error


def _follow(value: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and _INTEGER.fullmatch(part) and 0 <= int(part) < len(value):
            value = value[int(part)]
        else:
            return _NOTHING
    return value


def _to_number(text: str) -> int | float | None:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else None
