"""Text of strangers, made safe for a line of a terminal or a picture, and shortened to fit."""

from __future__ import annotations

_GAP = "..."


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
