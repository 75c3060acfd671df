"""Text, integer and JSON fields; values that would not read back equal are refused."""

from __future__ import annotations

import json
import operator
import re
from typing import Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.plans import describe_value
from torchdata_wds.handlers import warn_once

_BOM = b"\xef\xbb\xbf"
_INTEGER = re.compile(rb"[+-]?[0-9]+")

_MAX_DEPTH = 500  # whether deeper JSON reads back depends on how deep the reader's own calls are nested
_CONTAINERS = (dict, list, tuple)
_PLAIN, _STR = frozenset([type(None), bool, int, float, str]), frozenset([str])

# Two lone surrogates that form a pair are written like one character.
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")

# What json.loads calls in the end: for a small field, its checks of options take longer than decoding.
_decode_json_text = json.JSONDecoder().decode


def without_bom(data: bytes) -> bytes:
    """Drops a UTF-8 byte order mark at the beginning."""
    return data[3:] if data.startswith(_BOM) else data


def decode_text(data: bytes, options: DecodeOptions) -> str:
    """Decodes UTF-8 into ``str``, dropping a byte order mark; ``options.errors`` says how to handle damage."""
    return without_bom(data).decode("utf-8", options.errors)


def decode_int(data: bytes, options: DecodeOptions) -> int:  # noqa: ARG001
    """Decodes an ASCII decimal integer, ignoring blanks and byte order marks around it; ``1_000`` is a ValueError."""
    if data.isdigit():
        return int(data)
    digits = without_bom(data.strip()).removesuffix(_BOM).strip()
    if not _INTEGER.fullmatch(digits):
        raise ValueError("expected a decimal integer, such as 7 or -1")
    return int(digits)


def decode_int_or_word(data: bytes, options: DecodeOptions) -> int | bytes:
    """Decodes an integer as `decode_int` does; leaves anything else as bytes, since some data sets store words."""
    try:
        return decode_int(data, options)
    except ValueError:
        warn_once(
            "class without a number",
            "a field class or count does not hold a number, and stays bytes. For str, use "
            ".wds_decode(handle_extension('class count', bytes.decode))",
        )
        return data


def encode_text(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes ``str`` as UTF-8; if it begins with a byte order mark, adds another, which reading drops."""
    if not isinstance(value, str):
        raise TypeError("expected a str; convert it with str()")
    try:
        data = value.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise ValueError(
            f"it holds the lone surrogate {cause.object[cause.start]!r} at character {cause.start}, which UTF-8 has no "
            "bytes for; give bytes, as value.encode('utf-8', 'surrogateescape')"
        ) from cause
    return _BOM + data if data.startswith(_BOM) else data


def encode_int(value: Any, options: EncodeOptions) -> bytes:
    """Encodes an integer of any kind (bool, NumPy's, a tensor of one element; not 7.0), or a str that reads as one."""
    if type(value) is int:
        return b"%d" % value
    if isinstance(value, str):
        data = encode_text(value, options)
        decode_int(data, DecodeOptions())
        return data
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "ndim", None) == 0:
        return b"%d" % int(value)  # operator.index refuses NumPy's bools
    try:
        return b"%d" % operator.index(value)
    except TypeError as cause:
        raise TypeError("expected an int, or a str such as '7'; convert it with int()") from cause


def decode_json(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes UTF-8 JSON; accepts a byte order mark, and NaN and Infinity as Python's ``json`` does."""
    return _decode_json_text(without_bom(data).decode("utf-8"))


def write_json(value: Any, options: EncodeOptions | None = None) -> bytes:  # noqa: ARG001
    """Writes a value as compact UTF-8 JSON; tuples and NumPy arrays become lists, NumPy scalars numbers."""
    if isinstance(value, _CONTAINERS):
        _check(value, 1)
    text = _write(value)
    if "NaN" in text or "Infinity" in text:
        try:
            _write_strict(value)
        except ValueError:  # a number, not a str that contains these words
            warn_once(
                "json not a number",
                "a json field holds NaN or Infinity: Python reads them back, but they are not JSON, and other readers "
                "(JavaScript, jq, orjson) refuse the field. Write None instead, or name the field msgpack or cbor",
            )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        if _PAIR.search(text):
            message = "it holds a str with a surrogate pair as two characters, which would read back as one character"
            raise ValueError(message) from None
        return _write_ascii(value).encode("ascii")


def _check(container: Any, depth: int) -> None:
    """Checks what json does not: keys that it would turn into str, and nesting that is too deep."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself")
    if isinstance(container, tuple):
        warn_once(
            "json tuple",
            "a json field holds a tuple, which JSON writes as a list: it reads back as a list. Name the field pyd to "
            "keep tuples",
        )
    if isinstance(container, dict):
        for key in () if _STR.issuperset(map(type, container)) else container:
            if not isinstance(key, str):
                raise TypeError(
                    f"a dict has the key {key!r} of type {type(key).__name__}, which JSON would turn into a str; make "
                    "the keys str, or name the field msgpack or cbor"
                )
        container = container.values()
    # most containers hold plain values only, and this is the fastest way to find out
    if _PLAIN.issuperset(map(type, container)):
        return
    for item in container:
        if isinstance(item, _CONTAINERS):
            _check(item, depth + 1)


def _to_plain(value: Any) -> Any:
    """Converts NumPy's numbers and arrays; json calls it for types that it does not know."""
    if not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"JSON has no value {describe_value(value)}; use None, bool, int, float, str, list, dict and NumPy numbers "
            "and arrays (for tensors, .tolist())"
        )
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise TypeError(f"JSON has no numbers of dtype {value.dtype}; convert them, as with .astype() or str()")
    return value.tolist()


# Made once: json.dumps makes a new encoder at every call.
_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_to_plain).encode
_write_strict = json.JSONEncoder(allow_nan=False, default=_to_plain).encode
_write_ascii = json.JSONEncoder(separators=(",", ":"), default=_to_plain).encode
