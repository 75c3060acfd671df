"""Reading a shard while it is downloaded, by this process or another one.

Each reader opens the growing file itself and waits only for the download, never for another reader; the download waits
for nobody. If the download is given up, its process is killed, or the file disappears, the reader starts a download of
its own or follows a new one. What it has delivered by then is compared with the new bytes, and not delivered again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, Source, stored_bytes
from torchdata_wds.storage.cache.download import Download, Outcome
from torchdata_wds.storage.cache.locked_files import CopyLock, is_of_other_size, is_sealed, open_copy, open_part
from torchdata_wds.storage.cache.progress import StalledError, Waiting, report
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.opening import open_shard
from torchdata_wds.storage.urls import mask_url

if TYPE_CHECKING:
    import io

    from _typeshed import WriteableBuffer

    from torchdata_wds.storage.cache.settings import CacheSettings

#: Closing waits for a download that nobody reads any more while it progresses at least once in this many seconds.
_FINISH_SECONDS = 10.0


class _LostError(Exception):
    """The file that was read ended too early: its download was given up, or somebody cut it."""


class FollowedShard(Source):
    """The stored bytes of a shard, from its copy while that is written.

    `origin` is where it is read first. With `finish`, closing the stream before its end waits for the whole copy.
    """

    def __init__(self, cache: CacheSettings, url: str, path: str, origin: Origin, *, finish: bool = False) -> None:
        self._cache = cache
        self._url = url
        self._path = path
        self._finish = finish
        self._position = 0  # what was delivered
        self._checked = 0  # how much of it is known to be the same in what is read now
        self._proof: LockedFile | None = None  # a file that begins with what was delivered
        self._is_interrupted = False
        self._origin = origin

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Reads the next bytes, waiting for them; 0 only at the verified end."""
        view = memoryview(buffer)
        while True:
            if self._is_interrupted:
                raise _stopped(self._url)
            behind = self._position - self._checked
            target = view if not behind else memoryview(bytearray(min(behind, BUFFER_SIZE)))
            try:
                count = self._origin.read(target, self._checked)
            except (_LostError, StalledError) as error:
                self._find_another(error)
                continue
            if not behind:
                self._position = self._checked = self._checked + count
                return count
            if not count or not self._is_the_same(target[:count]):
                raise self._has_changed()
            self._checked += count

    def _is_the_same(self, data: memoryview) -> bool:
        assert self._proof is not None
        return os.pread(self._proof.fileno(), len(data), self._checked) == data

    def _find_another(self, reason: _LostError | StalledError) -> None:
        # What was delivered is proven by the file it came from. While the next origin catches up with that, the old
        # file stays the proof, even if this next one is lost as well.
        if self._checked == self._position:
            self._drop_proof()
            self._proof = self._origin.release_file()
        self._origin.close()
        if isinstance(reason, StalledError):
            self._origin = _open_source(self._cache, self._url, reason)
        else:
            self._origin = find_origin(self._cache, self._url, self._path)
        self._checked = 0

    def _has_changed(self) -> ShardOpenError:
        shard = mask_url(self._url)
        return ShardOpenError(
            f"shard {shard} changed while it was read: its download was given up and started again, and the new bytes "
            f"differ after byte {self._checked:,} of the {self._position:,} that were already read. Try again",
            shard=shard,
        )

    def interrupt(self) -> None:
        """Ends its own download, or the wait for another's."""
        self._is_interrupted = True
        self._origin.stop()

    def _drop_proof(self) -> None:
        if self._proof is not None:
            self._proof.close()
            self._proof = None

    def _close(self) -> None:
        try:
            # Ctrl-C and other errors should end soon.
            if self._finish and not self._is_interrupted and sys.exc_info()[0] is None:
                self._origin.finish()
        finally:
            self._origin.close()
            self._drop_proof()


class Origin:
    """Where the bytes come from: the source itself, or a subclass."""

    def __init__(self, source: io.RawIOBase) -> None:
        self._source = source

    def read(self, view: memoryview, position: int) -> int:  # noqa: ARG002 - a source goes forward only
        """Reads bytes at a position; 0 only at the verified end. After a `_LostError`, find another origin."""
        return self._source.readinto(view) or 0

    def release_file(self) -> LockedFile | None:
        """Gives away the file that was read from, if there is one."""
        return None

    def stop(self) -> None:
        """Ends a read in another thread, and a download that this reader started."""
        if isinstance(self._source, Source):
            self._source.interrupt()

    def finish(self) -> None:
        """Waits for a download that this reader started, while it makes progress."""

    def close(self) -> None:
        """Releases all resources."""
        with contextlib.suppress(Exception):
            self._source.close()


class _FileOrigin(Origin):
    """A copy, or the file of one in the making, which another reader or process fills."""

    def __init__(self, file: LockedFile, path: str, *, is_copy: bool = False) -> None:
        self._file = file
        self._path = path
        self._is_copy = is_copy
        self._size = os.fstat(file.fileno()).st_size  # the largest that was seen
        self._is_filled = is_copy
        self._is_released = self._is_stopped = False

    def read(self, view: memoryview, position: int) -> int:
        waiting = Waiting()
        while True:
            count = self._read_file(view, position, position)
            if count:
                return count
            if self._is_filled or self._is_stopped:
                break
            if self._file.lock(shared=True):  # the process that filled it has ended, in whatever way
                self._is_filled = True
            else:
                waiting.go_on()
        if self._is_stopped or self._is_lost():
            raise _LostError
        return 0

    def _read_file(self, view: memoryview, position: int, least: int) -> int:
        """Reads bytes at a position; a `_LostError` if the file has fewer than `least` bytes, or than it had before.

        A file that was cut in the moment before a write has other bytes at this position. Its download notices that by
        the size after the write, and stops: what was cut is then still missing, unless that was less than one piece.
        """
        count = os.preadv(self._file.fileno(), [view], position)
        size = os.fstat(self._file.fileno()).st_size
        if size < max(least, self._size):
            raise _LostError
        self._size = size
        return count

    def _is_lost(self) -> bool:
        """Returns whether its maker gave it up, or somebody cut it."""
        file = self._file.fileno()
        return not self._is_copy and (is_of_other_size(file) or not (self._file.is_at(self._path) or is_sealed(file)))

    def check(self, cache: CacheSettings, url: str) -> None:
        """Raises a CacheError if the file is a copy of another shard."""
        cache.check_mark(url, self._path, self._file.fileno())

    def stop(self) -> None:
        self._is_stopped = True

    def release_file(self) -> LockedFile:
        """Gives the file away."""
        self._is_released = True
        return self._file

    def close(self) -> None:
        """Closes the file, unless it was given away."""
        if not self._is_released:
            self._file.close()


class _DownloadOrigin(_FileOrigin):
    """The file of this reader's own download."""

    def __init__(self, path: str, download: Download) -> None:
        super().__init__(download.open_file(), path)
        self._download = download
        self._rest: io.RawIOBase | None = None

    def read(self, view: memoryview, position: int) -> int:
        download = self._download
        if not download.is_here:
            raise ValueError("the stream was opened in another process, before this one was forked")
        if self._rest is not None:
            return self._rest.readinto(view) or 0
        download.wait_for(position)
        if (end := download.position) > position:
            if count := self._read_file(view[: end - position], position, end):
                return count
            raise _LostError
        if download.outcome is Outcome.FAILED:
            assert download.failure is not None
            raise download.failure.with_traceback(None)
        if download.outcome is Outcome.DIRECT:
            self._rest = download.take_rest()
            return self._rest.readinto(view) or 0
        if download.outcome is Outcome.STOPPED:
            raise _stopped(download.url)
        return 0

    def stop(self) -> None:
        self._download.stop()
        if isinstance(self._rest, Source):
            self._rest.interrupt()

    def finish(self) -> None:
        download = self._download
        while download.is_here and not download.is_stopping and download.outcome is None:
            if not download.wait_for(download.position, _FINISH_SECONDS):
                return

    def close(self) -> None:
        self._download.stop()
        if self._rest is not None:
            self._rest.close()
        super().close()


def find_origin(cache: CacheSettings, url: str, path: str) -> Origin:
    """Finds where to read a shard: its copy, a copy in the making, a download that is started here, or the source.

    Raises:
        CacheError: if the copy, or the file of one in the making, belongs to another shard.
        ShardOpenError: if the source cannot be opened.
    """
    try:
        origin = _find_in_folder(cache, url, path)
    except OSError as error:
        return _open_source(cache, url, error)
    try:
        origin.check(cache, url)
    except BaseException:
        origin.close()
        raise
    return origin


def _find_in_folder(cache: CacheSettings, url: str, path: str) -> _FileOrigin:
    waiting = Waiting()
    while True:
        with contextlib.suppress(FileNotFoundError):
            copy = open_copy(path)
            if not cache.is_cut(copy):
                return _FileOrigin(copy, path, is_copy=True)
            with copy:
                if not cache.drop(path, copy):
                    raise OSError(f"its copy {path} is cut")
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a str
        lock = CopyLock.acquire(path)
        if lock is None:
            part = CopyLock.part_of(path)
            file = None if part is None else open_part(part)
            if file is not None:
                return _FileOrigin(file, path)
        elif not os.path.exists(path):  # noqa: PTH110
            return _start_download(cache, url, lock)
        else:
            lock.release()
        waiting.go_on()


def _open_source(cache: CacheSettings, url: str, reason: OSError) -> Origin:
    cache.warn(url, reason.strerror or str(reason))
    return Origin(stored_bytes(open_shard(url, storage_options=cache.storage_options)))


def _start_download(cache: CacheSettings, url: str, lock: CopyLock) -> _DownloadOrigin:
    report(cache.verbose, "miss %s", mask_url(url))
    download = Download(cache, url, lock)
    try:
        origin = _DownloadOrigin(lock.path, download)
        download.start()
    except BaseException:
        download.stop()
        raise
    return origin


def _stopped(url: str) -> ShardOpenError:
    shard = mask_url(url)
    return ShardOpenError(
        f"reading shard {shard} was stopped, by another thread or the end of the program", shard=shard
    )
