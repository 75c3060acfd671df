"""Record fields: json, msgpack, cbor.

What is inside of nested containers: one walk, which is fast where all is plain.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import ipaddress
import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from torchdata_wds.codecs.failures import describe_value
from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions, import_optional
from torchdata_wds.codecs.values.json import write_json
from torchdata_wds.codecs.values.text import without_bom

__all__ = [
    "CONTAINERS",
    "list_contents",
    "decode_cbor",
    "decode_json",
    "decode_msgpack",
    "encode_cbor",
    "encode_json",
    "encode_msgpack",
]


CONTAINERS = (dict, list, tuple, set, frozenset)


def list_contents(value: Any, plain: frozenset[type], max_depth: int) -> tuple[list[Any], list[Any]]:
    """Lists the containers in a value, with itself, and what in them is neither a container nor plain.

    Args:
        value: Any value.
        plain: The types that nobody needs to look at; subclasses of them are not among them.
        max_depth: How many containers may be in one another.

    Returns:
        The containers, and the other values; keys of dicts are values, too.

    Raises:
        ValueError: if it is nested too deeply.

    Example:
        >>> list_contents([1, {"a": 2.5}], frozenset([int, str]), 9)
        ([[1, {'a': 2.5}], {'a': 2.5}], [2.5])
    """
    containers: list[Any] = []
    others: list[Any] = []

    def look(items: Iterable[Any], depth: int) -> None:
        for item in items:
            if type(item) in plain:
                continue
            if not isinstance(item, CONTAINERS):
                others.append(item)
                continue
            if depth > max_depth:
                raise ValueError(f"it is nested too deeply, more than {max_depth} levels, or contains itself")
            containers.append(item)
            inner: Iterable[Any] = item
            if isinstance(item, dict):
                if not plain.issuperset(map(type, item)):
                    look(item, depth + 1)
                inner = item.values()
            # most containers hold plain values only, and this finds out fastest
            if not plain.issuperset(map(type, inner)):
                look(inner, depth + 1)

    look([value], 1)
    return containers, others


# What is smaller than this does not run out of memory, unless it claims more than it has.
_LARGE = 16 << 20

_BASICS = "None, bool, int, float, str, bytes, list, dict"

# Reading ends at 400 levels, of which a set takes two.
_CBOR_DEPTH = 150

# The canonical form of a set in a set is made twice, for the order and for the bytes: 2 ** depth times at the bottom.
_CBOR_SET_DEPTH = 12

_CBOR_PLAIN = frozenset([type(None), bool, int, float, str, bytes, bytearray])

# What is written and read back one by one, to see whether it is equal; subclasses, too.
_CBOR_KNOWN = (
    *(int, float, str, bytes, bytearray),
    *(datetime.date, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address),
)

# What json.loads calls at last: for a small field, finding that out takes longer than the field.
_decode_json_text = json.JSONDecoder().decode


def decode_json(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes UTF-8 JSON; a byte order mark is fine, NaN and Infinity too, as Python's ``json`` has them."""
    return _decode_json_text(without_bom(data).decode("utf-8"))


def decode_msgpack(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes one msgpack value, with ``str`` for strings and any keys in maps.

    Raises:
        MissingPackageError: without the msgpack package.
        ValueError: if the value is cut or bytes follow it.
    """
    try:
        return _msgpack().unpackb(data, raw=False, strict_map_key=False)
    except MemoryError:
        if len(data) > _LARGE:
            raise
        # lists in lists, each of which claims as many items as there are bytes
        raise ValueError("it claims more memory than there is, out of all proportion to its size") from None


def decode_cbor(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes one CBOR value.

    Raises:
        MissingPackageError: without the cbor2 package.
        ValueError: if bytes follow the value.
    """
    cbor2 = _cbor2()
    stream = io.BytesIO(data)
    value = cbor2.load(stream)
    if stream.read(1):
        raise ValueError("bytes follow behind the value")
    return value


def encode_json(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes a value as JSON; a str becomes a JSON string, tuples become lists.

    Raises:
        TypeError: if something in it is no JSON, or a key of a dict no str.
        ValueError: if it does not read back equal.

    Example:
        >>> encode_json({"a": [1, 2.5]}, EncodeOptions()), encode_json("[1]", EncodeOptions())
        (b'{"a":[1,2.5]}', b'"[1]"')
    """
    return write_json(value)


def encode_msgpack(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    r"""Encodes a value as msgpack; tuples become lists.

    Raises:
        MissingPackageError: without the msgpack package.
        TypeError: if something in it has no msgpack form.
        ValueError: if it does not read back.

    Example:
        >>> encode_msgpack({1: b"x"}, EncodeOptions())
        b'\x81\x01\xc4\x01x'
    """
    data: bytes = _msgpack().packb(value, use_bin_type=True, default=_refuse_in_msgpack)
    if isinstance(value, CONTAINERS):
        # keys that are tuples, and very deep values, are written but not read
        _read_back(decode_msgpack, data)
    return data


def encode_cbor(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    r"""Encodes a value as CBOR; tuples become lists, frozensets sets.

    With sets in it, it is canonical CBOR, because sets have no order. Of other types than the plain ones, dates,
    ``Decimal``, ``Fraction``, ``UUID`` and IP addresses are taken, each only if it reads back equal.

    Raises:
        MissingPackageError: without the cbor2 package.
        TypeError: if something in it is of another type.
        ValueError: if something in it does not read back equal, or it is nested too deeply.

    Example:
        >>> encode_cbor({1: b"x"}, EncodeOptions())
        b'\xa1\x01Ax'
    """
    cbor2 = _cbor2()
    has_sets = False
    if type(value) not in _CBOR_PLAIN:
        containers, others = list_contents(value, _CBOR_PLAIN, _CBOR_DEPTH)
        has_sets = any(isinstance(container, set | frozenset) for container in containers)
        if has_sets:
            list_contents(value, _CBOR_PLAIN, _CBOR_SET_DEPTH)
        for other in others:
            _check_cbor(other, cbor2)
    data: bytes = cbor2.dumps(value, canonical=has_sets)
    return data


def _check_cbor(value: Any, cbor2: Any) -> None:
    """Refuses a value that is not plain, unless its type is known and it reads back equal."""
    if not isinstance(value, _CBOR_KNOWN):
        known = f"{_BASICS}, set, datetime with a time zone, Decimal, Fraction, UUID"
        raise TypeError(f"cbor has no value {describe_value(value)}; {_cure(value, known)}")
    try:
        cause, again = None, cbor2.loads(cbor2.dumps(value))
    except Exception as error:  # noqa: BLE001 - the library has several
        cause, again = error, None
    # -Infinity as a Decimal would be equal, but a float
    if cause is not None or again != value or not isinstance(value, type(again)):
        found = f"{type(cause).__name__}: {cause}" if cause is not None else f"{again!r}"
        raise ValueError(
            f"{value!r} of type {type(value).__name__} would not read back equal ({found}); give a datetime a tzinfo "
            "of whole minutes, write other values as a str or a number, or name the field pkl"
        ) from cause


def _read_back(decode: Callable[[bytes, DecodeOptions], Any], data: bytes) -> None:
    try:
        decode(data, DecodeOptions())
    except Exception as cause:
        raise ValueError(
            f"it would not read back ({type(cause).__name__}: {cause}); keys that are containers and deep nesting do "
            "not: change its structure, or name the field json or pkl"
        ) from cause


def _refuse_in_msgpack(value: Any) -> Any:
    """Called by msgpack for what it does not know."""
    if isinstance(value, int):
        raise OverflowError(f"msgpack has integers from -2**63 to 2**64 - 1, not {describe_value(value)}; use json")
    raise TypeError(f"msgpack has no value {describe_value(value)}; {_cure(value, _BASICS)}")


def _cure(value: Any, known: str) -> str:
    if isinstance(value, np.generic):
        return "make it a number with .item()"
    if hasattr(value, "tolist"):
        return "make it numbers with .tolist(), or .item() for a single one"
    return f"use {known}, or name the field pkl"


def _msgpack() -> Any:
    return import_optional("msgpack", extra="msgpack", fields="fields mp, msg and msgpack")


def _cbor2() -> Any:
    return import_optional("cbor2", extra="cbor", fields="cbor fields")
