"""Samples as lines of JSON, which other programs read."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from torchdata_wds.cli.show.summaries import guess_text
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.codecs.plans import split_suffix
from torchdata_wds.codecs.table import find_codec
from torchdata_wds.codecs.values.json import write_json
from torchdata_wds.errors import UnsafeDataError

__all__ = ["JsonBinary", "JsonLines", "StoredField", "unfold"]


#: What becomes of values that JSON has not.
JsonBinary = Literal["base64", "skip"]

_UNSTRICT = (b"NaN", b"Infinity")

_FOLDED = ("torch", "cbor")  # their files can name what they hold already, and even hold themselves

_ITEM = 64  # bytes that a number in a list takes, about


class StoredField(NamedTuple):
    """A value with the name of the field that it was stored as, which says how it is decoded.

    Attributes:
        field: The name.
        data: The bytes.
    """

    field: str
    data: bytes


class JsonLines:
    r"""Writes samples as strict JSON, one a line.

    Fields are decoded by their names: text becomes a string, integers numbers, ``json``, ``msgpack`` and ``cbor`` what
    they hold, arrays and tensors lists. A field of no known type is a string if it looks like text. Everything else
    (images and other binary files, pickles, and values that JSON has no form for: NaN, dates, keys that are no strings,
    tensors of more than 16 million numbers) becomes ``{"base64": ...}`` with the field's bytes as they are stored.

    Args:
        binary: ``"skip"`` leaves such fields out instead.

    Attributes:
        skipped: How many fields were left out so far.

    Raises:
        ValueError: if `binary` is none of the two.

    Example:
        >>> print(JsonLines()({"__key__": "a", "cls": b"7", "txt": b"x\ny", "json": b'{"b": [1]}', "png": b"\x89"}))
        b'{"__key__":"a","cls":7,"txt":"x\\ny","json":{"b":[1]},"png":{"base64":"iQ=="}}'
    """

    def __init__(self, *, binary: JsonBinary = "base64") -> None:
        if binary not in get_args(JsonBinary):
            raise ValueError(f"binary must be one of {', '.join(get_args(JsonBinary))}, not {binary!r}")
        self.binary = binary
        self.skipped = 0
        self._decode = Decoder()

    def __call__(self, sample: Mapping[str, Any]) -> bytes:
        """Writes one sample.

        Args:
            sample: By name: bytes, a `StoredField`, or what is written as it is: a str, or None for null.

        Returns:
            The line, in UTF-8 and without its end.

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
        try:
            value = self._decode({**place, stored.field: stored.data})[stored.field]
            text = _write_strictly(value, stored.field)
        except UnsafeDataError:
            text = None
        if text is None and self.binary == "base64":
            return b'{"base64":"%b"}' % base64.b64encode(stored.data)
        return text


def _plain(value: Any, field: str) -> Any:
    """Makes text of bytes that no type claims, and lists of tensors; all else is left to JSON."""
    codec = find_codec(split_suffix(field)[0])
    if codec is None and isinstance(value, bytes):
        text = guess_text(value, len(value))
        return value if text is None else text
    return unfold(value) if codec is not None and codec.name in _FOLDED else value


def unfold(value: Any) -> Any:
    """Makes lists of tensors, and of containers that hold one thing many times, as files of torch and CBOR can.

    Args:
        value: What a codec gives.

    Raises:
        ValueError: if that takes more than 1 GiB, as even a small file can make it.
        RecursionError: if it holds itself.
        RuntimeError: if a tensor has no numbers.

    Example:
        >>> import torch
        >>> unfold({"a": (torch.tensor([1, 2]), "b")})
        {'a': [[1, 2], 'b']}
    """
    return _Unfolding()(value)


class _Unfolding:
    """Counts what is unfolded."""

    def __init__(self) -> None:
        self._room = DEFAULT_MAX_BYTES

    def __call__(self, value: Any) -> Any:
        is_tensor = hasattr(value, "tolist") and type(value).__module__.partition(".")[0] == "torch"
        self._room -= _ITEM * int(value.numel()) if is_tensor else _ITEM
        self._room -= len(value) if isinstance(value, str | bytes) else 0
        if self._room < 0:
            raise ValueError(f"it takes more than {DEFAULT_MAX_BYTES:,} bytes")
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        return value.tolist() if is_tensor else value


def _write_strictly(value: Any, field: str) -> bytes | None:
    """Writes a value, or gives None where JSON has none like it."""
    try:
        text = write_json(_plain(value, field))
        if any(word in text for word in _UNSTRICT):
            json.dumps(json.loads(text), allow_nan=False)
    except (TypeError, ValueError, RuntimeError):  # too deep; or torch, of a tensor without numbers
        return None
    return text
