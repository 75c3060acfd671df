"""Making the index of a shard that exists, from its headers.

The sizes of members, from the headers of a shard: what lies between them is passed over.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import IndexHeader, ShardIndex, index_url, pack_row, shard_name
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar import ReadOptions, read_marked_members
from torchdata_wds.format.tar.entries import TarEntries, TarEntry
from torchdata_wds.format.tar.gaps import HeaderScan
from torchdata_wds.format.tar.headers import HARD_LINK, is_file
from torchdata_wds.format.tar.members import Mark, PassedMember, ShardMember, Unit
from torchdata_wds.format.tar.skipped_entries import SkippedEntries
from torchdata_wds.storage import ByteStream, can_reopen, is_decompressed, mask_url, open_shard
from torchdata_wds.storage.urls import local_path, scheme_of, url_text


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
        kind="hard-link",
        offset=entry.offset,
    )


def _stored_size(url: str) -> int | None:
    if scheme_of(url) not in ("", "file"):
        return None
    return os.stat(local_path(url)).st_size  # noqa: PTH116 - a str, not a Path


_LARGE = 64 << 10  # what is smaller has been read before one could seek over it
_LOOKED_AT = 24


def read_sizes(
    stream: ByteStream,
    url: str,
    *,
    visit: int = 0,
    require_end_marker: bool = True,
    concatenated: bool = False,
    skipped: Counter[str] | None = None,
) -> Iterator[Unit]:
    """Gives the members of a shard with their sizes in place of their content, for `group_members`.

    A local file that is not compressed is sought through; other streams are read past. Memory holds the shard's names.

    Args:
        stream: The shard, decompressed.
        url: Its URL.
        visit: Tells readings of one shard apart.
        require_end_marker: Whether a shard without end-of-archive marker is an error.
        concatenated: Whether to read on behind an end marker.
        skipped: Counts what is no file, by its kind.

    Yields:
        `ShardMember` whose `data` is an int, and `Mark.END`.

    Example:
        >>> import io, tarfile
        >>> file = io.BytesIO()
        >>> with tarfile.open(fileobj=file, mode="w") as tar:
        ...     info = tarfile.TarInfo("a.txt")
        ...     info.size = 3
        ...     tar.addfile(info, io.BytesIO(b"abc"))
        >>> [unit[1:3] for unit in read_sizes(io.BytesIO(file.getvalue()), "x.tar") if unit is not Mark.END]
        [('a.txt', 3)]
    """
    entries = HeaderScan(stream, mask_url(url), concatenated=concatenated)
    entries.require_end_marker = require_end_marker
    sizes: dict[str, int] = {}
    skips = SkippedEntries(entries.shard, Counter() if skipped is None else skipped)
    with skips.reported():
        for entry in entries:
            if entry is None:
                yield Mark.END
            elif not is_file(entry.kind):
                entries.skip(entry)
                skips.add(entry, entry.name)
            else:
                skips.has_files = True
                try:
                    entries.skip(entry)
                    size = _size(entry, sizes, entries.shard)
                except Exception:
                    yield PassedMember(entry.name)  # where it begins another sample, the one before it is whole
                    raise
                sizes[posixpath.normpath(entry.name)] = size
                # grouping never looks into the content of a member
                yield ShardMember(url, entry.name, cast("bytes", size), visit)
    yield Mark.END


def read_for_sizes(
    url: str,
    *,
    visit: int = 0,
    require_end_marker: bool = True,
    concatenated: bool = False,
    skipped: Counter[str] | None = None,
) -> Generator[Unit, None, None]:
    """Gives the members of a shard in the way that tells their sizes fastest: with content, or as `read_sizes` does.

    Seeking pays in a local file of large members. Elsewhere all is read anyway, and in large pieces.

    Args:
        url: The shard.
        visit: As in `read_sizes`.
        require_end_marker: As in `read_sizes`.
        concatenated: As in `read_sizes`.
        skipped: As in `read_sizes`.

    Yields:
        Members whose `data` is bytes or an int, for `group_members`, and marks.

    Example:
        >>> import tarfile
        >>> with tarfile.open("x.tar", "w") as tar:
        ...     tar.addfile(tarfile.TarInfo("a.txt"))
        >>> from torchdata_wds.format.samples.grouping import group_members
        >>> list(group_members(read_for_sizes("x.tar")))
        [{'__key__': 'a', '__url__': 'x.tar', 'txt': b''}]
    """
    counts = Counter() if skipped is None else skipped
    seeks = _has_large_members(url)
    with open_shard(url) as stream:
        if seeks:
            yield from read_sizes(
                stream,
                url,
                visit=visit,
                require_end_marker=require_end_marker,
                concatenated=concatenated,
                skipped=counts,
            )
        else:
            reopen = (lambda offset: open_shard(url, offset=offset)) if can_reopen(url) else None
            options = ReadOptions(None, None, visit, mask_url(url), reopen, require_end_marker, concatenated)
            yield from read_marked_members(stream, url, options, counts)


def _has_large_members(url: str) -> bool:
    """Looks at the first headers of a local file."""
    if scheme_of(url) not in ("", "file") or not can_reopen(url):
        return False
    with open_shard(url) as stream:
        entries = HeaderScan(stream, mask_url(url))
        sizes = []
        try:
            for entry in islice(entries, _LOOKED_AT):
                if is_decompressed(stream):
                    return False
                if entry is not None:
                    entries.skip(entry)
                    sizes.append(entry.size)
        except ShardFormatError:
            return False  # told by whoever reads it
    return sum(sizes) > _LARGE * len(sizes)


def _size(entry: TarEntry, sizes: dict[str, int], shard: str) -> int:
    if entry.kind != HARD_LINK:
        return entry.size if entry.sparse_size is None else entry.sparse_size
    size = sizes.get(posixpath.normpath(entry.link))
    if size is None:
        raise ShardFormatError(
            f"member {entry.name} at byte {entry.offset:,} of shard {shard} is a hard link to {entry.link}, and the "
            "shard has no such member before it. Write the shard with tar --hard-dereference.",
            shard=shard,
            member=entry.name,
            kind="hard-link",
            offset=entry.offset,
        )
    return size
