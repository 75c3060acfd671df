"""Shards written to local files, which are renamed when they are complete, and to standard output (``-``).

Until then a file is named ``<final name>.partial``: always the same name, so that restarts do not pile up leftovers. A
lock on the file distinguishes a living writer's file from the leftover of a dead one, which is reused.
"""

import contextlib
import errno
import multiprocessing
import os
import stat
import sys
from pathlib import Path
from typing import Any

from torchdata_wds.errors import Advice, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.locks import LockedFile
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.targets.base import (
    REPLACE_OR_RENAME,
    FileTarget,
    Target,
    cannot_write,
    open_unfinished,
    sync_file,
    sync_folder,
)
from torchdata_wds.storage.urls import local_path, mask_url

#: The suffix of an unfinished shard.
PARTIAL = ".partial"


class LocalTarget(FileTarget):
    """A local file that is being written."""

    def __init__(self, url: str, path: Path, overwrite: bool) -> None:
        super().__init__(url)
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._overwrite = overwrite
        self._advice = f"what was written is in {self._partial}; free some space or write elsewhere"

    def _create(self) -> LockedFile:
        try:
            file = open_unfinished(self._partial)
        except OSError as error:
            raise cannot_write(self._shard, f"{self._partial}: {error.strerror or error}") from error
        if file is None:
            cure = "Give each its own shards: another pattern, or one with {rank} and {worker} in it"
            reason = f"another writer, in this process or a living one, has it open as {self._partial}."
            raise cannot_write(self._shard, reason, cure)
        return file

    def _commit(self) -> None:
        file = self._created()
        try:
            sync_file(file.fileno())
            self.version = StoredVersion.of_file(os.fstat(file.fileno()))
            if self._overwrite:
                self._partial.replace(self._path)
            else:
                self._publish()
            sync_folder(self._path.parent)
        except FileExistsError as error:
            raise cannot_write(
                self._shard,
                f"another writer has created it meanwhile; this one's shard is in {self._partial}.",
                Advice(
                    "Pass overwrite=True to replace such files, or give each writer its own pattern.",
                    "Pass --force to replace it.",
                ),
            ) from error
        except OSError as error:
            reason = error.strerror or error
            raise cannot_write(self._shard, f"it cannot be finished: {reason}; see {self._partial}") from error

    def _publish(self) -> None:
        """Gives the file its final name; raises FileExistsError if the name is taken."""
        try:
            os.link(self._partial, self._path)
        except FileExistsError:
            # The link may be ours: a file server that repeats a request whose answer was lost finds it already made.
            if not os.path.samestat(self._partial.lstat(), self._path.lstat()):
                raise
        except OSError:
            # Some file systems have no hard links.
            if os.path.lexists(self._path):
                raise FileExistsError(errno.EEXIST, "exists", str(self._path)) from None
            self._partial.replace(self._path)
            return
        with contextlib.suppress(OSError):
            self._partial.unlink()


def open_local_target(place: Place, overwrite: bool) -> LocalTarget:
    """Checks that a local path or ``file:`` URL can be written; creates nothing before the first byte."""
    shard, text = place.shown, local_path(place.url)
    if not text or text.endswith("/"):
        raise cannot_write(shard, "this names no file")
    try:
        # The working directory may change before the shard is finished.
        path = Path(text) if os.path.isabs(text) else Path.cwd() / text  # noqa: PTH117 - a str
    except OSError as error:
        raise cannot_write(shard, f"the working directory is gone: {error.strerror}") from error
    try:
        reason = _obstacle(path)
    except (OSError, ValueError) as error:
        raise cannot_write(shard, f"{getattr(error, 'strerror', None) or error}") from error
    if reason:
        raise cannot_write(shard, reason)
    if not overwrite and os.path.lexists(path):
        raise cannot_write(shard, "it already exists;", REPLACE_OR_RENAME)
    return LocalTarget(place.url, path, overwrite)


def remove_local(url: str) -> None:
    """Removes a file if it exists."""
    try:
        Path(local_path(url)).unlink(missing_ok=True)
    except OSError as error:
        raise ShardOpenError(f"cannot remove {url}: {error.strerror or error}", shard=mask_url(url)) from error


def list_local(url: str) -> list[str]:
    """Returns the names of the files in a folder; none if the folder does not exist."""
    try:
        with os.scandir(local_path(url) or ".") as entries:
            return sorted(entry.name for entry in entries if entry.is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ShardOpenError(f"cannot list {url}: {error.strerror or error}", shard=mask_url(url)) from error


def _obstacle(path: Path) -> str:
    """Returns why a file cannot be created or replaced at a path; "" if it can."""
    folder, shown = path.parent, mask_url(path.parent)
    mode = _mode(folder)
    if not mode:
        return f"its folder {shown} does not exist; make it first"
    if not stat.S_ISDIR(mode):
        return f"{shown} is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"no permission to write in the folder {shown}"
    longest, size = os.pathconf(folder, "PC_NAME_MAX"), len(os.fsencode(path.name + PARTIAL))
    if size > longest:
        return f"its name with {PARTIAL} has {size} bytes, and the file system takes {longest}; give it a shorter one"
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        return "it is a folder; add the name of a file"
    if mode and not stat.S_ISREG(mode):
        return f"it is not a regular file and would be replaced; write 'pipe:cat > {path}'"
    return ""


def _mode(path: Path) -> int:
    """Returns the mode of a file; 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode
    return 0


class StandardOutput(Target):
    """Writes to standard output, which stays open; an abort cannot take back what was written."""

    def __init__(self, url: str, stream: Any) -> None:
        super().__init__(url)
        self._stream = stream

    def _write(self, view: memoryview) -> int:
        count = 0
        try:
            # An unbuffered stream (python -u) may write only a part.
            while count < len(view):
                count += self._stream.write(view[count:]) or 0
            # A process forked later would write the contents of the buffer again.
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            reason = f"it failed at about byte {self._position + count:,}: {error.strerror or error}"
            raise _no_output(reason) from error
        return count

    def _commit(self) -> None:
        """Does nothing: all data is already flushed."""


def open_standard_output(place: Place, overwrite: bool) -> StandardOutput:  # noqa: ARG001 - as all
    """Opens standard output, in the main process; if its reader is gone, writing raises BrokenPipeError."""
    if multiprocessing.parent_process() is not None:
        mixed = "worker processes would mix their shards in it; write it in the main process, with num_workers=0"
        raise _no_output(mixed)
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise _no_output("this process has none")
    # Earlier output of print() must come first.
    sys.stdout.flush()
    return StandardOutput(place.url, stream)


def _no_output(reason: str) -> ShardOpenError:
    return ShardOpenError(f"cannot write the shard '-' (standard output): {reason}", shard="-")
