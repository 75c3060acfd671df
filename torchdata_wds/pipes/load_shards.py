"""Shard URLs to members."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds import storage
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.grouping import release_whole_samples
from torchdata_wds.format.members import Mark, ShardMember, Unit
from torchdata_wds.format.names import KeyRule, key_splitter
from torchdata_wds.format.tar import ReadOptions, Select, name_filter, read_marked_members
from torchdata_wds.handlers import Handler, check_handler, keep_going, reraise_exception
from torchdata_wds.pipes.base import WdsPipe, check_flags, register
from torchdata_wds.pipes.place import warn_about_workers

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

    Args:
        source_datapipe: Yields URLs (str or Path), or ``(url, stream)`` pairs from torchdata's openers.
        select: Which members to read: a glob, several separated by blanks, a list of globs, or a
            ``callable(name) -> bool``; None reads all.
        rename: ``callable(name) -> name``, applied before everything that looks at names.
        keys: How names become keys, as in ``group_by_key``: it tells where samples end.
        require_end_marker: Whether a shard without an end-of-archive marker counts as cut off.
        concatenated: Whether to read on behind the end marker, for shards joined with ``cat``.
        storage_options: fsspec options by protocol, as ``{"s3": {...}}``.
        handler: Asked about each shard that cannot be opened or read to its end.

    Yields:
        ShardMember: ``(url, name, data, visit)``, data as bytes.

    Raises:
        ShardOpenError: through the handler, if a shard cannot be opened or its source fails.
        ShardFormatError: through the handler, if a shard is cut or damaged.
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
            select = tuple(select) if isinstance(select, Iterable) else ()
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

    def marked_members(self) -> Iterator[Unit]:
        """Reads members as they come, with a mark behind each shard, for a grouping that heeds the marks."""
        warn_about_workers(self)
        for item in self.source_datapipe:
            try:
                yield from self._read(item)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                yield Mark.BROKEN  # what is whole goes out before the handler may raise
                if not keep_going(self.handler, error, self.skipped):
                    return

    def _read(self, item: Any) -> Iterator[Unit]:
        url, given = _as_source(item)
        if given is None:
            stream = storage.open_shard(url, storage_options=self.storage_options)
        else:
            stream = storage.wrap_stream(given, url)
        reopen = partial(_open_at, url, self.storage_options) if storage.can_reopen(url) else None
        options = ReadOptions(
            self.select,
            self.rename,
            visit=next(_visits),
            shard=storage.mask_url(url),
            reopen=reopen,
            require_end_marker=self.require_end_marker,
            concatenated=self.concatenated,
        )
        with closing(stream):
            yield from read_marked_members(stream, url, options, self.skipped)


def _open_at(url: str, storage_options: storage.StorageOptions, offset: int) -> storage.ByteStream:
    return storage.open_shard(url, offset=offset, storage_options=storage_options)


def _as_source(item: Any) -> tuple[str, Any]:
    """Splits an item into its URL and, where somebody has opened it already, its stream."""
    if isinstance(item, (str, os.PathLike)):
        return os.fspath(item), None
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], (str, os.PathLike)):
        return os.fspath(item[0]), item[1]
    raise ShardListError(
        f"load_wds_shards got {type(item).__name__} {str(item)[:80]!r}; it takes URLs (str or Path) or pairs "
        "(url, stream). Lists of patterns go through .list_shards() first."
    )
