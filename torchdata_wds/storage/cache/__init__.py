"""A local folder of shard copies: each is downloaded once, appears only when complete, and reads like the shard."""

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

from torchdata_wds.errors import CacheError, ShardFormatError, WdsError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, ByteStream, ShardSource, Source, interrupt, wrap_source
from torchdata_wds.storage.cache.download import Download, wait_for_copies
from torchdata_wds.storage.cache.followers import FollowedShard
from torchdata_wds.storage.cache.locked_files import CopyLock, ShardFacts, open_copy
from torchdata_wds.storage.cache.settings import CacheSettings, Check, Waiting
from torchdata_wds.storage.decompression import HEAD_SIZE, may_be_compressed
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.meters import LOCAL_FILES, Meter
from torchdata_wds.storage.running_reads import interruptible
from torchdata_wds.storage.urls import mask_url

__all__ = ["Check", "ShardCache", "wait_for_copies"]
_PLAIN_BUFFER_SIZE = 1 << 16


@dataclass(frozen=True)
class ShardCache(CacheSettings):
    """A folder of copies: each is made once, and reads like the shard."""

    def open(
        self,
        url: str,
        path: str,
        offset: int = 0,
        *,
        finish: bool = False,
        lingers: bool = False,
        facts: ShardFacts | None = None,
    ) -> ByteStream:
        """Opens the copy of a shard at an offset in decompressed bytes; makes the copy if it is missing.

        With `finish`, the copy is completed even if the stream is closed before its end. A copy is kept before its
        stream is closed; if it `lingers`, in a thread, for which `wait_for_copies` waits. With `facts`, the copy is
        completed and compared with them before it is read: an old copy that differs is made again, and a new one that
        differs raises ShardFormatError. A copy that belongs to another shard raises CacheError, and a source that fails
        ShardOpenError.
        """
        if offset < 0:
            raise ValueError(f"offset must not be negative, found {offset}")
        try:
            copy = None if facts is not None else self.open_copy(url, path)
            is_hit = copy is not None
            if facts is not None or (copy is None and not self.while_reading):
                is_hit = not self._make(url, path, facts)
                copy = self.open_copy(url, path)
        except WdsError:
            raise
        except OSError as error:
            self.warn(url, error.strerror or str(error))
            return open_shard(url, offset=offset, storage_options=self.storage_options)
        if copy is None:
            shard = FollowedShard(self, url, path, finish=finish, lingers=lingers)
            return wrap_source(shard, mask_url(url), skip=offset)
        self.report("hit %s: %s", mask_url(url), path)
        if is_hit:
            self.meter_of(url).looked_up(hit=True)
        source = _CopySource(self, url, path, copy, offset)
        return io.BufferedReader(source, source.buffer_size)

    def fetch(self, url: str, path: str, facts: ShardFacts | None = None) -> Path:
        """Makes a missing copy, or waits for the process that does; returns its path, or raises CacheError."""
        try:
            if not self._make(url, path, facts):
                self.meter_of(url).looked_up(hit=True)
        except WdsError:
            raise
        except OSError as error:
            shard, reason = mask_url(url), error.strerror or error
            message = f"shard {shard} cannot be kept in the cache folder {self.folder}: {reason}"
            raise CacheError(message, shard=shard) from error
        self.check_mark(url, path, path)
        return Path(path)

    def make(self, url: str, path: str, facts: ShardFacts | None = None) -> LockedFile | None:
        """Makes a missing copy and opens its stored bytes; None, with a warning, if the cache cannot store it.

        Raises the errors of `open`. While the file is open, its copy is not evicted.
        """
        waiting, is_hit = Waiting(), True
        try:
            while True:
                is_hit = not self._make(url, path, facts) and is_hit
                if (copy := self.open_copy(url, path)) is not None:
                    if is_hit:
                        self.meter_of(url).looked_up(hit=True)
                    return copy
                waiting.go_on()
        except WdsError:
            raise
        except OSError as error:
            self.warn(url, error.strerror or str(error))
            return None

    def _make(self, url: str, path: str, facts: ShardFacts | None) -> bool:
        """Makes a copy that is missing or differs from the facts; returns whether this process made it.

        Raises OSError if the cache cannot store it.
        """
        is_made = False
        may_be_stale, waiting = os.path.exists(path), Waiting()  # noqa: PTH110 - a str
        while True:
            if not os.path.exists(path):  # noqa: PTH110
                download = Download.begin(self, url, path, is_quiet=True)
                if download is None:
                    with self.meter_of(url).waiting():
                        waiting.go_on(CopyLock.progress_of(path))
                    continue
                is_made = True
                with interruptible(download.stop):
                    download.complete()
            if facts is None:
                return is_made
            with contextlib.suppress(FileNotFoundError), open_copy(path) as file:  # if it was evicted, make it again
                self.check_mark(url, path, file.fileno())
                difference = facts.difference(file.fileno())
                if not difference:
                    return is_made
                if not may_be_stale or not self.drop(path, file):
                    shard = mask_url(url)
                    raise ShardFormatError(
                        f"shard {shard}, whose copy is {path}, is not the one that its index describes: it has "
                        f"{difference}, as the index says. The index and the shard are of different versions: make the "
                        "index again with index_shard, or remove the copy if it was put there by hand",
                        shard=shard,
                        kind="index",
                    )
                self.report("stale %s: its copy has %s", mask_url(url), difference)
                may_be_stale = False


class _CopySource(Source):
    """The decompressed bytes of a finished copy; if the copy cannot be read, the source provides the rest.

    If compressed data turns out to be damaged, the bytes already delivered may be wrong too, so that raises an error
    and removes the copy.
    """

    def __init__(self, cache: ShardCache, url: str, path: str, file: LockedFile, offset: int) -> None:
        self._cache, self._url, self._path, self._file = cache, url, path, file
        self._start = self._position = offset
        self._is_source = False
        self._failure: Exception | None = None
        self._meter = Meter(mask_url(url), LOCAL_FILES)
        self._meter.opened()
        self._stream: io.RawIOBase = file
        self._size = 0  # of an uncompressed copy
        self.buffer_size = BUFFER_SIZE
        head = os.pread(file.fileno(), HEAD_SIZE, 0)
        if may_be_compressed(head):
            self._stream = source = ShardSource(file, f"{mask_url(url)} (its copy {path})", skip=offset)
            source.attach(self._meter)
            return
        size = self._size = os.fstat(file.fileno()).st_size
        if offset > size:
            file.close()
            shard = mask_url(url)
            raise ShardFormatError(
                f"the copy {path} of shard {shard} ends at byte {size:,}, before the offset {offset:,} that was asked "
                "for; is the shard's index older than the shard, or the copy?",
                shard=shard,
                kind="index",
            )
        self.buffer_size = _PLAIN_BUFFER_SIZE
        file.seek(offset)
        self._meter.byte = offset

    def fill(self, view: memoryview) -> int:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            count = self._read(view)
            if not count and self._stream is self._file and self._position < self._size:
                raise OSError(f"it ends at byte {self._position:,} of {self._size:,}")
        except (OSError, ShardFormatError) as error:
            if self._is_source or isinstance(error.__cause__, ImportError):
                raise
            if isinstance(error, ShardFormatError) and self._position > self._start:
                self._failure = self._remove_damaged(error)
                raise self._failure from error
            self._turn_to_source(error)
            count = self._read(view)
        self._position += count
        return count

    def _read(self, view: memoryview) -> int:
        if self._stream is self._file:
            return self._meter.read_into(self._file.readinto, view)
        return self._stream.readinto(view) or 0  # which has a meter

    def _remove_damaged(self, error: ShardFormatError) -> ShardFormatError:
        is_gone = self._cache.drop(self._path, self._file)
        cure = "The copy was removed: read the shard again" if is_gone else "Remove the copy, and read the shard again"
        return error.extended(f"{'' if str(error).endswith('.') else '.'} {cure}", shard=mask_url(self._url))

    def _turn_to_source(self, reason: Exception) -> None:
        self._cache.warn(self._url, f"its copy {self._path} is damaged: {reason}")
        self._is_source = True
        self._cache.drop(self._path, self._file)
        self._stream.close()
        try:
            source = open_shard(self._url, offset=self._position, storage_options=self._cache.storage_options)
            self._stream = source.detach()
        except Exception as error:
            self._failure = error
            raise

    def interrupt(self) -> None:
        interrupt(self._stream)

    def _close(self) -> None:
        self._failure = None
        self._stream.close()
