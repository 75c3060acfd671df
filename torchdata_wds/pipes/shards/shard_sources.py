"""Opens the items of a loader as streams: in sequence, ahead of their turn, or several in turn."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

from torchdata_wds import storage
from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.format.index import IndexedSample
from torchdata_wds.format.index.slices import ShardSlice, check_size, find_sample
from torchdata_wds.format.tar.members import LocatedUrl
from torchdata_wds.handlers import warn_rarely
from torchdata_wds.option_types import KeyRule
from torchdata_wds.pipes.shards.shard_copies import CachedShard
from torchdata_wds.pipes.shards.shard_counts import header_facts
from torchdata_wds.storage.read_ahead import ReadAhead, close_all
from torchdata_wds.storage.urls import check_letter

T = TypeVar("T")

#: A stream, and the sample at its position, by the shard's index; None at the start of the shard.
OpenedShard = tuple[storage.ByteStream, IndexedSample | None]

#: The same, opened by a thread.
Ahead = ReadAhead[IndexedSample | None]


class ShardSource(NamedTuple):
    """What to read, and from where."""

    part: ShardSlice
    options: storage.StorageOptions
    given: Any = None  # the shard's stream, if the item brings one
    cached: CachedShard | None = None  # the shard's local copy, if it is cached
    strict: bool = False  # whether an index counted the samples, so that a stale index is an error

    @property
    def url(self) -> str:
        """The URL that members carry, with the path of the local copy if the shard is cached."""
        return self.part.url if self.cached is None else LocatedUrl(self.part.url, self.cached.path)

    @property
    def can_reopen(self) -> bool:
        """Whether the shard can be opened a second time."""
        if self.cached is not None:
            return True
        return self.given is None and storage.can_reopen(self.part.url, storage_options=self.options)

    def open(self, keys: KeyRule, seeks: bool) -> OpenedShard:
        """Opens the shard at the part's first sample if its index has it and is usable (`seeks`), else at the start."""
        part = self.part
        # Reading an index costs a request, which pays only if at least one step of samples is skipped.
        gains = seeks and self.given is None and part.start >= part.step
        if gains and (found := find_sample(part.url, part.start, keys, self.options)) is not None:
            header, begin = found
            source = self
            try:
                if self.cached is None:
                    check_size(header, part.url)
                else:  # the copy must agree with the index
                    facts = header_facts(header) or self.cached.facts
                    source = self._replace(cached=self.cached._replace(facts=facts))
                return source.open_at(begin.start), begin
            except ShardFormatError as error:
                self.report_stale_index(begin, error)
        return self.open_at(), None

    def open_at(self, offset: int = 0) -> storage.ByteStream:
        """Opens the shard or its local copy at a byte offset, or wraps the stream that the item brings.

        The caller calls `wait_for_copies` at the end of the epoch.
        """
        if self.given is not None:
            return storage.wrap_stream(self.given, self.part.url)
        if self.cached is not None:
            return self.cached.open(offset, lingers=True)
        return storage.open_shard(self.part.url, offset=offset, storage_options=self.options)

    def report_stale_index(self, begin: IndexedSample, error: ShardFormatError) -> None:
        """Warns that the index is stale; raises the error instead if the index counted the samples."""
        shard = storage.mask_url(self.part.url)
        stale = ShardFormatError(
            f"shard {shard} has no sample {begin.key!r} at byte {begin.start:,}, where the index beside it says that "
            f"sample {self.part.start:,} begins: {error}. The shard is damaged there, or its index belongs to another "
            "version of it: make the index again with index_shard",
            shard=shard,
            key=begin.key,
            kind="index",
        )
        if self.strict:
            raise stale from error
        warn_rarely("read past", stale)


def is_opened(item: Any) -> bool:
    """Returns whether an item is a pair of a URL and a stream."""
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], tuple)


def as_source(
    item: Any, options: storage.StorageOptions, skip: int = 0, *, form: str = "load_wds_shards", slices: bool = True
) -> ShardSource:
    """Turns an item for the loader `form` into its source, without the first `skip` samples."""
    cached, given, found = None, None, item
    if isinstance(item, CachedShard):
        cached, found = item, item.url if item.part is None else item.part
    elif is_opened(item):
        found, given = item
    strict = isinstance(found, ShardSlice)
    url, start, stop, step = found if strict else (found, 0, None, 1)
    if not isinstance(url, (str, os.PathLike)):
        raise ShardListError(
            f"{form} got {type(item).__name__} {storage.mask_item(item)}; it takes URLs (str or Path), "
            f"{'ShardSlice, ' if slices else ''}CachedShard or pairs (url, stream). Lists of patterns go through "
            ".list_shards() first."
        )
    numbers = (start, 0 if stop is None else stop, step)
    if not all(isinstance(number, int) for number in numbers) or min(numbers) < 0 or not step:
        raise ShardListError(
            f"{found!r} is not a slice of a shard: start and stop must be whole numbers from 0 (stop may be None), and "
            "step one from 1"
        )
    if isinstance(url, str) and (strict or item is found):
        check_letter(url, f"{form} got the shard")
    part = found if strict else ShardSlice(os.fspath(url))
    if skip or not isinstance(part.url, str):
        part = part._replace(url=os.fspath(url), start=start + skip * step)
    return ShardSource(part, options, given, cached, strict)


def read_ahead(
    items: Iterable[T], lead: int, start: Callable[[T], Ahead | None]
) -> Generator[tuple[T, Ahead | None], None, None]:
    """Starts `lead` items before their turn; the caller closes those it takes. Errors of `items` wait too."""
    # With lead=2, items 0, 1 and 2 are started before item 0 is yielded. If taking item 2 fails, 0 and 1 are yielded
    # first: an error must not depend on how far ahead it was found.
    waiting: deque[tuple[T, Ahead | None]] = deque()
    failures: list[Exception] = []

    def started() -> Iterator[tuple[T, Ahead | None]]:
        try:
            for item in items:
                yield item, start(item) if lead else None
        except Exception as error:  # noqa: BLE001  (raised when its turn comes)
            failures.append(error)

    following = started()
    try:
        while True:
            waiting.extend(islice(following, lead + 1 - len(waiting)))
            if not waiting:
                break
            yield waiting.popleft()
        if failures:
            raise failures[0]
    finally:
        close_all(ahead for _, ahead in waiting if ahead is not None)


def in_sequence(streams: Iterable[Generator[T, None, None]]) -> Generator[T, None, None]:
    """Yields the items of one stream after the other, and closes each."""
    for stream in streams:
        with closing(stream):
            yield from stream


_ENDED: Any = object()


def interleave(
    streams: Iterator[Generator[T, None, None]],
    width: int,
    is_over: Callable[[], bool],
    places: list[tuple[int, int]] | None = None,
) -> Generator[T, None, None]:
    """Takes one item from each of `width` streams in turn; when a stream ends, the next one takes its place.

    `is_over` is called after a stream ends, and returns whether all others end too. `places` is kept up to date: for
    each open stream its number, from 0 in the order of `streams`, and how many items it has yielded. To resume, pass
    the places as they were when the newest of these streams was opened. `streams` then begins with these, and lacks
    the ones in between that had ended.
    """
    places = [] if places is None else places
    numbers = [number for number, _ in places]
    last = max(numbers, default=-1)
    begun = dict(zip(sorted(numbers), streams, strict=False))
    opened = [begun[number] for number in numbers]
    following = zip(count(last + 1), streams)
    # Places are saved when a stream is opened, and the next turn is that stream's. [(0, 5), (2, 0)]: stream 0 has
    # yielded 5 items, stream 1 has ended, and stream 2 has taken its place, the second, and yields the next item.
    turn = numbers.index(last) if numbers else 0
    is_vacant = False  # whether the stream of this place has just ended
    try:
        while True:
            if is_vacant or turn == len(opened):
                if (is_vacant or turn < width) and (found := next(following, None)) is not None:
                    opened.insert(turn, found[1])
                    places.insert(turn, (found[0], 0))
                is_vacant = False
                if turn == len(opened):
                    turn = 0
                    if not opened:
                        return
            item = next(opened[turn], _ENDED)
            if item is not _ENDED:
                number, taken = places[turn]
                places[turn] = number, taken + 1
                yield item
                turn += 1
            elif is_over():
                return
            else:
                del opened[turn], places[turn]
                is_vacant = True
    finally:
        for stream in opened:
            stream.close()
