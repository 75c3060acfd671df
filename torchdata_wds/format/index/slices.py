"""Parts of shards: which samples of a shard to read, where they begin, and the loop that leaves the others out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import ne
from pathlib import Path
from typing import NamedTuple

from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardOpenError
from torchdata_wds.format.index import IndexedSample, IndexHeader, ShardIndex
from torchdata_wds.format.samples.names import split_names
from torchdata_wds.format.tar.members import Mark, MemberRun, Single, Unit
from torchdata_wds.handlers import warn_rarely
from torchdata_wds.option_types import KeyRule, SplitName
from torchdata_wds.storage import StorageOptions
from torchdata_wds.storage.urls import is_local, local_path


class ShardSlice(NamedTuple):
    """The samples of a shard that one consumer reads, as ``.split_shards()`` gives them to ``.load_wds_shards()``.

    Samples count from 0 as they lie in the shard, those that ``select=`` leaves out among them.

    Attributes:
        url: The shard.
        start: The first sample to read.
        stop: The sample to end before; None reads to the shard's end.
        step: Every `step`-th sample is read, from the first on.
    """

    url: str
    start: int = 0
    stop: int | None = None
    step: int = 1


class TailSlice(ShardSlice):
    """A slice that ends where the shard does, according to its index: its reader finds out whether that is true."""

    __slots__ = ()


class OpenSlice(ShardSlice):
    """A slice that may reach past the shard's last sample."""

    __slots__ = ()


class PaddingSlice(ShardSlice):
    """A slice of samples that another consumer reads too: they only make the consumers equal."""

    __slots__ = ()


def slice_members(
    units: Iterable[Unit], split: SplitName, part: ShardSlice, *, first: int = 0, least: int = 0, shard: str = ""
) -> Iterator[Unit]:
    """Leaves out the members of all samples but those of a slice, without cutting them out of what was read.

    A sample is a run of members with one key, as in grouping. Members that were chosen away count as well, so that a
    slice has the same samples whatever `select` is; members without a key do not. Behind kept samples stands
    `Mark.END`. The rest of the shard is not read, unless the slice is a `TailSlice`. `units` are of one shard, from
    sample `first` on, which had `least` samples or more before.
    """
    slicer = _Slicer(split, part, first)
    for unit in units:
        yield from slicer.take_run(unit) if isinstance(unit, MemberRun) else slicer.take(unit)
        if slicer.is_done:
            return
    count = slicer.number + 1
    if count < least:
        raise ChangedShardError(
            f"shard {shard} has {count:,} samples, and had {least:,} or more when the state was made that is resumed "
            "here: it holds other samples now. Resume with the shards of that run, or begin a new epoch",
            shard=shard,
        )
    if part.stop is None or isinstance(part, OpenSlice):
        return
    if count < part.stop or (count > part.stop and isinstance(part, TailSlice)):
        raise ShardFormatError(
            f"shard {shard} has {count:,} samples, and {part.stop:,} were expected: the index that says so is of "
            "another version of the shard, or keys= of load_wds_shards are not those that it was made with. Make it "
            "again with index_shard, or correct the count",
            shard=shard,
            kind="index",
        )


class _Slicer:
    def __init__(self, split: SplitName, part: ShardSlice, first: int) -> None:
        self.key: str | None = None  # of the last member; None where the next one begins a sample whatever its key is
        self.number = first - 1  # which sample the last member belongs to
        self._limit = None if isinstance(part, TailSlice) else part.stop
        self._split = split
        self._part = part
        self._keeps = part.start <= first  # what the last sample, and so the next member without a key, is
        self._open = False  # whether a kept sample may still go on

    @property
    def is_done(self) -> bool:
        return self._limit is not None and self.number >= self._limit

    def take_run(self, run: MemberRun) -> Iterator[Unit]:
        columns = split_names(run.names, self._split)
        if columns is None:
            for member in run.members():
                yield from self.take(member)
                if self.is_done:
                    return
            return
        keys = columns[0]
        # Behind sample 6 with key "a", the keys a a b b c have the numbers 6 6 7 7 8: each change of key counts.
        changes = map(ne, keys, chain((self.key,), keys))
        numbers = list(accumulate(changes, initial=self.number))[1:]
        if self._limit is not None and numbers[-1] > self._limit:
            del numbers[bisect_left(numbers, self._limit) + 1 :]
        _, start, stop, step = self._part
        begin = bisect_left(numbers, start)
        end = len(numbers) if stop is None else bisect_left(numbers, stop)
        rows: list[int] | range = range(begin, end)
        if step != 1:
            rows = [row for row in rows if (numbers[row] - start) % step == 0]
        if self._open and not self._wants(numbers[0]):
            yield Mark.END
        yield from _pick(run, keys, numbers, rows)
        self.key, self.number = keys[len(numbers) - 1], numbers[-1]
        self._keeps = self._open = self._wants(self.number)
        if rows and not self._open:
            yield Mark.END

    def take(self, unit: Single) -> Iterator[Single]:
        if isinstance(unit, Mark):
            self.key, self._open = None, False
            yield unit
            return
        try:
            parts = self._split(unit.name)
        except Exception:  # noqa: BLE001  (grouping calls it again, and its handler decides)
            parts = None
        key = None if parts is None else parts[0]
        if key is not None and key != self.key:
            self.key = key
            self.number += 1
            self._keeps = self._wants(self.number)
            if self._open and not self._keeps:
                yield Mark.END
            self._open = self._keeps
        if self._keeps:
            yield unit

    def _wants(self, number: int) -> bool:
        _, start, stop, step = self._part
        return number >= start and (stop is None or number < stop) and (number - start) % step == 0


def _pick(run: MemberRun, keys: Sequence[str], numbers: list[int], rows: list[int] | range) -> Iterator[Unit]:
    """Cuts a run down to some of its rows; between two samples of one key it is parted, or they would become one."""
    if isinstance(rows, range):
        if rows:
            yield run if len(rows) == len(run.names) else run.rows(rows.start, rows.stop)
        return
    steps = enumerate(pairwise(rows), start=1)
    parted = [place for place, (one, two) in steps if keys[one] == keys[two] and numbers[one] != numbers[two]]
    for begin, end in pairwise((0, *parted, len(rows))):
        if begin:
            yield Mark.END
        if chosen := rows[begin:end]:
            yield run._replace(
                names=[run.names[row] for row in chosen],
                starts=[run.starts[row] for row in chosen],
                ends=[run.ends[row] for row in chosen],
            )


def find_sample(
    url: str, number: int, keys: KeyRule, storage_options: StorageOptions
) -> tuple[IndexHeader, IndexedSample] | None:
    """Finds where a sample lies by the index beside its shard, if there is one whose samples are those of `keys`."""
    if not isinstance(keys, str):
        return None
    try:
        index = ShardIndex.beside(url, storage_options=storage_options)
        if index.header.keys == keys and number < len(index):
            return index.header, index[number]
    except ShardFormatError as error:
        warn_rarely("not used", error)
    except (ShardOpenError, ValueError):  # a ValueError where nothing can lie beside
        pass
    return None


def check_size(header: IndexHeader, url: str) -> None:
    """Compares the size that an index says with that of a local shard."""
    path = Path(local_path(url)) if is_local(url) else None
    if header.bytes is None or path is None or not path.exists():  # opening it says better that it is missing
        return
    if (found := path.stat().st_size) != header.bytes:
        raise ShardFormatError(f"the shard has {found:,} bytes, and the index says {header.bytes:,}", kind="index")
