"""Comparing a shard, while it is read, with the index that lies beside it."""

from __future__ import annotations

import os

from torchdata_wds.errors import ShardFormatError, ShardOpenError, UnsafeDataError
from torchdata_wds.format.index import ShardIndex, index_url
from torchdata_wds.option_types import KeyRule
from torchdata_wds.storage import StorageOptions
from torchdata_wds.storage.urls import local_path, scheme_of

__all__ = ["IndexCheck"]


_CURE = "It is of another version of the shard, and loaders that divide the shard by it fail: make it again"


class IndexCheck:
    """The index beside a shard, compared with the samples as they are read.

    Args:
        url: The shard.
        keys: The rule by which names are split; an index that was made by another one is not looked at.
        storage_options: Options by protocol.

    Attributes:
        fault: What is wrong with it, first of all; None where nothing is, or there is none.
        is_readable: Whether it is an index at all, if there is one.
    """

    def __init__(self, url: str, keys: KeyRule, storage_options: StorageOptions) -> None:
        self.fault: str | None = None
        self.is_readable = True
        self._index: ShardIndex | None = None
        self._count = 0
        try:
            index = ShardIndex.load(index_url(url), storage_options=storage_options)
        except ShardFormatError as error:
            self.fault = str(error)
            self.is_readable = False
        except (ShardOpenError, UnsafeDataError, ValueError):  # there is none, or no place for one
            return
        else:
            if index.header.keys == keys:
                self._index = index
                self._check_size(index, url)

    def compare(self, key: str, start: int, stop: int) -> None:
        """Compares the next sample of the shard.

        Args:
            key: Its key.
            start: Where its first header begins.
            stop: Where its last member's padding ends.
        """
        number = self._count
        self._count += 1
        if self._index is None or self.fault is not None or number >= len(self._index):
            return
        try:
            row = self._index[number]
        except ShardFormatError as error:
            self.fault = str(error)
            return
        if (row.key, row.start, row.stop) != (key, start, stop):
            self._tell(
                f"sample {number:,} is {key!r} from byte {start:,} to {stop:,}, and the index says {row.key!r} from "
                f"byte {row.start:,} to {row.stop:,}"
            )

    def finish(self, tar_bytes: int) -> None:
        """Compares what is known at the shard's end.

        Args:
            tar_bytes: Size of the archive.
        """
        if self._index is None:
            return
        header = self._index.header
        if header.samples != self._count:
            self._tell(f"the shard has {self._count:,} samples, and the index says {header.samples:,}")
        if header.tar_bytes != tar_bytes:
            self._tell(f"the archive has {tar_bytes:,} bytes, and the index says {header.tar_bytes:,}")

    def _check_size(self, index: ShardIndex, url: str) -> None:
        expected = index.header.bytes
        if expected is None or scheme_of(url) not in ("", "file"):
            return
        try:
            found = os.stat(local_path(url)).st_size  # noqa: PTH116 - a str
        except OSError:  # opening it says better what is wrong
            return
        if found != expected:
            self._tell(f"the shard has {found:,} bytes, and the index says {expected:,}")

    def _tell(self, what: str) -> None:
        if self.fault is None:
            self.fault = f"the index beside the shard is stale: {what}. {_CURE}"
