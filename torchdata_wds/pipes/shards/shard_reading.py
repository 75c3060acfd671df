"""Reads the shards that items name: the loop of ``load_wds_shards``, without the pipe around it."""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, TypeVar

from torchdata_wds import storage
from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardListError
from torchdata_wds.format.index import IndexedSample
from torchdata_wds.format.index.slices import PaddingSlice, slice_members
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import key_splitter
from torchdata_wds.format.tar import ReadOptions, read_marked_members
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.format.tar.members import Mark, MemberRun, PassedMember, Unit
from torchdata_wds.handlers import Asked, warn_once
from torchdata_wds.option_types import KeyRule, Select
from torchdata_wds.pipes.resume_facts import Watch
from torchdata_wds.pipes.shards.shard_copies import CachedShard
from torchdata_wds.pipes.shards.shard_sources import Ahead, as_source, in_sequence, interleave, is_opened, read_ahead
from torchdata_wds.storage.byte_streams import stored_version
from torchdata_wds.storage.cache import wait_for_copies
from torchdata_wds.storage.places import meter_for
from torchdata_wds.storage.read_ahead import ReadAhead
from torchdata_wds.storage.targets.base import run_at_end

T = TypeVar("T")

#: Counts the openings of all loaders of this process: streams of several loaders may be joined.
_visits = count(1)


class Item(NamedTuple):
    """An item of a loader's source."""

    value: Any
    skip: int = 0  # how many of its samples to leave out
    ordinal: int = 0  # its number in the pass, if there is a `Watch`
    digest: int | None = None  # a CRC-32 over the items up to this one, if the `Watch` records it


class ShardReading(NamedTuple):
    """How shards are read: options of ``load_wds_shards``, and the counts of members that belong to no sample."""

    skipped: Counter[str]
    storage_options: storage.StorageOptions
    keys: KeyRule = "first_dot"
    select: Select | None = None
    rename: Callable[[str], str] | None = None
    require_end_marker: bool = True
    concatenated: bool = False
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES
    stage: Any = None  # the pipe that it reads for, which errors name

    def shards(
        self, items: Iterable[Item], lead: int, ask: Asked, watch: Watch | None = None
    ) -> Generator[Generator[Unit, None, None], None, None]:
        """Yields a generator per shard, of its members and marks; opens `lead` shards before their turn.

        Start each generator before taking the next, and close it if it is not exhausted. `watch` records each shard.
        """
        return _closed_at_end(self._shards(items, lead, ask, watch))

    def _shards(
        self, items: Iterable[Item], lead: int, ask: Asked, watch: Watch | None
    ) -> Generator[Generator[Unit, None, None], None, None]:
        running = 1  # this generator, and those of the shards; the last one that ends waits for the copies

        def end() -> None:
            nonlocal running
            running -= 1
            # Not after Ctrl-C. A StopIteration is that of a former epoch, in whose handler this one runs.
            if not running and sys.exc_info()[0] in (None, GeneratorExit, StopIteration):
                wait_for_copies()

        with ExitStack() as stack:
            stack.callback(end)
            started = stack.enter_context(closing(read_ahead(items, lead, self._start)))
            for item, ahead in started:
                running += 1
                yield _closed_at_end(self._units(item, ahead, ask, watch, end))

    def samples(
        self, items: Iterable[Item], ask: Asked, *, lead: int = 0, width: int = 1, **rules: Any
    ) -> Generator[dict[str, Any], None, None]:
        """Yields the samples of shards, of `width` shards in turn; `rules` are those of `group_members`."""

        def group(units: Generator[Unit, None, None]) -> Generator[dict[str, Any], None, None]:
            with closing(units):
                yield from group_members(
                    units, on_error=ask, skipped=self.skipped, shown=storage.mask_url, keys=self.keys, **rules
                )

        with closing(self.shards(items, lead, ask)) as shards:
            if width == 1:
                yield from group(in_sequence(shards))
            else:
                yield from interleave(map(group, shards), width, lambda: ask.is_over)

    def _start(self, item: Item) -> Ahead | None:
        """Starts a thread that opens an item; None for an invalid item or an open stream, which wait for their turn."""
        try:
            source = as_source(item.value, self.storage_options, item.skip)
        except ShardListError:
            return None
        if source.given is not None:
            return None
        return ReadAhead(
            partial(source.open, self.keys, self.rename is None), meter=meter_for(source.part.url, self.storage_options)
        )

    def _units(
        self, item: Item, ahead: Ahead | None, ask: Asked, watch: Watch | None, end: Callable[[], None]
    ) -> Generator[Unit, None, None]:
        with ExitStack() as stack:
            stack.callback(end)
            if ahead is not None:
                stack.callback(ahead.close)
            if watch is not None:
                if item.digest is not None:
                    watch.begin_shard(item.ordinal, item.digest)
                watch.reading = str(getattr(item.value, "url", identity_of(item.value)))
            try:
                yield from self._read(item, ahead, watch)
            except ChangedShardError:  # not for the handler: resuming would yield other samples
                raise
            except Exception as error:  # noqa: BLE001  (the handler decides)
                yield Mark.BROKEN  # whole samples go out before the handler may raise
                ask(error)

    def _read(self, item: Item, ahead: Ahead | None, watch: Watch | None) -> Iterator[Unit]:
        """Yields the members of an item, without its first `item.skip` samples."""
        source = as_source(item.value, self.storage_options, item.skip)
        part = source.part
        if item.skip and part.stop is not None and part.start >= part.stop:
            return  # the resumed run had already yielded the whole slice
        shown = storage.mask_url(part.url)
        options = ReadOptions(
            self.select,
            self.rename,
            visit=-next(_visits) if isinstance(part, PaddingSlice) else next(_visits),
            shard=shown,
            reopen=source.open_at if source.can_reopen else None,
            require_end_marker=self.require_end_marker,
            concatenated=self.concatenated,
            max_member_bytes=self.max_member_bytes,
        )
        with ExitStack() as stack:
            stream, begin = source.open(self.keys, self.rename is None) if ahead is None else ahead.opened()
            stack.enter_context(closing(stream))
            if watch is not None and (version := stored_version(stream)) is not None:
                watch.open_shard(item.ordinal, version)
            # With an index and start=500, reading begins at the byte of sample 500. Without one, or if another sample
            # is found there, the shard is read and counted from its start.
            offset = 0 if begin is None else begin.start
            units = read_marked_members(stream, source.url, options._replace(offset=offset), self.skipped)
            if begin is not None:
                try:
                    units = _beginning_with(units, begin)
                except ShardFormatError as error:
                    source.report_stale_index(begin, error)
                    begin = None
                    stream = stack.enter_context(closing(source.open_at()))
                    units = read_marked_members(stream, source.url, options, self.skipped)
            if self.select is not None:
                units = _noting_selection(units, shown, self.select)
            if part.start or part.stop is not None or part.step > 1:
                first = 0 if begin is None else part.start
                # With start=0, step=4 and skip=3, samples 0, 4 and 8 were yielded before. Now start is 12, and a shard
                # with fewer than 12 - 4 + 1 = 9 samples cannot be the same one.
                least = part.start - part.step + 1 if item.skip else 0
                units = slice_members(units, key_splitter(self.keys), part, first=first, least=least, shard=shown)
            yield from units


# Iterators that a program leaves unfinished are closed when it exits: later, Python has cleared the names of modules,
# and closing them would fail.
_unfinished: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_unfinished.clear)


def _closed_at_end(generator: Generator[T, None, None]) -> Generator[T, None, None]:
    _unfinished.add(generator)
    run_at_end(_close_unfinished)
    return generator


def _close_unfinished() -> None:
    for generator in list(_unfinished):
        with suppress(Exception):  # another thread may be running it
            generator.close()


def identity_of(item: Any) -> Any:
    """Returns what identifies an item in every run, wherever its shard is opened or cached."""
    if isinstance(item, CachedShard):
        return item.url if item.part is None else item.part
    return item[0] if is_opened(item) else item


def _noting_selection(units: Iterator[Unit], shard: str, select: Select) -> Iterator[Unit]:
    """Passes the units of a shard through; warns once if none is selected, since a wrong glob makes an epoch empty."""
    passed, is_taken = "", False
    for unit in units:
        if not is_taken and not isinstance(unit, Mark):
            is_taken = not isinstance(unit, PassedMember)
            passed = passed or getattr(unit, "name", "")
        yield unit
    if passed and not is_taken:
        warn_once(
            "select",
            f"load_wds_shards(select={select!r}) takes none of the members of shard {shard}; the first is {passed!r}. "
            "Globs match whole names: '*.jpg' takes the fields jpg",
        )


def _beginning_with(units: Iterator[Unit], begin: IndexedSample) -> Iterator[Unit]:
    """Checks that the first member is that of a sample; raises ShardFormatError if it is not."""
    head = next(units)
    name = head.names[0] if isinstance(head, MemberRun) else getattr(head, "name", None)
    if name != begin.members[0].name:
        raise ShardFormatError("there is " + (f"member {name}" if name else "the end of the archive"), kind="index")
    return chain((head,), units)
