"""JSON fields: what reads back equal is written, all else refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from torchdata_wds.codecs.failures import describe_value
from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.values.text import without_bom
from torchdata_wds.handlers import warn_once

# Deeper values would read back or not, depending on how deep in other calls the reader stands.
_MAX_DEPTH = 500
_CONTAINERS = (dict, list, tuple)
_PLAIN = frozenset([type(None), bool, int, float, str])
_STR = frozenset([str])

# Two lone surrogates that belong together are written as one character is.
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")

# What json.loads calls in the end: for a small field, its checks of options take longer than the field.
_decode_text = json.JSONDecoder().decode


def decode_json(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes UTF-8 JSON; a byte order mark is fine, NaN and Infinity too, as Python's ``json`` has them."""
    return _decode_text(without_bom(data).decode("utf-8"))


def encode_json(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes a value as JSON; a str becomes a JSON string, tuples become lists."""
    return write_json(value)


def write_json(value: Any) -> bytes:
    r"""Writes a value as compact UTF-8 JSON, with NumPy's numbers and arrays as numbers and lists.

    Example:
        >>> write_json({"größe": np.arange(2), "ok": (True, None)})
        b'{"gr\xc3\xb6\xc3\x9fe":[0,1],"ok":[true,null]}'
    """
    if isinstance(value, _CONTAINERS):
        _check(value, 1)
    text = _write(value)
    if "NaN" in text or "Infinity" in text:
        _warn_of_nan(value)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        if _PAIR.search(text):
            raise ValueError(
                "it holds a str with a surrogate pair as two characters, which would read back as one"
            ) from None
        return _write_ascii(value).encode("ascii")


def _warn_of_nan(value: Any) -> None:
    """Warns about numbers that are not JSON; a str may hold the same words."""
    try:
        _write_strict(value)
    except ValueError:
        warn_once(
            "json not a number",
            "a json field holds NaN or Infinity: Python reads them back, but they are not JSON, and other readers "
            "(JavaScript, jq, orjson) refuse the field. Write None instead, or name the field msgpack or cbor",
        )


def _check(container: Any, depth: int) -> None:
    """Checks what json does not: keys that it would turn into str, and the depth."""
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
    """Converts NumPy's numbers and arrays; json calls it for what it does not know."""
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
        if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return value.tolist()
        raise TypeError(
            f"JSON has no numbers like those of dtype {value.dtype}; convert them, as with .astype() or str()"
        )
    raise TypeError(
        f"JSON has no value {describe_value(value)}; use None, bool, int, float, str, list, dict and NumPy numbers and "
        "arrays (for tensors, .tolist())"
    )


# One encoder each: json.dumps makes a new one at every call.
_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_to_plain).encode
_write_strict = json.JSONEncoder(allow_nan=False, default=_to_plain).encode
_write_ascii = json.JSONEncoder(separators=(",", ":"), default=_to_plain).encode
