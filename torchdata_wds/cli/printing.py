"""Text of strangers on a line of a terminal, or in a picture: nothing in it acts."""

from __future__ import annotations

__all__ = ["printable", "shorten", "shorten_middle"]


_GAP = "..."


def printable(text: str) -> str:
    r"""Escapes whatever would move a cursor, hide, or turn the direction of writing.

    Letters of all scripts stay. Control and format characters, line ends, odd blanks, lone surrogates and what Unicode
    has not assigned are written as in Python's strings.

    Example:
        >>> print(printable("größe\x1b[2J\n"))
        größe\x1b[2J\n
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shorten(text: str, width: int) -> str:
    """Cuts a text at its end.

    Example:
        >>> shorten("abcdefghij", 8), shorten("abc", 8)
        ('abcde...', 'abc')
    """
    if len(text) <= width:
        return text
    return text[: max(0, width - len(_GAP))] + _GAP[: max(0, width)]


def shorten_middle(text: str, width: int) -> str:
    """Cuts a text in its middle: keys differ at their ends.

    Example:
        >>> shorten_middle("train/000/000123", 9), shorten_middle("abc", 9)
        ('tra...123', 'abc')
    """
    if len(text) <= width:
        return text
    room = max(0, width - len(_GAP))
    tail = room // 2
    return text[: room - tail] + _GAP[: max(0, width)] + (text[-tail:] if tail else "")
