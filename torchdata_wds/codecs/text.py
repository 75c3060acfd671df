"""Text and integer fields."""

from __future__ import annotations

import re

from torchdata_wds.codecs.options import DecodeOptions

__all__ = ["decode_int", "decode_text", "without_bom"]

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

    Raises:
        ValueError: for anything else, also for what only Python calls a number (``1_000``, digits of other scripts).
    """
    if data.isdigit():
        return int(data)
    digits = without_bom(data.strip()).removesuffix(_BOM).strip()
    if not _INTEGER.fullmatch(digits):
        raise ValueError("expected a decimal integer, such as 7 or -1")
    return int(digits)
