"""The table of field types: what each extension holds and how it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdata_wds.codecs.arrays import decode_npy, decode_npz
from torchdata_wds.codecs.image_specs import IMAGE_FIELDS
from torchdata_wds.codecs.options import DecodeOptions
from torchdata_wds.codecs.pickles import decode_pickle
from torchdata_wds.codecs.records import decode_cbor, decode_json, decode_msgpack
from torchdata_wds.codecs.tenbin import decode_tenbin
from torchdata_wds.codecs.tensors import decode_torch
from torchdata_wds.codecs.text import decode_int, decode_text

__all__ = ["CODECS", "Codec", "find_codec"]


@dataclass(frozen=True)
class Codec:
    """One field type.

    Args:
        name: What it is called in messages.
        extensions: The extensions that have it, space separated.
        decode: Bytes and options -> value; None where the bytes stay as they are unless a decoder is given.
    """

    name: str
    extensions: str
    decode: Callable[[bytes, DecodeOptions], Any] | None = None


_ROWS = (
    Codec("text", "txt text transcript", decode_text),
    Codec("an integer", "cls cls2 class count index inx id", decode_int),
    Codec("json", "json jsn", decode_json),
    Codec("npy", "npy", decode_npy),
    Codec("npz", "npz", decode_npz),
    Codec("torch", "pth pt", decode_torch),
    Codec("tenbin", "ten tenbin tb", decode_tenbin),
    Codec("msgpack", "mp msg msgpack", decode_msgpack),
    Codec("cbor", "cbor", decode_cbor),
    Codec("pickle", "pyd pkl pickle", decode_pickle),
    Codec("image", " ".join(IMAGE_FIELDS)),
)

#: Extension -> its codec.
CODECS: dict[str, Codec] = {extension: row for row in _ROWS for extension in row.extensions.split()}


def find_codec(field: str) -> Codec | None:
    """Looks up the codec of a field by its last dot-separated part; None where there is none."""
    return CODECS.get(field.lower().rpartition(".")[2])
