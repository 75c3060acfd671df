"""Hard links: the members that they stand for.

A link's bytes come from a second look at the shard, so that the normal path keeps nothing. Where a shard cannot be
opened a second time, the members just before a link are kept: most links point at neighbours.
"""

from __future__ import annotations

import posixpath
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Generic, TypeVar

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.format.headers import HARD_LINK, is_file
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES, TarEntries, TarEntry
from torchdata_wds.format.tar.members import ByteSource, MemberRun, ShardMember
from torchdata_wds.storage import can_reopen, is_decompressed, open_shard

Reopen = Callable[[int], AbstractContextManager[ByteSource]]
KEPT_BYTES = 64 << 20  # how many bytes of targets are kept for the links to come
RECENT_BYTES = 4 << 20  # how many bytes of the last members are kept where a shard cannot be opened again
_PASSES = 32  # how often a compressed shard may be decompressed to look up links, as long as it is up to there
_PIECE = 1 << 20
_HELD_SIZE = 1 << 20  # a larger member that nobody wants is not held
_ENTRY_BYTES = 200  # what a name and its place in a dict take, about
K = TypeVar("K")


class HardLinks:
    """Finds what the hard links of one shard point at.

    `reopen` opens it again at a byte offset of the decompressed archive, None opens `url` if possible; then `recent`
    holds the members before a link, else it is None.
    """

    def __init__(
        self, url: str, shard: str, reopen: Reopen | None, *, max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES
    ) -> None:
        self.shard = shard
        self.recent = RecentMembers() if reopen is None else None
        self.reopen = partial(_open_at, url) if reopen is None and can_reopen(url) else reopen
        self.met = False  # whether there has been a link: each entry from here on must be noted
        self._max_member_bytes = max_member_bytes
        self._offsets: dict[str, int] | None = None  # made at the first link; from then on it follows the reader
        self._kept: _Kept[int] = _Kept(KEPT_BYTES)
        self._stack = ExitStack()
        self._second: ByteSource | None = None  # the shard opened again, at `_position`
        self._position = 0
        self._passed = 0  # bytes that were decompressed only to get to targets

    def close(self) -> None:
        """Closes what was opened a second time."""
        self._second = None
        self._stack.close()

    def note(self, entry: TarEntry) -> None:
        """Remembers where an entry lies, once there has been a link in this shard."""
        if self._offsets is not None:
            _remember(self._offsets, entry)

    def read(self, entry: TarEntry, entries: TarEntries) -> bytes:
        """Reads the content of a member, or what it links to."""
        data = self.resolve(entry) if entry.kind == HARD_LINK else entries.take(entry)
        if self.recent is not None:
            self.recent.note(ShardMember("", entry.name, data))
        return data

    def pass_over(self, entry: TarEntry, entries: TarEntries) -> None:
        """Leaves a member out; a small one is held, where a link to it could not be looked up otherwise."""
        if self.recent is None or entry.kind == HARD_LINK:
            entries.skip(entry)
        elif entry.sparse_size is None and entry.size <= min(_HELD_SIZE, entries.max_member_bytes):
            self.recent.note(ShardMember("", entry.name, entries.take(entry)))
        else:
            entries.skip(entry)
            self.recent.forget(entry.name)

    def resolve(self, entry: TarEntry) -> bytes:
        """Reads the bytes that a hard link stands for."""
        self.met = True
        if self.recent is not None and (data := self.recent.find(entry.link)) is not None:
            return data
        if self.reopen is None:
            kept = f"of such streams only the last {RECENT_BYTES >> 20} MiB of members are kept"
            why = f"cannot be opened a second time to look it up: {kept}. Read it from a file"
            raise hard_link_error(entry, self.shard, f"{why}, for example by .cache_shards(), or write it")
        try:
            return self._read_target(entry, self.reopen)
        except ShardOpenError as error:
            why = f"cannot be opened a second time to look it up: {error}. Write"
            raise hard_link_error(entry, self.shard, why) from error

    def _read_target(self, entry: TarEntry, reopen: Reopen) -> bytes:
        if self._offsets is None:
            offsets: dict[str, int] = {}
            with reopen(0) as stream:
                entries = TarEntries(stream, self.shard, concatenated=True)
                for earlier in filter(None, entries):
                    if earlier.offset >= entry.offset:
                        break
                    _remember(offsets, earlier)
                    entries.skip(earlier)
            _remember(offsets, entry)  # a later link may point at this one
            self._offsets = offsets
        offset = self._offsets.get(posixpath.normpath(entry.link))
        if offset is None:
            raise hard_link_error(entry, self.shard, "has no such member before it. Write it")
        data = self._kept.get(offset)
        if data is None:
            data = self._read_at(offset, entry, reopen)
            self._kept.add(offset, data)
        return data

    def _read_at(self, offset: int, entry: TarEntry, reopen: Reopen) -> bytes:
        # A compressed shard stays open, because reading begins at its start each time; others are opened at the target.
        if self._second is None or offset < self._position:
            self.close()
            way = offset
            self._second = self._stack.enter_context(reopen(offset))
        else:
            way = left = offset - self._position
            while left and (piece := self._second.read(min(left, _PIECE))):
                left -= len(piece)
        self._position = sys.maxsize  # after an error below it is opened again
        entries = TarEntries(self._second, self.shard, offset=offset, max_member_bytes=self._max_member_bytes)
        target = next(iter(entries))
        if target is None:
            raise hard_link_error(entry, self.shard, "is not the same when it is read again. Write it")
        data = entries.take(target)
        self._position = entries.offset
        if not is_decompressed(self._second):  # type: ignore[arg-type]
            self.close()
            return data
        self._passed += way
        if self._passed > _PASSES * entry.offset + KEPT_BYTES:
            why = f"is compressed and had to be decompressed {_PASSES} times for its links, which point back and forth"
            raise hard_link_error(entry, self.shard, f"{why}. Decompress it, or write it")
        return data


def hard_link_error(entry: TarEntry, shard: str, why: str) -> ShardFormatError:
    """Makes the error for a link whose bytes are not found; `why` goes on after "the shard" and up to "with tar"."""
    what = f"member {entry.name} at byte {entry.offset:,} of shard {shard} is a hard link to {entry.link}"
    cure = "'tar --hard-dereference', or, with a program that has no such option, from a copy of the folder"
    message = f"{what}, and the shard {why} with {cure} that 'cp -r' has made."
    return ShardFormatError(message, shard=shard, member=entry.name, kind="hard-link", offset=entry.offset)


class RecentMembers:
    """The last members of a shard, by name: no more than some MiB, which were read anyhow and are only held longer."""

    def __init__(self) -> None:
        self._units: deque[MemberRun | ShardMember] = deque()  # as they came; nobody looks at them before a link does
        self._size = 0
        self._members: _Kept[str] = _Kept(RECENT_BYTES)

    def note(self, unit: MemberRun | ShardMember) -> None:
        """Holds members."""
        units = self._units
        if not units or units[-1].data is not unit.data:
            self._size += len(unit.data) + _ENTRY_BYTES
        units.append(unit)
        while self._size > RECENT_BYTES and len(units) > 1:
            first = units.popleft()
            if units[0].data is not first.data:
                self._size -= len(first.data) + _ENTRY_BYTES

    def forget(self, name: str) -> None:
        """Forgets a name, which now stands for a member that is not held."""
        self._sort()
        self._members.forget(posixpath.normpath(name))

    def find(self, name: str) -> bytes | None:
        """Returns the bytes of the last member of a name, if they are held."""
        self._sort()
        return self._members.get(posixpath.normpath(name))

    def _sort(self) -> None:
        for unit in self._units:
            for member in unit.members() if isinstance(unit, MemberRun) else (unit,):
                self._members.add(posixpath.normpath(member.name), member.data)
        self._units.clear()
        self._size = 0


class _Kept(Generic[K]):
    """Bytes by name or place, those first used least recently going first; the last ones are held however many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._held: OrderedDict[K, bytes] = OrderedDict()

    def get(self, key: K) -> bytes | None:
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def add(self, key: K, data: bytes) -> None:
        self.forget(key)
        self._held[key] = data
        self._size += len(data) + _ENTRY_BYTES
        while self._size > self._most and len(self._held) > 1:
            self._size -= len(self._held.popitem(last=False)[1]) + _ENTRY_BYTES

    def forget(self, key: K) -> None:
        if (data := self._held.pop(key, None)) is not None:
            self._size -= len(data) + _ENTRY_BYTES


def _open_at(url: str, offset: int) -> AbstractContextManager[ByteSource]:
    return open_shard(url, offset=offset)


def _remember(offsets: dict[str, int], entry: TarEntry) -> None:
    name = posixpath.normpath(entry.name)
    if entry.kind == HARD_LINK:
        target = offsets.get(posixpath.normpath(entry.link))
        if target is not None:
            offsets[name] = target
    elif is_file(entry.kind):
        offsets[name] = entry.offset
