"""What samples are sorted by: the value of a field as text or as a number, or a place in a reproducible shuffle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Literal, get_args

from torchdata_wds.codecs.values.text import without_bom
from torchdata_wds.errors import DecodingError
from torchdata_wds.pipes.samples.field_specs import alternatives, find_field, missing_field, name_sample

__all__ = ["MissingValue", "SortKey", "SortType"]


SortType = Literal["text", "int", "float", "shuffle"]

#: What becomes of a sample without a field to sort by.
MissingValue = Literal["error", "skip", "last"]

_INTEGER = re.compile(rb"[+-]?[0-9]+")

_SHOWN = 40


class SortKey:
    """Finds out what samples are sorted by. One object serves one sort, whose samples it counts.

    Args:
        field: The field with the value, or ``__key__``; of several separated by ``;``, the first that is there.
        kind: ``"text"`` compares bytes, which for UTF-8 is the order of code points; ``"int"`` takes integers of any
            size, ``"float"`` numbers from -inf to inf. ``"shuffle"`` gives an order that looks random and depends only
            on the seed and each sample's value and ``__key__``; samples that have both in common are told apart by
            their number in the stream.
        seed: For ``"shuffle"``.
        missing: What becomes of a sample without the field: ``"error"``; ``"skip"`` leaves it out; ``"last"`` puts it
            behind all others.
        reverse: Whether the sort goes from the largest to the smallest, so that ``"last"`` can be the end of that.

    Attributes:
        left_out: How many samples were left out so far.

    Raises:
        ValueError: if an argument is none of those that are valid.

    Example:
        >>> value = SortKey("cls", "int")
        >>> value({"__key__": "a", "cls": b" 12"})
        12
        >>> SortKey("cls")({"__key__": "a", "cls": b" 12"})
        b' 12'
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
        if kind not in get_args(SortType):
            raise ValueError(f"kind must be one of {', '.join(get_args(SortType))}, not {kind!r}")
        if missing not in get_args(MissingValue):
            raise ValueError(f"missing must be one of {', '.join(get_args(MissingValue))}, not {missing!r}")
        self.fields = [name.removeprefix(".") for name in alternatives(field)]
        self.kind = kind
        self.missing = missing
        self.left_out = 0
        self._read = _READERS[kind]
        self._shuffle = Shuffle(seed) if kind == "shuffle" else None
        self._ranks = (1, 0) if reverse else (0, 1)  # of the samples with a value, and of those without

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """Gives a sample's value, which can be compared with that of every other; None if the sample is left out.

        Raises:
            MissingFieldError: if there is no such field, and that is an error.
            DecodingError: if the value is not of the kind that was asked for.
        """
        field = find_field(sample, self.fields)
        if field is None:
            return self._without(sample)
        try:
            value = self._read(_as_bytes(sample[field]))
        except ValueError as error:
            raise _unfit(sample, field, str(error)) from error
        if self._shuffle is not None:
            value = self._shuffle.place(_as_bytes(sample[field]), _as_bytes(sample.get("__key__", "")))
        return value if self.missing != "last" else (self._ranks[0], value)

    def _without(self, sample: Mapping[str, Any]) -> Any:
        if self.missing == "error":
            raise missing_field(sample, self.fields)
        if self.missing == "last":
            return (self._ranks[1],)
        self.left_out += 1
        return None


class Shuffle:
    """Places in an order that looks random: digests, which are compared.

    Args:
        seed: Another one gives another order.
    """

    def __init__(self, seed: int) -> None:
        self._start = blake2b(b"%d\0" % seed, digest_size=16)
        self._number = 0

    def place(self, value: bytes, key: bytes) -> bytes:
        """The place of the next sample: those with the same value and key are told apart by their number."""
        own, numbered = self._start.copy(), self._start.copy()
        own.update(b"%d:%b%b" % (len(value), value, key))
        numbered.update(b"#%d" % self._number)
        self._number += 1
        return own.digest() + numbered.digest()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _read_int(data: bytes) -> int | Decimal:
    digits = without_bom(data.strip()).strip()
    if not _INTEGER.fullmatch(digits):
        raise ValueError("no integer, such as 7 or -1")
    try:
        return int(digits)
    except ValueError:  # more digits than int() takes, which would need time in their square
        return Decimal(digits.decode())


def _read_float(data: bytes) -> float:
    text = without_bom(data.strip())
    try:
        number = math.nan if b"_" in text else float(text)
    except ValueError:
        raise ValueError("no number, such as 0.5 or -1e3") from None
    if math.isnan(number):
        raise ValueError("no number that has a place in an order")
    return number


_READERS: dict[SortType, Callable[[bytes], Any]] = {
    "text": bytes,
    "int": _read_int,
    "float": _read_float,
    "shuffle": bytes,
}


def _unfit(sample: Mapping[str, Any], field: str, what: str) -> DecodingError:
    found = sample[field]
    rest = "" if len(found) <= _SHOWN else f" and {len(found) - _SHOWN:,} more bytes"
    which, place = name_sample(sample)
    return DecodingError(
        f"{which} cannot be sorted by field {field!r}, which is {what}: found {found[:_SHOWN]!r}{rest}. Sort it as "
        "text, or leave such samples out",
        **place,
        field=field,
    )
