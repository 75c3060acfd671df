"""A tar stream to its regular members."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES, ByteSource, TarEntries, TarEntry
from torchdata_wds.format.tar.fast import LookAhead
from torchdata_wds.format.tar.headers import HARD_LINK, is_file
from torchdata_wds.format.tar.members import Mark, MemberRun, PassedMember, ShardMember, Unit, singles
from torchdata_wds.format.tar.skipped_entries import SkippedEntries
from torchdata_wds.format.tar.special import HardLinks, Reopen, read_payload
from torchdata_wds.option_types import Select
from torchdata_wds.storage import mask_url

_HELD_SIZE = 1 << 20


def read_members(
    stream: ByteSource,
    url: str,
    *,
    select: Select | None = None,
    rename: Callable[[str], str] | None = None,
    visit: int = 0,
    shard: str | None = None,
    reopen: Reopen | None = None,
    require_end_marker: bool = True,
    concatenated: bool = False,
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES,
    skipped: Counter[str] | None = None,
) -> Iterator[ShardMember]:
    """Reads the regular members of a tar archive, in their order, one at a time in memory.

    ustar, GNU, PAX and V7 archives are read forward only. Hard links give the bytes of the member they stand for.
    Folders, symbolic links, devices and FIFOs are skipped and counted, with a warning where they have names of fields.

    Args:
        stream: The decompressed archive.
        url: The shard's URL, which every member carries.
        select: Which members to read, by name (after `rename`): a glob, several, or a ``callable(name) -> bool``.
        rename: Changes names before anything looks at them.
        visit: Which opening this is, for `ShardMember.visit`.
        shard: The URL as messages may show it; `url` without its secrets by default.
        reopen: Opens the archive again at a byte offset, for hard links; by default through `url` where that is
            possible.
        require_end_marker: Whether an archive without an end-of-archive block is an error.
        concatenated: Whether to read on behind an end-of-archive block, as for archives joined with ``cat``.
        max_member_bytes: The size of the largest member that is read; a larger one that `select` does not leave out
            is an error.
        skipped: Counts what is skipped, by reason.

    Yields:
        Members; the last one is no proof of a whole shard, the normal end of the iterator is.

    Raises:
        ShardFormatError: at any damage, after the members before it: a wrong header checksum, a cut anywhere, no
            end marker, bytes behind the end marker, a member that is too large.

    Example:
        >>> import io, tarfile
        >>> out = io.BytesIO()
        >>> with tarfile.open(fileobj=out, mode="w") as tar:
        ...     tar.addfile(tarfile.TarInfo("a.txt"))
        >>> [member.name for member in read_members(io.BytesIO(out.getvalue()), "x.tar")]
        ['a.txt']
    """
    options = ReadOptions(
        select,
        rename,
        visit,
        mask_url(url) if shard is None else shard,
        reopen,
        require_end_marker,
        concatenated,
        max_member_bytes=max_member_bytes,
    )
    for item in singles(read_marked_members(stream, url, options, Counter() if skipped is None else skipped)):
        if isinstance(item, ShardMember):
            yield item


class ReadOptions(NamedTuple):
    """How a shard is read: the options of `read_members`."""

    select: Select | None
    rename: Callable[[str], str] | None
    visit: int
    shard: str
    reopen: Reopen | None
    require_end_marker: bool
    concatenated: bool
    offset: int = 0  # where in the archive the stream begins
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES


def read_marked_members(stream: ByteSource, url: str, options: ReadOptions, skipped: Counter[str]) -> Iterator[Unit]:
    """Does what `read_members` does, and also reports where samples are complete although an error follows.

    Small members come as runs where neither `rename` nor `select` is given.
    `Mark.END` comes as soon as an end marker is seen, before the rest of the stream is checked. A `PassedMember`
    stands for each file that `select` leaves out, and comes before the error of a payload that cannot be read.
    """
    select, rename, visit, shard, reopen, require_end_marker, concatenated, offset, largest = options
    wanted = None if select is None else name_filter(select)
    choose = None if rename is None and wanted is None else partial(_choice, rename, wanted)
    links = HardLinks(url, shard, reopen, max_member_bytes=largest)
    source = LookAhead(stream, url, visit, max_member_bytes=largest, choose=None if wanted is None else choose)
    entries = TarEntries(
        source,
        shard,
        offset=offset,
        require_end_marker=require_end_marker,
        concatenated=concatenated,
        max_member_bytes=largest,
    )
    skips = SkippedEntries(shard, skipped, is_whole=not offset)
    with skips.reported(), closing(links):
        for entry in _walk(entries, source, links):
            if entry is None:
                yield Mark.END
                continue
            if not isinstance(entry, TarEntry):
                skips.has_files = True
                if links.recent is not None and not isinstance(entry, PassedMember):
                    links.recent.note(entry)
                if choose is None or (source.chooses and not isinstance(entry, MemberRun)):
                    yield entry
                    continue
                for member in entry.members() if isinstance(entry, MemberRun) else (entry,):
                    name, is_wanted = choose(member.name)
                    yield member._replace(name=name) if is_wanted else PassedMember(name)
                continue
            name = entry.name if rename is None else _renamed(rename, entry.name)
            if is_file(entry.kind):
                skips.has_files = True
                links.note(entry)
                try:
                    data = None
                    if wanted is None or wanted(name):
                        data = _read_file(entry, entries, links)
                    else:
                        _pass(entry, entries, links)
                except Exception:
                    yield PassedMember(name)
                    raise
                yield PassedMember(name) if data is None else ShardMember(url, name, data, visit)
            else:
                skips.add(entry, name, wanted)
                entries.skip(entry)
    yield Mark.END  # an archive without end marker, where that is allowed


def check_whole(stream: ByteSource, shard: str) -> None:
    """Raises unless an archive, or several that were joined, reaches its end marker and nothing follows.

    Payloads are passed over by seeking where the stream can.
    """
    source = LookAhead(stream, shard, 0, choose=lambda name: (name, False))
    entries = TarEntries(source, shard, concatenated=True)
    for entry in _walk(entries, source, None):
        if isinstance(entry, TarEntry):
            entries.skip(entry)


def _walk(
    entries: TarEntries, source: LookAhead, links: HardLinks | None
) -> Iterator[TarEntry | MemberRun | ShardMember | PassedMember | None]:
    """Yields entries one by one, and members wherever the source can and nothing before them says otherwise."""
    yield from _take(entries, source)
    for entry in entries:
        yield entry
        if entry is not None and not entries.has_globals and not (links is not None and links.met):
            yield from _take(entries, source)


def _take(entries: TarEntries, source: LookAhead) -> Iterator[MemberRun | ShardMember | PassedMember]:
    while (taken := source.take()) is not None:
        entries.passed(taken[1])
        yield taken[0]


def _read_file(entry: TarEntry, entries: TarEntries, links: HardLinks) -> bytes:
    data = links.resolve(entry) if entry.kind == HARD_LINK else read_payload(entries, entry)
    if links.recent is not None:
        links.recent.note(ShardMember("", entry.name, data))
    return data


def _pass(entry: TarEntry, entries: TarEntries, links: HardLinks) -> None:
    """Leaves a member out; a small one is held, where a link to it could not be looked up otherwise."""
    if links.recent is None or entry.kind == HARD_LINK:
        entries.skip(entry)
    elif entry.sparse_size is None and entry.size <= min(_HELD_SIZE, entries.max_member_bytes):
        links.recent.note(ShardMember("", entry.name, entries.take(entry)))
    else:
        entries.skip(entry)
        links.recent.forget(entry.name)


def _choice(rename: Callable[[str], str] | None, wanted: Callable[[str], bool] | None, name: str) -> tuple[str, bool]:
    """Returns a member's new name, and whether the member is wanted."""
    new = name if rename is None else _renamed(rename, name)
    return new, wanted is None or wanted(new)


def _renamed(rename: Callable[[str], str], name: str) -> str:
    new = rename(name)
    if not isinstance(new, str):
        raise TypeError(
            f"rename= returned {new!r} for member {name!r}; it must return a str. select= leaves members out"
        )
    return new


def name_filter(select: Select) -> Callable[[str], bool]:
    """Turns a ``select=`` argument into a predicate on names; ``*`` matches slashes, a leading ``./`` is ignored.

    Example:
        >>> name_filter("*.jpg *.cls")("d/a.jpg")
        True
    """
    if isinstance(select, str):
        select = [glob for glob in re.split(r"[;\s]+", select) if glob]
    if callable(select):
        return select
    globs = list(select) if isinstance(select, Iterable) else []
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"select must be a glob, a list of globs or a callable(name) -> bool, not {select!r}")
    matches = [re.compile(fnmatch.translate(glob.removeprefix("./"))).match for glob in globs]
    return lambda name: any(match(name.removeprefix("./")) for match in matches)
