"""Globs and folders, local and by fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from torchdata_wds.errors import ShardListError, WdsError
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.globs import find_matches
from torchdata_wds.storage.places import StorageOptions
from torchdata_wds.storage.retrying import error_words
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.sources.fsspec import connect, protocol_of
from torchdata_wds.storage.urls import local_path, mask_url, scheme_of

_SHOWN_SUFFIXES = ", ".join(SHARD_SUFFIXES)
_MAGIC = re.compile(r"[*?[]")
_QUERY = re.compile(r"\?[\w.-]+=[^*[]*$")


def search_local(url: str) -> Iterator[str]:
    """Yields the shards of a local folder or glob, sorted, or a path that is neither as it is."""
    path = local_path(url)
    if os.path.isdir(path):  # noqa: PTH112 - a name that is too long is not a folder
        names = sorted(entry.name for entry in os.scandir(path) if not entry.is_dir())
        found = [os.path.join(path, name) for name in names if _is_shard(name)]  # noqa: PTH118 - keeps "./"
        if not found:
            raise _nothing(url, f"the folder holds {len(names):,} files, none of them ends in {_SHOWN_SUFFIXES}")
    elif os.path.lexists(path) or not _MAGIC.search(path):
        yield path if url.startswith("~") else url
        return
    else:
        matches = find_matches(path)
        found = [match for match in matches if not os.path.isdir(match)]  # noqa: PTH112
        if not found:
            raise _nothing(url, _local_hint(path, len(matches)))
    for name in found:
        yield name if scheme_of(url) != "file" else f"file:{'//' if name.startswith('/') else ''}{quote(name)}"


def search_remote(url: str, options: StorageOptions) -> Iterator[str]:
    """Yields the shards of a folder (a URL that ends in ``/``) or glob by fsspec, sorted, or else the URL as it is."""
    parts = url.split("::")
    index = next((i for i, part in enumerate(parts) if is_pattern(part)), None)
    if index is None:
        yield url
        return
    try:
        found = sorted(_names(url, parts[index], options))
    except WdsError as error:
        raise ShardListError(str(error), shard=error.shard) from error
    except Exception as error:  # noqa: BLE001 - whatever a client library raises
        shown = mask_url(url)
        reason = "not found" if isinstance(error, FileNotFoundError) else error_words(error)
        raise ShardListError(f"cannot list {shown}: {reason}", shard=shown) from masked_cause(error)
    if not found:
        raise _nothing(url, f"a folder gives what ends in {_SHOWN_SUFFIXES}" if url.endswith("/") else "")
    for name in found:
        yield "::".join([*parts[:index], _full_url(parts[index], name), *parts[index + 1 :]])


def _is_shard(name: str) -> bool:
    return name.lower().endswith(SHARD_SUFFIXES) and not name.startswith(".")


def _names(url: str, part: str, options: StorageOptions) -> Iterator[str]:
    filesystem, path = connect(url, options)
    filesystem.invalidate_cache()  # listings are kept for ever, and shards come and go between epochs
    is_folder = part.endswith("/")
    entries: Iterable[dict[str, Any]]
    entries = filesystem.ls(path, detail=True) if is_folder else filesystem.glob(path, detail=True).values()
    for entry in entries:
        name: str = entry["name"]
        if entry.get("type") != "directory" and (not is_folder or _is_shard(name.rpartition("/")[2])):
            yield name


def is_pattern(part: str) -> bool:
    """Returns whether a URL of a store (one part of a chained one) is a glob or a folder."""
    protocol, slashes, path = part.partition("://")
    return bool(slashes) and (bool(_MAGIC.search(_QUERY.sub("", path))) or (path.endswith("/") and protocol != "dir"))


def _full_url(part: str, name: str) -> str:
    """The URL of a file that was found, written as the pattern was: with its user, host or account."""
    import fsspec

    protocol = protocol_of(part)
    magic = _MAGIC.search(part)
    base = part[: magic.start() if magic else None].rpartition("/")[0] + "/"
    if base.endswith("://"):
        return base + name.lstrip("/")
    inside = str(fsspec.get_filesystem_class(protocol)._strip_protocol(base)).rstrip("/")
    return base.rstrip("/") + name[len(inside) :] if name.startswith(inside + "/") else f"{protocol}://{name}"


def _local_hint(path: str, folders: int) -> str:
    if folders:
        return f"it matches {folders:,} folders and no file"
    start = _MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0]  # a path without magic is not searched
    folder = start or ("/" if path.startswith("/") else ".")
    where = "" if folder.startswith("/") else f" (the working directory is {os.getcwd()})"  # noqa: PTH109
    if not os.path.isdir(folder):  # noqa: PTH112
        return f"the folder {folder!r} does not exist{where}"
    return f"the folder {folder!r} holds {len(os.listdir(folder)):,} entries{where}"  # noqa: PTH208


def _nothing(pattern: str, hint: str) -> ShardListError:
    shown = mask_url(pattern)
    return ShardListError(f"no shard matches {shown}" + (f": {hint}" if hint else ""), shard=shown)
