r"""Cells of tables with tabs between them: each value on one line, and read back as it was.

In a cell a backslash, tab, newline and carriage return are written ``\\``, ``\t``, ``\n`` and ``\r``. Bytes that are
not UTF-8 are an error, or ``\xe9`` each, or the whole value becomes ``base64:`` and its Base64.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Literal, get_args

__all__ = ["Binary", "escape_cell", "read_cell", "unescape_cell", "write_cell"]


#: What a cell has for bytes that are not UTF-8.
Binary = Literal["error", "escape", "base64"]

_BASE64 = "base64:"

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})

_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}

_PLAIN = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}

_SEQUENCE = re.compile(r"\\(x[89a-fA-F][0-9a-fA-F]|.?)", re.DOTALL)


def escape_cell(text: str) -> str:
    r"""Writes a text so that it has neither tabs nor line ends.

    Args:
        text: Any text. Bytes that the error handler ``surrogateescape`` has let through are written as ``\x80``.

    Raises:
        ValueError: if it holds another lone surrogate, which UTF-8 has no bytes for.

    Example:
        >>> print(escape_cell("one\ttwo\n"))
        one\ttwo\n
    """
    escaped = text.translate(_ESCAPES)
    if escaped.isascii():
        return escaped
    escaped = escaped.translate(_BYTES)
    try:
        escaped.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of {text[:40]!r} is a lone surrogate, which UTF-8 has no bytes for"
        ) from error
    return escaped


def unescape_cell(cell: str) -> str:
    r"""Reads a cell that `escape_cell` has written.

    Raises:
        ValueError: for a backslash before anything that is not escaped so.

    Example:
        >>> unescape_cell("one\\ttwo")
        'one\ttwo'
    """
    if "\\" not in cell:
        return cell

    def plain(found: re.Match[str]) -> str:
        code = found[1]
        if len(code) == 3:
            return chr(0xDC00 + int(code[1:], 16))
        if code not in _PLAIN:
            raise ValueError(
                f"the cell {cell[:40]!r} has a backslash at character {found.start()} that escapes nothing: expected "
                r"\\, \t, \n, \r or a byte such as \xe9. Write a backslash itself as \\"
            )
        return _PLAIN[code]

    return _SEQUENCE.sub(plain, cell)


def write_cell(data: bytes, binary: Binary = "error") -> str:
    r"""Writes bytes as a cell, from which `read_cell` makes the same bytes.

    Args:
        data: The value of a field.
        binary: What becomes of bytes that are not UTF-8. For ``"base64"`` a text that begins with ``base64:`` itself
            is written so, too.

    Raises:
        ValueError: for ``"error"``, if they are not UTF-8, naming the byte; or if `binary` is none of the three.

    Example:
        >>> write_cell("größe\n".encode()), write_cell(b"\xff", "base64"), write_cell(b"caf\xe9", "escape")
        ('größe\\n', 'base64:/w==', 'caf\\xe9')
    """
    _check(binary)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if binary == "escape":
            return escape_cell(data.decode(errors="surrogateescape"))
        if binary == "base64":
            return _BASE64 + base64.b64encode(data).decode()
        raise ValueError(
            f"byte {error.start:,} of {len(data):,} is {data[error.start : error.start + 1]!r}, which is not UTF-8"
        ) from error
    if binary == "base64" and text.startswith(_BASE64):
        return _BASE64 + base64.b64encode(data).decode()
    return escape_cell(text)


def read_cell(cell: str, binary: Binary = "error") -> bytes:
    r"""Reads the bytes that `write_cell` has written, with the same `binary`.

    Raises:
        ValueError: if it is no such cell.

    Example:
        >>> read_cell("base64:/w==", "base64"), read_cell("one\\ttwo")
        (b'\xff', b'one\ttwo')
    """
    _check(binary)
    if binary == "base64" and cell.startswith(_BASE64):
        try:
            return base64.b64decode(cell.removeprefix(_BASE64), validate=True)
        except binascii.Error as error:
            raise ValueError(f"the cell {cell[:40]!r} is no Base64 behind {_BASE64!r}: {error}") from error
    return unescape_cell(cell).encode(errors="surrogateescape")


def _check(binary: str) -> None:
    if binary not in get_args(Binary):
        raise ValueError(f"binary must be one of {', '.join(get_args(Binary))}, not {binary!r}")
