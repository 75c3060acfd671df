"""Shard URLs to members."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import chain, count
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds import storage
from torchdata_wds.errors import ShardFormatError, ShardListError
from torchdata_wds.format.grouping import release_whole_samples
from torchdata_wds.format.index import IndexedSample
from torchdata_wds.format.members import Mark, MemberRun, ShardMember, Unit
from torchdata_wds.format.names import KeyRule, key_splitter
from torchdata_wds.format.slicing import (
    PaddingSlice,
    ShardSlice,
    check_size,
    find_index,
    place_of_sample,
    slice_members,
)
from torchdata_wds.format.tar import ReadOptions, Select, name_filter, read_marked_members
from torchdata_wds.handlers import Handler, check_handler, keep_going, reraise_exception, warn_rarely
from torchdata_wds.pipes.base import WdsPipe, check_flags, in_order, register
from torchdata_wds.pipes.place import warn_about_workers
from torchdata_wds.pipes.progress import ShardBegun, Watch, other_shards

__all__ = ["ShardLoaderIterDataPipe"]


#: Counts the openings of all loaders of this process: streams of several loaders may be joined.
_visits = count(1)


@register("load_wds_shards")
class ShardLoaderIterDataPipe(WdsPipe[ShardMember]):
    """Loads tar shards into their members (functional name: ``load_wds_shards``).

    Shards are read front to back in the order they come, one open at a time, one sample in memory. The members of
    a sample come together, once the next key or the shard's end marker has been seen: a cut shard never gives half a
    sample. An item, for the handler, is a shard: one that fails is left at the damage, after the whole samples
    before it.

    Of a `ShardSlice` only its samples are read. Where an index lies beside the shard (``<shard>.index``), reading
    begins at the slice's first sample, by seeking or a range request; without one, and with `rename`, the samples
    before it are read past. What lies behind a slice is not looked at: neither the end marker, nor checksums of the
    compression, nor the exit status of a command, except by the consumer that reads the shard's last samples.

    Args:
        source_datapipe: Yields URLs (str or Path), `ShardSlice` of ``split_shards``, or ``(url, stream)`` pairs from
            torchdata's openers.
        select: Which members to read: a glob, several separated by blanks, a list of globs, or a
            ``callable(name) -> bool``; None reads all.
        rename: ``callable(name) -> name``, applied before everything that looks at names.
        keys: How names become keys, as in ``group_by_key``: it tells where samples end. Slices count samples by it:
            behind ``split_shards`` give both the same, which must be that of the index.
        require_end_marker: Whether a shard without an end-of-archive marker counts as cut off.
        concatenated: Whether to read on behind the end marker, for shards joined with ``cat``.
        storage_options: fsspec options by protocol, as ``{"s3": {...}}``.
        handler: Asked about each shard that cannot be opened or read to its end.

    Yields:
        ShardMember: ``(url, name, data, visit)``, data as bytes; the visit is negative for samples that only pad.

    Raises:
        ShardOpenError: through the handler, if a shard cannot be opened or its source fails.
        ShardFormatError: through the handler, if a shard is cut or damaged, or is not the one of its index.
        UnsafeDataError: through the handler, for ``pipe:`` under ``WDS_SECURE=1``.

    Example:
        >>> import tarfile
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> with tarfile.open("one.tar", "w") as tar:
        ...     tar.addfile(tarfile.TarInfo("a.txt"))
        >>> [member[:3] for member in IterableWrapper(["one.tar"]).load_wds_shards()]
        [('one.tar', 'a.txt', b'')]
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        select: Select | None = None,
        rename: Callable[[str], str] | None = None,
        keys: KeyRule = "first_dot",
        require_end_marker: bool = True,
        concatenated: bool = False,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        key_splitter(keys)
        check_flags(require_end_marker=require_end_marker, concatenated=concatenated)
        if rename is not None and not callable(rename):
            raise TypeError(f"rename must be a function from name to name, not {rename!r}")
        self.source_datapipe = source_datapipe
        if select is not None and not isinstance(select, str) and not callable(select):
            select = in_order(select) if isinstance(select, Iterable) else ()
        if select is not None:
            name_filter(select)
        self.select = select
        self.rename = rename
        self.keys = keys
        self.require_end_marker = require_end_marker
        self.concatenated = concatenated
        self.storage_options = storage.StorageOptions(storage_options)
        self.handler = check_handler(handler)
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[ShardMember]:
        on_error = partial(keep_going, self.handler, skipped=self.skipped)
        yield from release_whole_samples(self.marked_members(), key_splitter(self.keys), on_error)

    def marked_members(
        self,
        watch: Watch | None = None,
        begun: ShardBegun | None = None,
        skip: int = 0,
        *,
        keys: KeyRule | None = None,
    ) -> Iterator[Unit]:
        """Reads members as they come, with a mark behind each shard, for a grouping that heeds the marks.

        Args:
            watch: Is told of each shard.
            begun: The item of the source to begin with; those before it are passed over.
            skip: How many samples of that to leave out.
            keys: The rule by which the grouping tells samples apart, if not that of this pipe.

        Raises:
            ShardListError: if the source does not give the items that `begun` tells of.
        """
        warn_about_workers(self)
        for item in self.source_datapipe if watch is None else self._items_from(begun, watch):
            skipped, skip = skip, 0
            try:
                yield from self._read(item, skipped, self.keys if keys is None else keys)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                yield Mark.BROKEN  # what is whole goes out before the handler may raise
                if not keep_going(self.handler, error, self.skipped):
                    return

    def _items_from(self, begun: ShardBegun | None, watch: Watch) -> Iterator[Any]:
        digest = 0
        ordinal = -1
        last_passed = -1 if begun is None else begun.ordinal - 1
        for ordinal, item in enumerate(self.source_datapipe):
            digest = zlib.crc32(repr(item[0] if _is_opened(item) else item).encode(), digest)
            if begun is None or ordinal > begun.ordinal:
                watch.begin_shard(ordinal, digest)
            elif ordinal == begun.ordinal and digest != begun.digest:
                break
            if ordinal > last_passed:
                yield item
        else:
            if ordinal > last_passed or begun is None:
                return
        raise other_shards(ordinal)

    def _read(self, item: Any, skip: int, keys: KeyRule) -> Iterator[Unit]:
        """Reads what an item asks for, without so many of its samples at its beginning."""
        part, given = _as_source(item)
        start = part.start + skip * part.step
        if skip and part.stop is not None and start >= part.stop:
            return
        visit = -next(_visits) if isinstance(part, PaddingSlice) else next(_visits)
        first = 0
        sought = None
        if given is None and start >= part.step:  # else there is nothing to gain
            sought = self._seek(part, start, visit, keys, strict=isinstance(item, ShardSlice))
        if sought is not None:
            (stream, units), first = sought, start
        elif given is None:
            stream = storage.open_shard(part.url, storage_options=self.storage_options)
            units = self._members_of(stream, part.url, visit)
        else:
            stream = storage.wrap_stream(given, part.url)
            units = self._members_of(stream, part.url, visit)
        with closing(stream):
            if start or part.stop is not None or part.step > 1:
                part = part._replace(start=start)
                units = slice_members(units, key_splitter(keys), part, first=first, shard=storage.mask_url(part.url))
            yield from units

    def _members_of(self, stream: storage.ByteStream, url: str, visit: int, offset: int = 0) -> Iterator[Unit]:
        options = ReadOptions(
            self.select,
            self.rename,
            visit=visit,
            shard=storage.mask_url(url),
            reopen=partial(_open_at, url, self.storage_options) if storage.can_reopen(url) else None,
            require_end_marker=self.require_end_marker,
            concatenated=self.concatenated,
            offset=offset,
        )
        return read_marked_members(stream, url, options, self.skipped)

    def _seek(
        self, part: ShardSlice, start: int, visit: int, keys: KeyRule, *, strict: bool
    ) -> tuple[storage.ByteStream, Iterator[Unit]] | None:
        """Opens a shard at one of its samples; None where no index tells its place.

        Raises:
            ShardFormatError: if the index is not that of the shard; where not `strict` that is a warning, and None.
        """
        index = None if self.rename else find_index(part.url, keys, self.storage_options)
        begin = None if index is None else place_of_sample(index, start)
        if index is None or begin is None:
            return None
        try:
            check_size(index, part.url)
            return self._open_at_sample(part.url, begin, visit)
        except ShardFormatError as error:
            shard = storage.mask_url(part.url)
            stale = ShardFormatError(
                f"shard {shard} has no sample {begin.key!r} at byte {begin.start:,}, where the index beside it says "
                f"that sample {start:,} begins: {error}. The shard is damaged there, or its index is of another "
                "version of it: make that again with index_shard",
                shard=shard,
                key=begin.key,
            )
            if strict:
                raise stale from error
            warn_rarely("read past", stale)
            return None

    def _open_at_sample(self, url: str, begin: IndexedSample, visit: int) -> tuple[storage.ByteStream, Iterator[Unit]]:
        stream = _open_at(url, self.storage_options, begin.start)
        try:
            units = self._members_of(stream, url, visit, begin.start)
            head = next(units)
            name = head.names[0] if isinstance(head, MemberRun) else getattr(head, "name", None)
            if name != begin.members[0].name:
                raise ShardFormatError("there is " + (f"member {name}" if name else "the end of the archive"))
        except BaseException:
            stream.close()
            raise
        return stream, chain((head,), units)


def _open_at(url: str, storage_options: storage.StorageOptions, offset: int) -> storage.ByteStream:
    return storage.open_shard(url, offset=offset, storage_options=storage_options)


def _is_opened(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], tuple)


def _as_source(item: Any) -> tuple[ShardSlice, Any]:
    """Splits an item into what to read of which URL and, where somebody has opened it already, its stream."""
    if isinstance(item, ShardSlice):
        return _checked(item), None
    if isinstance(item, (str, os.PathLike)):
        return ShardSlice(os.fspath(item)), None
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], (str, os.PathLike)):
        return ShardSlice(os.fspath(item[0])), item[1]
    raise ShardListError(
        f"load_wds_shards got {type(item).__name__} {str(item)[:80]!r}; it takes URLs (str or Path), ShardSlice or "
        "pairs (url, stream). Lists of patterns go through .list_shards() first."
    )


def _checked(part: ShardSlice) -> ShardSlice:
    url, start, stop, step = part
    numbers = (start, 0 if stop is None else stop, step)
    if not all(isinstance(number, int) for number in numbers) or min(numbers) < 0 or not step:
        raise ShardListError(
            f"{part!r} is no slice of a shard: start and stop must be whole numbers from 0 (stop may be None), and "
            "step one from 1"
        )
    return part if isinstance(url, str) else part._replace(url=os.fspath(url))
