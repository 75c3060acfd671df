"""Whether a tar archive is whole: a walk over its headers, without looking at what is in it."""

from __future__ import annotations

import io

from torchdata_wds.format.tar.entries import TarEntries
from torchdata_wds.format.tar.headers import BLOCK, HeaderError, has_payload, padding, parse_header

_WINDOW = 1 << 18
_REGULAR = ord("0")


def begins_a_tar(block: bytes) -> bool:
    """Tells whether a tar archive, maybe an empty one, begins with these 512 bytes.

    Example:
        >>> begins_a_tar(bytes(512)), begins_a_tar(b"x" * 512), begins_a_tar(bytes(100))
        (True, False, False)
    """
    if len(block) < BLOCK:
        return False
    try:
        parse_header(block)
    except HeaderError:
        return not block.strip(b"\0")
    return True


def check_whole(stream: io.BufferedIOBase, shard: str) -> None:
    """Checks that an archive, or several that were joined, goes on to its end marker and to the stream's end.

    Args:
        stream: The decompressed archive; payloads are skipped by seeking where it can.
        shard: Its URL as messages may show it.
    """
    source = _Windows(stream)
    entries = TarEntries(source, shard, concatenated=True)
    for entry in entries:
        if entry is None:
            continue
        length = entry.size + padding(entry.size) if has_payload(entry.kind) else 0
        source.skip(length)
        if not entries.has_globals:
            length += source.skip_plain()
        entries.passed(length)


class _Windows:
    """A stream read in windows, in which plain entries are passed without a closer look."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream
        self._seeks = stream.seekable()
        self._data = b""
        self._at = 0  # in the window; behind its end if that much is to be skipped first

    def read(self, size: int, /) -> bytes:
        """Reads so many bytes, fewer only at the end."""
        if self._at + size > len(self._data):
            self._fill(size)
        data = self._data[self._at : self._at + size]
        self._at += len(data)
        return data

    def skip(self, size: int) -> None:
        """Leaves so many bytes out, whether they are there or not: the next read finds out."""
        self._at += size

    def skip_plain(self) -> int:
        """Leaves out all entries in the window that are regular files with nothing special; gives their bytes."""
        data, begin = self._data, self._at
        at, last = begin, len(data) - BLOCK
        while at <= last and data[at + 156] == _REGULAR and data[at + 257 : at + 262] == b"ustar":
            size = _octal(data[at + 124 : at + 135])
            if size < 0:
                break
            at += BLOCK + size + padding(size)
        self._at = at
        return at - begin

    def _fill(self, size: int) -> None:
        beyond = self._at - len(self._data)
        rest = self._data[self._at :]
        if beyond > 0:
            self._pass(beyond)
        self._data = rest + self._stream.read(max(size, _WINDOW))
        self._at = 0

    def _pass(self, size: int) -> None:
        if self._seeks:
            self._stream.seek(size, io.SEEK_CUR)
            return
        while size and (data := self._stream.read(min(size, 1 << 20))):
            size -= len(data)


def _octal(digits: bytes) -> int:
    try:
        return int(digits, 8) if digits.isdigit() else -1
    except ValueError:
        return -1
