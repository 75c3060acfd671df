"""Hard links: their bytes come from a second look at the shard, so that the normal path keeps nothing."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.format.entries import DEFAULT_MAX_MEMBER_BYTES, ByteSource, TarEntries, TarEntry
from torchdata_wds.format.headers import HARD_LINK, REGULAR, SPARSE
from torchdata_wds.format.sparse import read_payload
from torchdata_wds.storage import can_reopen, open_shard

__all__ = ["HardLinks", "Reopen"]

Reopen = Callable[[int], AbstractContextManager[ByteSource]]


class HardLinks:
    """Finds what the hard links of one shard point at.

    Args:
        url: The shard's URL.
        shard: The URL as messages may show it.
        reopen: Opens the shard again at a byte offset of the decompressed archive; None opens `url`, where that is
            possible.
        max_member_bytes: The size of the largest member that is read.
    """

    def __init__(
        self, url: str, shard: str, reopen: Reopen | None, *, max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES
    ) -> None:
        self.shard = shard
        self._max_member_bytes = max_member_bytes
        if reopen is None and can_reopen(url):
            reopen = partial(_open_at, url)
        self.reopen = reopen
        self._offsets: dict[str, int] | None = None  # made at the first link; from then on it follows the reader

    @property
    def met(self) -> bool:
        """Whether there has been a link: each entry from here on must be noted."""
        return self._offsets is not None

    def note(self, entry: TarEntry) -> None:
        """Remembers where an entry lies, once there has been a link in this shard."""
        if self._offsets is not None:
            _remember(self._offsets, entry)

    def resolve(self, entry: TarEntry) -> bytes:
        """Reads the bytes that a hard link stands for.

        Each link opens the shard at its target; a compressed shard is read up to there again.

        Raises:
            ShardFormatError: if no earlier member has that name, or the shard cannot be opened again.
        """
        if self.reopen is None:
            raise self._error(entry, "cannot be opened a second time to look it up")
        try:
            return self._read_target(entry, self.reopen)
        except ShardOpenError as error:
            raise self._error(entry, f"cannot be opened a second time to look it up: {error}") from error

    def _read_target(self, entry: TarEntry, reopen: Reopen) -> bytes:
        if self._offsets is None:
            self._offsets = self._scan(entry.offset, reopen)
            _remember(self._offsets, entry)  # a later link may point at this one
        offset = self._offsets.get(posixpath.normpath(entry.link))
        if offset is None:
            raise self._error(entry, "has no such member before it")
        with reopen(offset) as stream:
            entries = TarEntries(stream, self.shard, offset=offset, max_member_bytes=self._max_member_bytes)
            target = next(iter(entries))
            if target is None:
                raise self._error(entry, "is not the same when it is read again")
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

    def _error(self, entry: TarEntry, why: str) -> ShardFormatError:
        return ShardFormatError(
            f"member {entry.name} at byte {entry.offset:,} of shard {self.shard} is a hard link to {entry.link}, "
            f"and the shard {why}. Write the shard "
            "with tar --hard-dereference.",
            shard=self.shard,
            member=entry.name,
        )


def _open_at(url: str, offset: int) -> AbstractContextManager[ByteSource]:
    return open_shard(url, offset=offset)


def _remember(offsets: dict[str, int], entry: TarEntry) -> None:
    name = posixpath.normpath(entry.name)
    if entry.kind in REGULAR or entry.kind == SPARSE:
        offsets[name] = entry.offset
    elif entry.kind == HARD_LINK:
        target = offsets.get(posixpath.normpath(entry.link))
        if target is not None:
            offsets[name] = target
