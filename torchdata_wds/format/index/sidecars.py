"""Where the index of a shard lies: ``.wds-index/<name>.index`` beside it, or ``<name>.index`` as older versions wrote.

Other programs take every file of a folder for data (a listing by Hugging Face Datasets or Ray), so indexes go into a
hidden folder. They are looked for there first, then beside the shard itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import ByteStream, Target, mask_url, open_shard, open_target
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.targets.base import cannot_write
from torchdata_wds.storage.urls import HIDDEN_FOLDER, STDIN, is_local, local_path, scheme_of, url_text

INDEX_SUFFIX = ".index"
_PIECE = 4096
_LONGEST_LINE = 1 << 20


def index_url(shard: str | os.PathLike[str]) -> str:
    """Returns where the index of a shard is written, and first looked for.

    Example:
        >>> index_url("a/x.tar"), index_url("https://host/x.tar?token=1")
        ('a/.wds-index/x.tar.index', 'https://host/.wds-index/x.tar.index?token=1')
    """
    return beside(shard, lambda name: f"{HIDDEN_FOLDER}/{name}{INDEX_SUFFIX}")


def old_index_url(shard: str | os.PathLike[str]) -> str:
    """Returns where older versions wrote the index of a shard.

    Example:
        >>> old_index_url("a/x.tar")
        'a/x.tar.index'
    """
    return beside(shard, lambda name: name + INDEX_SUFFIX)


def index_urls(shard: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns all places where the index of a shard may lie, in the order in which they are searched."""
    return index_url(shard), old_index_url(shard)


def shard_name(url: str) -> str:
    """The last part of a shard's name, as its index has it.

    Example:
        >>> shard_name("a/x?1.tar"), shard_name("file:///a/x%20y.tar"), shard_name("https://host/x.tar?token=1")
        ('x?1.tar', 'x y.tar', 'x.tar')
    """
    if is_local(url):
        return os.path.basename(local_path(url))  # noqa: PTH119 - a str
    return mask_url(url).partition("?")[0].rpartition("/")[2]


def index_in_folder(shard: str | os.PathLike[str], folder: str, rename: Callable[[str], str] | None = None) -> str:
    """Returns where the index of a shard lies in a folder of indexes; raises ValueError for a stream.

    Example:
        >>> index_in_folder("s3://b/x.tar?versionId=3", "indexes")
        'indexes/x.tar.index'
    """
    url = url_text(shard)
    name = shard_name(url)
    if scheme_of(url) in (STDIN, "pipe") or name in ("", ".", ".."):
        raise ValueError(f"{mask_url(url)} has no name that an index could have")
    base = name + INDEX_SUFFIX if rename is None else rename(name)
    return f"{folder.rstrip('/')}/{base}" if folder.strip("/") else folder + base


def beside(shard: str | os.PathLike[str], rename: Callable[[str], str]) -> str:
    """Returns a shard's URL with another name for its last part; raises ValueError for a stream."""
    url = url_text(shard)
    scheme = scheme_of(url)
    if scheme in (STDIN, "pipe"):
        raise ValueError(f"there is no place beside {mask_url(url)} for an index: name one, or write to a path")
    if scheme in ("", "file"):
        start = len("file:") if scheme else 0
        cut = max(url.rfind("/") + 1, start)
        return url[:cut] + rename(url[cut:])
    # of a chain such as simplecache::s3://b/x.tar the first part that names a file
    parts = url.split("::")
    number = next((number for number, part in enumerate(parts) if "://" in part), 0)
    path, mark, query = parts[number].partition("?")
    folder, slash, name = path.rpartition("/")
    parts[number] = folder + slash + rename(name) + mark + query
    return "::".join(parts)


def local_index(shard: str) -> str | None:
    """Returns the path of the index of a local shard, given by path or ``file:`` URL; None if there is none."""
    return next((path for path in map(local_path, index_urls(shard)) if Path(path).exists()), None)


def open_index(
    shard: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str, ByteStream]:
    """Opens the index of a shard wherever it lies; returns its URL and its stream, which the caller closes.

    Raises:
        ShardOpenError: if there is none, or it cannot be opened.
        ValueError: if nothing can lie beside the shard.
    """
    hidden, old = index_urls(shard)
    try:
        return hidden, open_shard(hidden, storage_options=storage_options)
    except ShardOpenError as error:
        try:
            return old, open_shard(old, storage_options=storage_options)
        except ShardOpenError:
            raise error from None


def read_index_line(
    shard: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str, bytes]:
    """Reads the first line of the index of a shard, without its end; returns the index's URL too.

    Raises as `open_index`.
    """
    url, opened = open_index(shard, storage_options=storage_options)
    line = b""
    with opened as stream:
        while b"\n" not in line and len(line) < _LONGEST_LINE and (piece := stream.read(_PIECE)):
            line += piece
    return url, line.partition(b"\n")[0]


def open_index_target(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> Target:
    """Opens a target for an index, in place of one that is there; makes a local hidden folder that is missing.

    Raises:
        ShardOpenError: if it cannot be written.
    """
    make_index_folder(url, storage_options=storage_options)
    return open_target(url, overwrite=True, storage_options=storage_options)


def make_index_folder(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Makes the hidden folder of a local index if it is missing; stores need none, and other folders are not made."""
    place = resolve(url, storage_options)
    folder = Path(local_path(place.url)).parent if place.is_local else None
    if folder is None or folder.name != HIDDEN_FOLDER:
        return
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        pass  # opening the target says that it is not a folder
    except OSError as error:
        raise cannot_write(place.shown, f"its folder cannot be made: {error.strerror or error}") from error
