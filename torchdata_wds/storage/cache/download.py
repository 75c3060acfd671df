"""One download into a cache, to a file that gets its final name only when it is complete."""

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
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, interrupt, stored_bytes, stored_version
from torchdata_wds.storage.cache.locked_files import CopyLock, mark_as_ours, note_tag, seal
from torchdata_wds.storage.cache.settings import CacheSettings
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.meters import reads_ahead
from torchdata_wds.storage.targets.base import run_at_end
from torchdata_wds.storage.urls import mask_url

_PATIENCE = 1.0

#: The interpreter freezes daemon threads when it exits, with all locks they hold, so do not wait long for them.
_PATIENCE_AT_EXIT = 0.2

#: At the end of the process, a copy whose bytes are all there is waited for so long.
_PATIENCE_TO_FINISH = 10.0

#: How many downloads may finish their copies while the readers go on to other shards.
_MOST_LINGERING = 2
_SENT_AT_ONCE = 8 << 20
_THREAD = "wds-cache"


class Download:
    """Fills the file of a copy at the speed of the source, in a thread or in the caller; then releases the copy's lock.

    With `is_quiet`, logs no warning if the copy cannot be kept. Raises OSError if the file cannot be created.
    """

    def __init__(self, cache: CacheSettings, url: str, lock: CopyLock, *, is_quiet: bool = False) -> None:
        self._cache, self._url, self._lock, self._is_quiet = cache, url, lock, is_quiet
        self.position = 0  # the number of bytes in the file
        self.is_whole = False  # whether these are all bytes of the shard, up to its verified end
        self.has_ended = False  # whether there will be no more, and the copy is kept or given up
        self.failure: BaseException | None = None  # why it ended early: the source failed, or it was stopped
        self.reason = ""  # why the copy cannot be kept, although the source did not fail
        # If the file cannot be written to its end, the reader continues with the unwritten bytes, then with the source.
        self._source: io.RawIOBase | None = None
        self._unwritten = memoryview(b"")
        self.is_stopping = False  # whether the download is no longer needed
        self._changed = threading.Condition()
        self._released = threading.Lock()  # taken, for good, by the thread that removes the file
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
                    "processes that need a shard at the same time each download it, and max_bytes may be exceeded",
                )
        except BaseException:
            lock.release()
            raise
        mark_as_ours(self._file.fileno(), cache.mark_for(url))
        _running.add(self)
        run_at_end(_stop_all)

    @classmethod
    def begin(cls, cache: CacheSettings, url: str, path: str, *, is_quiet: bool = False) -> Self | None:
        """Begins to make a copy; returns None if it already exists, or another process is making it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a str
        lock = CopyLock.acquire(path)
        if lock is None:
            return None
        if os.path.exists(path):  # noqa: PTH110
            lock.release()
            return None
        cache.report("miss %s", mask_url(url))
        cache.meter_of(url).looked_up(hit=False)
        return cls(cache, url, lock, is_quiet=is_quiet)

    @property
    def is_here(self) -> bool:
        """Whether it runs in this process, and not in the parent that this process was forked from."""
        return self._owner == os.getpid()

    def start(self) -> LockedFile:
        """Runs the download in a thread; returns its file, open for the reader."""
        file = LockedFile(os.dup(self._file.fileno()))
        self._thread = threading.Thread(target=self.run, name=_THREAD, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads can be started: download before returning
            self._thread = None
            self.run()
        return file

    def run(self) -> None:
        """Runs the download to its end."""
        try:
            with contextlib.nullcontext() if self._thread is None else reads_ahead():
                self._fill()
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self.failure = error
            if self.is_whole:  # the reader may be gone
                self._note(f"{type(error).__name__}: {error}")
        finally:
            # In this order: the shared lock on the file tells readers in other processes that no more bytes follow. If
            # the file is not complete, they start a download of their own at once, and must find this one released.
            self._release()
            self._leave_file()
            if not self._unwritten or self.is_stopping:
                self._close_source()
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()

    def complete(self) -> None:
        """Runs the download to its end; raises its failure, or an OSError if the copy cannot be kept."""
        self.run()
        self.close()
        if self.failure is not None:
            raise self.failure
        if self.reason:
            raise OSError(self.reason)

    def wait_for(self, position: int, seconds: float | None = None) -> bool:
        """Waits for more than `position` bytes, or for the last one; returns False if `seconds` pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.position > position or self.is_whole or self.has_ended, seconds)

    def read_rest(self, view: memoryview) -> int:
        """Reads the bytes that could not be written to the file, for its reader in this process; raises the failure."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if rest := self._unwritten:
            count = min(len(view), len(rest))
            view[:count], self._unwritten = rest[:count], rest[count:]
            return count
        return 0 if self._source is None else self._source.readinto(view) or 0

    def stop(self, patience: float = _PATIENCE) -> None:
        """Ends the download and removes its file; waits at most `patience` seconds for the source to respond."""
        if not self.is_here:
            return
        self.is_stopping = True
        if (source := self._source) is not None:
            interrupt(source)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(patience)
        self._release()

    def close(self) -> None:
        """Stops the download, and closes the source if the reader was reading it directly."""
        self.stop()
        if self.has_ended:
            self._close_source()

    def finish(self, *, lingers: bool) -> None:
        """Closes the download after its reader has got all bytes: if they are the shard, its copy is kept before.

        If it `lingers`, this happens in its thread, and only the oldest of several such downloads is waited for.
        """
        if self.is_here and self.is_whole and not _is_ending:
            if lingers:
                _lingering.append(self)
                _wait_for_lingering(_MOST_LINGERING)
                return
            self._wait_for_end()
        self.close()

    def _wait_for_end(self, seconds: float | None = None) -> None:
        if threading.current_thread().name == _THREAD:
            return  # a garbage collection in the thread of a download closes a reader: that thread must go on
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended, seconds)

    def _leave_file(self) -> None:
        if not self._file.closed:
            self._file.lock(shared=True)
            self._file.leave()

    def _close_source(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            with contextlib.suppress(Exception):
                source.close()

    def _release(self) -> None:
        """Removes the file, unless it has become the copy, and releases the copy's lock; idempotent."""
        # Both the download's thread and `stop` call this. Neither may wait for the other: at exit, the interpreter may
        # have frozen the thread that is in here, and a garbage collection can call `stop` in the download's own thread.
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
            while True:
                if self.is_stopping:
                    raise stopped(self._url)
                if not (count := source.readinto(view)):
                    break  # the verified end: the copy is whole, even if its reader has left by now
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
        if (version := stored_version(source)) is not None:
            note_tag(self._file.fileno(), version.tag)
        # Tells readers in other processes, too, that these are all bytes.
        mark_as_ours(self._file.fileno(), self._cache.mark_for(self._url), self.position)
        with self._changed:
            self.is_whole = True
            self._changed.notify_all()
        self._close_source()
        self._finish(time.monotonic() - start)

    def _write(self, piece: memoryview) -> int:
        """Writes as much of a piece as the system accepts at once, and returns how much."""
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
            # Makes the disk start writing now, so that the final fsync takes less time.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(self._file.fileno(), self._sent, unsent, os.POSIX_FADV_DONTNEED)
            self._sent = self.position
        return count

    def _check_size(self, expected: int) -> None:
        """Raises an OSError if another program has cut the file, so that later bytes are in the wrong place."""
        size = os.fstat(self._file.fileno()).st_size
        if size != expected:
            raise OSError(f"another program has changed {self._part}: expected {expected:,} bytes, found {size:,}")

    def _finish(self, seconds: float) -> None:
        """Gives the complete file its final name; if it cannot be kept, marks it as complete for its readers."""
        # Before the rename, so that every process that finds the copy can trust it: mark, check, fsync and size.
        # Under the eviction lock, so that two downloads do not both take the last free bytes: the rename. A file that
        # is not kept is sealed, because readers in other processes cannot know otherwise that it is complete.
        file, cache = self._file.fileno(), self._cache
        try:
            if cache.check is not None:
                cache.check(self._part, self._url)
            os.fsync(file)
            self._check_size(self.position)
            with cache.room_for(self.position):
                os.rename(self._part, self._lock.path)  # noqa: PTH104 - strs
                self._leave_file()  # now, so that another download can evict the copy if nobody reads it
            size = f"{self.position:,}"
            cache.report("downloaded %s: %s bytes in %.1f s", mask_url(self._url), size, seconds)
        except (WdsError, OSError) as error:
            doubt = f"{error} (verify=False keeps copies that do not look complete)"
            self._note(doubt if isinstance(error, WdsError) else error.strerror or str(error))
            seal(file)

    def _note(self, reason: str) -> None:
        self.reason = reason
        if not self._is_quiet and not self.is_stopping:
            self._cache.warn(self._url, reason)


def stopped(url: str) -> ShardOpenError:
    """Returns the error for a read or download that was stopped."""
    shard, reason = mask_url(url), "was stopped, by another thread or the end of the program"
    return ShardOpenError(f"reading shard {shard} {reason}", shard=shard)


# The unfinished downloads of this process, which are stopped when it exits.
_running: weakref.WeakSet[Download] = weakref.WeakSet()
_is_ending = False

# Those whose readers have gone on to other shards.
_lingering: list[Download] = []


def wait_for_copies() -> None:
    """Waits until each shard that this process has read through a cache has its copy, or is known to get none."""
    _wait_for_lingering(0)


def _wait_for_lingering(most: int) -> None:
    for download in list(_lingering):
        if download.has_ended or _is_ending:
            with contextlib.suppress(ValueError):  # several threads may be here
                _lingering.remove(download)
    waiting = list(_lingering)
    for download in waiting[: max(0, len(waiting) - most)]:
        download._wait_for_end()


def _stop_all() -> None:
    global _is_ending
    _is_ending = True
    end = time.monotonic() + _PATIENCE_TO_FINISH
    for download in list(_running):
        if download.is_whole:
            download._wait_for_end(max(0.0, end - time.monotonic()))
        download.stop(patience=_PATIENCE_AT_EXIT)


os.register_at_fork(after_in_child=_running.clear)
os.register_at_fork(after_in_child=_lingering.clear)
