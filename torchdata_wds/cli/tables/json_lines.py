"""Samples as lines of JSON, which other programs read."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torchdata_wds.cli.printing import guess_text
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.codecs.plans import split_suffix
from torchdata_wds.codecs.table import find_codec
from torchdata_wds.codecs.values.json import write_json
from torchdata_wds.errors import UnsafeDataError

#: What becomes of values that JSON cannot hold.
JsonBinary = Literal["base64", "skip"]

_UNSTRICT = (b"NaN", b"Infinity")
_FOLDED = ("torch", "cbor")  # their files can refer to what they hold already, and even to themselves
_ITEM = 64  # bytes that a number in a list takes, about


class StoredField(NamedTuple):
    """The bytes of a field, and the name that they were stored under, by which they are decoded."""

    field: str
    data: bytes


class JsonLines:
    r"""Writes samples as strict JSON, one a line.

    Fields are decoded by their names: text becomes a string, integers numbers, ``json``, ``msgpack`` and ``cbor`` what
    they hold, arrays and tensors lists. A field of no known type is a string if it looks like text. Everything else
    (images and other binary files, pickles, and values that JSON has no form for: NaN, dates, keys that are no strings,
    tensors of more than 16 million numbers) becomes ``{"base64": ...}`` with the field's bytes as they are stored, or
    is left out and counted as ``skipped``.

    Example:
        >>> print(JsonLines()({"__key__": "a", "cls": b"7", "txt": b"x\ny", "json": b'{"b": [1]}', "png": b"\x89"}))
        b'{"__key__":"a","cls":7,"txt":"x\\ny","json":{"b":[1]},"png":{"base64":"iQ=="}}'
    """

    def __init__(self, binary: JsonBinary = "base64") -> None:
        self.binary = binary
        self.skipped = 0
        self._decode = Decoder()

    def __call__(self, sample: Mapping[str, Any]) -> bytes:
        """Returns the line of a sample of bytes, `StoredField`, str and None (null), without its end.

        Raises:
            DecodingError: if a field does not decode.
            ImportError: if a field needs a package that is not installed.
        """
        place = {name: value for name, value in sample.items() if name in ("__key__", "__url__")}
        written = []
        for name, value in sample.items():
            if isinstance(value, bytes):
                value = StoredField(name, value)
            text = self._write(value, place) if isinstance(value, StoredField) else write_json(value)
            if text is None:
                self.skipped += 1
            else:
                written.append(write_json(name) + b":" + text)
        return b"{" + b",".join(written) + b"}"

    def _write(self, stored: StoredField, place: Mapping[str, Any]) -> bytes | None:
        text = None
        with contextlib.suppress(UnsafeDataError):
            text = _write_strictly(self._decode({**place, stored.field: stored.data})[stored.field], stored.field)
        if text is None and self.binary == "base64":
            return b'{"base64":"%b"}' % base64.b64encode(stored.data)
        return text


def _write_strictly(value: Any, field: str) -> bytes | None:
    """Returns a value as JSON, or None where JSON has no such value."""
    codec = find_codec(split_suffix(field)[0])
    if codec is None and isinstance(value, bytes) and (guess := guess_text(value, len(value))) is not None:
        value = guess
    try:
        text = write_json(unfold(value) if codec is not None and codec.name in _FOLDED else value)
        if any(word in text for word in _UNSTRICT):
            json.dumps(json.loads(text), allow_nan=False)
    except (TypeError, ValueError, RuntimeError):  # nested too deeply; or torch, of a tensor without numbers
        return None
    return text


def unfold(value: Any) -> Any:
    """Turns tensors into lists, also in containers that hold one thing many times, as files of torch and CBOR can.

    Raises:
        ValueError: if the result takes more than 1 GiB, which even a small file can cause.
        RecursionError: if it contains itself.
        RuntimeError: if a tensor has no numbers.

    Example:
        >>> import torch
        >>> unfold({"a": (torch.tensor([1, 2]), "b")})
        {'a': [[1, 2], 'b']}
    """
    room = DEFAULT_MAX_BYTES

    def plain(value: Any) -> Any:
        nonlocal room
        is_tensor = hasattr(value, "tolist") and type(value).__module__.partition(".")[0] == "torch"
        room -= _ITEM * int(value.numel()) if is_tensor else _ITEM
        room -= len(value) if isinstance(value, str | bytes) else 0
        if room < 0:
            raise ValueError(f"it takes more than {DEFAULT_MAX_BYTES:,} bytes")
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value.tolist() if is_tensor else value

    return plain(value)
