"""Readers of a shard that this or another process is downloading.

Each reader opens the growing file itself and waits only for the download, never for another reader; the download never
waits for readers. If the download is given up, its process is killed, or the file disappears, the reader starts its own
download or follows a new one. It compares the new bytes with those already delivered, and does not deliver them again.
"""

import contextlib
import io
import os
import sys
from types import NoneType

from torchdata_wds.errors import ShardOpenError, WdsError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, Source, interrupt, stored_bytes
from torchdata_wds.storage.cache.download import Download, stopped
from torchdata_wds.storage.cache.locked_files import CopyLock, is_of_other_size, is_of_size, is_sealed
from torchdata_wds.storage.cache.settings import CacheSettings, StalledError, Waiting
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.urls import mask_url

#: With `finish`, closing waits for the download as long as it makes progress within this many seconds.
_FINISH_SECONDS = 10.0


class _LostError(Exception):
    """The file being read ended too early: its download was given up, or another program cut it."""


class FollowedShard(Source):
    """The stored bytes of a shard: from its copy while that is written, or from the source if no copy can be made.

    With `finish`, closing the stream before its end first waits until a download that was started here is complete.
    Closing it at its end waits until the copy is kept, unless it `lingers`: then `wait_for_copies` does.
    """

    def __init__(
        self, cache: CacheSettings, url: str, path: str, *, finish: bool = False, lingers: bool = False
    ) -> None:
        self._cache, self._url, self._path, self._finish, self._lingers = cache, url, path, finish, lingers
        self._position = 0  # the number of bytes delivered
        self._checked = 0  # how many of these were compared with the current file or source
        self._proof: LockedFile | None = None  # a former file, which begins with all delivered bytes
        self._is_interrupted = False
        self._meter = cache.meter_of(url)
        self._file: LockedFile | None = None
        self._size = 0  # the largest size of the file seen so far
        self._is_copy = False
        self._download: Download | None = None  # the download that fills the file, if it was started here
        self._source: io.RawIOBase | None = None  # read instead of a file
        try:
            self._find()
        except BaseException:
            self.close()
            raise
        if self._source is None and self._download is None:
            self._meter.looked_up(hit=True)

    def fill(self, view: memoryview) -> int:
        """Reads the next bytes, waiting for them; 0 only at the verified end."""
        while True:
            if self._is_interrupted:
                raise stopped(self._url)
            # A download died after 5,000,000 bytes were delivered: the next one is read from its start into a scratch
            # buffer, and compared with the old file, until _checked is 5,000,000 too. Only then is `view` filled again.
            behind = self._position - self._checked
            target = view if not behind else memoryview(bytearray(min(behind, BUFFER_SIZE)))
            try:
                count = self._read(target)
            except (_LostError, StalledError) as error:
                self._find_another(error)
                continue
            if not behind:
                self._position = self._checked = self._meter.byte = self._checked + count
                return count
            assert self._proof is not None
            if not count or os.pread(self._proof.fileno(), count, self._checked) != target[:count]:
                shard = mask_url(self._url)
                raise ShardOpenError(
                    f"shard {shard} changed while it was read: its download was given up and started again, and the "
                    f"new bytes differ after byte {self._checked:,} of the {self._position:,} that were already read. "
                    "Try again",
                    shard=shard,
                )
            self._checked += count

    def interrupt(self) -> None:
        """Ends its own download, or the wait for that of another process."""
        self._is_interrupted = True
        if self._download is not None:
            self._download.stop()
        if self._source is not None:
            interrupt(self._source)

    def _find(self) -> None:
        """Finds something to read: the copy, an unfinished one, a new download, or else the source."""
        try:
            file = self._file = self._find_in_folder()
            self._size = os.fstat(file.fileno()).st_size
            self._cache.check_mark(self._url, self._path, file.fileno())
        except WdsError:
            raise
        except OSError as error:
            self._open_source(error)

    def _find_in_folder(self) -> LockedFile:
        cache, path, waiting = self._cache, self._path, Waiting()
        while True:
            copy = cache.open_copy(self._url, path)
            self._is_copy = copy is not None
            if copy is not None:
                return copy
            self._download = Download.begin(cache, self._url, path)
            if self._download is not None:
                return self._download.start()
            if (part := CopyLock.open_part(path)) is not None:
                return part
            waiting.go_on()

    def _open_source(self, reason: OSError) -> None:
        self._leave()
        self._cache.warn(self._url, reason.strerror or str(reason))
        self._source = stored_bytes(open_shard(self._url, storage_options=self._cache.storage_options))

    def _find_another(self, reason: _LostError | StalledError) -> None:
        # The lost file holds all delivered bytes, so it becomes the proof. If the file after it is lost too before it
        # has caught up, the older file stays the proof: only that one is long enough.
        if self._checked == self._position:
            self._file, self._proof = self._proof, self._file
        self._leave()
        self._checked = 0
        if isinstance(reason, StalledError):
            self._open_source(reason)
        else:
            self._find()

    def _read(self, view: memoryview) -> int:
        """Reads the bytes after the checked ones; 0 only at the verified end."""
        if self._source is not None:
            return self._source.readinto(view) or 0
        if self._download is not None:
            return self._read_download(self._download, view)
        assert self._file is not None
        waiting, is_filled = Waiting(), self._is_copy
        while not (count := self._read_file(view, self._checked)):
            if self._is_interrupted:
                raise stopped(self._url)
            if is_filled:
                is_whole = self._file.is_at(self._path) or is_sealed(self._file.fileno())
                if self._is_copy or (is_whole and not is_of_other_size(self._file.fileno())):
                    return 0
                raise _LostError
            # The writer holds an exclusive lock until it is done or dead. After that the file is read once more, since
            # bytes may have been added between the last read and the lock; if there are none, it is whole or lost. A
            # writer that has all bytes, and still waits for the disk, has noted their number.
            if self._file.lock(shared=True):
                is_filled = True
                continue
            if is_of_size(self._file.fileno(), self._checked):
                return 0
            with self._meter.waiting():
                waiting.go_on()
        return count

    def _read_download(self, download: Download, view: memoryview) -> int:
        if not download.is_here:
            raise ValueError("the stream was opened in another process, before this one was forked")
        with self._meter.waiting():
            download.wait_for(self._checked)
        if (end := download.position) > self._checked:
            if count := self._read_file(view[: end - self._checked], end):
                return count
            raise _LostError
        return 0 if download.is_whole else download.read_rest(view)

    def _read_file(self, view: memoryview, least: int) -> int:
        """Reads bytes of the file; raises `_LostError` if it is shorter than `least` bytes, or than it was before."""
        # If a file is cut just before a write, other bytes follow at this position. Its download sees the wrong size
        # after the write and stops, so the file stays shorter than before, unless less than one piece was cut off.
        assert self._file is not None
        count = os.preadv(self._file.fileno(), [view], self._checked)
        size = os.fstat(self._file.fileno()).st_size
        if size < max(least, self._size):
            raise _LostError
        self._size = size
        return count

    def _leave(self) -> None:
        """Closes the current file or source, and stops a download that was started here."""
        download, self._download = self._download, None
        if download is not None:
            download.close()
        if self._source is not None:
            with contextlib.suppress(Exception):
                self._source.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close(self) -> None:
        try:
            # Do not wait while an exception such as Ctrl-C is being handled. A StopIteration may be that of a former
            # epoch: many programs begin the next one in its handler.
            error = sys.exc_info()[1]
            if self._finish and not self._is_interrupted and error is None:
                download = self._download
                while download is not None and download.is_here and not (download.is_whole or download.has_ended):
                    if download.is_stopping or not download.wait_for(download.position, _FINISH_SECONDS):
                        break
            is_failing = not isinstance(error, (StopIteration, NoneType))
            if (download := self._download) is not None and self._position == download.position and not is_failing:
                if self._file is not None and download.is_whole and not download.has_ended:
                    self._file.leave()  # not closed, which would release the lock that the download still needs
                download.finish(lingers=self._lingers)
                self._download = None
        finally:
            self._leave()
            if self._proof is not None:
                self._proof.close()
                self._proof = None
