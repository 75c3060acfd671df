"""Opens targets by the scheme of their URL, and lists and removes existing shards."""

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


#: Scheme -> backend; "" is a local path, and fsspec opens all schemes not listed. Each raises what `open_target` does.
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
    """Opens a target for a shard, which appears there only when complete: at ``commit``, and never after ``abort``.

    A local path (used verbatim) or ``file:`` is written as ``<name>.partial`` and renamed; ``-`` is standard output;
    the command of ``pipe:`` reads the shard from its input and must exit with 0; for ``ais:`` and URLs that fsspec
    knows, the shard is collected in the folder for temporary files (``TMPDIR``) and then uploaded. The rules in
    ``WDS_REWRITE`` and ``GOPEN_REWRITE`` apply.

    Raises ShardOpenError for all problems that show before the first byte. Unless `overwrite`, an existing shard is one
    of them; if another writer creates it later, ``commit`` raises.
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
    """Removes a file if it exists, and nothing for ``-`` and ``pipe:``; raises ShardOpenError if that fails."""
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
    """Returns the sorted names of files, with ``.partial``; none for a missing folder, and for ``-`` and ``pipe:``."""
    place = resolve(folder_url, storage_options)
    if place.is_local:
        return list_local(place.url)
    if place.scheme == AIS:
        raise ShardOpenError(str(no_listing(place.url)), shard=place.shown)
    if place.scheme in _WEB:
        _refuse_web(place)
    return [] if place.scheme in _WITHOUT_NAMES else list_remote(place)
