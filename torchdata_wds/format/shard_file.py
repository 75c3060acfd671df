"""One shard while it is written: packed samples to compressed bytes at their destination, or to nothing at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from torchdata_wds.errors import ReappearingKeyError, ShardOpenError
from torchdata_wds.format.headers import BLOCK
from torchdata_wds.format.index import IndexHeader, ShardIndex, index_url, pack_row
from torchdata_wds.format.packing import PackedSample
from torchdata_wds.storage import compression_for, mask_url, open_compressor, open_target, remove_target
from torchdata_wds.storage.urls import STDIN, scheme_of, url_text

__all__ = ["Destination", "ShardFile", "ShardInfo", "archive_size"]

Destination = str | os.PathLike[str] | BinaryIO

# tar writes whole records of 20 blocks
_RECORD = 20 * BLOCK
_FLUSH_AT = 256 << 10


@dataclass(frozen=True)
class ShardInfo:
    """A finished shard.

    Attributes:
        path: Its path or URL.
        count: How many samples it has.
        bytes: Its size in bytes, as it is stored.
        sha256: Its digest, in hexadecimal digits.
    """

    path: str
    count: int
    bytes: int
    sha256: str


def archive_size(content: int) -> int:
    """The size of a finished archive whose members take so many bytes: with its end marker, in whole records.

    Example:
        >>> archive_size(0), archive_size(9216), archive_size(9217)
        (10240, 10240, 20480)
    """
    return content + 2 * BLOCK + -(content + 2 * BLOCK) % _RECORD


class OpenFile:
    """A file that somebody else has opened: it is written to, and neither closed nor renamed."""

    def __init__(self, file: BinaryIO, shard: str) -> None:
        self._file = file
        self._shard = shard

    def write(self, data: bytes, /) -> None:
        """Writes all of it."""
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            # text files, and files that do not block, would lose what they do not take
            if not isinstance(written, int) or not 0 < written <= len(view):
                raise ShardOpenError(
                    f"the file of shard {self._shard!r} took {written!r} of {len(view):,} bytes; a shard needs a "
                    "binary, blocking file (mode='wb')",
                    shard=self._shard,
                )
            view = view[written:]

    def commit(self) -> None:
        """Hands everything over to the system."""
        flush = getattr(self._file, "flush", None)
        if callable(flush):
            flush()

    def abort(self) -> None:
        """Leaves the file as it is: without an end marker, so that every reader sees that it is no whole shard."""


class ShardFile:
    """A shard that is being written.

    Whatever happens before `close` has returned, nothing with the shard's name is there that is not whole.

    Args:
        destination: A path, a URL that can be written, or an open binary file.
        name: What an open file is called.
        compress: As in `compression_for`.
        overwrite: Whether a shard of that name is replaced.
        index: Whether an index is written beside the shard.
        digest: Whether the SHA-256 digest is computed, as it always is for an index.
        storage_options: Options by protocol.

    Raises:
        ShardOpenError: if it cannot be written there.
        ValueError: for an unknown compression, or an index that there is no place for.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        name: str = "",
        compress: str | bool | None = None,
        overwrite: bool = False,
        index: bool = False,
        digest: bool = True,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._options = storage_options
        self._overwrite = overwrite
        if isinstance(destination, (str, os.PathLike)):
            self.url = url_text(destination)
            self._old_index = _old_index(self.url, index, overwrite)
            self._target: Any = open_target(self.url, overwrite=overwrite, storage_options=storage_options)
        else:
            self.url = name
            self._old_index = None
            self._target = _take_file(destination, mask_url(name), index)
        self._compression = compression_for(self.url, compress)
        self._compressor = open_compressor(self._compression) if self._compression else None
        self._digest = hashlib.sha256() if digest or index else None
        self._stored = 0
        self._keys: set[str] = set()
        self._rows: list[str] | None = [] if index else None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._size = 0

    @property
    def count(self) -> int:
        """How many samples it has so far."""
        return len(self._keys)

    @property
    def size(self) -> int:
        """The bytes of the archive so far, before compression."""
        return self._size

    def append(self, packed: PackedSample) -> None:
        """Adds a sample.

        Raises:
            ReappearingKeyError: if a sample before it has the same key; nothing is written then.
            ShardOpenError: if the destination fails.
        """
        key = packed.key
        if key in self._keys:
            raise ReappearingKeyError(
                f"key {key!r} comes twice in shard {mask_url(self.url)}: a reader would refuse the second sample. "
                "Give it another key",
                shard=mask_url(self.url),
                key=key,
            )
        if self._rows is not None:
            start = self._size
            places = [(name, start + offset, size) for name, offset, size in packed.members()]
            self._rows.append(pack_row(key, start, start + packed.size, places))
        self._keys.add(key)
        self._size += packed.size
        self._pending += packed.parts
        self._pending_size += packed.size
        # the first sample at once: a destination that cannot be written shows before much work is done
        if self._pending_size >= _FLUSH_AT or len(self._keys) == 1:
            self._flush()

    def close(self) -> ShardInfo:
        """Finishes the shard and lets it appear under its name.

        Returns:
            What was written.

        Raises:
            ShardOpenError: if the destination fails.
        """
        try:
            end = archive_size(self._size)
            self._pending.append(bytes(end - self._size))
            self._size = end
            self._flush()
            if self._compressor is not None:
                self._store(self._compressor.flush())
            info = ShardInfo(self.url, self.count, self._stored, self._digest.hexdigest() if self._digest else "")
            self._commit(info)
        except BaseException:
            self.abort()
            raise
        return info

    def abort(self) -> None:
        """Gives the shard up: it never appears under its name. A local one stays as ``.partial``, with all samples."""
        with contextlib.suppress(Exception):
            self._flush()
        self._pending = []
        self._target.abort()

    def _flush(self) -> None:
        if self._compressor is not None:
            self._store(self._compressor.compress(b"".join(self._pending)))
        else:
            self._store(b"".join(self._pending))
        self._pending = []
        self._pending_size = 0

    def _store(self, data: bytes) -> None:
        if data:
            self._target.write(data)
            if self._digest is not None:
                self._digest.update(data)
            self._stored += len(data)

    def _commit(self, info: ShardInfo) -> None:
        """Lets shard and index appear, in an order in which a kill leaves no index beside a shard that is not its own.

        A new shard has its index before it; one that is replaced has none for a moment.
        """
        if self._old_index is not None:
            remove_target(self._old_index, storage_options=self._options)
        if self._rows is None or self._overwrite:
            self._target.commit()
        if self._rows is not None:
            self._save_index(info, self._rows)
        if self._rows is not None and not self._overwrite:
            self._target.commit()

    def _save_index(self, info: ShardInfo, rows: list[str]) -> None:
        name = mask_url(self.url).partition("?")[0].rpartition("/")[2]
        header = IndexHeader(name, "first_dot", len(rows), self._size, info.bytes, info.sha256)
        ShardIndex(header, rows).save(index_url(self.url), storage_options=self._options)


def _old_index(url: str, index: bool, overwrite: bool) -> str | None:
    """Where an index may lie that is not the new shard's: of the shard before, or of a writer that was killed.

    Raises:
        ValueError: if an index is asked for where nothing lies beside the shard.
    """
    scheme = scheme_of(url)
    is_local = scheme in ("", "file")
    if index or is_local or (overwrite and scheme not in (STDIN, "pipe")):
        return index_url(url)
    return None


def _take_file(file: Any, shard: str, index: bool) -> OpenFile:
    if index:
        raise ValueError("index=True needs a path or a URL: there is no place beside an open file")
    if not callable(getattr(file, "write", None)):
        raise TypeError(f"a shard is written to a path, a URL or a binary file, not to {file!r}")
    return OpenFile(file, shard)
