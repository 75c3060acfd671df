"""What this process has read, and how long it waited for it, by source.

Always on, and cheap: everything is counted once per opening and once per buffer, never per member or sample. There are
no locks, so two threads that count at the same moment could lose an addition; CPython does not switch threads there.

A thread that reads ahead calls `reads_ahead`: its waiting is in the `seconds` of a source, and not in `waited`, which
is that of the thread that makes items.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import add, sub
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

from torchdata_wds.environment import ais_endpoint, ais_schemes
from torchdata_wds.storage.urls import AIS, HIDDEN_FOLDER, LOCAL, STDIN, scheme_of

LOCAL_FILES, COMMANDS, STANDARD_INPUT, GIVEN_STREAMS = "local files", "commands", "standard input", "given streams"


class SourceTally(NamedTuple):
    """What was read from one source; the seconds are those of a clock on the wall."""

    shards: int = 0  # how many were opened
    bytes: int = 0  # as stored, so those of compressed shards are compressed
    seconds: float = 0.0  # in opening and reading, by any thread
    waited: float = 0.0  # by the threads that make items
    first_seconds: float = 0.0  # from the start of an opening to the first byte, in total
    first_bytes: int = 0  # the number of openings in that total
    retries: int = 0  # connections and requests that were tried again
    hits: int = 0  # shards that a cache folder had, or that another process was downloading to it
    misses: int = 0
    slowest: str = ""  # the shard with the most seconds since `forget_slowest`, with secrets masked
    slowest_seconds: float = 0.0


class _Counts:
    """The counts of one source, which change."""

    __slots__ = SourceTally._fields

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        for name, value in SourceTally._field_defaults.items():
            setattr(self, name, value)

    def tally(self) -> SourceTally:
        return SourceTally(*(getattr(self, name) for name in self.__slots__))


_counts: dict[str, Any] = {}
_ahead: set[int] = set()  # the threads that read ahead
_told: tuple[Callable[[str], object], ...] = ()  # what is called at each opening
_latest: "Meter | None" = None


class Meter:
    """Counts what is read from one opened shard; `shard` is its URL with secrets masked."""

    __slots__ = ("_counts", "_is_waiting", "_seconds", "byte", "shard")

    def __init__(self, shard: str, source: str = "") -> None:
        self.shard = str(shard)  # of a subclass, such as those of NumPy, marshal makes bytes
        self.byte = 0  # how far the shard has been read
        self._counts = counts_of(source or source_of(self.shard))
        self._seconds = 0.0
        self._is_waiting = True  # for the first byte

    def opened(self, seconds: float = 0.0) -> None:
        """Counts an opening; the files beside shards are not counted as shards."""
        is_shard = HIDDEN_FOLDER not in self.shard
        self._counts.shards += is_shard
        self.add(0, seconds)
        for function in _told if is_shard else ():
            function(self.shard)

    def looked_up(self, *, hit: bool) -> None:
        """Counts a shard that was looked for in a cache folder."""
        self._counts.hits += hit
        self._counts.misses += not hit

    def begin(self) -> None:
        """Notes that this shard is the one being read, unless this thread reads ahead."""
        global _latest
        if not _ahead or get_ident() not in _ahead:
            _latest = self

    def add(self, count: int, seconds: float) -> None:
        """Counts bytes, and the seconds that reading them took."""
        counts = self._counts
        self.byte += count
        counts.bytes += count
        counts.seconds += seconds
        if not _ahead or get_ident() not in _ahead:
            counts.waited += seconds
        own = self._seconds = self._seconds + seconds
        if own > counts.slowest_seconds:
            counts.slowest, counts.slowest_seconds = self.shard, own
        if count and self._is_waiting:
            self._is_waiting = False
            counts.first_seconds += own
            counts.first_bytes += 1

    def move(self, byte: int) -> None:
        """Notes a seek: bytes that will be read again are taken off, so that they count once."""
        self._counts.bytes -= max(0, self.byte - byte)
        self.byte = byte

    def read_into(self, readinto: Callable[[Any], int | None], buffer: Any) -> int:
        """Calls a function that reads into a buffer, and counts what it reads, even if it fails."""
        self.begin()
        count, begin = 0, perf_counter()
        try:
            count = readinto(buffer) or 0
        finally:
            self.add(count, perf_counter() - begin)
        return count

    def read(self, read: Callable[..., bytes | None], *size: int) -> bytes:
        """Calls a function that returns bytes, and counts them, even if it fails."""
        self.begin()
        data, begin = b"", perf_counter()
        try:
            data = read(*size) or b""
        finally:
            self.add(len(data), perf_counter() - begin)
        return data

    def read_range(self, read: Callable[[int, int, Any], bytes], start: int, stop: int, version: Any) -> bytes:
        """Calls the `read` of a reader of ranges, and counts its bytes, even if it fails."""
        global _latest
        self.byte = start
        if not _ahead:
            _latest = self
        else:
            self.begin()
        data, begin = b"", perf_counter()
        try:
            data = read(start, stop, version)
        finally:
            self.add(len(data), perf_counter() - begin)
        return data

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of a wait for another thread or process, which counts the reading itself."""
        self.begin()
        begin = perf_counter()
        try:
            yield
        finally:
            if get_ident() not in _ahead:
                self._counts.waited += perf_counter() - begin


def counts_of(source: str) -> Any:
    """Returns the counts of a source, which the caller may add to."""
    return _counts.get(source) or _counts.setdefault(source, _Counts())


def source_of(shard: str) -> str:
    """Names the source of a shard: its server or bucket without secrets, or the kind of its source.

    Example:
        >>> source_of("https://me:***@data.example.org/train-0000.tar?token=***"), source_of("train-0000.tar")
        ('https://data.example.org', 'local files')
    """
    scheme = scheme_of(shard)
    named = {**dict.fromkeys(LOCAL, LOCAL_FILES), "pipe": COMMANDS, STDIN: STANDARD_INPUT}.get(scheme)
    if named is not None:
        return named
    if (scheme == AIS or scheme in ais_schemes()) and (endpoint := ais_endpoint()):
        return _server_of(endpoint)
    # simplecache::s3://bucket/x.tar reads from the last of its parts; an IPv6 address has colons too
    last = shard if scheme in ("http", "https") else shard.rpartition("::")[2]
    return _server_of(last) if "://" in last else LOCAL_FILES


def _server_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    server = rest.partition("/")[0].partition("?")[0].partition("#")[0]
    # abfs://container@account.host: not a user
    return f"{scheme.lower()}://{server if scheme.lower().startswith('abfs') else server.rpartition('@')[2]}"


def retried(shard: str) -> None:
    """Counts a connection or request for a shard that is tried again."""
    counts_of(source_of(shard)).retries += 1


@contextlib.contextmanager
def reads_ahead() -> Iterator[None]:
    """Marks this thread as one that reads ahead of the thread that makes items."""
    thread = get_ident()
    _ahead.add(thread)
    try:
        yield
    finally:
        _ahead.discard(thread)


def reading() -> tuple[str, int] | None:
    """Returns the shard that the thread that makes items reads or has read last, with secrets masked, and the byte.

    Any thread may ask at any time. None if nothing was read. The bytes are stored ones, except that a shard that a
    thread reads ahead, or that is being downloaded to a cache folder, may count them decompressed.
    """
    latest = _latest
    return None if latest is None else (latest.shard, latest.byte)


def waited() -> float:
    """Returns for how many seconds the threads that make items have waited for all sources."""
    return float(sum(counts.waited for counts in _counts.copy().values()))


def snapshot() -> dict[str, SourceTally]:
    """Returns what this process has read since it began, by source; sources without any are left out."""
    tallies = {source: counts.tally() for source, counts in _counts.copy().items()}
    return {source: tally for source, tally in tallies.items() if any(tally)}


def difference(later: Mapping[str, SourceTally], earlier: Mapping[str, SourceTally]) -> dict[str, SourceTally]:
    """Returns what was read between two snapshots; the slowest shard is "" if it is still the same one."""
    nothing = SourceTally()
    changes = {source: _minus(tally, earlier.get(source, nothing)) for source, tally in later.items()}
    return {source: tally for source, tally in changes.items() if any(tally)}


def total(snapshots: Iterable[Mapping[str, SourceTally]]) -> dict[str, SourceTally]:
    """Adds snapshots, such as those of several workers."""
    found: dict[str, SourceTally] = {}
    for tallies in snapshots:
        for source, tally in tallies.items():
            found[source] = _plus(found.get(source, SourceTally()), tally)
    return found


def _minus(later: SourceTally, earlier: SourceTally) -> SourceTally:
    slowest: Any = later[-2:] if later[-2:] != earlier[-2:] else ("", 0.0)
    return SourceTally._make([*map(sub, later[:-2], earlier[:-2]), *slowest])


def _plus(one: SourceTally, other: SourceTally) -> SourceTally:
    slowest = max(one[-2:], other[-2:], key=lambda pair: pair[1])
    return SourceTally._make([*map(add, one[:-2], other[:-2]), *slowest])


def tell_openings(function: Callable[[str], object], *, stop: bool = False) -> None:
    """Calls a function with each shard that is opened, with secrets masked, or no longer calls it."""
    global _told
    _told = (*(told for told in _told if told != function), *(() if stop else (function,)))


def forget_slowest() -> None:
    """Makes the slowest shard of each source one that is read from now on, such as in the next epoch."""
    for counts in _counts.copy().values():
        counts.slowest, counts.slowest_seconds = "", 0.0


def fresh() -> None:
    """Starts all counts at zero, as in a forked child; meters in use keep counting."""
    global _latest, _told
    _latest, _told = None, ()
    _ahead.clear()
    for counts in _counts.values():
        counts.clear()


os.register_at_fork(after_in_child=fresh)
