"""One download into a cache: from a source to a file that appears only when it is whole."""

import contextlib
import io
import os
import threading
import time
import weakref
from typing import Self

from torchdata_wds.errors import ShardOpenError, WdsError
from torchdata_wds.handlers import warn_once
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, interrupt, stored_bytes
from torchdata_wds.storage.cache.locked_files import CopyLock, mark_as_ours, seal
from torchdata_wds.storage.cache.settings import CacheSettings
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.targets.base import run_at_end
from torchdata_wds.storage.urls import mask_url

_PATIENCE = 1.0

#: The interpreter freezes daemon threads at its end, with all locks they hold: do not wait for them long.
_PATIENCE_AT_EXIT = 0.2
_SENT_AT_ONCE = 8 << 20


class Download:
    """Fills the file of a copy at the source's speed, in a thread or at once; the copy's lock is released at the end.

    With `is_quiet`, nobody is warned if the copy cannot be kept. An OSError if the file cannot be created.
    """

    def __init__(self, cache: CacheSettings, url: str, lock: CopyLock, *, is_quiet: bool = False) -> None:
        self._cache, self._url, self._lock, self._is_quiet = cache, url, lock, is_quiet
        self.position = 0  # how many bytes the file has
        self.has_ended = False  # whether that is all
        self.failure: BaseException | None = None  # why it ended early: a source that failed, or nobody needs it
        self.reason = ""  # why the copy cannot be kept, although the source did not fail
        self._source: io.RawIOBase | None = None  # None at the end, unless the file cannot be written to its end:
        self._unwritten = memoryview(b"")  # then its reader goes on with this, and with the rest of the source
        self.is_stopping = False  # whether nobody needs it any longer
        self._changed = threading.Condition()
        self._released = threading.Lock()  # kept by the thread that removes the file
        self._owner = os.getpid()
        self._sent = 0
        self._thread: threading.Thread | None = None
        try:
            if _is_ending:
                raise OSError("the program is ending")
            self._part, self._file = lock.create_part()
            if lock.file is None:
                warn_once(
                    f"no locks in {cache.folder}",
                    f"the file system of the cache folder {cache.folder} has no locks (flock): copies are kept, but "
                    "processes that want a shard at the same time each download it, and max_bytes may be exceeded",
                )
        except BaseException:
            lock.release()
            raise
        mark_as_ours(self._file.fileno(), cache.mark_for(url))
        _running.add(self)
        run_at_end(_stop_all)

    @classmethod
    def begin(cls, cache: CacheSettings, url: str, path: str, *, is_quiet: bool = False) -> Self | None:
        """Begins to make a copy; None if it exists by now, or another process is making it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a str
        lock = CopyLock.acquire(path)
        if lock is None:
            return None
        if os.path.exists(path):  # noqa: PTH110
            lock.release()
            return None
        cache.report("miss %s", mask_url(url))
        return cls(cache, url, lock, is_quiet=is_quiet)

    @property
    def is_here(self) -> bool:
        """Whether it runs in this process, which may be a forked child."""
        return self._owner == os.getpid()

    def start(self) -> LockedFile:
        """Runs it in a thread, and opens the file for its reader."""
        file = LockedFile(os.dup(self._file.fileno()))
        self._thread = threading.Thread(target=self.run, name="wds-cache", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: at once, then
            self._thread = None
            self.run()
        return file

    def run(self) -> None:
        """Runs it to its end."""
        try:
            self._fill()
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self.failure = error
        finally:
            self._release()
            # Other readers see by the shared lock that no more bytes will follow.
            self._file.lock(shared=True)
            self._file.leave()
            if not self._unwritten or self.is_stopping:
                self._close_source()
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()

    def complete(self) -> None:
        """Runs it to its end; raises its failure, or an OSError if the copy cannot be kept."""
        self.run()
        self.close()
        if self.failure is not None:
            raise self.failure
        if self.reason:
            raise OSError(self.reason)

    def wait_for(self, position: int, seconds: float | None = None) -> bool:
        """Waits until there are more than `position` bytes or it has ended; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.position > position or self.has_ended, seconds)

    def read_rest(self, view: memoryview) -> int:
        """Reads what comes after the file, for its only reader: what could not be written; raises its failure."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if rest := self._unwritten:
            count = min(len(view), len(rest))
            view[:count], self._unwritten = rest[:count], rest[count:]
            return count
        return 0 if self._source is None else self._source.readinto(view) or 0

    def stop(self, patience: float = _PATIENCE) -> None:
        """Ends it and removes its file; a source that does not answer for `patience` seconds ends later by itself."""
        if not self.is_here:
            return
        self.is_stopping = True
        if (source := self._source) is not None:
            interrupt(source)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(patience)
        self._release()

    def close(self) -> None:
        """Stops it, and closes the source if its reader had to go on from there."""
        self.stop()
        if self.has_ended:
            self._close_source()

    def _close_source(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            with contextlib.suppress(Exception):
                source.close()

    def _release(self) -> None:
        """Removes the file, if it has not become the copy, and releases the lock: in one thread, and once.

        No thread waits for another here: the end of the program may have frozen one, and a garbage collection may stop
        a download in its own thread.
        """
        if self._released.acquire(blocking=False):
            _running.discard(self)
            with contextlib.suppress(OSError):
                os.unlink(self._part)  # noqa: PTH108 - a str
            self._lock.release()

    def _fill(self) -> None:
        start = time.monotonic()
        source = self._source = stored_bytes(open_shard(self._url, storage_options=self._cache.storage_options))
        view = memoryview(bytearray(BUFFER_SIZE))
        with self._cache.progress_bar(self._url) as bar:
            while not self.is_stopping and (count := source.readinto(view)):
                piece = view[:count]
                try:
                    while piece:
                        piece = piece[self._write(piece) :]
                except OSError as error:
                    self._unwritten = piece
                    self._note(error.strerror or str(error))
                    return
                if bar is not None:
                    bar.update(count)
        if self.is_stopping:
            raise stopped(self._url)
        self._finish(time.monotonic() - start)

    def _write(self, piece: memoryview) -> int:
        """Writes as much of a piece as the system takes at once, and returns how much that is."""
        limit = self._cache.max_bytes
        if limit is not None and self.position + len(piece) > limit:
            raise OSError(f"it is larger than max_bytes={limit:,}")
        self._check_size(self.position)
        count = os.write(self._file.fileno(), piece)
        self._check_size(self.position + count)
        with self._changed:
            self.position += count
            self._changed.notify_all()
        if (unsent := self.position - self._sent) >= _SENT_AT_ONCE:
            # The disk starts writing, so that there is less to wait for at the end.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(self._file.fileno(), self._sent, unsent, os.POSIX_FADV_DONTNEED)
            self._sent = self.position
        return count

    def _check_size(self, expected: int) -> None:
        """Raises an OSError if somebody has cut the file, so that what was appended since is in the wrong place."""
        size = os.fstat(self._file.fileno()).st_size
        if size != expected:
            raise OSError(f"somebody has changed {self._part}: expected {expected:,} bytes, found {size:,}")

    def _finish(self, seconds: float) -> None:
        """Makes the file the copy; if it cannot be kept, its readers still see that it is complete."""
        file, cache = self._file.fileno(), self._cache
        try:
            if cache.check is not None:
                cache.check(self._part, self._url)
            mark_as_ours(file, cache.mark_for(self._url), self.position)
            os.fsync(file)
            self._check_size(self.position)
            with cache.room_for(self.position):
                os.rename(self._part, self._lock.path)  # noqa: PTH104 - strs
            size = f"{self.position:,}"
            cache.report("downloaded %s: %s bytes in %.1f s", mask_url(self._url), size, seconds)
        except (WdsError, OSError) as error:
            doubt = f"{error} (verify=False keeps what does not look whole)"
            self._note(doubt if isinstance(error, WdsError) else error.strerror or str(error))
            seal(file)

    def _note(self, reason: str) -> None:
        self.reason = reason
        if not self._is_quiet and not self.is_stopping:
            self._cache.warn(self._url, reason)


def stopped(url: str) -> ShardOpenError:
    """Makes the error for a read or download that was stopped."""
    shard, reason = mask_url(url), "was stopped, by another thread or the end of the program"
    return ShardOpenError(f"reading shard {shard} {reason}", shard=shard)


# The downloads of this process that have not ended, stopped when it ends.
_running: weakref.WeakSet[Download] = weakref.WeakSet()
_is_ending = False


def _stop_all() -> None:
    global _is_ending
    _is_ending = True
    for download in list(_running):
        download.stop(patience=_PATIENCE_AT_EXIT)


os.register_at_fork(after_in_child=_running.clear)
