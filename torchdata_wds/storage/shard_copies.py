"""Copies of remote shards in a local folder: each is downloaded once, by one process, and only appears whole.

A copy is decompressed, and named after its URL; one that is there is taken as it is, however old.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchdata_wds.errors import CacheError
from torchdata_wds.storage.opening import open_shard
from torchdata_wds.storage.searching import SHARD_SUFFIXES
from torchdata_wds.storage.streams import BUFFER_SIZE
from torchdata_wds.storage.targets import open_target
from torchdata_wds.storage.urls import STDIN, mask_url, scheme_of

__all__ = ["copy_name", "is_copied", "local_copy"]

_NEVER_COPIED = ("", "file", "pipe", STDIN)
_LONGEST_STEM = 100


def is_copied(url: str) -> bool:
    """Tells whether `local_copy` is for this URL: a local file is its own copy, and a command gives what it likes.

    Example:
        >>> [is_copied(url) for url in ("s3://b/x.tar", "https://host/x.tar", "x.tar", "file:x.tar", "pipe:cat x.tar")]
        [True, True, False, False, False]
    """
    return scheme_of(url) not in _NEVER_COPIED


def copy_name(url: str) -> str:
    """Names the copy of a shard: the shard's own name, and a digest of the whole URL.

    Example:
        >>> copy_name("s3://bucket/data/train-000.tar.gz?versionId=3")
        'train-000-3566d554aa90429fdb966a5dc395f2a0.tar'
    """
    stem = urlsplit(url.rpartition("::")[2]).path.rpartition("/")[2]
    suffix = max((suffix for suffix in SHARD_SUFFIXES if stem.lower().endswith(suffix)), key=len, default="")
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", stem.removesuffix(suffix) if suffix else stem)[:_LONGEST_STEM].lstrip(".")
    digest = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{stem or 'shard'}-{digest}.tar"


def local_copy(
    url: str, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> Path:
    """Gives the local copy of a remote shard, and makes it if there is none; other processes wait meanwhile.

    Args:
        url: The shard's URL.
        folder: The folder of the copies; it is made if need be, and must be on a file system with locks.
        storage_options: Options by protocol, for reading.

    Returns:
        The copy's path: a whole, decompressed shard.

    Raises:
        CacheError: if the folder cannot be written.
        ShardOpenError: if the shard cannot be opened or read.
        ShardFormatError: if its compression is damaged.
    """
    path = Path(folder).absolute() / copy_name(url)
    if not path.exists():
        with _lock(path, mask_url(url)):
            # Another process may have made it while this one waited.
            if not path.exists():
                _download(url, path, storage_options)
    return path


def _download(url: str, path: Path, storage_options: Mapping[str, Mapping[str, Any]] | None) -> None:
    shard = mask_url(url)
    with open_shard(url, storage_options=storage_options) as stream:
        with _cache_errors(path.parent, shard):
            target = open_target(path, overwrite=True)
        try:
            while piece := stream.read(BUFFER_SIZE):
                with _cache_errors(path.parent, shard):
                    target.write(piece)
            with _cache_errors(path.parent, shard):
                target.commit()
        finally:
            target.abort()  # does nothing to what is committed


@contextlib.contextmanager
def _lock(path: Path, shard: str) -> Iterator[None]:
    """Holds the lock of one copy; its file stays, for those who wait for it would else hold a lock on nothing."""
    with _cache_errors(path.parent, shard):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with _cache_errors(path.parent, shard):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            # A child that was forked meanwhile would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


@contextlib.contextmanager
def _cache_errors(folder: Path, shard: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CacheError(
            f"shard {shard} cannot be kept in the cache folder {folder}: {reason}. Free some space there, or choose "
            "a folder on a local disk that may be written to",
            shard=shard,
        ) from error
