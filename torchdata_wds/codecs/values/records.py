"""Fields of Python values: msgpack, cbor, and pickle, which is off unless the program allows it."""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import ipaddress
import pickle
import uuid
from typing import Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions, import_optional
from torchdata_wds.codecs.plans import describe_value
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError

_LARGE = 16 << 20  # smaller data runs out of memory only if it claims more than it holds
_CONTAINERS = (dict, list, tuple, set, frozenset)
_BASICS = "None, bool, int, float, str, bytes, list, dict"

# Reading stops at 400 levels, and a set takes two of them.
_CBOR_DEPTH = 150
# Each set encodes its items twice, for their order and for the bytes: 2**12 = 4096 times at a depth of 12.
_CBOR_SET_DEPTH = 12
_CBOR_PLAIN = frozenset([type(None), bool, int, float, str, bytes, bytearray])
_PICKLE_PROTOCOL = 4  # fixed, so that the bytes do not depend on the Python that writes them

# Values of these types and their subclasses are written and read back one by one, to check that they stay equal.
_CBOR_KNOWN = (
    *(int, float, str, bytes, bytearray, datetime.date, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address),
)


def decode_msgpack(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes one msgpack value, with ``str`` for strings and any keys in maps."""
    try:
        return _msgpack().unpackb(data, raw=False, strict_map_key=False)
    except MemoryError:
        if len(data) > _LARGE:
            raise
        # nested lists, each claiming as many items as there are bytes
        raise ValueError("it claims more memory than there is, far out of proportion to its size") from None


def decode_cbor(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes one CBOR value."""
    stream = io.BytesIO(data)
    value = _cbor2().load(stream)
    if stream.read(1):
        raise ValueError("bytes follow the value")
    return value


def encode_msgpack(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes a value as msgpack; tuples become lists."""
    data: bytes = _msgpack().packb(value, use_bin_type=True, default=_refuse_in_msgpack)
    if isinstance(value, _CONTAINERS):
        # msgpack writes keys that are tuples, and very deep values, but does not read them
        try:
            decode_msgpack(data, DecodeOptions())
        except Exception as cause:
            raise ValueError(
                f"it would not read back ({type(cause).__name__}: {cause}); avoid containers as keys and deep nesting, "
                "or name the field json or pkl"
            ) from cause
    return data


def _refuse_in_msgpack(value: Any) -> Any:
    """Refuses a value; msgpack calls it for types that it does not know."""
    if isinstance(value, int):
        raise OverflowError(f"msgpack has integers from -2**63 to 2**64 - 1, not {describe_value(value)}; use json")
    raise TypeError(f"msgpack has no value {describe_value(value)}; {_cure(value, _BASICS)}")


def encode_cbor(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes a value as CBOR, in canonical order if it has sets; tuples become lists, frozensets become sets."""
    cbor2 = _cbor2()
    has_sets, others = _look_inside(value, _CBOR_DEPTH)
    if has_sets:
        _look_inside(value, _CBOR_SET_DEPTH)
    for other in others:
        _check_cbor(other, cbor2)
    data: bytes = cbor2.dumps(value, canonical=has_sets)
    return data


def _look_inside(value: Any, max_depth: int) -> tuple[bool, list[Any]]:
    """Returns whether a value has sets in it, and the items and keys in it that are neither containers nor plain."""
    has_sets = False
    others: list[Any] = []
    pending: list[tuple[Any, int]] = [([value], 1)]
    while pending:
        items, depth = pending.pop()
        for item in items:
            if type(item) in _CBOR_PLAIN:
                continue
            if not isinstance(item, _CONTAINERS):
                others.append(item)
                continue
            if depth > max_depth:
                raise ValueError(f"it is nested too deeply, more than {max_depth} levels, or contains itself")
            has_sets = has_sets or isinstance(item, (set, frozenset))
            # most containers hold plain values only, and this is the fastest way to find out
            inners = (item, item.values()) if isinstance(item, dict) else (item,)
            pending += [(inner, depth + 1) for inner in inners if not _CBOR_PLAIN.issuperset(map(type, inner))]
    return has_sets, others


def _check_cbor(value: Any, cbor2: Any) -> None:
    """Refuses a value that is not plain, unless its type is known and it reads back equal."""
    if not isinstance(value, _CBOR_KNOWN):
        known = f"{_BASICS}, set, datetime with a time zone, Decimal, Fraction, UUID"
        raise TypeError(f"cbor has no value {describe_value(value)}; {_cure(value, known)}")
    cause: Exception | None = None
    try:
        again = cbor2.loads(cbor2.dumps(value))
        # Decimal("-Infinity") would read back as an equal float
        if again == value and isinstance(value, type(again)):
            return
        found = repr(again)
    except Exception as error:  # noqa: BLE001 - cbor2 raises several types
        cause, found = error, f"{type(error).__name__}: {error}"
    raise ValueError(
        f"{value!r} of type {type(value).__name__} would not read back equal ({found}); give a datetime a tzinfo "
        "of whole minutes, write other values as a str or a number, or name the field pkl"
    ) from cause


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


def decode_pickle(data: bytes, options: DecodeOptions) -> Any:
    """Unpickles a field, only with ``allow_pickle=True`` and without ``WDS_SECURE=1``."""
    if not options.allow_pickle:
        raise UnsafeDataError(
            "is a pickle, which can run any code while it is loaded. If you trust the author of the shard, decode with "
            "allow_pickle=True; otherwise leave the field as bytes, with only= naming the others"
        )
    if is_secure():
        raise UnsafeDataError("is a pickle, and WDS_SECURE=1 refuses pickles even with allow_pickle=True")
    return pickle.loads(data)


def encode_pickle(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Pickles a value; readers need ``allow_pickle=True``. Equal values may have different pickles."""
    # the order of a set of str differs between processes, and an object that occurs twice is written once
    return pickle.dumps(value, _PICKLE_PROTOCOL)
