"""The samples of plain tar shards by number and by key: a map-style data set."""

from __future__ import annotations

import copy
import operator
import os
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np
from torch.utils.data import MapDataPipe

from torchdata_wds import storage
from torchdata_wds.checks import check_choice, check_count, check_flags
from torchdata_wds.codecs import Decoder
from torchdata_wds.datasets import map_fetches  # noqa: F401  (makes torch's DataLoader fetch whole batches)
from torchdata_wds.errors import ReappearingKeyError, ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.index.lookup import find_index
from torchdata_wds.format.index.samples import LARGEST_LOCAL_PIECE, LARGEST_REMOTE_PIECE, Result, SampleReader
from torchdata_wds.format.samples.names import grouping_rules
from torchdata_wds.pipes.base import Held, in_order
from torchdata_wds.pipes.chain_text import stage_text
from torchdata_wds.storage.ranges import ShardRanges
from torchdata_wds.storage.urls import STDIN, mask_url, scheme_of

if TYPE_CHECKING:
    from torchdata_wds.format.index.dataset import DatasetIndex

DecoderLike = str | Callable[[str, Any], Any]
Sample = dict[str, Any]

#: How many requests to a store are under way at once.
_REQUESTS = 16
#: How many samples an iteration reads at once.
_NEIGHBOURS = 16


class IndexedShards(MapDataPipe[Sample]):
    """Reads any sample of tar shards by its number or key: a map-style data set.

    Samples are numbered from 0 over the shards in listed order, and equal those of
    ``.list_shards().load_wds_shards().group_by_key()``. Nothing is read before the first use. The index and the open
    files take bounded memory; a batch is fetched at once, with one read for neighbours and parallel requests to stores.
    It works with torch's samplers, ``DataLoader``, ``random_split`` and the map-style ``.map``, ``.batch`` and
    ``.shuffle``, is safe under fork and spawn, and can be pickled. Each sample is compared with the index: if its shard
    has changed, that is an error, and never another sample.

    Args:
        shards: A pattern or a (nested) list of patterns, as for ``list_shards``.
        index: Where the samples are: ``"auto"`` takes the index beside each shard or in the user's cache folder, and
            scans a shard once if there is none; True needs one for each shard; or a path or URL (of a packed index, a
            folder of indexes or a ``wids`` list), a dict from URL to `ShardIndex` or path, or a `DatasetIndex`.
        index_dir: Another folder or URL to look for indexes in.
        keys: How names become keys: ``"first_dot"`` or ``"last_dot"``, as in the index.
        lowercase: Whether to convert fields to lower case.
        fields: Which fields to keep, as in ``group_by_key``; a sample with none of them has only its key and URL.
        decode: What ``wds_decode`` takes, one decoder or several; None leaves bytes, ``()`` decodes all but images.
        cache: A folder in which to keep copies of remote shards, each copied whole when it is first read; samples gain
            ``__local_path__``. None reads only the samples' bytes, by range requests.
        max_open: The most files that are kept open.
        storage_options, rewrite: As in ``list_shards``.

    Raises:
        ShardListError: at first use, if no shard matches, or the index lacks one.
        ShardFormatError: for a sample that is not as the index says, or in a compressed shard.
        ShardOpenError: for a shard that cannot be read.

    Example:
        >>> from torchdata_wds import TarWriter
        >>> with TarWriter("x.tar") as writer:
        ...     for number in range(100):
        ...         _ = writer.write({"__key__": f"{number:02d}", "cls": number})
        >>> data = IndexedShards("x.tar", decode=(), index_dir="indexes")
        >>> len(data), data[-1]["cls"], data["07"]["cls"], data.key_of(42)
        (100, 99, 7, '42')
        >>> train, rest = data[:90], data[90:]
        >>> len(rest), rest[0]["cls"]
        (10, 90)
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[Any],
        *,
        index: Literal["auto", True] | str | os.PathLike[str] | Mapping[str, Any] | DatasetIndex = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        keys: Literal["first_dot", "last_dot"] = "first_dot",
        lowercase: bool = True,
        fields: Iterable[str] | str | None = None,
        decode: DecoderLike | Sequence[DecoderLike] | None = None,
        cache: str | os.PathLike[str] | None = None,
        max_open: int = 64,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
        rewrite: str | Mapping[str, str] | storage.RewriteRules | None = None,
    ) -> None:
        super().__init__()
        check_choice("keys", keys, ("first_dot", "last_dot"))
        check_flags(lowercase=lowercase)
        check_count("max_open", max_open, 1)
        _check_index(index)
        fields = fields if fields is None or isinstance(fields, str) else in_order(fields)
        grouping_rules(keys, lowercase, fields)
        self.shards, self.index, self.index_dir = shards, _held(index), index_dir
        self.keys, self.lowercase, self.fields = keys, lowercase, fields
        self.decode = _held(decode)
        self.cache, self.max_open = cache, max_open
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite
        self._decoder: Decoder | None = None
        if decode is not None:
            self._decoder = Decoder(*([decode] if isinstance(decode, str) or callable(decode) else decode))
        self._opened = _OpenedShards(self)
        self._part: range | None = None  # which samples of the shards these are; None for all

    def __len__(self) -> int:
        return len(self._numbers())

    @overload
    def __getitem__(self, item: SupportsIndex | str) -> Sample: ...

    @overload
    def __getitem__(self, item: slice) -> IndexedShards: ...

    def __getitem__(self, item: Any) -> Any:
        """Returns the sample with a number (negative ones count from the end) or key; for a slice a part, unread.

        A part of a data set is a data set: it has numbers of its own from 0, shares the index and the open files, and
        reads a sample when it is asked for it.
        """
        if isinstance(item, slice):
            return self._slice(item)
        return self._by_key(item) if isinstance(item, str) else self.__getitems__([item])[0]

    def __getitems__(self, numbers: Sequence[SupportsIndex]) -> list[Sample]:
        """Returns the samples with these numbers, in this order; repeated numbers give equal samples."""
        whole = self._numbers()
        return list(map(self._decoded, self._opened.read([_pick(whole, number) for number in numbers])))

    def __iter__(self) -> Iterator[Sample]:
        """Yields all samples in order; few at a time are in memory."""
        whole = self._numbers()
        for begin in range(0, len(whole), _NEIGHBOURS):
            for sample in self._opened.read(whole[begin : begin + _NEIGHBOURS]):
                yield self._decoded(sample)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self.find(key))

    def find(self, key: str) -> list[int]:
        """Returns the numbers of the samples with a key, in order: one in each shard that has it.

        Raises:
            ShardFormatError: if the index has no keys, as that of another program.
        """
        return [self._numbers().index(number) for number, _ in self._matches(key)]

    def key_of(self, number: SupportsIndex) -> str:
        """Returns the key of the sample with a number; reads the sample."""
        key: str = self._opened.read([_pick(self._numbers(), number)])[0]["__key__"]
        return key

    def close(self) -> None:
        """Closes all files; the next access opens what it needs again."""
        self._opened.close()

    def __enter__(self) -> IndexedShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        part = self._part
        steps = "" if part is None else f"[{part.start}:{part.stop}" + f":{part.step}" * (part.step != 1) + "]"
        return stage_text(self) + steps if self.repr_hook is None else super().__repr__()

    def _numbers(self) -> range:  # not a property, where torch would hide an AttributeError
        """The numbers of the samples among those of all shards."""
        return range(len(self._opened.index)) if self._part is None else self._part

    def _slice(self, item: slice) -> IndexedShards:
        part = copy.copy(self)
        part._part = self._numbers()[item]
        return part

    def _decoded(self, sample: Sample) -> Sample:
        return sample if self._decoder is None else self._decoder(sample)

    def _matches(self, key: str) -> list[tuple[int, Sample]]:
        """Returns the samples with a key and their numbers in the shards; the index knows only hashes of keys."""
        whole = self._numbers()
        numbers = [number for number in self._opened.index.find(key) if number in whole]
        samples = self._opened.read(numbers)
        return [(number, sample) for number, sample in zip(numbers, samples, strict=True) if sample["__key__"] == key]

    def _by_key(self, key: str) -> Sample:
        matches = self._matches(key)
        if not matches:
            raise KeyError(f"no sample has the key {key!r}; a key has the folders of its members and no extension")
        if len(matches) > 1:
            whole = self._numbers()
            shown = ", ".join(f"{whole.index(number)} (in {mask_url(sample['__url__'])})" for number, sample in matches)
            what = f"{len(matches)} samples have the key {key!r}: number {shown}. Choose one by its number"
            raise ReappearingKeyError(f"{what}: find({key!r}) lists them", key=key)
        return self._decoded(matches[0][1])


class _OpenedShards:
    """The shards of a data set, which its parts share: listed and indexed once, and opened in each process."""

    def __init__(self, data: IndexedShards) -> None:
        self._patterns, self._options = data.shards, data.storage_options
        self._index = getattr(data.index, "value", data.index)
        self._index_options: dict[str, Any] = {
            "index_dir": data.index_dir,
            "keys": data.keys,
            "storage_options": data.storage_options,
        }
        self._rules: dict[str, Any] = {"lowercase": data.lowercase, "fields": data.fields}
        self._cache, self._max_open = data.cache, data.max_open
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
            fetch: Callable[..., Iterator[bytes | Exception]] = map
            if len(pieces) > 1 and not self._are_near({piece.shard for piece in pieces}):
                fetch = stack.enter_context(ThreadPoolExecutor(min(len(pieces), _REQUESTS))).map
            for piece, data in zip(pieces, fetch(reader.fetch, pieces), strict=True):
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


def _check_index(index: object) -> None:
    if index is None or index is False:
        raise ValueError(f"random access needs an index, not index={index!r}: 'auto' makes one where none is")


def _held(value: Any) -> Any:
    """Hides a collection from torch's traversal of graphs, which would pickle it."""
    return Held(value) if isinstance(value, Collection) and not isinstance(value, str) else value


def _pick(numbers: range, number: SupportsIndex) -> int:
    """Returns a sample's number in all shards."""
    try:
        place = operator.index(number)
    except TypeError:
        what = f"samples are chosen by a number, a slice or a key (str), not by {number!r}"
        raise TypeError(f"{what}. torch.utils.data.Subset(data, numbers) takes a list of numbers") from None
    try:
        return numbers[place]
    except IndexError:
        raise IndexError(f"there is no sample {place:,}: the data set has {len(numbers):,} samples") from None
