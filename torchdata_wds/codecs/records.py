"""Record fields: json, msgpack, cbor."""

from __future__ import annotations

import io
import json
from typing import Any

from torchdata_wds.codecs.optional import import_optional
from torchdata_wds.codecs.options import DecodeOptions
from torchdata_wds.codecs.text import without_bom

__all__ = ["decode_cbor", "decode_json", "decode_msgpack"]


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
    msgpack = import_optional("msgpack", extra="msgpack", fields="fields mp, msg and msgpack")
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def decode_cbor(data: bytes, options: DecodeOptions) -> Any:  # noqa: ARG001
    """Decodes one CBOR value.

    Raises:
        MissingPackageError: without the cbor2 package.
        ValueError: if bytes follow the value.
    """
    cbor2 = import_optional("cbor2", extra="cbor", fields="cbor fields")
    stream = io.BytesIO(data)
    value = cbor2.load(stream)
    if stream.read(1):
        raise ValueError("bytes follow behind the value")
    return value
