"""The settings of a shard cache, which its downloads and readers share."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from torchdata_wds.errors import CacheError
from torchdata_wds.handlers import warn_rarely
from torchdata_wds.storage.cache.locked_files import CopyLock, is_of_other_size, mark_of
from torchdata_wds.storage.cache.names import digest_of, unsigned
from torchdata_wds.storage.cache.origins import origin_of
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.places import StorageOptions
from torchdata_wds.storage.urls import mask_url

#: A function of a file and its URL that raises ShardFormatError unless the file is a whole shard.
Check = Callable[[str, str], None]
logger = logging.getLogger(__name__)
_without_locks: set[str] = set()


@dataclass(frozen=True)
class CacheSettings:
    """The settings of a folder of copies; nothing is open, and they can be pickled at any time.

    Attributes:
        folder: The absolute path of the folder.
        max_bytes: How many bytes all copies may have together; None is no limit.
        is_named_by_digest: Whether names tell all shards apart, so that a copy can only belong to its own.
        check: Raises if a download is not a whole shard; None keeps whatever has the announced length.
        while_reading: Whether a shard is read while it is downloaded.
        verbose: Whether to report hits, downloads and evictions.
        storage_options: Options by protocol, for reading.
    """

    folder: str
    max_bytes: float | None = None
    is_named_by_digest: bool = True
    check: Check | None = None
    while_reading: bool = True
    verbose: bool = False
    storage_options: StorageOptions = field(default_factory=StorageOptions)

    def mark_for(self, url: str) -> str:
        """Returns the mark of a copy of a shard: a digest of where it comes from."""
        return digest_of(unsigned(origin_of(url, self.storage_options)))

    def too_large(self, size: int) -> str | None:
        """Returns why a shard of `size` bytes cannot be kept; None if it can."""
        if self.max_bytes is None or size <= self.max_bytes:
            return None
        return f"it is larger than max_bytes={self.max_bytes:,}"

    def warn(self, url: str, reason: str) -> None:
        """Warns, but not too often, that a shard is read from its source."""
        shard = mask_url(url)
        message = f"shard {shard} is read from its source, and not from the cache folder {self.folder}: {reason}"
        warn_rarely("not cached", CacheError(message, shard=shard))

    def warn_of_no_locks(self) -> None:
        """Warns, once per process, that several processes may download the same shard."""
        if self.folder not in _without_locks:
            _without_locks.add(self.folder)
            logger.warning(
                "the file system of the cache folder %s has no locks (flock): copies are kept, but processes that want "
                "a shard at the same time each download it, and max_bytes may be passed by that",
                self.folder,
            )

    def is_cut(self, file: LockedFile) -> bool:
        """Returns whether an open copy no longer has the length with which this package made it."""
        return self.is_named_by_digest and is_of_other_size(file.fileno())

    def drop(self, path: str, file: LockedFile) -> bool:
        """Removes a damaged copy that this package made; returns whether it is gone."""
        if not self.is_named_by_digest and mark_of(file.fileno()) is None:
            return False
        with contextlib.suppress(OSError):
            lock = CopyLock.acquire(path)
            if lock is not None:
                try:
                    if file.is_at(path):
                        os.unlink(path)  # noqa: PTH108 - a str
                finally:
                    lock.release()
        return not file.is_at(path)

    def check_mark(self, url: str, path: str, file: int | str) -> None:
        """Raises a CacheError if a copy, whose name several shards may have, belongs to another one."""
        if self.is_named_by_digest:
            return
        mark = mark_of(file)
        if mark is not None and mark != self.mark_for(url):
            shard = mask_url(url)
            raise CacheError(
                f"shard {shard} has the same name in the cache folder as another URL, or as itself at another place "
                f"(by a rewriting rule, or the endpoint of a store), whose copy is {path}. Leave name= out, or pass "
                "one that tells them apart; if it is the same shard by a new URL, remove the copy",
                shard=shard,
            )
