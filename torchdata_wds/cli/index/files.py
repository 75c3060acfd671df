"""Index files of shards: where they lie, and writing those that are not there yet."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index import INDEX_SUFFIX, IndexHeader, ShardIndex, index_url, shard_name
from torchdata_wds.format.index.exports import dali_index
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.storage import StorageOptions, mask_url, open_shard, open_target
from torchdata_wds.storage.byte_streams import stored_bytes
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

__all__ = [
    "IndexJob",
    "IndexResult",
    "Outcome",
    "dali_index_url",
    "index_in_folder",
    "listed_url",
    "make_indexes",
    "md5_of",
    "save_index",
    "save_text",
]


Outcome = Literal["written", "unchanged"]

_LOCAL = ("", "file")

_DALI_SUFFIX = ".idx"


class IndexJob(NamedTuple):
    """What to do for one shard.

    Attributes:
        url: The shard.
        keys: How names are split.
        own: Where to write its index; None writes none.
        dali: Where to write that of DALI; None writes none.
        overwrite: Whether to replace other files.
        md5: Whether to compute the shard's MD5 digest.
    """

    url: str
    keys: Literal["first_dot", "last_dot"] = "first_dot"
    own: str | None = None
    dali: str | None = None
    overwrite: bool = False
    md5: bool = False


class IndexResult(NamedTuple):
    """What came of it.

    Attributes:
        url: The shard.
        outcomes: What became of each file.
        failure: Why it failed.
        header: What its index says about it as a whole.
        md5: Its MD5 digest, if that was asked for.
    """

    url: str
    outcomes: tuple[Outcome, ...] = ()
    failure: WdsError | None = None
    header: IndexHeader | None = None
    md5: str | None = None


def make_indexes(job: IndexJob) -> IndexResult:
    """Makes the indexes of one shard.

    Args:
        job: What to do.

    Returns:
        What came of it, failures too.

    Example:
        >>> str(make_indexes(IndexJob("no-such.tar")).failure)[:37]
        'cannot open shard no-such.tar: it doe'
    """
    outcomes: list[Outcome] = []
    try:
        index = index_shard(job.url, keys=job.keys, to=False)
        if job.own is not None:
            outcomes.append(save_index(index, job.own, overwrite=job.overwrite))
        if job.dali is not None:
            outcomes.append(save_text(dali_index(index), job.dali, overwrite=job.overwrite))
        md5 = md5_of(job.url) if job.md5 else None
    except WdsError as error:
        return IndexResult(job.url, tuple(outcomes), error)
    return IndexResult(job.url, tuple(outcomes), None, index.header, md5)


def dali_index_url(shard: str) -> str:
    """Where DALI's own ``wds2idx`` puts the index of a shard: all behind the first dot of its name is replaced.

    Raises:
        ValueError: for standard input and commands, beside which nothing lies.

    Example:
        >>> dali_index_url("data.v1/train-000.tar"), dali_index_url("s3://bucket/a.b.tar?versionId=3")
        ('data.v1/train-000.idx', 's3://bucket/a.idx?versionId=3')
    """
    index = index_url(shard)
    ends = range(len(shard), 0, -1)
    place = next(end for end in ends if shard[:end] + INDEX_SUFFIX + shard[end:] == index)
    folder, slash, base = shard[:place].rpartition("/")
    return folder + slash + _without_suffixes(base) + _DALI_SUFFIX + shard[place:]


def index_in_folder(shard: str, folder: str, *, dali: bool = False) -> str:
    """Where the index of a shard lies in a folder of indexes.

    Raises:
        ValueError: if the shard has no name, as standard input and commands.

    Example:
        >>> index_in_folder("s3://bucket/x.tar", "indexes"), index_in_folder("x.tar", "indexes/", dali=True)
        ('indexes/x.tar.index', 'indexes/x.idx')
    """
    name = shard_name(shard)
    if scheme_of(shard) in (STDIN, "pipe") or name in ("", ".", ".."):
        raise ValueError(f"{mask_url(shard)} has no name that an index could have")
    base = _without_suffixes(name) + _DALI_SUFFIX if dali else name + INDEX_SUFFIX
    return f"{folder.rstrip('/')}/{base}" if folder.strip("/") else folder + base


def listed_url(shard: str, list_file: str) -> str:
    """The URL of a shard as a list has it: relative local paths are those from the list's folder.

    Example:
        >>> listed_url("data/x.tar", "data/list.json"), listed_url("s3://bucket/x.tar", "list.json")
        ('x.tar', 's3://bucket/x.tar')
    """
    if scheme_of(shard) or posixpath.isabs(shard):
        return shard
    if scheme_of(list_file) not in _LOCAL:
        return os.path.abspath(shard)  # noqa: PTH100 - a str
    return os.path.relpath(shard, os.path.dirname(local_path(list_file)) or ".")  # noqa: PTH120


def save_index(
    index: ShardIndex,
    url: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Outcome:
    """Writes an index, unless it is there already; one that knows the shard's digest besides is as good.

    Args:
        index: The index.
        url: Where to.
        overwrite: Whether to replace another one.
        storage_options: Options by protocol.

    Raises:
        ShardOpenError: if another file is there, without `overwrite`, or it cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from torchdata_wds.format.index import IndexHeader
        >>> path = str(pathlib.Path(tempfile.mkdtemp(), "x.tar.index"))
        >>> index = ShardIndex(IndexHeader("x.tar", "first_dot", 0, 10240), [])
        >>> save_index(index, path), save_index(index, path)
        ('written', 'unchanged')
    """
    there = _read(url, storage_options)
    if there is not None:
        try:
            old = ShardIndex.load(url, storage_options=storage_options)
            size = old.header.bytes if index.header.bytes is not None else None
            old.header = old.header._replace(sha256=index.header.sha256, bytes=size)
            if old == index:
                return "unchanged"
        except ShardFormatError:
            pass
    return _save(index.dump(), there, url, overwrite, storage_options)


def save_text(
    text: str,
    url: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Outcome:
    """Writes an index of another program's, unless it is there already.

    Args:
        text: Its content.
        url: Where to.
        overwrite: Whether to replace another one.
        storage_options: Options by protocol.

    Raises:
        ShardOpenError: if another file is there, without `overwrite`, or it cannot be written.
    """
    return _save(text.encode(), _read(url, storage_options), url, overwrite, storage_options)


def md5_of(url: str, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The MD5 digest of a shard as it is stored, in hexadecimal digits; it is read whole.

    Raises:
        ShardOpenError: if it cannot be opened or read.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> _ = path.write_bytes(b"")
        >>> md5_of(str(path))
        'd41d8cd98f00b204e9800998ecf8427e'
    """
    digest = hashlib.md5(usedforsecurity=False)
    with stored_bytes(open_shard(url, storage_options=storage_options)) as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _without_suffixes(base: str) -> str:
    dot = base.find(".", 1)
    return base[:dot] if dot > 0 else base


def _read(url: str, storage_options: Mapping[str, Mapping[str, Any]] | None) -> bytes | None:
    """What lies there, as it is stored; None if there is nothing."""
    options = StorageOptions(storage_options)
    if scheme_of(url) in (STDIN, "pipe"):
        return None
    if scheme_of(url) in _LOCAL and not os.path.lexists(local_path(url)):
        return None
    try:
        with stored_bytes(open_shard(url, storage_options=options)) as stream:
            return b"".join(iter(lambda: stream.read(1 << 20) or b"", b""))
    except ShardOpenError:
        return None  # writing it says better what is wrong


def _save(
    data: bytes,
    there: bytes | None,
    url: str,
    overwrite: bool,
    storage_options: Mapping[str, Mapping[str, Any]] | None,
) -> Outcome:
    if there == data:
        return "unchanged"
    if there is not None and not overwrite:
        shown = mask_url(url)
        raise ShardOpenError(
            f"cannot write the index {shown}: another one is there, of other options or another version of its shard. "
            "Pass overwrite=True to replace such files",
            shard=shown,
        )
    target = open_target(url, overwrite=overwrite, storage_options=storage_options)
    try:
        target.write(data)
        target.commit()
    except BaseException:
        target.abort()
        raise
    return "written"
