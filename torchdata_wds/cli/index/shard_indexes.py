"""The index of one shard: made from its headers, ours or DALI's, and saved unless the same exists."""

import hashlib
import os
from contextlib import suppress
from typing import Literal, NamedTuple

from torchdata_wds.cli.outputs import write_whole
from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index import IndexHeader, ShardIndex, dali_index, shard_name
from torchdata_wds.format.index.columns import ShardColumns
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.format.index.sidecars import INDEX_SUFFIX, beside, make_index_folder
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.byte_streams import stored_bytes
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

WRITTEN, UNCHANGED = "written", "unchanged"


class IndexResult(NamedTuple):
    """What happened to the file, or why it failed; the shard's header, MD5 digest, and columns to pack."""

    outcome: str | None = None
    failure: WdsError | None = None
    header: IndexHeader | None = None
    md5: str | None = None
    columns: ShardColumns | None = None


def make_index(
    job: tuple[str, str | None],
    *,
    keys: Literal["first_dot", "last_dot"] = "first_dot",
    dali: bool = False,
    md5: bool = False,
    pack: bool = False,
    overwrite: bool = False,
) -> IndexResult:
    """Makes the index of one shard and saves it unless its target is None; returns failures, does not raise them."""
    url, target = job
    outcome = digest = columns = None
    try:
        index = index_shard(url, keys=keys, to=False)
        if target is not None:
            outcome = save_index(dali_index(index).encode() if dali else index, target, overwrite=overwrite)
        columns = ShardColumns.of(url, index) if pack else None
        if md5:
            with stored_bytes(open_shard(url)) as stream:
                digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except WdsError as error:
        return IndexResult(outcome, error)
    return IndexResult(outcome, None, index.header, digest, columns)


def save_index(index: ShardIndex | bytes, url: str, *, overwrite: bool = False) -> str:
    """Writes an index, ours or another program's, unless the same exists; returns ``"written"`` or ``"unchanged"``."""
    there = None
    if scheme_of(url) not in (STDIN, "pipe") and (not is_local(url) or os.path.lexists(local_path(url))):
        with suppress(ShardOpenError), stored_bytes(open_shard(url)) as stream:  # writing the file gives a better error
            there = stream.read()
    if isinstance(index, ShardIndex):
        if there is not None:
            # An existing index may know more than this one, made from headers: the shard's digest, or its size. It is
            # as good if the rest is equal, and must not be replaced by one that knows less.
            with suppress(ShardFormatError):
                old = ShardIndex.load(url)
                size = None if index.header.bytes is None else old.header.bytes
                old.header = old.header._replace(sha256=index.header.sha256, bytes=size)
                if old == index:
                    return UNCHANGED
        index = index.dump()
    if there == index:
        return UNCHANGED
    if there is not None and not overwrite:
        shown = mask_url(url)
        why = "a different one exists, of other options or another version of the shard. Pass --force to replace it"
        raise ShardOpenError(f"cannot write the index {shown}: {why}", shard=shown)
    make_index_folder(url)
    write_whole([index], url, overwrite=overwrite)
    return WRITTEN


def dali_index_url(shard: str) -> str:
    """Returns where DALI's own ``wds2idx`` puts the index of a shard: the name up to its first dot counts."""
    return beside(shard, _dali_name)


def index_in_folder(shard: str, folder: str, *, dali: bool = False) -> str:
    """Returns where the index of a shard goes in a folder of indexes."""
    name = shard_name(shard)
    if scheme_of(shard) in (STDIN, "pipe") or name in ("", ".", ".."):
        raise ValueError(f"{mask_url(shard)} has no name that an index could have")
    base = _dali_name(name) if dali else name + INDEX_SUFFIX
    return f"{folder.rstrip('/')}/{base}" if folder.strip("/") else folder + base


def _dali_name(base: str) -> str:
    return base[:1] + base[1:].partition(".")[0] + ".idx"
