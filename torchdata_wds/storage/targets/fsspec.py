"""Shards to all other stores, by fsspec: ``s3:``, ``gs:``, ``abfs:``, ``hf:``, ``memory:``, ``sftp:``.

A shard is collected in a local temporary file and then uploaded, because a store that receives a shard piece by piece
may keep half of it. The folder for temporary files (``TMPDIR``) needs room for one shard per writer.
"""

import contextlib
import logging
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torchdata_wds.errors import Advice, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.retrying import attempt, error_words
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.sources.fsspec import connect, tag_of
from torchdata_wds.storage.targets.base import REPLACE_OR_RENAME, FileTarget, cannot_write

logger = logging.getLogger(__name__)

#: Further attempts to upload, after the first.
RETRIES = 4
_SHOWN_NAME = 100
_NOT_ASKING = Advice("overwrite=True does not ask", "--force does not ask")


class RemoteTarget(FileTarget):
    """A temporary file that becomes an object in a store."""

    def __init__(self, url: str, filesystem: Any, path: str, overwrite: bool) -> None:
        super().__init__(url)
        self._filesystem, self._path, self._overwrite = filesystem, path, overwrite
        self._local: str | None = None

    def _create(self) -> LockedFile:
        # A query in the path may be secret.
        name = re.sub(r"[^\w.-]", "_", self._path.partition("?")[0].rpartition("/")[2])[-_SHOWN_NAME:]
        try:
            file, self._local = tempfile.mkstemp(prefix="wds-", suffix=f"-{name}")
        except OSError as error:
            reason = f"no temporary file can be made: {error.strerror or error}; set TMPDIR to another folder"
            raise cannot_write(self._shard, reason) from error
        elsewhere = "free some space there or set TMPDIR to a folder with more"
        self._advice = f"it is collected in {self._local} first; {elsewhere}"
        return LockedFile(file)

    def _commit(self) -> None:
        file, local = self._created(), str(self._local)
        try:
            file.close()
            if not self._overwrite and _exists(self._filesystem, self._path):
                raise FileExistsError("another writer has created it meanwhile, and overwriting is off")
            attempt(partial(self._put, local), RETRIES, self._shard, "uploading it failed: ")
        except BaseException as error:
            # Keep the file: `_release` would delete it.
            self._local = None
            if not isinstance(error, Exception):
                logger.warning("the upload of shard %s was interrupted; it is kept whole in %s", self._shard, local)
                raise
            kept = f"It is kept whole in {local}: upload it from there, or delete it"
            reason = f"shard {self._shard} could not be uploaded: {error_words(error)}. {kept}"
            raise ShardOpenError(reason, shard=self._shard) from masked_cause(error)

    def _put(self, local: str) -> None:
        from fsspec.asyn import AsyncFileSystem

        # Asynchronous filesystems are object stores: without folders, and they would create a mistyped bucket.
        parent = self._path.rpartition("/")[0]
        if parent and not isinstance(self._filesystem, AsyncFileSystem):
            with contextlib.suppress(Exception):
                self._filesystem.makedirs(parent, exist_ok=True)
        self._filesystem.put_file(local, self._path)
        details: dict[str, Any] = {}
        try:
            details = self._filesystem.info(self._path)
        except FileNotFoundError as error:
            raise OSError("it is not there after the upload") from error
        except Exception as error:  # noqa: BLE001 - client libraries raise anything
            # Permission to write does not imply permission to stat, and the store has reported success.
            logger.info("the size of an uploaded shard cannot be checked: %s", error_words(error))
        size = details.get("size")
        if not isinstance(size, int):
            return
        if size != self._position:
            # Half a shard under its final name would pass for a complete one.
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(self._path)
            raise OSError(f"expected {self._position:,} bytes in the store after the upload, found {size:,}")
        self.version = StoredVersion(size, "" if "::" in self.url else tag_of(details))

    def _release(self, *, owned: bool) -> None:
        super()._release(owned=owned)
        if owned and self._local is not None:
            with contextlib.suppress(OSError):
                Path(self._local).unlink()
        self._local = None


#: A connected store, and a path in it.
Store = tuple[Any, str]


def open_remote_target(place: Place, overwrite: bool, store: Store | None = None) -> RemoteTarget:
    """Opens a target in `store`, or in the one that fsspec finds for the URL."""
    filesystem, path = store or connect(place.url, place.options)
    if not overwrite:
        try:
            exists = _exists(filesystem, path)
        except Exception as error:  # noqa: BLE001 - client libraries raise anything
            reason = f"cannot check whether it exists: {error_words(error)};"
            raise cannot_write(place.shown, reason, _NOT_ASKING) from masked_cause(error)
        if exists:
            raise cannot_write(place.shown, "it already exists;", REPLACE_OR_RENAME)
    return RemoteTarget(place.url, filesystem, path, overwrite)


def remove_remote(place: Place, store: Store | None = None) -> None:
    """Removes a file from a store if it exists; raises ShardOpenError if that fails."""
    filesystem, path = store or connect(place.url, place.options)
    try:
        filesystem.rm_file(path)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001 - client libraries raise anything
        reason = f"cannot remove {place.shown}: {error_words(error)}"
        raise ShardOpenError(reason, shard=place.shown) from masked_cause(error)


def list_remote(place: Place) -> list[str]:
    """Returns the names of the files in a folder; none if the folder does not exist."""
    filesystem, path = connect(place.url, place.options)
    try:
        filesystem.invalidate_cache()
        entries = filesystem.ls(path, detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:  # noqa: BLE001 - client libraries raise anything
        reason = f"cannot list {place.shown}: {error_words(error)}"
        raise ShardOpenError(reason, shard=place.shown) from masked_cause(error)
    files = [entry["name"].rstrip("/") for entry in entries if entry["type"] != "directory"]
    # A store may list the folder itself, as an empty object.
    return sorted(file.rpartition("/")[2] for file in files if file != path.rstrip("/"))


def _exists(filesystem: Any, path: str) -> bool:
    # Listings are cached, and other processes write too.
    filesystem.invalidate_cache()
    return bool(filesystem.exists(path))
