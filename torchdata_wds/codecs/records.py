"""Record fields: json, msgpack, cbor."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from torchdata_wds.codecs.json_values import write_json
from torchdata_wds.codecs.optional import import_optional
from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.text import without_bom

__all__ = ["decode_cbor", "decode_json", "decode_msgpack", "encode_cbor", "encode_json", "encode_msgpack"]


_CONTAINERS = (dict, list, tuple, set, frozenset)

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
    return _msgpack().unpackb(data, raw=False, strict_map_key=False)


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
    data: bytes = _msgpack().packb(value, use_bin_type=True)
    if isinstance(value, _CONTAINERS):
        # keys that are tuples, and very deep values, are written but not read
        _read_back(decode_msgpack, data)
    return data


def encode_cbor(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    r"""Encodes a value as CBOR; tuples become lists. With sets in it, it is canonical CBOR: sets have no order.

    Raises:
        MissingPackageError: without the cbor2 package.
        TypeError: if something in it has no CBOR form.
        ValueError: if it does not read back.

    Example:
        >>> encode_cbor({1: b"x"}, EncodeOptions())
        b'\xa1\x01Ax'
    """
    data: bytes = _cbor2().dumps(value, canonical=_has_set(value))
    if isinstance(value, _CONTAINERS):
        _read_back(decode_cbor, data)
    return data


def _has_set(value: Any) -> bool:
    if isinstance(value, set | frozenset):
        return True
    if isinstance(value, dict):
        return any(map(_has_set, value)) or any(map(_has_set, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_set, value))


def _read_back(decode: Callable[[bytes, DecodeOptions], Any], data: bytes) -> None:
    try:
        decode(data, DecodeOptions())
    except Exception as cause:
        raise ValueError(
            f"it would not read back ({type(cause).__name__}: {cause}); keys that are containers and deep nesting do "
            "not: change its structure, or name the field json or pkl"
        ) from cause


def _msgpack() -> Any:
    return import_optional("msgpack", extra="msgpack", fields="fields mp, msg and msgpack")


def _cbor2() -> Any:
    return import_optional("cbor2", extra="cbor", fields="cbor fields")
