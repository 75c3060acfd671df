"""The table from scheme to backend for writing, `open_target`, and what a writer asks about the shards that exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.naming import naming
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.rewriting import rewritten
from torchdata_wds.storage.sources.aistore import is_in_aistore, no_listing, open_ais_target, remove_ais
from torchdata_wds.storage.targets.base import cannot_write
from torchdata_wds.storage.targets.command import open_command_target
from torchdata_wds.storage.targets.fsspec import list_remote, open_remote_target, remove_remote
from torchdata_wds.storage.targets.local import list_local, open_local_target, remove_local
from torchdata_wds.storage.targets.stdout import open_standard_output
from torchdata_wds.storage.urls import STDIN, mask_url, scheme_of, url_text

__all__ = ["TARGETS", "Target", "list_targets", "open_target", "remove_target"]


STDOUT = STDIN

_LOCAL = ("", "file")

_WITHOUT_NAMES = (STDOUT, "pipe")

_WEB = ("http", "https")

_WHY = "where a rewriting rule puts"


class Target(Protocol):
    """Where a finished shard goes, while it is written.

    Data comes in large pieces and is not buffered. A target that nobody finished is aborted when it is collected or its
    process ends. It belongs to the process that opened it: in a forked child it is closed, and says so when it is used.

    Attributes:
        url: Where the shard goes, as given.
    """

    url: str

    def write(self, data: bytes | bytearray | memoryview, /) -> object:
        """Writes all of the data. After a failure the target is aborted."""

    def commit(self) -> None:
        """Makes the whole shard appear under its final name, durably."""

    def abort(self) -> None:
        """Lets go of everything, so that nothing appears under the final name; quiet, at any time, also twice."""


Opener = Callable[[str, bool, StorageOptions], Target]


def _refuse_web(url: str, overwrite: bool, options: StorageOptions) -> NoReturn:  # noqa: ARG001 - as all
    shard = mask_url(url)
    raise cannot_write(
        shard,
        f"web servers are read only; use the store's own scheme (s3://, gs://, ...) or 'pipe:curl -fsS -T - {shard}'",
    )


#: Scheme -> backend; "" is a local path, and every scheme that is not here belongs to fsspec.
TARGETS: dict[str, Opener] = {
    "": open_local_target,
    "file": open_local_target,
    STDOUT: open_standard_output,
    "pipe": open_command_target,
    "http": _refuse_web,
    "https": _refuse_web,
}


def open_target(
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Target:
    """Opens a place for a shard that appears there only when it is whole.

    Args:
        url: A local path (taken verbatim) or ``file:``, written as ``<name>.partial`` and renamed; ``-`` (standard
            output); ``pipe:command``, which gets the shard as its input and must exit with 0; or ``ais:`` or any URL
            that fsspec knows, for which the shard is collected in the folder for temporary files (``TMPDIR``) and
            uploaded whole. The rules in ``WDS_REWRITE`` and ``GOPEN_REWRITE`` hold here too.
        overwrite: Replaces what exists, at once and only by a whole shard. Otherwise it is an error, here or at
            ``commit`` if another writer was faster.
        storage_options: Options by protocol: ``{"s3": {"endpoint_url": ...}}``.

    Returns:
        The target. ``write`` puts all of the data, ``commit`` finishes the shard, ``abort`` drops it.

    Raises:
        ShardOpenError: if it cannot be written, as far as that can be seen before the first byte.
        UnsafeDataError: for a command under ``WDS_SECURE=1``.
        TypeError: if the URL is no str or path, or the options are no mapping of mappings.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> target = open_target(path)
        >>> _ = target.write(bytes(1024))
        >>> path.exists()
        False
        >>> target.commit()
        >>> path.stat().st_size
        1024
    """
    text, options = url_text(url), StorageOptions(storage_options)
    place = rewritten(text, options.rewrite)
    scheme = scheme_of(place)
    opener = open_ais_target if is_in_aistore(scheme) else TARGETS.get(scheme, open_remote_target)
    if place == text:
        return opener(text, overwrite, options)
    with naming(text, _WHY):
        return opener(place, overwrite, options)


def remove_target(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Removes a file if it is there.

    Args:
        url: As for `open_target`; for ``-`` and ``pipe:`` there is nothing to remove.
        storage_options: Options by protocol.

    Raises:
        ShardOpenError: if it cannot be removed, is a folder, or for a web server.

    Example:
        >>> remove_target("no-such.tar")
    """
    text, scheme, options = _place(url, storage_options)
    if scheme in _LOCAL:
        remove_local(text)
    elif is_in_aistore(scheme):
        remove_ais(text, options)
    elif scheme not in _WITHOUT_NAMES:
        remove_remote(text, options)


def list_targets(
    folder_url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[str]:
    """Lists the files in a folder.

    Args:
        folder_url: A local folder ("" is the working directory) or a folder of a store; ``-`` and ``pipe:`` have none.
        storage_options: Options by protocol.

    Returns:
        Their names, without the folder's, sorted; ``.partial`` ones too. Empty where there is no such folder.

    Raises:
        ShardOpenError: if it cannot be listed, or for a web server.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = folder.joinpath("x.tar").write_bytes(b"")
        >>> list_targets(folder), list_targets(folder / "no")
        (['x.tar'], [])
    """
    text, scheme, options = _place(folder_url, storage_options)
    if scheme in _WITHOUT_NAMES:
        return []
    if is_in_aistore(scheme):
        raise ShardOpenError(str(no_listing(text)), shard=mask_url(text))
    return list_local(text) if scheme in _LOCAL else list_remote(text, options)


def _place(
    url: str | os.PathLike[str], storage_options: Mapping[str, Mapping[str, Any]] | None
) -> tuple[str, str, StorageOptions]:
    options = StorageOptions(storage_options)
    text = rewritten(url_text(url), options.rewrite)
    scheme = scheme_of(text)
    if scheme in _WEB:
        _refuse_web(text, False, options)
    return text, scheme, options
