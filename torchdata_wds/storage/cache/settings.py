"""The settings of a shard cache, and what its downloads and readers share: reports, eviction, and waiting."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchdata_wds.environment import reports_caching
from torchdata_wds.errors import CacheError
from torchdata_wds.handlers import warn_rarely
from torchdata_wds.storage.cache.locked_files import (
    ROOM,
    CopyLock,
    copies_in,
    is_of_other_size,
    mark_of,
    open_copy,
    remove_empty,
    remove_unlocked,
)
from torchdata_wds.storage.cache.names import digest_of, origin_of, unsigned
from torchdata_wds.storage.locks import LockedFile, lock
from torchdata_wds.storage.meters import Meter
from torchdata_wds.storage.places import StorageOptions, meter_for
from torchdata_wds.storage.urls import mask_url

#: A function of a file and its URL that raises ShardFormatError unless the file is a complete shard.
Check = Callable[[str, str], None]
logger = logging.getLogger(__name__)
_BLOCK = 512
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02

#: Seconds without progress after which a downloading process counts as suspended, and others read the source.
_LONGEST_WAIT = 300.0


@dataclass(frozen=True)
class CacheSettings:
    """The settings of a folder of copies; they hold nothing open, and can always be pickled."""

    folder: str  # an absolute path
    max_bytes: float | None = None  # for all copies together; None is no limit
    is_named_by_digest: bool = True  # whether no two shards can have a copy of the same name
    check: Check | None = None  # raises if a download is not a complete shard; None checks only the announced length
    while_reading: bool = True  # whether a shard is read while it is downloaded
    verbose: bool = False  # whether to report hits, downloads and evictions
    storage_options: StorageOptions = field(default_factory=StorageOptions)

    def mark_for(self, url: str) -> str:
        """Returns the mark for a shard's copy: a digest of its origin."""
        return digest_of(unsigned(origin_of(url, self.storage_options)))

    def warn(self, url: str, reason: str) -> None:
        """Logs a rate-limited warning that a shard is read from its source."""
        shard = mask_url(url)
        message = f"shard {shard} is read from its source, not from the cache folder {self.folder}: {reason}"
        warn_rarely("not cached", CacheError(message, shard=shard))

    def report(self, message: str, *values: object) -> None:
        """Logs an event, or writes it to standard error if reports are on and logging is not configured.

        ``verbose=True`` and ``WDS_VERBOSE_CACHE=1`` turn reports on. Secrets in `values` must already be masked.
        """
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info(message, *values)
        elif self.verbose or reports_caching():
            record = logger.makeRecord(logger.name, logging.INFO, "", 0, "cache: " + message, values, None)
            logging.StreamHandler(sys.stderr).handle(record)

    def progress_bar(self, url: str) -> Any:
        """Returns a context manager: of a tqdm bar in bytes, or of None if reports are off or tqdm is missing."""
        if self.verbose or reports_caching():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm  # type: ignore[import-untyped]

                return tqdm(desc=mask_url(url)[-40:], unit="B", unit_scale=True, leave=False, disable=None)
        return contextlib.nullcontext()

    def meter_of(self, url: str) -> Meter:
        """Returns a meter for the source of a shard."""
        return meter_for(url, self.storage_options)

    def open_copy(self, url: str, path: str) -> LockedFile | None:
        """Opens a finished copy; returns None if there is none, or it was removed as cut; raises OSError for others."""
        try:
            file = open_copy(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OSError(f"its copy {path} cannot be opened: {error.strerror or error}") from error
        with contextlib.ExitStack() as stack:
            stack.callback(file.close)
            self.check_mark(url, path, file.fileno())
            # A copy is cut off if its size is not the one noted on it, or if it is a tar archive without an end.
            is_cut = self.is_named_by_digest and is_of_other_size(file.fileno())
            if not is_cut and (self.check is None or not _is_open_ended(file.fileno())):
                stack.pop_all()
                return file
            reason = f"its copy {path} is cut off{'' if is_cut else ' (verify=False reads it anyway)'}"
            if not self.drop(path, file):
                raise OSError(reason)
        self.warn(url, reason)
        return None

    def drop(self, path: str, file: LockedFile) -> bool:
        """Removes a damaged copy if this package made it; returns whether the copy is gone."""
        if not self.is_named_by_digest and mark_of(file.fileno()) is None:
            return False
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if (copy_lock := CopyLock.acquire(path)) is not None:
                stack.callback(copy_lock.release)
                if file.is_at(path):
                    os.unlink(path)  # noqa: PTH108 - a str
        return not file.is_at(path)

    def check_mark(self, url: str, path: str, file: int | str) -> None:
        """Raises CacheError if a copy whose name is not unique belongs to another shard."""
        if not self.is_named_by_digest and mark_of(file) not in (None, self.mark_for(url)):
            shard = mask_url(url)
            raise CacheError(
                f"shard {shard} has the same name in the cache folder as another URL, or as the same URL at another "
                f"place (by a rewriting rule, or the endpoint of a store), whose copy is {path}. Leave name= out, or "
                "pass one that tells them apart; if it is the same shard under a new URL, remove the copy",
                shard=shard,
            )

    @contextlib.contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        """Removes the least recently used copies until a new one fits; no other process can add one meanwhile.

        Copies that are being read stay, so the new copy may exceed the limit; raises OSError if they alone exceed it.
        """
        if self.max_bytes is None:
            yield
            return
        name = os.path.join(self.folder, ROOM)  # noqa: PTH118 - strs
        with LockedFile(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)) as file:
            if lock(file.fileno(), wait=True) is None:
                remove_empty(name, file)
            # max_bytes=100, and copies of 40, 30 and 20, least recently used first: for a new one of 30, only that of
            # 40 goes (90 + 30 > 100, 50 + 30 <= 100). If that is being read, the one of 30 goes instead (60 + 30). The
            # folder is listed anew each time, because other processes and users add and remove files too.
            kept = sorted(copies_in(self.folder, deep=not self.is_named_by_digest))
            total = sum(length for _, length, _ in kept)
            for _, length, path in kept:
                if total + size <= self.max_bytes:
                    break
                with contextlib.suppress(OSError):
                    if remove_unlocked(path) != "in use":
                        total -= length
                        self.report("evicted %s: %s bytes", path, f"{length:,}")
            if total > self.max_bytes:
                raise OSError(f"max_bytes={self.max_bytes:,} is less than the size of the shards that are being read")
            yield


def _is_open_ended(file: int) -> bool:
    size = os.fstat(file).st_size
    if os.pread(file, 5, 257) != b"ustar":
        return size == 0
    end = _BLOCK + size % _BLOCK
    return size < end or bool(os.pread(file, end, size - end).strip(b"\0"))


class StalledError(OSError):
    """Another process holds a shard's lock, and makes no progress."""


class Waiting:
    """Waits for another process as long as it makes progress."""

    def __init__(self) -> None:
        self._pause = _SHORTEST_PAUSE
        self._seen: object = None
        self._since = time.monotonic()

    def go_on(self, seen: object = None) -> None:
        """Sleeps briefly, longer each time; raises StalledError if `seen` (the progress) is the same for minutes."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > _LONGEST_WAIT:
            raise StalledError(f"the process that downloads it has made no progress for {_LONGEST_WAIT:.0f} seconds")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
