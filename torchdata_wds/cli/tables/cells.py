r"""Cells of tables with tabs between them: each value on one line, and read back as it was.

In a cell a backslash, tab, newline and carriage return are written ``\\``, ``\t``, ``\n`` and ``\r``. Bytes that are
not UTF-8 are an error, or ``\xe9`` each, or the whole value becomes ``base64:`` and its Base64.
"""

from __future__ import annotations

import base64
import re
from typing import Literal

#: How a cell shows bytes that are not UTF-8.
Binary = Literal["error", "escape", "base64"]

_BASE64 = "base64:"
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}  # as surrogateescape decodes them
_PLAIN = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}
_SEQUENCE = re.compile(r"\\(x[89a-fA-F][0-9a-fA-F]|.?)", re.DOTALL)


def escape_cell(text: str) -> str:
    r"""Escapes tabs, line ends, backslashes, and as ``\x80`` the bytes that ``surrogateescape`` let through.

    Raises:
        ValueError: if the text holds another lone surrogate, which UTF-8 has no bytes for.
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
    r"""Reverses `escape_cell`.

    Raises:
        ValueError: for a backslash before anything that `escape_cell` does not escape.
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
    r"""Writes bytes as a cell; with ``"base64"``, text that begins with ``base64:`` itself becomes Base64 too.

    Raises:
        ValueError: for ``"error"``, if they are not UTF-8, naming the byte.

    Example:
        >>> write_cell("größe\n".encode()), write_cell(b"\xff", "base64"), write_cell(b"caf\xe9", "escape")
        ('größe\\n', 'base64:/w==', 'caf\\xe9')
    """
    text: str | None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if binary == "error":
            raise ValueError(
                f"byte {error.start:,} of {len(data):,} is {data[error.start : error.start + 1]!r}, which is not UTF-8"
            ) from error
        text = data.decode(errors="surrogateescape") if binary == "escape" else None
    if text is None or (binary == "base64" and text.startswith(_BASE64)):
        return _BASE64 + base64.b64encode(data).decode()
    return escape_cell(text)
