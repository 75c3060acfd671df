"""Text of strangers: recognized in bytes, made safe for a line of a terminal or a picture, and shortened to fit."""

from __future__ import annotations

import re

_GAP = "..."
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")  # tabs, line ends and form feeds are text


def printable(text: str) -> str:
    r"""Escapes everything that would move a cursor, hide, or turn the direction of writing.

    Letters of all scripts stay. Control and format characters, line ends, odd blanks, lone surrogates and unassigned
    code points are written as in Python's strings.

    Example:
        >>> print(printable("größe\x1b[2J\n"))
        größe\x1b[2J\n
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shorten(text: str, width: int) -> str:
    """Cuts a text at its end: ``abcde...``."""
    if len(text) <= width:
        return text
    return text[: max(0, width - len(_GAP))] + _GAP[: max(0, width)]


def shorten_middle(text: str, width: int) -> str:
    """Cuts a text in its middle, as ``tra...123``: keys differ at their ends."""
    if len(text) <= width:
        return text
    room = max(0, width - len(_GAP))
    tail = room // 2
    return text[: room - tail] + _GAP[: max(0, width)] + (text[-tail:] if tail else "")


def guess_text(data: bytes, length: int) -> str | None:
    r"""Decodes the first `length` bytes if they look like text: UTF-8 without control characters."""
    try:
        text = data[:length].decode()
    except UnicodeDecodeError as error:
        if len(data) <= length or error.start < length - 3:
            return None
        text = data[: error.start].decode()  # the last character was cut
    return None if _NO_TEXT.search(text) else text
