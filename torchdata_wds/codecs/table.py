"""The table of field types, and the rules for matching fields by extension."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchdata_wds.codecs.images.encoding import IMAGE_ENCODERS, refuse_image
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS
from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.values import numpy, records, text
from torchdata_wds.codecs.values.torch import decode_torch, encode_torch


@dataclass(frozen=True)
class Codec:
    """One field type: its name in messages, and its extensions, separated by spaces."""

    name: str
    extensions: str
    decode: Callable[[bytes, DecodeOptions], Any] | None = None  # None: stays bytes unless a decoder is passed
    encode: Callable[[Any, EncodeOptions], bytes] | None = None  # None: only bytes can be written


_ROWS = (
    Codec("text", "txt text transcript", text.decode_text, text.encode_text),
    Codec("an integer", "cls cls2 index inx id", text.decode_int, text.encode_int),
    Codec("an integer", "class count", text.decode_int_or_word, text.encode_int),
    Codec("json", "json jsn", text.decode_json, text.write_json),
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
    """Looks up the codec of a field by the last part of its name; None if it has none."""
    return CODECS.get(field.lower().rpartition(".")[2])


class ExtensionDecoder:
    """Decodes fields with certain extensions, for ``.wds_decode(...)``; its public name is ``handle_extension``.

    An extension matches the field of that name and fields that end in it after a dot, in any case: ``png`` matches
    ``png`` and ``input.png``, not ``xpng``; ``seg.png`` does not match ``png``. The decoder is called as
    ``decoder(key, data)`` and returns None for other fields. It pickles if ``fn`` does.

    Args:
        extensions: Extensions separated by spaces; a leading dot is optional.
        fn: Turns the field's bytes into its value; if it returns None, the next decoder is tried.

    Raises:
        TypeError, ValueError: if ``fn`` is not callable, or ``extensions`` is empty or not a str.

    Example:
        >>> decoder = handle_extension("vocab .labels.txt", bytes.split)
        >>> decoder(".train.vocab", b"a b"), decoder(".txt", b"a b")
        ([b'a', b'b'], None)
    """

    def __init__(self, extensions: str, fn: Callable[[bytes], Any]) -> None:
        if not callable(fn):
            raise TypeError(f"handle_extension takes a function of the field's bytes, not {fn!r}")
        self.extensions = parse_extensions("extensions", extensions)
        if not self.extensions:
            raise ValueError("handle_extension needs at least one extension, such as 'jpg' or 'seg.png'")
        self.fn = fn

    def __call__(self, key: str, data: bytes) -> Any:
        """Decodes a field with one of the extensions; returns None for any other."""
        return self.fn(data) if matches(key, self.extensions) else None

    def __repr__(self) -> str:
        return f"handle_extension({' '.join(self.extensions)!r}, {getattr(self.fn, '__qualname__', self.fn)})"


handle_extension = ExtensionDecoder


def parse_extensions(name: str, extensions: str | Iterable[str]) -> tuple[str, ...]:
    """Splits extensions at blanks and semicolons; returns them in lower case, without leading dots."""
    words = [extensions] if isinstance(extensions, str) else extensions
    if not isinstance(words, bytes) and isinstance(words, Iterable):
        words = list(words)
        if all(isinstance(word, str) for word in words):
            names = (word.removeprefix(".").lower() for text in words for word in text.replace(";", " ").split())
            return tuple(name for name in names if name)
    raise TypeError(f"{name} must be names of fields, as in 'jpg cls', not {extensions!r}")


def is_named(field: str, names: Iterable[str]) -> bool:
    """Returns whether a field matches one of the names or globs, ignoring case and its leading dot."""
    lowered = field.lower().removeprefix(".")
    return any(fnmatch.fnmatchcase(lowered, name) for name in names)


def matches(field: str, extensions: Iterable[str]) -> bool:
    """Returns whether a field is one of the extensions, or ends in one after a dot."""
    dotted = "." + field.lower()
    return any(dotted.endswith("." + extension) for extension in extensions)
