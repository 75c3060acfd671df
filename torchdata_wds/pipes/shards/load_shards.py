"""Shard URLs to members."""

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import Any

from torchdata_wds import storage
from torchdata_wds.checks import check_count, check_flags
from torchdata_wds.format.samples.grouping import release_whole_samples
from torchdata_wds.format.samples.names import key_splitter
from torchdata_wds.format.tar import name_filter
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.format.tar.members import ShardMember, Unit
from torchdata_wds.handlers import Asked, Handler, reraise_exception
from torchdata_wds.option_types import KeyRule, Select, SplitName
from torchdata_wds.pipes.base import Pipe, in_order, register
from torchdata_wds.pipes.division import check_workers
from torchdata_wds.pipes.foreign_loaders import SpawnNote
from torchdata_wds.pipes.lone_ranks import warn_of_lone_reader
from torchdata_wds.pipes.resume_facts import ShardBegun, Watch, other_shards
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.shard_reading import Item, ShardReading, identity_of
from torchdata_wds.pipes.shards.shard_sources import in_sequence, interleave
from torchdata_wds.pipes.starvation import CycledPasses, CycledShards, warn_when_idle


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
    helper_types = (ShardReading,)  # whose methods run for it

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
        reading = ShardReading(
            self.skipped,
            self.storage_options,
            self.keys if keys is None else keys,
            self.select,
            self.rename,
            self.require_end_marker,
            self.concatenated,
            self.max_member_bytes,
            self,
        )
        items = map(Item, self.source_datapipe) if watch is None else self._items_from(begun, skips or {})
        with closing(reading.shards(items, self.read_ahead, ask, watch)) as shards:
            for units in shards:
                yield units
                got = True
                self._shards_read += 1
                if ask.is_over:
                    return
                cycled.note()
        warn_of_lone_reader(self)
        if not got:
            warn_when_idle(self)

    def _items_from(self, begun: ShardBegun | None, skips: Mapping[int, int]) -> Iterator[Item]:
        """Yields the items from number `begun.ordinal` on, and the earlier ones that `skips` names."""
        # A running checksum shows at any item whether the list so far is that of the interrupted run, without keeping
        # the URLs, which may be many, in the state.
        digest, ordinal, first = 0, -1, 0 if begun is None else begun.ordinal
        for ordinal, item in enumerate(self.source_datapipe):
            digest = zlib.crc32(repr(identity_of(item)).encode(), digest)
            if begun is not None and ordinal == first and digest != begun.digest:
                break
            if ordinal >= first or ordinal in skips:
                is_new = begun is None or ordinal > first
                yield Item(item, skips.get(ordinal, 0), ordinal, digest if is_new else None)
        else:
            if ordinal >= first or begun is None:
                return
        raise other_shards(ordinal)


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
