"""One download into a cache: from a source to a file that appears only when it is whole."""

from __future__ import annotations

import contextlib
import enum
import io
import multiprocessing.util
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from torchdata_wds.errors import WdsError
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, Source, stored_bytes
from torchdata_wds.storage.cache.locked_files import CopyLock, make_room, mark_as_ours, seal
from torchdata_wds.storage.cache.progress import download_bar, report
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.opening import open_shard
from torchdata_wds.storage.urls import mask_url

if TYPE_CHECKING:
    from torchdata_wds.storage.cache.settings import CacheSettings

_PATIENCE = 1.0

#: The interpreter freezes daemon threads at its end, with all locks they hold: do not wait for them long.
_PATIENCE_AT_EXIT = 0.2
_SENT_AT_ONCE = 8 << 20


class Outcome(enum.Enum):
    """How a download ended.

    Attributes:
        KEPT: The copy exists.
        WHOLE: The source was read to its verified end, but there is no copy.
        DIRECT: The copy cannot be written; the reader reads on from the source.
        FAILED: The source failed.
        STOPPED: Nobody needs it any longer.
    """

    KEPT = enum.auto()
    WHOLE = enum.auto()
    DIRECT = enum.auto()
    FAILED = enum.auto()
    STOPPED = enum.auto()


class Download:
    """Fills the file of a copy at the source's speed, in a thread or at once; the copy's lock is released at the end.

    With `is_quiet`, nobody is warned if the copy cannot be kept.

    Attributes:
        part: The path of the file that is filled.
        position: How many bytes it has.
        outcome: How it ended; None while it runs.
        failure: Why it failed.
        reason: Why the copy cannot be kept.
        is_stopping: Whether nobody needs it any longer.

    Raises:
        OSError: if the file cannot be created, or the program is ending. The lock is then released.
    """

    def __init__(self, cache: CacheSettings, url: str, lock: CopyLock, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self.reason = ""
        self.position = 0
        self.outcome: Outcome | None = None
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        self._cache = cache
        self.url = url
        self._lock = lock
        self._owner = os.getpid()
        self._ending = threading.RLock()  # a garbage collection may stop a download in its own thread
        self._is_released = False
        self.is_stopping = False
        self._sent = 0
        self._source: io.RawIOBase | None = None
        self._rest: io.RawIOBase | None = None
        self._thread: threading.Thread | None = None
        try:
            if _AtExit.has_begun:
                raise OSError("the program is ending")
            self.part, self._file = lock.create_part()
            if not lock.is_real:
                cache.warn_of_no_locks()
        except BaseException:
            lock.release()
            raise
        mark_as_ours(self._file.fileno(), cache.mark_for(url))
        _remember(self)

    def open_file(self) -> LockedFile:
        """Opens the file for a reader."""
        return LockedFile(os.dup(self._file.fileno()))

    @property
    def is_here(self) -> bool:
        """Whether it runs in this process, which may be a forked child."""
        return self._owner == os.getpid()

    def start(self) -> None:
        """Runs it in a thread."""
        self._thread = threading.Thread(target=self.run, name="wds-cache", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: at once, then
            self._thread = None
            self.run()

    def run(self) -> None:
        """Runs it to its end."""
        outcome = Outcome.FAILED
        try:
            outcome = self._fill()
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self.failure = error
        finally:
            if outcome is Outcome.WHOLE:
                seal(self._file.fileno())
            with self._ending:
                self._release()
            # Other readers see by the shared lock that no more bytes will follow.
            self._file.lock(shared=True)
            self._file.leave()
            if outcome is not Outcome.DIRECT and self._source is not None:
                with contextlib.suppress(Exception):
                    self._source.close()
            if self.is_stopping and self._rest is not None:
                self._rest.close()
            self._source = None
            with self.changed:
                self.outcome = outcome
                self.changed.notify_all()

    def complete(self) -> str | None:
        """Runs it to its end; returns the reason if the copy cannot be kept.

        Raises:
            ShardOpenError: if the source fails.
        """
        self.run()
        self.stop()
        if self.failure is not None:
            raise self.failure
        return None if self.outcome is Outcome.KEPT else self.reason

    def wait_for(self, position: int, seconds: float | None = None) -> bool:
        """Waits until there are more than `position` bytes or it has ended; returns whether that is so."""
        with self.changed:
            return self.changed.wait_for(lambda: self.position > position or self.outcome is not None, seconds)

    def take_rest(self) -> io.RawIOBase:
        """Returns the bytes of the source after the file's, for one reader, if the outcome is `Outcome.DIRECT`."""
        rest, self._rest = self._rest, None
        assert rest is not None
        return rest

    def stop(self, patience: float = _PATIENCE) -> None:
        """Ends it and removes its file; a source that does not answer for `patience` seconds ends later by itself."""
        if not self.is_here:
            return
        self.is_stopping = True
        source = self._source
        if self.outcome is None and isinstance(source, Source):
            source.interrupt()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(patience)
        if not self._is_released:  # the program's end may have frozen a thread that is about to
            with self._ending:
                self._release()
        if self._rest is not None:
            self._rest.close()
            self._rest = None

    def _fill(self) -> Outcome:
        start = time.monotonic()
        source = self._source = stored_bytes(open_shard(self.url, storage_options=self._cache.storage_options))
        view = memoryview(bytearray(BUFFER_SIZE))
        with download_bar(self.url, self._cache.verbose) as advance:
            while not self.is_stopping:
                count = source.readinto(view)
                if not count:
                    return self._finish(time.monotonic() - start)
                if (reason := self._write(view[:count])) is not None:
                    self._note(reason)
                    return Outcome.DIRECT
                advance(count)
        return Outcome.STOPPED

    def _write(self, piece: memoryview) -> str | None:
        """Writes a piece; if that fails, keeps what was not written for the reader, and returns the reason."""
        reason = self._cache.too_large(self.position + len(piece))
        count = 0
        try:
            self._check_size(self.position)
            while reason is None and piece[count:]:
                written = os.write(self._file.fileno(), piece[count:])
                self._check_size(self.position + count + written)
                count += written
        except OSError as error:
            reason = error.strerror or str(error)
        if reason is not None:
            assert self._source is not None
            self._rest = _Rest(bytes(piece[count:]), self._source)
        with self.changed:
            self.position += count
            self.changed.notify_all()
        if self.position - self._sent >= _SENT_AT_ONCE:
            self._send_to_disk()
        return reason

    def _check_size(self, expected: int) -> None:
        """Raises an OSError if somebody has cut the file, so that what was appended since is in the wrong place."""
        size = os.fstat(self._file.fileno()).st_size
        if size != expected:
            raise OSError(f"somebody has changed {self.part}: expected {expected:,} bytes, found {size:,}")

    def _send_to_disk(self) -> None:
        """Tells the disk to start writing, so that there is less to wait for at the end."""
        with contextlib.suppress(OSError, AttributeError):
            length = self.position - self._sent
            os.posix_fadvise(self._file.fileno(), self._sent, length, os.POSIX_FADV_DONTNEED)
        self._sent = self.position

    def _finish(self, seconds: float) -> Outcome:
        shard = mask_url(self.url)
        try:
            if self._cache.check is not None:
                self._cache.check(self.part, self.url)
            mark_as_ours(self._file.fileno(), self._cache.mark_for(self.url), self.position)
            os.fsync(self._file.fileno())
            self._check_size(self.position)
        except WdsError as error:
            self._note(f"{error} (verify=False keeps what does not look whole)")
            return Outcome.WHOLE
        except OSError as error:
            self._note(error.strerror or str(error))
            return Outcome.WHOLE
        try:
            if self._commit():
                report(self._cache.verbose, "downloaded %s: %s bytes in %.1f s", shard, f"{self.position:,}", seconds)
                return Outcome.KEPT
        except OSError as error:
            self._note(error.strerror or str(error))
        return Outcome.WHOLE

    def _commit(self) -> bool:
        cache = self._cache
        if cache.max_bytes is None:
            return self._rename()
        with make_room(cache.folder, self.position, cache.max_bytes, deep=not cache.is_named_by_digest) as (
            fits,
            removed,
        ):
            for copy in removed:
                report(cache.verbose, "evicted %s: %s bytes", copy.path, f"{copy.size:,}")
            if fits:
                return self._rename()
        self._note(f"max_bytes={cache.max_bytes:,} is less than the size of the shards that are being read")
        return False

    def _rename(self) -> bool:
        with self._ending:
            if self._is_released:
                return False
            os.rename(self.part, self._lock.path)  # noqa: PTH104 - strs
            self._release(kept=True)
        return True

    def _release(self, *, kept: bool = False) -> None:
        if not self._is_released:
            self._is_released = True
            _running.discard(self)
            if not kept:
                with contextlib.suppress(OSError):
                    os.unlink(self.part)  # noqa: PTH108
            self._lock.release()

    def _note(self, reason: str) -> None:
        self.reason = reason
        if not self._is_quiet:
            self._cache.warn(self.url, reason)


class _Rest(Source):
    """A piece, and what its source gives after it."""

    def __init__(self, piece: bytes, source: io.RawIOBase) -> None:
        self._piece = piece
        self._source = source

    def take(self, size: int) -> bytes:
        if self._piece:
            data, self._piece = self._piece[:size], self._piece[size:]
            return data
        return self._source.read(size) or b""

    def interrupt(self) -> None:
        if isinstance(self._source, Source):
            self._source.interrupt()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._source.close()


# The downloads of this process that have not ended, stopped when it ends.
_running: weakref.WeakSet[Download] = weakref.WeakSet()


class _AtExit:
    """In which process `_stop_all` is registered to run at the end, and whether it has run."""

    process = 0
    has_begun = False


def _remember(download: Download) -> None:
    _running.add(download)
    if _AtExit.process != os.getpid():
        _AtExit.process = os.getpid()
        # Unlike atexit, this runs at the end of multiprocessing's workers as well.
        multiprocessing.util.Finalize(None, _stop_all, exitpriority=10)


def _stop_all() -> None:
    _AtExit.has_begun = True
    for download in list(_running):
        download.stop(patience=_PATIENCE_AT_EXIT)


os.register_at_fork(after_in_child=_running.clear)
