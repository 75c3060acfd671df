"""The table of field types: what each extension holds, and how it is decoded and encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdata_wds.codecs.images.encoding import IMAGE_ENCODERS, refuse_image
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS
from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.values import numpy, records, text
from torchdata_wds.codecs.values.torch import decode_torch, encode_torch


@dataclass(frozen=True)
class Codec:
    """One field type: its name in messages, and the extensions that have it, space separated."""

    name: str
    extensions: str
    decode: Callable[[bytes, DecodeOptions], Any] | None = None  # None: stays bytes unless a decoder is given
    encode: Callable[[Any, EncodeOptions], bytes] | None = None  # None: only bytes can be written


_ROWS = (
    Codec("text", "txt text transcript", text.decode_text, text.encode_text),
    Codec("an integer", "cls cls2 index inx id", text.decode_int, text.encode_int),
    Codec("an integer", "class count", text.decode_int_or_word, text.encode_int),
    Codec("json", "json jsn", text.decode_json, text.encode_json),
    Codec("npy", "npy", numpy.decode_npy, numpy.encode_npy),
    Codec("npz", "npz", numpy.decode_npz, numpy.encode_npz),
    Codec("torch", "pth pt", decode_torch, encode_torch),
    Codec("tenbin", "ten tenbin tb", numpy.decode_tenbin, numpy.encode_tenbin),
    Codec("msgpack", "mp msg msgpack", records.decode_msgpack, records.encode_msgpack),
    Codec("cbor", "cbor", records.decode_cbor, records.encode_cbor),
    Codec("pickle", "pyd pkl pickle", records.decode_pickle, records.encode_pickle),
    *(Codec("an image", field, encode=IMAGE_ENCODERS.get(field, refuse_image)) for field in IMAGE_FIELDS),
)

#: Extension -> its codec.
CODECS: dict[str, Codec] = {extension: row for row in _ROWS for extension in row.extensions.split()}


def find_codec(field: str) -> Codec | None:
    """Looks up the codec of a field by its last dot-separated part; None where there is none."""
    return CODECS.get(field.lower().rpartition(".")[2])
