"""The table from scheme to backend for writing, `open_target`, and the listing and removal of existing shards."""

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import naming
from torchdata_wds.storage.places import Place, resolve
from torchdata_wds.storage.sources.aistore import no_listing, open_ais_target, remove_ais
from torchdata_wds.storage.targets.base import Target, cannot_write
from torchdata_wds.storage.targets.command import open_command_target
from torchdata_wds.storage.targets.fsspec import list_remote, open_remote_target, remove_remote
from torchdata_wds.storage.targets.local import list_local, open_local_target, open_standard_output, remove_local
from torchdata_wds.storage.urls import AIS, STDIN

STDOUT = STDIN
_WITHOUT_NAMES = (STDOUT, "pipe")
_WEB = ("http", "https")
_WHY = "where a rewriting rule puts"


def _refuse_web(place: Place, overwrite: bool = False) -> NoReturn:  # noqa: ARG001 - as all
    cure = f"use the store's own scheme (s3://, gs://, ...) or 'pipe:curl -fsS -T - {place.shown}'"
    raise cannot_write(place.shown, f"web servers are read only; {cure}")


#: Scheme -> backend, which raises what `open_target` does; "" is a local path, and a scheme not listed is fsspec's.
TARGETS: dict[str, Callable[[Place, bool], Target]] = {
    "": open_local_target,
    "file": open_local_target,
    STDOUT: open_standard_output,
    "pipe": open_command_target,
    AIS: open_ais_target,
    **dict.fromkeys(_WEB, _refuse_web),
}


def open_target(
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Target:
    """Opens a place for a shard that appears there only when it is whole: by ``commit``, and not after ``abort``.

    A local path (taken verbatim) or ``file:`` is written as ``<name>.partial`` and renamed; ``-`` is standard output;
    the command of ``pipe:`` gets the shard as its input and must exit with 0; for ``ais:`` and any URL that fsspec
    knows, it is collected in the folder for temporary files (``TMPDIR``) and uploaded whole. The rules in
    ``WDS_REWRITE`` and ``GOPEN_REWRITE`` apply.

    Unless `overwrite`, a shard that exists is a ShardOpenError, here or at ``commit`` if another writer was faster; so
    is whatever else can be seen before the first byte.
    """
    place = resolve(url, storage_options)
    opener = TARGETS.get(place.scheme, open_remote_target)
    if not place.is_moved:
        return opener(place, overwrite)
    with naming(place.name, _WHY):
        return opener(place, overwrite)


def remove_target(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Removes a file if it is there, and nothing for ``-`` and ``pipe:``; a ShardOpenError if it cannot be removed."""
    place = resolve(url, storage_options)
    if place.is_local:
        remove_local(place.url)
    elif place.scheme == AIS:
        remove_ais(place)
    elif place.scheme in _WEB:
        _refuse_web(place)
    elif place.scheme not in _WITHOUT_NAMES:
        remove_remote(place)


def list_targets(
    folder_url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[str]:
    """Returns the sorted names of a folder's files, ``.partial`` ones too: none without a folder, and for pipes."""
    place = resolve(folder_url, storage_options)
    if place.is_local:
        return list_local(place.url)
    if place.scheme == AIS:
        raise ShardOpenError(str(no_listing(place.url)), shard=place.shown)
    if place.scheme in _WEB:
        _refuse_web(place)
    return [] if place.scheme in _WITHOUT_NAMES else list_remote(place)
