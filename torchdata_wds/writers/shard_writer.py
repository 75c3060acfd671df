"""Samples to numbered shards, with limits on what each holds."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, BinaryIO, Unpack

from torchdata_wds.checks import checked_int
from torchdata_wds.format.index.sidecars import index_url
from torchdata_wds.format.shards import ShardFile, ShardInfo, ShardNames, archive_size
from torchdata_wds.format.tar.packing import PackedSample
from torchdata_wds.option_types import StartShard
from torchdata_wds.process_place import process_place, rank_place
from torchdata_wds.storage import compression_for, mask_url, open_compressor
from torchdata_wds.writers.tar_writer import SampleWriter, TarOptions

logger = logging.getLogger(__name__)


class ShardWriter(SampleWriter):
    """Writes samples into numbered shards of limited size.

    A shard gets its name when it is complete: an exception inside ``with``, or a killed process, leaves the finished
    shards and one ``.partial``, for which `post` is not called. Nothing is created before the first sample.

    Args:
        pattern: Path or URL with ``%06d`` or ``{shard:06d}`` for the number. ``{rank}`` is the rank of this process,
            and ``{worker}`` its number among all workers of all ranks.
        max_count: The most samples in a shard.
        max_bytes: The most bytes in a shard before compression, with headers and the end marker, which pads it to a
            multiple of 10,240. A larger sample gets its own shard, and a warning.
        start_shard: Number of the first shard, or ``"next"`` to continue after the highest number that exists.
        max_shards: The most shards: once they are full, `write` writes no more samples. None means no limit.
        post: Called with the `ShardInfo` of each finished shard.
        overwrite: Whether to replace shards that exist; otherwise they are an error.
        opener: ``callable(name)`` that opens a binary file for each shard. The file is closed when the shard is
            complete, or without an end marker after an exception.
        **options: Those of `TarWriter`, from ``encoder`` on.

    Attributes:
        shards: The `ShardInfo` of each finished shard.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is not valid.

    Example:
        >>> import pathlib, tempfile
        >>> with ShardWriter(tempfile.mkdtemp() + "/x-%06d.tar", max_count=2) as writer:
        ...     for number in range(5):
        ...         _ = writer.write({"__key__": f"{number:06d}", "cls": number})
        >>> [(pathlib.Path(shard.path).name, shard.count) for shard in writer.shards]
        [('x-000000.tar', 2), ('x-000001.tar', 2), ('x-000002.tar', 1)]
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str] | ShardNames,
        *,
        max_count: int = 100_000,
        max_bytes: float = 3e9,
        start_shard: StartShard = 0,
        max_shards: int | None = None,
        post: Callable[[ShardInfo], Any] | None = None,
        overwrite: bool = False,
        opener: Callable[[str], BinaryIO] | None = None,
        **options: Unpack[TarOptions],
    ) -> None:
        own = "max_count max_bytes start_shard max_shards post overwrite opener"
        super().__init__(options, own, overwrite=overwrite)
        for name, function in (("post", post), ("opener", opener)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, not {function!r}")
        limit: Any = max_bytes  # to mypy a float is not a Real
        if isinstance(limit, bool) or not isinstance(limit, Real):
            raise TypeError(f"max_bytes must be a number, not {max_bytes!r}")
        if not max_bytes >= 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes!r}")
        if not isinstance(pattern, ShardNames):
            pattern = ShardNames(pattern, rank=rank_place().number, worker=process_place().number)
        if start_shard == "next":
            pattern.check_listable()
        elif isinstance(start_shard, str):
            raise ValueError(f"start_shard must be a number or 'next', not {start_shard!r}")
        else:
            start_shard = checked_int("start_shard (if it is not 'next')", start_shard, 0)
        self.start_shard = start_shard
        self.max_count = checked_int("max_count", max_count, 1)
        self.max_bytes = max_bytes
        self.max_shards = None if max_shards is None else checked_int("max_shards", max_shards, 1)
        self.post, self.opener = post, opener
        self.shards: list[ShardInfo] = []
        # errors that concern all shards are raised before the first one is opened
        if (kind := compression_for(pattern.name(0), options.get("compress"))) is not None:
            open_compressor(kind)
        if options.get("index"):
            if opener is not None:
                raise ValueError("index=True needs a path or a URL: there is no place beside what an opener opens")
            index_url(pattern.name(0))
        self._names = pattern
        self._numbers: Iterator[int] | None = None
        self._number = 0
        self._shard: ShardFile | None = None
        self._file: BinaryIO | None = None

    @property
    def is_full(self) -> bool:
        """Whether all of `max_shards` are known to be full, so that no more samples are needed."""
        return self._is_last and (self._shard is None or self._shard.count >= self.max_count)

    @property
    def _is_last(self) -> bool:
        """Whether the open shard, or else the one closed last, is the last that `max_shards` allows."""
        return self.max_shards is not None and len(self.shards) + (self._shard is not None) >= self.max_shards

    def shard_for(self, packed: PackedSample) -> ShardFile | None:
        """Returns the shard that a packed sample goes into: the open one, or a new one; None if all are full."""
        if self._shard is not None and not self._has_room(self._shard, packed):
            self._finish()
        if self._shard is None and not self._is_last:
            self._shard = self._open(packed)
        return self._shard

    def close(self) -> None:
        """Finishes the last shard, as `TarWriter.close` does; idempotent."""
        self._closed = True
        with self._lock:
            self._finish()

    def abort(self) -> None:
        """Abandons the open shard, left as ``.partial``; keeps finished ones."""
        self._closed = True
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        with contextlib.suppress(Exception):
            self._close_file()

    def _has_room(self, shard: ShardFile, packed: PackedSample) -> bool:
        # With max_bytes=10_240, 9,216 bytes fit, with 1,024 of end marker; one more block makes the archive 20,480.
        return bool(shard.count < self.max_count and archive_size(shard.size + packed.size) <= self.max_bytes)

    def _open(self, packed: PackedSample) -> ShardFile:
        if (size := archive_size(packed.size)) > self.max_bytes:
            sizes = f"{size:,} bytes, more than the size limit of {self.max_bytes:,.0f}"
            logger.warning("sample %r alone makes a shard of %s", packed.key, sizes)
        if self._numbers is None:
            self._numbers = self._names.numbers(self.start_shard, self._file_options.get("storage_options"))
            self._number = next(self._numbers)
        name = self._names.name(self._number)
        destination: Any = name
        if self.opener is not None:
            destination = self.opener(name)
            if not callable(getattr(destination, "write", None)):
                raise TypeError(f"opener must return a binary file, not {destination!r}")
            self._file = destination
        try:
            shard = ShardFile(destination, name=name, **self._file_options)
        except BaseException:
            self._close_file()
            raise
        # only now, so that no number is left out if the shard cannot be opened
        self._number = next(self._numbers)
        logger.info("writing shard %s", mask_url(name))
        return shard

    def _finish(self) -> None:
        if self._shard is None:
            return
        # open until complete, so that closing it again after an error raises again
        info = self._shard.close()
        self._shard = None
        self.shards.append(info)
        self._close_file()
        if self.post is not None:
            self.post(info)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
