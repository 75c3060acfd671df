"""Comparing a shard, while it is read, with the index beside it."""

from __future__ import annotations

import os
from contextlib import suppress

from torchdata_wds.errors import ShardFormatError, ShardOpenError, UnsafeDataError, cli_message
from torchdata_wds.format.index import ShardIndex, index_url
from torchdata_wds.option_types import KeyRule
from torchdata_wds.storage import StorageOptions
from torchdata_wds.storage.urls import is_local, local_path

_CURE = "It is of another version of the shard, and loaders that divide the shard by it fail: make it again"


class IndexCheck:
    """The index beside a shard, compared with the samples as they are read; one made by another rule for keys is not.

    `fault` is the first thing that is wrong with it; None if it is right or absent.
    """

    def __init__(self, url: str, keys: KeyRule, storage_options: StorageOptions) -> None:
        self.fault: str | None = None
        self.is_readable = True
        self._index: ShardIndex | None = None
        self._count = 0
        try:
            index = ShardIndex.load(index_url(url), storage_options=storage_options)
        except ShardFormatError as error:
            self.fault = cli_message(error)
            self.is_readable = False
            return
        except (ShardOpenError, UnsafeDataError, ValueError):  # there is none, or no place for one
            return
        if index.header.keys != keys:
            return
        self._index = index
        expected = index.header.bytes
        if expected is not None and is_local(url):
            with suppress(OSError):  # opening the shard says better what is wrong
                found = os.stat(local_path(url)).st_size  # noqa: PTH116 - a str
                if found != expected:
                    self._blame(f"the shard has {found:,} bytes, and the index says {expected:,}")

    def compare(self, key: str, start: int, stop: int) -> None:
        """Compares the next sample: its key, and the bytes from its first header to its last padding."""
        number = self._count
        self._count += 1
        if self._index is None or self.fault is not None or number >= len(self._index):
            return
        try:
            row = self._index[number]
        except ShardFormatError as error:
            self.fault = cli_message(error)
            return
        if (row.key, row.start, row.stop) != (key, start, stop):
            self._blame(
                f"sample {number:,} is {key!r} from byte {start:,} to {stop:,}, and the index says {row.key!r} from "
                f"byte {row.start:,} to {row.stop:,}"
            )

    def finish(self, tar_bytes: int) -> None:
        """Compares the counts and the archive's size at the shard's end."""
        if self._index is None:
            return
        header = self._index.header
        if header.samples != self._count:
            self._blame(f"the shard has {self._count:,} samples, and the index says {header.samples:,}")
        if header.tar_bytes != tar_bytes:
            self._blame(f"the archive has {tar_bytes:,} bytes, and the index says {header.tar_bytes:,}")

    def _blame(self, what: str) -> None:
        if self.fault is None:
            self.fault = f"the index beside the shard is stale: {what}. {_CURE}"
