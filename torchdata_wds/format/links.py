"""Hard links: their bytes come from a second look at the shard, so that the normal path keeps nothing."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.entries import ByteSource, TarEntries, TarEntry
from torchdata_wds.format.headers import HARD_LINK, REGULAR, SPARSE
from torchdata_wds.format.sparse import read_payload

__all__ = ["HardLinks", "Reopen"]

Reopen = Callable[[int], AbstractContextManager[ByteSource]]


class HardLinks:
    """Finds what the hard links of one shard point at.

    Args:
        shard: The shard's URL as messages may show it.
        reopen: Opens the shard again at a byte offset of the decompressed archive; None where that is impossible.
    """

    def __init__(self, shard: str, reopen: Reopen | None) -> None:
        self.shard = shard
        self.reopen = reopen
        self._offsets: dict[str, int] | None = None  # made at the first link; from then on it follows the reader

    def note(self, entry: TarEntry) -> None:
        """Remembers where an entry lies, once there has been a link in this shard."""
        if self._offsets is not None:
            _remember(self._offsets, entry)

    def resolve(self, entry: TarEntry) -> bytes:
        """Reads the bytes that a hard link stands for.

        Raises:
            ShardFormatError: if no earlier member has that name, or the shard cannot be opened again.
        """
        if self.reopen is None:
            raise self._error(
                entry, "cannot be opened a second time to look it up", "Write the shard with tar --hard-dereference."
            )
        if self._offsets is None:
            self._offsets = self._scan(entry.offset, self.reopen)
            _remember(self._offsets, entry)  # a later link may point at this one
        offset = self._offsets.get(posixpath.normpath(entry.link))
        if offset is None:
            raise self._error(entry, "has no such member before it", "Write the shard with tar --hard-dereference.")
        with self.reopen(offset) as stream:
            entries = TarEntries(stream, self.shard, offset=offset)
            target = next(iter(entries))
            if target is None:
                raise self._error(entry, "is not the same when it is read again", "Do not write to it meanwhile.")
            return read_payload(entries, target)

    def _scan(self, end: int, reopen: Reopen) -> dict[str, int]:
        offsets: dict[str, int] = {}
        with reopen(0) as stream:
            entries = TarEntries(stream, self.shard, concatenated=True)
            for entry in entries:
                if entry is None:
                    continue
                if entry.offset >= end:
                    break
                _remember(offsets, entry)
                entries.skip(entry)
        return offsets

    def _error(self, entry: TarEntry, why: str, cure: str) -> ShardFormatError:
        return ShardFormatError(
            f"member {entry.name} at byte {entry.offset:,} of shard {self.shard} is a hard link to {entry.link}, "
            f"and the shard {why}. {cure}",
            shard=self.shard,
            member=entry.name,
        )


def _remember(offsets: dict[str, int], entry: TarEntry) -> None:
    name = posixpath.normpath(entry.name)
    if entry.kind in REGULAR or entry.kind == SPARSE:
        offsets[name] = entry.offset
    elif entry.kind == HARD_LINK:
        target = offsets.get(posixpath.normpath(entry.link))
        if target is not None:
            offsets[name] = target
