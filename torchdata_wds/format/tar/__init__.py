"""A tar stream to its regular members."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from torchdata_wds.format.headers import DIRECTORY, HARD_LINK, HEADER_WORDS, VOLUME_LABEL, is_file
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES, TarEntries, TarEntry
from torchdata_wds.format.tar.fast import LookAhead
from torchdata_wds.format.tar.links import HardLinks, Reopen
from torchdata_wds.format.tar.members import ByteSource, Mark, MemberRun, PassedMember, ShardMember, Unit, singles
from torchdata_wds.handlers import warn_seldom
from torchdata_wds.option_types import Select
from torchdata_wds.storage import mask_url

_NEVER_FIELDS = frozenset({DIRECTORY, VOLUME_LABEL})
_SYMBOLIC_LINK = HEADER_WORDS[ord("2")]
_CURE = "Write the shard with tar --dereference (-h), which stores what links point to."


class ReadOptions(NamedTuple):
    """How a shard is read; those without a comment are options of ``load_wds_shards``."""

    select: Select | None = None
    rename: Callable[[str], str] | None = None
    visit: int = 0  # as in `ShardMember`
    shard: str = ""  # the URL as messages may show it
    reopen: Reopen | None = None  # opens the archive again at a byte offset, for hard links; by default through the URL
    require_end_marker: bool = True
    concatenated: bool = False
    offset: int = 0  # where in the archive the stream begins
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES
    sizes_only: bool = False  # whether members that can be sought past have their size for content


def read_members(
    stream: ByteSource, url: str, *, skipped: Counter[str] | None = None, **options: Any
) -> Iterator[ShardMember]:
    """Reads the regular members of a tar archive (ustar, GNU, PAX or V7) forward, one at a time in memory.

    Options are those of `ReadOptions`; `skipped` counts what is skipped, by reason. Only the normal end of the iterator
    proves a whole shard: at any damage it raises a `ShardFormatError`, after the members before it.

    """
    chosen = ReadOptions(**{"shard": mask_url(url), **options})
    for item in singles(read_marked_members(stream, url, chosen, Counter() if skipped is None else skipped)):
        if isinstance(item, ShardMember):
            yield item


def read_marked_members(stream: ByteSource, url: str, options: ReadOptions, skipped: Counter[str]) -> Iterator[Unit]:
    """Does what `read_members` does, and also reports where samples are complete although an error follows.

    Small members come as runs where neither `rename` nor `select` is given. `Mark.END` comes as soon as an end marker
    is seen, before the rest of the stream is checked. A `PassedMember` stands for each file that `select` leaves out,
    and comes before the error of a payload that cannot be read.
    """
    select, rename, visit, shard, reopen, require_end_marker, concatenated, offset, largest, sizes_only = options
    wanted = None if select is None else name_filter(select)
    choose = None if rename is None and wanted is None else partial(_choice, rename, wanted)
    links = HardLinks(url, shard, reopen, max_member_bytes=largest)
    # What a later hard link may need is held, or forgotten, in the loop below.
    seeks_past = pass_over if sizes_only else None if wanted is None or links.recent is not None else choose
    source = LookAhead(stream, url, visit, largest, seeks_past)
    ends = {"require_end_marker": require_end_marker, "concatenated": concatenated}
    entries = TarEntries(source, shard, offset=offset, max_member_bytes=largest, **ends)
    skips = SkippedEntries(shard, skipped, is_whole=not offset)
    with skips.reported(), closing(links):
        for entry in walk(entries, source, links):
            if entry is None:
                yield Mark.END
            elif isinstance(entry, TarEntry):
                name = _renamed(rename, entry.name)
                if not is_file(entry.kind):
                    skips.add(entry, name, wanted)
                    entries.skip(entry)
                    continue
                skips.has_files = True
                links.note(entry)
                try:
                    if sizes_only and links.recent is None and entry.kind != HARD_LINK:
                        entries.skip(entry)
                        size = entry.size if entry.sparse_size is None else entry.sparse_size
                        unit: Unit = ShardMember(url, name, cast("bytes", size), visit)
                    elif wanted is None or wanted(name):
                        unit = ShardMember(url, name, links.read(entry, entries), visit)
                    else:
                        links.pass_over(entry, entries)
                        unit = PassedMember(name)
                except Exception:
                    yield PassedMember(name)
                    raise
                yield unit
            else:
                skips.has_files = True
                if links.recent is not None and not isinstance(entry, PassedMember):
                    links.recent.note(entry)
                if sizes_only and isinstance(entry, PassedMember):
                    yield ShardMember(url, entry.name, cast("bytes", entry.size), visit)
                elif choose is None or (source.chooses and not isinstance(entry, MemberRun)):
                    yield entry
                else:
                    for member in entry.members() if isinstance(entry, MemberRun) else (entry,):
                        name = _renamed(rename, member.name)
                        try:
                            is_wanted = wanted is None or wanted(name)
                        except Exception:
                            yield PassedMember(name)
                            raise
                        yield member._replace(name=name) if is_wanted else PassedMember(name)
    yield Mark.END  # an archive without end marker, where that is allowed


def check_whole(stream: ByteSource, shard: str) -> None:
    """Raises unless an archive, or several that were joined, reaches its end marker and nothing follows."""
    source = LookAhead(stream, shard, 0, choose=pass_over)
    entries = TarEntries(source, shard, concatenated=True)
    for entry in walk(entries, source):
        if isinstance(entry, TarEntry):
            entries.skip(entry)


def walk(
    entries: TarEntries, source: LookAhead, links: HardLinks | None = None
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


def pass_over(name: str) -> tuple[str, bool]:
    """Chooses no member, as the `choose` of a `LookAhead` whose caller needs no content."""
    return name, False


def _choice(rename: Callable[[str], str] | None, wanted: Callable[[str], bool] | None, name: str) -> tuple[str, bool]:
    new = _renamed(rename, name)
    return new, wanted is None or wanted(new)


def _renamed(rename: Callable[[str], str] | None, name: str) -> str:
    if rename is None:
        return name
    new = rename(name)
    if not isinstance(new, str):
        what = f"rename= returned {new!r} for member {name!r}"
        raise TypeError(f"{what}; it must return a str. select= leaves members out")
    return new


def name_filter(select: Select) -> Callable[[str], bool]:
    """Turns a ``select=`` argument into a predicate on names; ``*`` matches slashes, a leading ``./`` is ignored."""
    if isinstance(select, str):
        select = [glob for glob in re.split(r"[;\s]+", select) if glob]
    if callable(select):
        return select
    globs = list(select) if isinstance(select, Iterable) else []
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"select must be a glob, a list of globs or a callable(name) -> bool, not {select!r}")
    matches = [re.compile(fnmatch.translate(glob.removeprefix("./"))).match for glob in globs]
    return lambda name: any(match(name.removeprefix("./")) for match in matches)


@dataclass
class SkippedEntries:
    """The entries of a shard that hold no content: counted, and warned about where that would be silent loss."""

    shard: str
    counts: Counter[str]
    is_whole: bool = True
    has_files: bool = False  # set by the reader at the first member

    def __post_init__(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._fields: Counter[str] = Counter()  # those with the name of a field
        self._first = ""

    def add(self, entry: TarEntry, name: str, wanted: Callable[[str], bool] | None = None) -> None:
        """Counts an entry."""
        kind = HEADER_WORDS.get(entry.kind, f"entry of type {chr(entry.kind)!r}")
        self.counts[kind] += 1
        self._kinds[kind] += 1
        if entry.kind in _NEVER_FIELDS or split_name(name) is None or not (wanted is None or wanted(name)):
            return
        self._fields[kind] += 1
        if not self._first:
            self._first = f"{name} -> {entry.link}" if entry.link else name

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Logs at most one warning, at the shard's end or where its reading ends."""
        is_whole = False
        try:
            yield
            is_whole = self.is_whole
        finally:
            gives_nothing = is_whole and not self.has_files
            cure = f" {_CURE}" if _SYMBOLIC_LINK in (self._fields or self._kinds) else ""
            if self._fields:
                more = " It has no other members." if gives_nothing else ""
                loss = f"skipped {_listed(self._fields)} named like fields, whose content it does not hold"
                what = f"shard {self.shard}: {loss}; the first is {self._first}.{more}{cure}"
                warn_seldom("skipped links and devices", what)
            elif gives_nothing and self._kinds:
                what = f"shard {self.shard} gives no member: it only has {_listed(self._kinds)}.{cure}"
                warn_seldom("shards without members", what)


def _listed(kinds: Counter[str]) -> str:
    texts = []
    for kind, count in sorted(kinds.items()):
        plural = kind.replace("directory", "directories").replace("entry", "entries")
        texts.append(f"{count:,} {kind if count == 1 else plural if plural != kind else kind + 's'}")
    return ", ".join(texts)
