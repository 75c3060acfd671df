"""The samples of plain tar shards by number and by key: a map-style data set."""

from __future__ import annotations

import copy
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from torch.utils.data import MapDataPipe

from torchdata_wds import storage
from torchdata_wds.checks import check_choice, check_count, check_flags
from torchdata_wds.codecs import Decoder
from torchdata_wds.datasets import map_fetches  # noqa: F401  (makes torch's DataLoader fetch whole batches)
from torchdata_wds.datasets.opened_shards import OpenedShards, Sample
from torchdata_wds.errors import ReappearingKeyError
from torchdata_wds.format.samples.names import grouping_rules
from torchdata_wds.pipes.base import Held, in_order
from torchdata_wds.pipes.chain_text import stage_text
from torchdata_wds.pipes.pickling import check_functions
from torchdata_wds.storage.urls import mask_url

if TYPE_CHECKING:
    from torchdata_wds.format.index.dataset import DatasetIndex

DecoderLike = str | Callable[[str, Any], Any]

#: How many samples an iteration reads at once.
_NEIGHBOURS = 16


class IndexedShards(MapDataPipe[Sample]):
    """Reads any sample of tar shards by its number or key: a map-style data set.

    Samples are numbered from 0 over the shards in listed order, and equal those of
    ``.list_shards().load_wds_shards().group_by_key()``. The shards are listed and their index is opened at once, so
    that numbers mean the same in all workers; the shards themselves are opened when they are read. It works with
    torch's samplers, ``DataLoader``, ``random_split`` and the map-style ``.map``, ``.batch`` and ``.shuffle``, is safe
    under fork and spawn, and can be pickled. A ``DataLoader`` fetches each batch at once, with one read for neighbours
    and parallel requests to stores. Each sample is compared with the index: if its shard has changed, that is an error,
    and never another sample.

    Args:
        shards: A pattern or a (nested) list of patterns, as for ``list_shards``.
        index: Where the samples are: ``"auto"`` takes the index beside each shard or in the user's cache folder, and
            scans a shard once if there is none; True needs one for each shard; or a path or URL (of a packed index, a
            folder of indexes or a ``wids`` list), a dict from URL to `ShardIndex` or path, or a `DatasetIndex`.
        index_dir: Another folder to look for indexes in, and to keep scans in.
        keys: How names become keys: ``"first_dot"`` or ``"last_dot"``, as in the index.
        lowercase: Whether to convert fields to lower case.
        fields: Which fields to keep, as in ``group_by_key``; a sample with none of them has only its key and URL.
        decode: What ``wds_decode`` takes, one decoder or several; None leaves bytes, ``()`` decodes all but images.
        cache: A folder in which to keep copies of remote shards, each copied whole when it is first read; samples gain
            ``__local_path__``. None reads only the samples' bytes, by range requests.
        max_open: The most files that are kept open.
        storage_options, rewrite: As in ``list_shards``.

    Raises:
        ShardListError: if no shard matches, or the index lacks one.
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
        self.shards = list(shards) if isinstance(shards, list) else shards
        self.index, self.index_dir = _held(index), index_dir
        self.keys, self.lowercase, self.fields = keys, lowercase, fields
        self.decode = _held(decode)
        self.cache, self.max_open = cache, max_open
        self.storage_options = storage.StorageOptions(storage_options, rewrite=rewrite)
        self.rewrite = self.storage_options.rewrite
        self._decoder: Decoder | None = None
        if decode is not None:
            self._decoder = Decoder(*([decode] if isinstance(decode, str) or callable(decode) else decode))
        self._opened = OpenedShards(
            self.shards,
            index,
            index_options={"index_dir": index_dir, "keys": keys, "storage_options": self.storage_options},
            cache=cache,
            max_open=max_open,
            rules={"lowercase": lowercase, "fields": fields},
        )
        self._numbers = range(len(self._opened.index))  # which samples of the shards these are

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, item: SupportsIndex | str) -> Sample: ...

    @overload
    def __getitem__(self, item: slice) -> IndexedShards: ...

    @overload
    def __getitem__(self, item: list[int]) -> list[Sample]: ...

    def __getitem__(self, item: Any) -> Any:
        """Returns the sample with a number (negative ones count from the end) or key.

        A list, or an array or tensor of numbers, gives a list of samples. A slice gives a part, which is a data set: it
        has numbers of its own from 0, shares the index and the open files, and reads a sample when it is asked for.
        """
        if isinstance(item, slice):
            return self._slice(item)
        if isinstance(item, str):
            return self._by_key(item)
        if isinstance(item, (list, range)) or getattr(item, "ndim", 0) == 1:
            return self.__getitems__(item)
        return self.__getitems__([item])[0]

    def __getitems__(self, numbers: Sequence[SupportsIndex]) -> list[Sample]:
        """Returns the samples with these numbers, in this order; repeated numbers give equal samples."""
        whole = self._numbers
        return list(map(self._decoded, self._opened.read([_pick(whole, number) for number in numbers])))

    def __iter__(self) -> Iterator[Sample]:
        """Yields all samples in order; few at a time are in memory."""
        whole = self._numbers
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
        return [number for number, _ in self._matches(key)]

    def key_of(self, number: SupportsIndex) -> str:
        """Returns the key of the sample with a number; reads the sample."""
        key: str = self._opened.read([_pick(self._numbers, number)])[0]["__key__"]
        return key

    def close(self) -> None:
        """Closes all files; the next access opens what it needs again."""
        self._opened.close()

    def __enter__(self) -> IndexedShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.repr_hook is not None:
            return super().__repr__()
        start, stop, step = self._numbers.start, self._numbers.stop, self._numbers.step
        is_whole = (start, stop, step) == (0, len(self._opened.index), 1)
        return stage_text(self) + ("" if is_whole else f"[{start}:{stop}" + f":{step}" * (step != 1) + "]")

    def __reduce_ex__(self, *args: Any) -> Any:
        if self.reduce_ex_hook is None:  # not for a traversal of the graph
            check_functions(self, sys._getframe(1))
        return super().__reduce_ex__(*args)

    def _slice(self, item: slice) -> IndexedShards:
        part = copy.copy(self)
        part._numbers = self._numbers[item]
        return part

    def _decoded(self, sample: Sample) -> Sample:
        return sample if self._decoder is None else self._decoder(sample)

    def _matches(self, key: str) -> Iterator[tuple[int, Sample]]:
        """Yields the samples with a key, each with its number; the index knows only hashes of keys."""
        whole = self._numbers
        numbers = [number for number in self._opened.index.find(key) if number in whole]
        for begin in range(0, len(numbers), _NEIGHBOURS):
            part = numbers[begin : begin + _NEIGHBOURS]
            for number, sample in zip(part, self._opened.read(part), strict=True):
                if sample["__key__"] == key:
                    yield whole.index(number), sample

    def _by_key(self, key: str) -> Sample:
        matches = self._matches(key)
        first, other = next(matches, None), next(matches, None)
        if first is None:
            raise KeyError(f"no sample has the key {key!r}; a key has the folders of its members and no extension")
        if other is not None:
            shown = ", ".join(f"{number} (in {mask_url(sample['__url__'])})" for number, sample in (first, other))
            what = f"several samples have the key {key!r}, such as those with the numbers {shown}"
            raise ReappearingKeyError(f"{what}. Choose one by its number: find({key!r}) lists them", key=key)
        return self._decoded(first[1])


def _check_index(index: object) -> None:
    if index is None or index is False:
        raise ValueError(f"random access needs an index, not index={index!r}: 'auto' makes one where none is")


def _held(value: Any) -> Any:
    """Hides a collection from torch's traversal of graphs, which would pickle it."""
    return Held(value) if isinstance(value, Collection) and not isinstance(value, str) else value


def _pick(numbers: range, number: SupportsIndex) -> int:
    """Returns a sample's number in all shards."""
    try:
        place = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        place = None
    if place is None:
        raise TypeError(f"samples are chosen by a number, a slice, a key (str) or a list of numbers, not by {number!r}")
    try:
        return numbers[place]
    except IndexError:
        raise IndexError(f"there is no sample {place:,}: the data set has {len(numbers):,} samples") from None
