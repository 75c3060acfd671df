"""The items that a loader takes, on their way to open streams: at once, or by threads before their turn comes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, Generic, NamedTuple, TypeVar

from torchdata_wds import storage
from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.format.index import IndexedSample, ShardIndex
from torchdata_wds.format.index.slices import ShardSlice, check_size, find_index, place_of_sample
from torchdata_wds.format.tar.members import LocatedUrl
from torchdata_wds.handlers import warn_rarely
from torchdata_wds.option_types import KeyRule
from torchdata_wds.pipes.shards.cache_shards import CachedShard
from torchdata_wds.pipes.shards.shard_counts import header_facts
from torchdata_wds.storage.read_ahead import ReadAhead, close_all
from torchdata_wds.storage.urls import check_letter

__all__ = [
    "Ahead",
    "OpenedShard",
    "ShardOpener",
    "ShardSource",
    "Interleaver",
    "as_source",
    "in_sequence",
    "is_opened",
    "read_ahead",
    "stale_index",
]


T = TypeVar("T")


class ShardSource(NamedTuple):
    """What to read, and from where.

    Attributes:
        part: Which samples of which shard.
        given: The shard's stream, where somebody has opened it already.
        cached: The shard's local copy, if it is to have one.
        strict: Whether the samples were counted by an index, which must be that of the shard.
    """

    part: ShardSlice
    given: Any = None
    cached: CachedShard | None = None
    strict: bool = False

    @property
    def url(self) -> str:
        """The shard's URL as its members have it: with the path of its copy, if there is one."""
        return self.part.url if self.cached is None else LocatedUrl(self.part.url, self.cached.path)

    def stated_by(self, index: ShardIndex) -> ShardSource:
        """The same, with a copy that must be as an index says."""
        if self.cached is None:
            return self
        return self._replace(cached=self.cached._replace(facts=header_facts(index.header) or self.cached.facts))


class OpenedShard(NamedTuple):
    """A stream of a shard.

    Attributes:
        stream: The stream, for whoever closes it.
        begin: The sample that it stands at according to the shard's index; None where it stands at the beginning.
    """

    stream: storage.ByteStream
    begin: IndexedSample | None = None


def is_opened(item: Any) -> bool:
    """Tells whether an item is a pair of a URL and a stream."""
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], tuple)


def as_source(item: Any) -> ShardSource:
    """Tells what an item of the loader's source asks for.

    Raises:
        ShardListError: if it is none of what a loader takes.
    """
    if isinstance(item, CachedShard):
        part = ShardSlice(item.url) if item.part is None else _checked(item.part)
        return ShardSource(part, cached=item, strict=item.part is not None)
    if isinstance(item, ShardSlice):
        return ShardSource(_checked(item), strict=True)
    if isinstance(item, str):
        check_letter(item, "load_wds_shards got the shard")
    if isinstance(item, (str, os.PathLike)):
        return ShardSource(ShardSlice(os.fspath(item)))
    if is_opened(item) and isinstance(item[0], (str, os.PathLike)):
        return ShardSource(ShardSlice(os.fspath(item[0])), item[1])
    raise ShardListError(
        f"load_wds_shards got {type(item).__name__} {storage.mask_item(item)}; it takes URLs (str or Path), "
        "ShardSlice, CachedShard or pairs (url, stream). Lists of patterns go through .list_shards() first."
    )


def _checked(part: ShardSlice) -> ShardSlice:
    url, start, stop, step = part
    numbers = (start, 0 if stop is None else stop, step)
    if not all(isinstance(number, int) for number in numbers) or min(numbers) < 0 or not step:
        raise ShardListError(
            f"{part!r} is no slice of a shard: start and stop must be whole numbers from 0 (stop may be None), and "
            "step one from 1"
        )
    if not isinstance(url, str):
        return part._replace(url=os.fspath(url))
    check_letter(url, "load_wds_shards got the shard")
    return part


class ShardOpener:
    """Opens shards for a loader, at one of their samples where an index beside them tells its place.

    Args:
        storage_options: As of the loader.
        seeks: Whether indexes count the samples as the loader does.
    """

    def __init__(self, storage_options: storage.StorageOptions, *, seeks: bool) -> None:
        self.storage_options = storage_options
        self._seeks = seeks

    def open(self, source: ShardSource, start: int, keys: KeyRule) -> OpenedShard:
        """Opens a shard at a sample, or else at its beginning.

        Raises:
            ShardFormatError: if the index is not that of the shard; where the source is not strict that is a warning.
            ShardOpenError: if it cannot be opened.
        """
        if source.given is not None:
            return OpenedShard(storage.wrap_stream(source.given, source.part.url))
        begin = None
        if self._seeks and start >= source.part.step:  # else there is nothing to gain
            index = find_index(source.part.url, keys, self.storage_options)
            begin = None if index is None else place_of_sample(index, start)
            if index is not None and begin is not None:
                try:
                    if source.cached is None:
                        check_size(index, source.part.url)
                    return OpenedShard(self.open_at(source.stated_by(index), begin.start), begin)
                except ShardFormatError as error:
                    stale_index(source, start, begin, error)
        return OpenedShard(self.open_at(source))

    def open_at(self, source: ShardSource, offset: int = 0) -> storage.ByteStream:
        """Opens a shard, its copy if it is to have one, at a byte."""
        if source.cached is not None:
            return source.cached.open(offset)
        return storage.open_shard(source.part.url, offset=offset, storage_options=self.storage_options)


def stale_index(source: ShardSource, start: int, begin: IndexedSample, error: ShardFormatError) -> None:
    """Says that the index of a shard is not its own: as a warning, unless samples were counted by it.

    Raises:
        ShardFormatError: if they were.
    """
    shard = storage.mask_url(source.part.url)
    stale = ShardFormatError(
        f"shard {shard} has no sample {begin.key!r} at byte {begin.start:,}, where the index beside it says "
        f"that sample {start:,} begins: {error}. The shard is damaged there, or its index is of another "
        "version of it: make that again with index_shard",
        shard=shard,
        key=begin.key,
    )
    if source.strict:
        raise stale from error
    warn_rarely("read past", stale)


#: A stream that a thread opens, with the sample that it stands at.
Ahead = ReadAhead[IndexedSample | None]


def read_ahead(
    items: Iterable[T], count: int, start: Callable[[T], Ahead | None]
) -> Generator[tuple[T, Ahead | None], None, None]:
    """Starts threads for the items to come, so many at a time.

    What the items' iterator raises is raised after the items before it.

    Args:
        items: The items.
        count: How many items are taken before their turn; with 0 no thread is started.
        start: Starts the thread of an item; gives None for one that has none.

    Yields:
        Each item, and its thread's work, to be closed by who takes it.
    """
    waiting: deque[tuple[T, Ahead | None]] = deque()
    source = iter(items)
    failure: Exception | None = None
    is_over = False
    try:
        while True:
            while len(waiting) <= count and not is_over:
                try:
                    item = next(source)
                except StopIteration:
                    is_over = True
                except Exception as error:  # noqa: BLE001  (raised when its turn comes)
                    failure, is_over = error, True
                else:
                    waiting.append((item, start(item) if count else None))
            if not waiting:
                break
            yield waiting.popleft()
        if failure is not None:
            raise failure
    finally:
        close_all(ahead for _, ahead in waiting if ahead is not None)


def in_sequence(streams: Iterable[Generator[T, None, None]]) -> Generator[T, None, None]:
    """Gives the items of one stream after the other, and closes each."""
    for stream in streams:
        with closing(stream):
            yield from stream


class _Ended:
    """What comes instead of an item behind a stream's end."""


_ENDED = _Ended()


class Interleaver(Generic[T]):
    """Takes items of several streams in turn, one of each; where one ends, the next stream comes in its place.

    Args:
        streams: The streams, numbered from 0 as they come; each is asked for when a place is free.
        width: How many are open at a time.
        is_over: Asked after each stream's end: whether all others are to end there too.
        places: The streams to begin with, as the attribute had them when the last of them was opened; of the others
            up to that one none comes.

    Attributes:
        places: The numbers of the open streams, and how many items each has given.

    Example:
        >>> streams = ((letter for letter in letters) for letters in ("abc", "1", "xy"))
        >>> list(Interleaver(streams, 2, lambda: False).take())
        ['a', '1', 'b', 'x', 'c', 'y']
    """

    def __init__(
        self,
        streams: Iterator[Generator[T, None, None]],
        width: int,
        is_over: Callable[[], bool],
        places: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.places = list(places)
        self._streams = streams
        self._width = width
        self._is_over = is_over
        self._open: list[Generator[T, None, None]] = []

    def take(self) -> Generator[T, None, None]:
        """Gives the items, and closes the streams at the end."""
        try:
            turn = self._begin()
            while True:
                if turn == len(self._open) and not (turn < self._width and self._add(turn)):
                    turn = 0
                    if not self._open:
                        return
                item = next(self._open[turn], _ENDED)
                if not isinstance(item, _Ended):
                    number, taken = self.places[turn]
                    self.places[turn] = number, taken + 1
                    yield item
                    turn += 1
                elif self._is_over():
                    return
                else:
                    del self._open[turn], self.places[turn]
                    self._add(turn)
        finally:
            for stream in self._open:
                stream.close()

    def _begin(self) -> int:
        """Opens the streams to begin with; gives the place whose turn it is."""
        numbers = [number for number, _ in self.places]
        self._last = max(numbers, default=-1)
        streams = dict(zip(sorted(numbers), self._streams, strict=False))
        self._open = [streams[number] for number in numbers]
        return numbers.index(self._last) if numbers else 0

    def _add(self, place: int) -> bool:
        """Puts the next stream in a place, if there is one."""
        stream = next(self._streams, None)
        if stream is None:
            return False
        self._last += 1
        self._open.insert(place, stream)
        self.places.insert(place, (self._last, 0))
        return True
