"""The shards of a map-style data set: listed and indexed when first needed, and read by numbers of samples."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import repeat
from typing import Any

import numpy as np

from torchdata_wds import storage
from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.lookup import find_index
from torchdata_wds.format.index.samples import LARGEST_LOCAL_PIECE, LARGEST_REMOTE_PIECE, Result, SampleReader
from torchdata_wds.pipes.order.fetching import FetchThreads, result_of
from torchdata_wds.storage.ranges import ShardRanges
from torchdata_wds.storage.urls import STDIN, mask_url, scheme_of

Sample = dict[str, Any]

#: How many requests to a store are under way at once.
_REQUESTS = 16


class OpenedShards:
    """The shards of a data set, which its parts share: listed and indexed once, and opened in each process.

    Args:
        patterns: As for `list_urls`.
        index: As for `find_index`.
        index_options: The other options of `find_index`.
        cache, max_open: As for `ShardRanges`.
        rules: Options of `SampleReader`.
    """

    def __init__(
        self,
        patterns: object,
        index: Any,
        *,
        index_options: dict[str, Any],
        cache: str | os.PathLike[str] | None,
        max_open: int,
        rules: dict[str, Any],
    ) -> None:
        self._patterns, self._index, self._index_options, self._rules = patterns, index, index_options, rules
        self._options: storage.StorageOptions = index_options["storage_options"]
        self._cache, self._max_open = cache, max_open
        self._reader: SampleReader | None = None
        self._near: set[int] = set()  # shards that are read without requests
        self._sent: tuple[str, bytes] | None = None  # of a pickle: the digest of its index, and the pickled index

    def __getstate__(self) -> dict[str, Any]:
        sent = self._sent
        if self._reader is not None:
            sent = self.index.digest, pickle.dumps(self.index)
        return {**vars(self), "_reader": None, "_near": set(), "_sent": sent}

    @property
    def reader(self) -> SampleReader:
        """Reads the samples."""
        if self._reader is None:
            ranges = ShardRanges(self._options, max_open=self._max_open, cache=self._cache)
            index = self._find_index()
            is_local = len(index.shards) > 0 and ranges.is_local(index.shards[0].url)
            largest = LARGEST_LOCAL_PIECE if is_local else LARGEST_REMOTE_PIECE
            self._reader = SampleReader(index, ranges, largest=largest, **self._rules)
        return self._reader

    def _find_index(self) -> DatasetIndex:
        """Returns the index of the process that pickled this, or else the one that is found here."""
        if self._sent is not None:
            with suppress(ShardOpenError):  # it is a file of another machine
                received: DatasetIndex = pickle.loads(self._sent[1])
                return received
        urls = list(storage.list_urls(self._patterns, storage_options=self._options))
        streams = (STDIN,) if self._cache is not None else (STDIN, "pipe")
        if (stream := next((url for url in urls if scheme_of(url) in streams), None)) is not None:
            raise ShardListError(
                f"shard {mask_url(stream)} can only be read from its start to its end: it is standard input or the "
                "output of a command. Write it to a file, pass cache= to copy what commands write, or read it with "
                "load_wds_shards",
                shard=mask_url(stream),
            )
        index = find_index(urls, self._index, **self._index_options)
        if self._sent is not None and index.digest != self._sent[0]:
            raise ShardFormatError(
                f"{len(urls):,} shards, the first {mask_url(urls[0])}, are not those of the process that pickled the "
                "data set: numbers would stand for other samples. Make the data set again",
                kind="index",
            )
        return index

    @property
    def index(self) -> DatasetIndex:
        """The index of all shards."""
        return self.reader.index

    def read(self, numbers: Sequence[int]) -> list[Sample]:
        """Reads samples in this order: neighbours together, and from stores several pieces at once."""
        reader = self.reader
        if len(numbers) == 1:
            return reader.read(numbers)
        # For 7, 3, 4 and 3, pieces 3..4 and 7 are read, and samples 2, 0, 1 and 0 of these returned.
        wanted, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        pieces = reader.pieces(wanted)
        results: list[Result] = []
        with ExitStack() as stack:
            fetched: Iterable[bytes | Exception] = map(reader.fetch, pieces)
            if len(pieces) > 1 and not self._are_near({piece.shard for piece in pieces}):
                threads = stack.enter_context(FetchThreads(min(len(pieces), _REQUESTS)))
                futures = [threads.fetch(reader, piece) for piece in pieces]
                fetched = map(result_of, futures, repeat(reader), pieces)
            for piece, data in zip(pieces, fetched, strict=True):
                results += reader.take(piece, data)
        samples = []
        for place in places.tolist():
            if isinstance(result := results[place], Exception):
                raise result
            samples.append(result if len(wanted) == len(places) else dict(result))
        return samples

    def _are_near(self, shards: set[int]) -> bool:
        """Returns whether shards are local files, or were read before and so have a copy in the cache."""
        reader = self.reader
        far = {shard for shard in shards - self._near if not reader.ranges.is_local(reader.index.shards[shard].url)}
        self._near |= shards if reader.ranges.cache is not None else shards - far
        return not far

    def close(self) -> None:
        """Closes the files."""
        if self._reader is not None:
            self._reader.ranges.close()
