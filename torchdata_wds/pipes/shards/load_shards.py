"""Shard URLs to members."""

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import chain, count, groupby
from typing import Any, NamedTuple

from torchdata_wds import storage
from torchdata_wds.checks import check_count, check_flags
from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardListError
from torchdata_wds.format.index import IndexedSample
from torchdata_wds.format.index.slices import PaddingSlice, slice_members
from torchdata_wds.format.samples.grouping import release_whole_samples
from torchdata_wds.format.samples.names import key_splitter
from torchdata_wds.format.tar import ReadOptions, name_filter, read_marked_members
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.format.tar.members import Mark, MemberRun, PassedMember, ShardMember, Unit
from torchdata_wds.handlers import Asked, Handler, reraise_exception, warn_once
from torchdata_wds.option_types import KeyRule, Select, SplitName
from torchdata_wds.pipes.base import Pipe, in_order, register
from torchdata_wds.pipes.division import check_workers
from torchdata_wds.pipes.foreign_loaders import SpawnNote
from torchdata_wds.pipes.lone_ranks import warn_of_lone_reader
from torchdata_wds.pipes.resume_facts import ShardBegun, Watch, other_shards
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.cache_shards import CachedShard
from torchdata_wds.pipes.shards.shard_sources import Ahead, as_source, in_sequence, interleave, is_opened, read_ahead
from torchdata_wds.pipes.starvation import CycledPasses, CycledShards, warn_when_idle
from torchdata_wds.storage.byte_streams import stored_version
from torchdata_wds.storage.places import meter_for
from torchdata_wds.storage.read_ahead import ReadAhead

#: Counts the openings of all loaders of this process: streams of several loaders may be joined.
_visits = count(1)


class _Item(NamedTuple):
    """An item of the source."""

    value: Any
    skip: int = 0  # how many of its samples to leave out
    ordinal: int = 0  # its number in the pass, if there is a `Watch`
    digest: int | None = None  # a CRC-32 over the items up to this one, if the `Watch` records it


@register("load_wds_shards")
class ShardLoaderIterDataPipe(HandlingPipe[ShardMember]):
    """Loads tar shards into their members (functional name: ``load_wds_shards``).

    Shards are read front to back in the order of the source, with one shard open and one sample in memory. A sample's
    members are yielded together, once the next key or the shard's end marker has been seen, so that a cut-off shard
    never yields half a sample. The handler is called once per shard; complete samples before the damage are kept. From
    a `ShardSlice` only its own samples are yielded: reading starts at the first one if the shard has an index
    beside it and there is no `rename`, and the rest of the shard (end marker, checksums) is checked only if
    the slice ends with it.

    Args:
        source_datapipe: Yields URLs (str or Path), `ShardSlice` of ``split_shards``, `CachedShard` of
            ``cache_shards``, or ``(url, stream)`` pairs from torchdata's openers.
        select: Which members to read: a glob, several separated by blanks, a list of globs, or a
            ``callable(name) -> bool``; None reads all.
        rename: ``callable(name) -> name``, applied before names are used for anything else.
        keys: How names become keys, as in ``group_by_key``; after ``split_shards`` use the rule of the index.
        require_end_marker: Whether a shard without an end-of-archive marker counts as cut off.
        concatenated: Whether to read on after the end marker, for shards joined with ``cat``.
        read_ahead: How many shards to open before their turn, each in a thread that reads up to 16 MiB ahead, which
            hides the latency of servers; 0 starts no thread. Pairs ``(url, stream)`` are read only in their turn.
        interleave: How many shards to keep open, taking one sample from each in turn. When one ends, the next takes its
            place; the order depends on nothing else.
        max_member_bytes: The largest member that is read, in bytes after decompression. A larger one ends its shard
            with an error, unless `select` leaves it out.
        storage_options, rewrite: As in ``list_shards``, for reading.
        handler: Called for each shard that cannot be opened or whose source fails (ShardOpenError), that is cut off,
            damaged or unlike its index (ShardFormatError), or that ``WDS_SECURE=1`` refuses (UnsafeDataError).

    Yields:
        ShardMember: ``(url, name, data, visit)``: data is bytes, and visit is negative for samples that are padding. If
        the shard has a local copy, the attribute ``local_path`` of the URL is its path.

    Raises:
        ShardOpenError: through the handler, if a shard cannot be opened or its source fails.
        ShardFormatError: through the handler, if a shard is cut or damaged, has a member that is too large, or does not
            match its index.
        UnsafeDataError: through the handler, for ``pipe:`` under ``WDS_SECURE=1``.

    Example:
        >>> import tarfile
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> with tarfile.open("one.tar", "w") as tar:
        ...     tar.addfile(tarfile.TarInfo("a.txt"))
        >>> [member[:3] for member in IterableWrapper(["one.tar"]).load_wds_shards()]
        [('one.tar', 'a.txt', b'')]
    """

    reads_shards = True

    def __init__(
        self,
        source_datapipe: Pipe,
        *,
        select: Select | None = None,
        rename: Callable[[str], str] | None = None,
        keys: KeyRule = "first_dot",
        require_end_marker: bool = True,
        concatenated: bool = False,
        read_ahead: int = 0,
        interleave: int = 1,
        max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        key_splitter(keys)
        check_flags(require_end_marker=require_end_marker, concatenated=concatenated)
        check_count("read_ahead", read_ahead, 0)
        check_count("interleave", interleave, 1)
        check_count("max_member_bytes", max_member_bytes, 1)
        if rename is not None and not callable(rename):
            raise TypeError(f"rename must be a function from name to name, not {rename!r}")
        if not (select is None or isinstance(select, str) or callable(select)):
            select = in_order(select) if isinstance(select, Iterable) else ()
        if select is not None:
            name_filter(select)
        super().__init__(source_datapipe, handler)
        self.select, self.rename, self.keys = select, rename, keys
        self.require_end_marker, self.concatenated = require_end_marker, concatenated
        self.read_ahead, self.interleave, self.max_member_bytes = read_ahead, interleave, max_member_bytes
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite
        self._shards_read = 0
        self._cycled = CycledPasses()
        self._spawn_note = SpawnNote()

    def __iter__(self) -> Iterator[ShardMember]:
        ask, split = self.asked(), key_splitter(self.keys)
        with closing(self.shards(ask)) as shards:
            if self.interleave == 1:
                with closing(in_sequence(shards)) as units:
                    yield from release_whole_samples(units, split, ask)
                return
            samples = (_whole_samples(units, split, ask) for units in shards)
            with closing(interleave(samples, self.interleave, lambda: ask.is_over)) as turns:
                for members in turns:
                    yield from members

    def shards(
        self,
        ask: Asked,
        watch: Watch | None = None,
        begun: ShardBegun | None = None,
        skips: Mapping[int, int] | None = None,
        *,
        keys: KeyRule | None = None,
    ) -> Generator[Generator[Unit, None, None], None, None]:
        """Yields a generator per shard, of its members and marks, for a grouping that reads the marks.

        Start each generator before taking the next, and close it if it is not exhausted. `watch` records each shard.
        Items of the source before `begun` are left out, except those in `skips`, which maps the number of an item to
        how many of its first samples to leave out. `keys` overrides the key rule of this pipe.
        """
        check_workers(self)
        self._cycled.begin(self)
        cycled, got = CycledShards(self), False
        keys = self.keys if keys is None else keys
        items = map(_Item, self.source_datapipe) if watch is None else self._items_from(begun, skips or {})
        with closing(read_ahead(items, self.read_ahead, partial(self._start, keys))) as started:
            for item, ahead in started:
                yield self._units(item, ahead, keys, ask, watch)
                got = True
                self._shards_read += 1
                if ask.is_over:
                    return
                cycled.note()
        warn_of_lone_reader(self)
        if not got:
            warn_when_idle(self)

    def _items_from(self, begun: ShardBegun | None, skips: Mapping[int, int]) -> Iterator[_Item]:
        """Yields the items from number `begun.ordinal` on, and the earlier ones that `skips` names."""
        # A running checksum shows at any item whether the list so far is that of the interrupted run, without keeping
        # the URLs, which may be many, in the state.
        digest, ordinal, first = 0, -1, 0 if begun is None else begun.ordinal
        for ordinal, item in enumerate(self.source_datapipe):
            digest = zlib.crc32(repr(_identity(item)).encode(), digest)
            if begun is not None and ordinal == first and digest != begun.digest:
                break
            if ordinal >= first or ordinal in skips:
                is_new = begun is None or ordinal > first
                yield _Item(item, skips.get(ordinal, 0), ordinal, digest if is_new else None)
        else:
            if ordinal >= first or begun is None:
                return
        raise other_shards(ordinal)

    def _start(self, keys: KeyRule, item: _Item) -> Ahead | None:
        """Starts a thread that opens an item; None for an invalid item or an open stream, which wait for their turn."""
        try:
            source = as_source(item.value, self.storage_options, item.skip)
        except ShardListError:
            return None
        if source.given is not None:
            return None
        return ReadAhead(
            partial(source.open, keys, self.rename is None), meter=meter_for(source.part.url, self.storage_options)
        )

    def _units(
        self, item: _Item, ahead: Ahead | None, keys: KeyRule, ask: Asked, watch: Watch | None
    ) -> Generator[Unit, None, None]:
        with nullcontext() if ahead is None else closing(ahead):
            if watch is not None:
                if item.digest is not None:
                    watch.begin_shard(item.ordinal, item.digest)
                watch.reading = str(getattr(item.value, "url", _identity(item.value)))
            try:
                yield from self._read(item, ahead, keys, watch)
            except ChangedShardError:  # not for the handler: resuming would yield other samples
                raise
            except Exception as error:  # noqa: BLE001  (the handler decides)
                yield Mark.BROKEN  # whole samples go out before the handler may raise
                ask(error)

    def _read(self, item: _Item, ahead: Ahead | None, keys: KeyRule, watch: Watch | None) -> Iterator[Unit]:
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
            stream, begin = source.open(keys, self.rename is None) if ahead is None else ahead.opened()
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
                units = slice_members(units, key_splitter(keys), part, first=first, least=least, shard=shown)
            yield from units


def _identity(item: Any) -> Any:
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


def _whole_samples(
    units: Generator[Unit, None, None], split: SplitName, ask: Asked
) -> Generator[list[ShardMember], None, None]:
    """Yields a list of members per sample; members without a key join the sample before them."""
    key: str | None = None

    def key_of(member: ShardMember) -> str | None:
        nonlocal key
        parts = split(member.name)
        key = key if parts is None else parts[0]
        return key

    with closing(units):
        for _, members in groupby(release_whole_samples(units, split, ask), key_of):
            yield list(members)
