"""Making the index of a shard that exists, from its headers."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.entries import TarEntries, TarEntry
from torchdata_wds.format.gaps import HeaderScan
from torchdata_wds.format.grouping import group_members
from torchdata_wds.format.headers import HARD_LINK, is_file
from torchdata_wds.format.index import IndexHeader, ShardIndex, index_url, pack_row, shard_name
from torchdata_wds.format.members import Mark, ShardMember, Unit
from torchdata_wds.format.skipped_entries import SkippedEntries
from torchdata_wds.storage import is_decompressed, mask_url, open_shard
from torchdata_wds.storage.urls import local_path, scheme_of, url_text

__all__ = ["index_shard"]


class _Extent(NamedTuple):
    """Where a member lies: it stands for the member's content while members are grouped."""

    name: str
    start: int
    stop: int
    offset: int | None
    size: int | None


def index_shard(
    url: str | os.PathLike[str],
    *,
    keys: Literal["first_dot", "last_dot"] = "first_dot",
    to: str | os.PathLike[str] | Literal[False] | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> ShardIndex:
    """Makes the index of a shard that exists.

    Only headers are looked at: a local file that is not compressed is sought through, other shards are read past. The
    samples are those that ``load_wds_shards`` and ``group_by_key`` give.

    Args:
        url: The shard, as `open_shard` takes it.
        keys: How names are split, as in ``group_by_key``.
        to: Where to write the index: by default beside the shard, with ``.index`` behind its name; False writes none.
        storage_options: Options by protocol, for both.

    Returns:
        The index, which has been written.

    Raises:
        ValueError: if `keys` is a rule that an index cannot name.
        ShardOpenError: if the shard cannot be opened or the index not written.
        ShardFormatError: at any damage that headers show.
        SampleError: where grouping refuses a sample: a field twice, a key that comes back.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.tar")
        >>> _ = path.write_bytes(bytes(1024))
        >>> len(index_shard(path)), path.with_name("x.tar.index").exists()
        (0, True)
    """
    if keys not in ("first_dot", "last_dot"):
        raise ValueError(f"an index needs keys='first_dot' or 'last_dot', which it can name, not {keys!r}")
    text = url_text(url)
    rows = []
    with open_shard(text, storage_options=storage_options) as stream:
        entries = HeaderScan(stream, mask_url(text))
        for sample in group_members(_members(entries, text), keys=keys, shown=mask_url):
            key, _, *fields = sample.values()
            extents = cast("list[_Extent]", fields)
            members = [(extent.name, extent.offset, extent.size) for extent in extents]
            rows.append(pack_row(key, extents[0].start, extents[-1].stop, members))
        compressed = is_decompressed(stream)
    header = IndexHeader(shard_name(text), keys, len(rows), entries.offset, compressed, _stored_size(text))
    index = ShardIndex(header, rows)
    if to is not False:
        index.save(index_url(text) if to is None else to, storage_options=storage_options)
    return index


def _members(entries: TarEntries, url: str) -> Iterator[Unit]:
    """Gives the members with their places as content."""
    places: dict[str, _Extent] = {}
    skips = SkippedEntries(entries.shard, Counter())
    with skips.reported():
        for entry in entries:
            if entry is None:
                yield Mark.END
                continue
            content = entries.offset
            entries.skip(entry)
            if not is_file(entry.kind):
                skips.add(entry, entry.name)
                continue
            skips.has_files = True
            extent = _extent_of(entry, content, entries, places)
            places[posixpath.normpath(entry.name)] = extent
            # grouping never looks into the content of a member
            yield ShardMember(url, entry.name, cast("bytes", extent))
    yield Mark.END


def _extent_of(entry: TarEntry, content: int, entries: TarEntries, places: Mapping[str, _Extent]) -> _Extent:
    extent = _Extent(entry.name, entry.offset, entries.offset, content, entry.size)
    if entry.sparse_size is not None:
        return extent._replace(offset=None, size=None)
    if entry.kind != HARD_LINK:
        return extent
    target = places.get(posixpath.normpath(entry.link))
    if target is None:
        raise _dangling(entry, entries.shard)
    return extent._replace(offset=target.offset, size=target.size)


def _dangling(entry: TarEntry, shard: str) -> ShardFormatError:
    return ShardFormatError(
        f"member {entry.name} at byte {entry.offset:,} of shard {shard} is a hard link to {entry.link}, and the shard "
        "has no such member before it. Write the shard with tar --hard-dereference.",
        shard=shard,
        member=entry.name,
    )


def _stored_size(url: str) -> int | None:
    if scheme_of(url) not in ("", "file"):
        return None
    return os.stat(local_path(url)).st_size  # noqa: PTH116 - a str, not a Path
