"""The index of a shard that exists, and the sizes of its members, without their content where that can be."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

from torchdata_wds.errors import ChangedShardError
from torchdata_wds.format.index import SPECIAL, IndexHeader, ShardIndex, index_url, pack_row, shard_name
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar import ReadOptions, SkippedEntries, read_marked_members
from torchdata_wds.format.tar.entries import TarEntries
from torchdata_wds.format.tar.headers import HARD_LINK, is_file
from torchdata_wds.format.tar.links import hard_link_error
from torchdata_wds.format.tar.members import Mark, PassedMember, ShardMember, Unit
from torchdata_wds.storage import ByteStream, can_reopen, is_decompressed, mask_url, open_shard
from torchdata_wds.storage.byte_streams import StoredVersion, stored_version
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.ranges import find_version
from torchdata_wds.storage.urls import url_text


class _Extent(NamedTuple):
    """Where a member lies: it stands for the member's content while members are grouped."""

    name: str
    start: int  # where its first header begins
    stop: int  # where its padding ends
    offset: int | None  # where its content begins, that of its target for a hard link; None for a sparse member
    size: int  # of its content, with the holes of a sparse member


def index_shard(
    url: str | os.PathLike[str],
    *,
    keys: Literal["first_dot", "last_dot"] = "first_dot",
    to: str | os.PathLike[str] | Literal[False] | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> ShardIndex:
    """Makes the index of a shard that exists, from its headers.

    A local file that is not compressed is sought through, other shards are read past. The samples are those that
    ``load_wds_shards`` and ``group_by_key`` give.

    Args:
        url: The shard, as `open_shard` takes it.
        keys: How names are split, as in ``group_by_key``.
        to: Where to write the index: by default ``.wds-index/<name>.index`` beside the shard; False writes
            none.
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
        >>> len(index_shard(path)), path.with_name(".wds-index").joinpath("x.tar.index").exists()
        (0, True)
    """
    if keys not in ("first_dot", "last_dot"):
        raise ValueError(f"an index needs keys='first_dot' or 'last_dot', which it can name, not {keys!r}")
    text = url_text(url)
    index = scan_shard(text, keys, storage_options)
    if to is not False:
        index.save(index_url(text) if to is None else to, storage_options=storage_options)
    return index


def scan_shard(
    text: str,
    keys: Literal["first_dot", "last_dot"],
    storage_options: Mapping[str, Mapping[str, Any]] | None,
    opened: Callable[[ByteStream], object] = lambda _: None,
) -> ShardIndex:
    """Makes the index of a shard and writes none; `opened` is called with the shard's stream, for an `interrupt`."""
    version = find_version(text, storage_options=storage_options)
    rows = []
    special: set[str] = set()
    with open_shard(text, storage_options=storage_options) as stream:
        opened(stream)
        entries = TarEntries(stream, mask_url(text))
        for sample in group_members(_scan(entries, text, special), keys=keys, shown=mask_url):
            key, _, *extents = sample.values()
            members = [(name, offset, None if offset is None else size) for name, _, _, offset, size in extents]
            rows.append(pack_row(key, extents[0].start, extents[-1].stop, members))
        compressed = is_decompressed(stream)
        _check_unchanged(text, version, stored_version(stream), storage_options)
    words = tuple(word for word in SPECIAL if word in special)
    header = IndexHeader(shard_name(text), keys, len(rows), entries.offset, compressed, special=words)
    if version is not None:
        header = header._replace(bytes=version.size, tag=version.tag or None)
    return ShardIndex(header, rows)


def _check_unchanged(
    url: str,
    version: StoredVersion | None,
    now: StoredVersion | None,
    storage_options: Mapping[str, Mapping[str, Any]] | None,
) -> None:
    """Raises if a shard is another version than before it was read; `now` is what its store sent with it."""
    if now is None and resolve(url, storage_options).is_local:
        now = find_version(url, storage_options=storage_options)
    if version is not None and now is not None and (difference := version.difference(now)):
        shown = mask_url(url)
        what = f"shard {shown} was changed while its index was made: it has {difference}. Index it once it is written"
        raise ChangedShardError(what, shard=shown)


def _scan(entries: TarEntries, url: str, special: set[str]) -> Iterator[Unit]:
    """Walks the headers of a shard and yields its members with an `_Extent` in place of their content, and marks.

    Adds to `special` the `SPECIAL` words of what it meets.
    """
    extents: dict[str, _Extent] = {}
    skips = SkippedEntries(entries.shard, Counter())
    with skips.reported():
        for entry in entries:
            if entry is None:
                yield Mark.END
                continue
            offset: int | None = entries.offset
            size = entry.size
            if not is_file(entry.kind):
                entries.skip(entry)
                skips.add(entry, entry.name)
                continue
            skips.has_files = True
            try:
                entries.skip(entry)
                if entry.sparse_size is not None:
                    offset, size = None, entry.sparse_size
                    special.add("sparse")
                elif entry.kind == HARD_LINK:
                    target = extents.get(posixpath.normpath(entry.link))
                    if target is None:
                        raise hard_link_error(entry, entries.shard, "has no such member before it. Write it")
                    offset, size = target.offset, target.size
                    special.add("hard_links")
            except Exception:
                yield PassedMember(entry.name)  # where it begins another sample, the one before it is whole
                raise
            if entries.has_globals:
                special.add("global_headers")
            extent = _Extent(entry.name, entry.offset, entries.offset, offset, size)
            extents[posixpath.normpath(entry.name)] = extent
            # grouping never looks into the content of a member
            yield ShardMember(url, entry.name, cast("bytes", extent))
    yield Mark.END


def read_sizes(url: str, *, skipped: Counter[str] | None = None, **options: Any) -> Generator[Unit, None, None]:
    """Reads the members of a shard for `group_members`, those that can be sought past with their size for content."""
    with open_shard(url) as stream:
        reopen = (lambda offset: open_shard(url, offset=offset)) if can_reopen(url) else None
        chosen = ReadOptions(shard=mask_url(url), reopen=reopen, sizes_only=True, **options)
        yield from read_marked_members(stream, url, chosen, Counter() if skipped is None else skipped)
