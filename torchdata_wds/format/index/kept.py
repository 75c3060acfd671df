"""Indexes in the user's cache folder: those of single shards that were scanned, and those of whole lists of shards.

A file is named by a digest of what it is of: where a shard is, and which version. So it is never changed, and a shard
that is written anew has another file. Two processes that make the same one write the same. All are packed indexes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from torchdata_wds.environment import cache_home
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.format.index.columns import Columns, ShardColumns, pack
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.packed import KEYED, PackedIndex
from torchdata_wds.format.index.stores import BytesStore, FileStore
from torchdata_wds.handlers import warn_once
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.locks import LockedFile, lock

logger = logging.getLogger(__name__)
_SHARDS, _LISTS = "shards", "lists"
_PACK, _LOCK = ".pack", ".lock"
_OLD_SECONDS = 30 * 86400.0


class KeptIndexes:
    """The folder of kept indexes; where it cannot be written, indexes stay in memory, and one warning says so.

    Args:
        folder: The folder; None for a user who has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        try:
            if folder is not None:
                for name in (_SHARDS, _LISTS):
                    (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)

    @classmethod
    def of_user(cls) -> KeptIndexes:
        """Opens the folder of this user, and makes it if it is missing."""
        home = cache_home()
        return cls(None if home is None else Path(home, "torchdata_wds", "index"))

    def load_shard(self, name: str, url: str) -> ShardColumns | None:
        """Returns the index of a shard; None if it is not kept."""
        packed = self._open(_SHARDS, name)
        if packed is None:
            return None
        count, flags = int(packed.bounds[-1]), int(packed.flags[0])
        try:
            offsets = packed.offsets(0, 0, count)
            hashes = packed.all_hashes() if flags & KEYED else None
        except (ShardFormatError, ShardOpenError):
            return None
        stored = int(packed.stored[0])
        version = None if stored < 0 else StoredVersion(stored, packed.tag(0))
        return ShardColumns(url, offsets, hashes, int(packed.tar_bytes[0]), version, flags, packed.keys)

    def keep_shard(self, name: str, columns: ShardColumns) -> None:
        """Keeps the index of a shard."""
        self._write(_SHARDS, name, pack(Columns.of(columns.keys, [columns._replace(url=name)])), sync=False)

    def load_list(self, name: str, urls: Sequence[str], chosen: Sequence[int]) -> DatasetIndex | None:
        """Returns the index of a list of shards under their URLs, `chosen` of those kept; None if it is not kept."""
        packed = self._open(_LISTS, name)
        return None if packed is None else _named(packed, urls, chosen)

    def keep_list(self, name: str, image: bytearray, urls: Sequence[str], chosen: Sequence[int]) -> DatasetIndex:
        """Keeps the packed index of a list of shards, and returns it as `load_list` does."""
        self._write(_LISTS, name, image, sync=True)
        self._remove_old()
        return self.load_list(name, urls, chosen) or _named(PackedIndex(BytesStore(image, "in memory")), urls, chosen)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds the lock of a list while its index is made; waits for a process that does so already."""
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                with contextlib.suppress(OSError):  # then processes work side by side
                    path = self.folder / _LISTS / f"{name}{_LOCK}"
                    file = stack.enter_context(LockedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)))
                    os.utime(path)
                    if lock(file.fileno()) is False:
                        logger.info("another process makes the index of these shards: waiting for it")
                        lock(file.fileno(), wait=True)
            yield

    def _open(self, kind: str, name: str) -> PackedIndex | None:
        if (folder := self.folder) is None:
            return None
        path = folder / kind / f"{name}{_PACK}"
        try:
            packed = PackedIndex(FileStore(str(path), str(path)))
        except (ShardFormatError, ShardOpenError):  # it is made again
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is used
        return packed

    def _write(self, kind: str, name: str, data: bytes | bytearray, *, sync: bool) -> None:
        if (folder := self.folder) is None:  # which a thread that cannot write sets
            return
        path = folder / kind / f"{name}{_PACK}"
        part = path.with_name(f"{name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            with part.open("xb") as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        reason = error.strerror or error
        warn_once(
            "kept indexes",
            f"indexes cannot be kept in {self.folder}: {reason}. They are made again by each process that needs them; "
            "set XDG_CACHE_HOME to a folder that can be written, or write indexes beside the shards with `wds index`",
        )
        self.folder = None

    def _remove_old(self) -> None:
        """Removes what nobody has used for a month."""
        limit = time.time() - _OLD_SECONDS
        for kind in (_SHARDS, _LISTS) if self.folder is not None else ():
            with contextlib.suppress(OSError), os.scandir(Path(str(self.folder), kind)) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_mtime < limit:
                            os.unlink(entry.path)  # noqa: PTH108 - a str


def _named(packed: PackedIndex, urls: Sequence[str], chosen: Sequence[int]) -> DatasetIndex:
    everything = len(chosen) == len(packed.flags) and list(chosen) == list(range(len(chosen)))
    return DatasetIndex(packed, chosen=None if everything else np.array(chosen, np.int64), urls=tuple(urls))
