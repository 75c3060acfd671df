"""The index of one shard: made from its headers, ours or DALI's, and saved unless the same exists."""

import hashlib
import os
from contextlib import suppress
from typing import Literal, NamedTuple

from torchdata_wds.cli.outputs import write_whole
from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index import IndexHeader, ShardIndex, dali_index
from torchdata_wds.format.index.columns import ShardColumns
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.format.index.shard_lookup import read_existing
from torchdata_wds.format.index.sidecars import make_index_folder
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.byte_streams import StoredVersion, stored_bytes
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

WRITTEN, UNCHANGED = "written", "unchanged"


class IndexResult(NamedTuple):
    """What happened to the file, or why it failed; the shard's header, MD5 digest, and columns to pack.

    Without a header, the columns are those of an index that exists.
    """

    outcome: str | None = None
    failure: WdsError | None = None
    header: IndexHeader | None = None
    md5: str | None = None
    columns: ShardColumns | None = None

    @property
    def samples(self) -> int:
        """How many samples the shard has; 0 if it could not be read."""
        if self.header is not None:
            return self.header.samples
        return 0 if self.columns is None else len(self.columns.offsets) - 1


def make_index(
    job: tuple[str, str | None],
    *,
    keys: Literal["first_dot", "last_dot"] = "first_dot",
    dali: bool = False,
    md5: bool = False,
    pack: bool = False,
    reuse: bool = False,
    overwrite: bool = False,
) -> IndexResult:
    """Makes the index of one shard and saves it unless its target is None; returns failures, does not raise them.

    With `reuse`, the shard is not read if there is an index beside it that fits: for a packed index, and no other file.
    """
    url, target = job
    if reuse and (columns := read_existing(url, keys)) is not None:
        return IndexResult(columns=columns)
    outcome = digest = None
    try:
        index = index_shard(url, keys=keys, to=False)
        if target is not None:
            outcome = save_index(dali_index(index).encode() if dali else index, target, overwrite=overwrite)
        made = ShardColumns.of(url, index) if pack else None
        if md5:
            with stored_bytes(open_shard(url)) as stream:
                digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except WdsError as error:
        return IndexResult(outcome, error)
    return IndexResult(outcome, None, index.header, digest, made)


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
                was, now = old.header, index.header
                size = None if now.bytes is None else was.bytes
                old.header = was._replace(sha256=now.sha256, bytes=size, tag=now.tag)
                if old == index:
                    if not StoredVersion(0, was.tag or "").difference(StoredVersion(0, now.tag or "")):
                        return UNCHANGED
                    overwrite = True  # the shard was copied or touched: its index goes on being its index
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
