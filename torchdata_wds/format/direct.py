"""One member at a time, its payload read straight into its own bytes: for large members, which need no more copies.

As with windows, only what every tar writer of today writes is taken; the rest is left to `TarEntries`.
"""

from __future__ import annotations

from torchdata_wds.format.headers import BLOCK, byte_sum, full_name, text

__all__ = ["read_plain_header"]

_PLAIN_FILE = ord("0")
_BEHIND_NUMBERS = b"\0 "


def read_plain_header(block: bytes) -> tuple[str, int] | None:
    """Reads name and size from the header of a regular file; None where `TarEntries` must look at it.

    Args:
        block: What was read for a header, perhaps less than one.

    Example:
        >>> import tarfile
        >>> read_plain_header(tarfile.TarInfo("a.txt").tobuf()), read_plain_header(bytes(512))
        (('a.txt', 0), None)
    """
    if len(block) < BLOCK or block[156] != _PLAIN_FILE or block[257:261] != b"usta":
        return None
    size, total, behind = block[124:135], block[148:154], block[135:136] + block[154:156]
    if not (size.isdigit() and total.isdigit() and not behind.strip(_BEHIND_NUMBERS)):
        return None
    try:
        if byte_sum(block) - sum(block[148:156]) + 8 * 32 != int(total, 8):
            return None
        name = text(full_name(block))
        return None if name.endswith("/") else (name, int(size, 8))
    except ValueError:  # an 8 or a 9
        return None
