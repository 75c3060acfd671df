"""Shards to every other store, by fsspec: ``s3:``, ``gs:``, ``abfs:``, ``hf:``, ``memory:``, ``sftp:``.

A shard is collected in a local temporary file and uploaded whole, for a store that gets a shard piece by piece may keep
half of one. The file lies in the folder for temporary files; set ``TMPDIR`` to one with room for a shard per writer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from torchdata_wds.errors import Advice, ShardOpenError
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.retrying import Patience
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.sources.fsspec import HOPELESS, connect, error_words
from torchdata_wds.storage.targets.base import REPLACE_OR_RENAME, FileTarget, cannot_write
from torchdata_wds.storage.urls import mask_url

__all__ = ["list_remote", "open_remote_target", "remove_remote", "target_in"]


logger = logging.getLogger(__name__)

#: Attempts to upload that may follow the first.
RETRIES = 4

_SHOWN_NAME = 100


class RemoteTarget(FileTarget):
    """A temporary file that becomes an object in a store."""

    def __init__(self, url: str, filesystem: Any, path: str, overwrite: bool) -> None:
        super().__init__(url)
        self._filesystem = filesystem
        self._path = path
        self._overwrite = overwrite
        self._local: str | None = None

    def _cure(self) -> str:
        return f"it is collected in {self._local} first; free some space there or set TMPDIR to a folder with more"

    def _create(self) -> int:
        # a query in the path may be a secret
        name = re.sub(r"[^\w.-]", "_", self._path.partition("?")[0].rpartition("/")[2])[-_SHOWN_NAME:]
        try:
            file, self._local = tempfile.mkstemp(prefix="wds-", suffix=f"-{name}")
        except OSError as error:
            raise cannot_write(
                self._shard, f"no temporary file can be made: {error.strerror or error}; set TMPDIR to another folder"
            ) from error
        return file

    def _commit(self) -> None:
        self._ensure_created()
        local = str(self._local)
        self._close_file()
        try:
            if not self._overwrite and _exists(self._filesystem, self._path):
                raise FileExistsError("it has come into existence meanwhile, by another writer, and overwriting is off")
            self._upload(local)
        except BaseException as error:
            # Nothing is lost: the file is forgotten here, so that nobody deletes it.
            self._local = None
            if not isinstance(error, Exception):
                logger.warning("the upload of shard %s was interrupted; it is kept whole in %s", self._shard, local)
                raise
            raise ShardOpenError(
                f"shard {self._shard} could not be uploaded: {error_words(error)}. "
                f"It is kept whole in {local}: upload it from there, or delete it",
                shard=self._shard,
            ) from masked_cause(error)

    def _upload(self, local: str) -> None:
        patience = Patience(RETRIES, self._shard)
        while True:
            try:
                return self._put(local)
            except Exception as error:
                if isinstance(error, HOPELESS) or not patience.endures(f"uploading it failed: {error_words(error)}"):
                    raise

    def _put(self, local: str) -> None:
        _make_parent(self._filesystem, self._path)
        self._filesystem.put_file(local, self._path)
        size = _size(self._filesystem, self._path)
        if size is not None and size != self._position:
            # half a shard under its final name would pass for a whole one
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(self._path)
            raise OSError(f"expected {self._position:,} bytes in the store after the upload, found {size:,}")

    def _close_file(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _release(self, *, owned: bool) -> None:
        self._close_file()
        if owned and self._local is not None:
            with contextlib.suppress(OSError):
                Path(self._local).unlink()
        self._local = None


def open_remote_target(url: str, overwrite: bool, options: StorageOptions) -> RemoteTarget:
    """Connects to a store that fsspec knows; the shard is collected in the folder for temporary files (``TMPDIR``).

    Raises:
        ShardOpenError: if the scheme is unknown, its package is missing, the store refuses, or the shard exists
            (unless `overwrite`).
    """
    filesystem, path = connect(url, options)
    return target_in(url, filesystem, path, overwrite)


_NOT_ASKING = Advice("overwrite=True does not ask", "--force does not ask")


def target_in(url: str, filesystem: Any, path: str, overwrite: bool) -> RemoteTarget:
    """Makes a target in a store to which there is a connection.

    Raises:
        ShardOpenError: if the shard exists (unless `overwrite`), or the store does not say.
    """
    shard = mask_url(url)
    if not overwrite:
        try:
            exists = _exists(filesystem, path)
        except Exception as error:  # noqa: BLE001 - whatever a client library raises
            raise cannot_write(
                shard, f"whether it exists cannot be asked: {error_words(error)};", _NOT_ASKING
            ) from masked_cause(error)
        if exists:
            raise cannot_write(shard, "it already exists;", REPLACE_OR_RENAME)
    return RemoteTarget(url, filesystem, path, overwrite)


def remove_remote(url: str, options: StorageOptions) -> None:
    """Removes a file if it is there.

    Raises:
        ShardOpenError: if it cannot be removed.
    """
    filesystem, path = connect(url, options)
    try:
        filesystem.rm_file(path)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001 - whatever a client library raises
        raise _failure("remove", url, error) from masked_cause(error)


def list_remote(url: str, options: StorageOptions) -> list[str]:
    """Names of the files in a folder; none where there is no folder.

    Raises:
        ShardOpenError: if it cannot be listed.
    """
    filesystem, path = connect(url, options)
    try:
        filesystem.invalidate_cache()
        entries = filesystem.ls(path, detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:  # noqa: BLE001 - whatever a client library raises
        raise _failure("list", url, error) from masked_cause(error)
    files = [entry["name"].rstrip("/") for entry in entries if entry["type"] != "directory"]
    # A store may list the folder itself, as an empty object.
    return sorted(file.rpartition("/")[2] for file in files if file != path.rstrip("/"))


def _exists(filesystem: Any, path: str) -> bool:
    # Listings are cached, and other processes write too.
    filesystem.invalidate_cache()
    return bool(filesystem.exists(path))


def _make_parent(filesystem: Any, path: str) -> None:
    """Makes the folder of a file, where the store has folders.

    Asynchronous filesystems are object stores: they need none, and take a misspelled bucket for one to be made.
    """
    from fsspec.asyn import AsyncFileSystem

    parent = path.rpartition("/")[0]
    if parent and not isinstance(filesystem, AsyncFileSystem):
        with contextlib.suppress(Exception):
            filesystem.makedirs(parent, exist_ok=True)


def _size(filesystem: Any, path: str) -> int | None:
    """The size of a file that has just been uploaded, or None where the store does not say."""
    try:
        size = filesystem.info(path).get("size")
    except FileNotFoundError as error:
        raise OSError("it is not there after the upload") from error
    except Exception as error:  # noqa: BLE001 - whatever a client library raises
        # Who may write need not be allowed to look; what is in the store has been taken by the store.
        logger.info("the size of an uploaded shard cannot be asked: %s", error_words(error))
        return None
    return size if isinstance(size, int) else None


def _failure(what: str, url: str, error: Exception) -> ShardOpenError:
    shard = mask_url(url)
    return ShardOpenError(f"cannot {what} {shard}: {error_words(error)}", shard=shard)
