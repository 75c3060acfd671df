"""The index of a shard that exists, and the sizes of its members, without their content where that can be."""

from __future__ import annotations

import os
import posixpath
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import compress, count, islice
from json.encoder import encode_basestring_ascii as quoted
from operator import ne, sub
from typing import Any, Literal, NamedTuple, Self, cast

from torchdata_wds.errors import ChangedShardError
from torchdata_wds.format.headers import BLOCK, HARD_LINK, is_file, padding
from torchdata_wds.format.index import SPECIAL, IndexHeader, ShardIndex, index_url, pack_row, shard_name
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import RESERVED_FIELDS, GroupingRules
from torchdata_wds.format.tar import ReadOptions, SkippedEntries, pass_over, read_marked_members, walk
from torchdata_wds.format.tar.entries import TarEntries, TarEntry
from torchdata_wds.format.tar.fast import LookAhead
from torchdata_wds.format.tar.links import hard_link_error
from torchdata_wds.format.tar.members import Mark, MemberRun, PassedMember, ShardMember, Unit
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
        source = LookAhead(stream, text, 0, choose=pass_over)
        entries = TarEntries(source, mask_url(text))
        extents = _scan(entries, source, text, special)
        for sample in group_members(extents, keys=keys, shown=mask_url, make=_make_rows):
            if isinstance(sample, str):
                rows.append(sample)
                continue
            key, _, *places = sample.values()
            members = [(name, offset, None if offset is None else size) for name, _, _, offset, size in places]
            rows.append(pack_row(key, places[0].start, places[-1].stop, members))
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


def _scan(entries: TarEntries, source: LookAhead, url: str, special: set[str]) -> Iterator[Unit]:
    """Walks the headers of a shard and yields its members with an `_Extent` in place of their content, and marks.

    Adds to `special` the `SPECIAL` words of what it meets.
    """
    targets = _Targets()
    skips = SkippedEntries(entries.shard, Counter())
    begin = 0  # of the entry
    with skips.reported():
        for entry in walk(entries, source):
            if entry is None:
                yield Mark.END
            elif isinstance(entry, MemberRun):
                skips.has_files = True
                run = ExtentRun.of(entry, url, begin, entries.offset)
                targets.note(run.names, run.starts, run.ends)
                yield run
            elif isinstance(entry, TarEntry) and not is_file(entry.kind):
                entries.skip(entry)
                skips.add(entry, entry.name)
            else:
                skips.has_files = True
                try:
                    extent = _find_extent(entry, entries, targets, special)
                except Exception:
                    yield PassedMember(entry.name)  # where it begins another sample, the one before it is whole
                    raise
                # grouping never looks into the content of a member
                yield ShardMember(url, entry.name, cast("bytes", extent))
            begin = entries.offset
    yield Mark.END


def _find_extent(
    entry: TarEntry | ShardMember | PassedMember, entries: TarEntries, targets: _Targets, special: set[str]
) -> _Extent:
    """Finds where a member lies: an entry, which is passed, or a plain one that has been passed."""
    if not isinstance(entry, TarEntry):
        size = entry.size if isinstance(entry, PassedMember) else len(entry.data)
        start, stop = entries.offset - size - padding(size), entries.offset
        extent = _Extent(entry.name, start - BLOCK, stop, start, size)
    else:
        start = entries.offset
        entries.skip(entry)
        extent = _Extent(entry.name, entry.offset, entries.offset, start, entry.size)
        if entry.sparse_size is not None:
            extent = extent._replace(offset=None, size=entry.sparse_size)
            special.add("sparse")
        elif entry.kind == HARD_LINK:
            target = targets.find(entry.link)
            if target is None:
                raise hard_link_error(entry, entries.shard, "has no such member before it. Write it")
            extent = extent._replace(offset=target[0], size=target[1])
            special.add("hard_links")
        if entries.has_globals:
            special.add("global_headers")
    offset = -1 if extent.offset is None else extent.offset
    targets.note((entry.name,), (offset,), (offset + extent.size,))
    return extent


class ExtentRun(MemberRun):
    """A run of members without their content: `data` are the places where they begin, and where the last one stops.

    All places are bytes of the archive.
    """

    @classmethod
    def of(cls, run: MemberRun, url: str, begin: int, stop: int) -> ExtentRun:
        """Makes the run of what was read between two places of the archive."""
        base = stop - run.ends[-1] - padding(run.ends[-1])
        ends = [base + end for end in run.ends]
        begins = [begin, *[end + -end % BLOCK for end in ends]]
        return cls(url, cast("bytes", begins), run.names, [base + start for start in run.starts], ends, run.visit)

    def members(self) -> Iterator[ShardMember]:
        """Yields the members, with an `_Extent` each."""
        for name, extent in zip(self.names, self._extents(), strict=True):
            yield ShardMember(self.url, name, cast("bytes", extent), self.visit)

    def rows(self, first: int, last: int) -> Self:
        """Returns the members from the first to the one before the last."""
        begins = self.data[first : last + 1]
        return super().rows(first, last)._replace(data=begins)

    def parts(self) -> Iterator[tuple[str, str, bytes]]:
        """Yields field, name and extent of each member."""
        for field, name, extent in zip(self.fields, self.names, self._extents(), strict=True):
            yield field, name, cast("bytes", extent)

    def _extents(self) -> Iterator[_Extent]:
        sizes = map(sub, self.ends, self.starts)
        return map(_Extent, self.names, self.data, self.data[1:], self.starts, sizes)


def _make_rows(run: MemberRun, _: GroupingRules, seen: set[int]) -> list[str] | None:
    """Makes the rows of a run of whole samples; does otherwise what `make_samples` does."""
    keys, fields = run.keys, [field.lower() for field in run.fields]
    if not RESERVED_FIELDS.isdisjoint(fields) or len(set(zip(keys, fields, strict=True))) < len(keys):
        return None
    firsts = [0, *compress(count(1), map(ne, keys, islice(keys, 1, None)))]
    hashes = {hash(keys[row]) for row in firsts}
    if len(hashes) < len(firsts) or not seen.isdisjoint(hashes):
        return None
    seen |= hashes
    sizes = map(sub, run.ends, run.starts)
    members = list(map("[%s,%d,%d]".__mod__, zip(map(quoted, run.names), run.starts, sizes, strict=True)))
    begins = run.data
    return [
        f"[{quoted(keys[first])},{begins[first]},{begins[last]},[{','.join(members[first:last])}]]"
        for first, last in zip(firsts, [*firsts[1:], len(keys)], strict=True)
    ]


class _Targets:
    """The places of all members so far, for hard links to them: packed until the first link looks for one."""

    def __init__(self) -> None:
        self._names: list[str] = []  # of several members each, which NULs separate
        self._starts, self._ends = array("q"), array("q")  # -1 for the start of a sparse member
        self._rows: dict[str, int] | None = None

    def note(self, names: Sequence[str], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Adds members."""
        if self._rows is None:
            self._names.append("\0".join(names))
        else:
            self._rows.update(zip(map(posixpath.normpath, names), count(len(self._starts))))
        self._starts.extend(starts)
        self._ends.extend(ends)

    def find(self, link: str) -> tuple[int | None, int] | None:
        """Finds the content that a link stands for: where it begins, None if it is sparse, and its size."""
        if self._rows is None:
            names = "\0".join(self._names).split("\0") if self._names else []
            self._rows = {posixpath.normpath(name): row for row, name in enumerate(names)}
            self._names.clear()
        row = self._rows.get(posixpath.normpath(link))
        if row is None:
            return None
        start, size = self._starts[row], self._ends[row] - self._starts[row]
        return None if start < 0 else start, size


def read_sizes(url: str, *, skipped: Counter[str] | None = None, **options: Any) -> Generator[Unit, None, None]:
    """Reads the members of a shard for `group_members`, those that can be sought past with their size for content."""
    with open_shard(url) as stream:
        reopen = (lambda offset: open_shard(url, offset=offset)) if can_reopen(url) else None
        chosen = ReadOptions(shard=mask_url(url), reopen=reopen, sizes_only=True, **options)
        yield from read_marked_members(stream, url, chosen, Counter() if skipped is None else skipped)
