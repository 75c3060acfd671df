"""Text and integer fields."""

from __future__ import annotations

import operator
import re
from typing import Any

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.handlers import warn_once

_BOM = b"\xef\xbb\xbf"
_INTEGER = re.compile(rb"[+-]?[0-9]+")


def without_bom(data: bytes) -> bytes:
    """Drops a UTF-8 byte order mark at the beginning."""
    return data[3:] if data.startswith(_BOM) else data


def decode_text(data: bytes, options: DecodeOptions) -> str:
    """Decodes UTF-8 into ``str``, without a byte order mark; ``options.errors`` chooses what damage becomes."""
    return without_bom(data).decode("utf-8", options.errors)


def decode_int(data: bytes, options: DecodeOptions) -> int:  # noqa: ARG001
    """Decodes a decimal number in ASCII, with blanks, newlines and byte order marks around it, into ``int``.

    What only Python calls a number (``1_000``, digits of other scripts) is a ValueError.
    """
    if data.isdigit():
        return int(data)
    digits = without_bom(data.strip()).removesuffix(_BOM).strip()
    if not _INTEGER.fullmatch(digits):
        raise ValueError("expected a decimal integer, such as 7 or -1")
    return int(digits)


def decode_int_or_word(data: bytes, options: DecodeOptions) -> int | bytes:
    """Decodes a number as `decode_int` does, and leaves anything else as bytes, with one warning.

    For ``class`` and ``count``, which webdataset does not decode: some data sets keep words in them.
    """
    try:
        return decode_int(data, options)
    except ValueError:
        warn_once(
            "class without a number",
            "a field class or count does not hold a number, and stays bytes. For str give "
            ".wds_decode(handle_extension('class count', bytes.decode))",
        )
        return data


def encode_text(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes ``str`` as UTF-8; one that begins with a byte order mark gets another, which reading drops."""
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
    """Encodes an integer of any sort (bool, NumPy's, a tensor of one element; not 7.0), or a str that reads as one."""
    if type(value) is int:
        return b"%d" % value
    if isinstance(value, str):
        data = encode_text(value, options)
        decode_int(data, DecodeOptions())
        return data
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "ndim", None) == 0:
        return b"%d" % int(value)  # NumPy's truth values are integers nowhere else
    try:
        return b"%d" % operator.index(value)
    except TypeError as cause:
        raise TypeError("expected an int, or a str such as '7'; convert it with int()") from cause
