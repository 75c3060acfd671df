"""Samples of indexed shards, read by their numbers: one read for neighbours, and a check of every sample."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index.dataset import DatasetIndex, ShardEntry, key_check
from torchdata_wds.format.index.slices import ShardSlice, slice_members
from torchdata_wds.format.samples.grouping import group_members, make_samples
from torchdata_wds.format.samples.names import RESERVED_FIELDS, GroupingRules, grouping_rules, split_names
from torchdata_wds.format.tar import ReadOptions, read_marked_members
from torchdata_wds.format.tar.fast import find_members, read_plain_header
from torchdata_wds.format.tar.headers import BLOCK, padding
from torchdata_wds.format.tar.members import MemberRun, Unit
from torchdata_wds.handlers import warn_once
from torchdata_wds.option_types import OnDuplicate
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.ranges import ShardRanges

#: A sample, or why it cannot be read.
Result = dict[str, Any] | Exception

_LARGEST_PIECE = 16 << 20  # bytes that are read at once, unless a single sample is larger
# Headers are read one by one, unless a piece has more than this many samples, of fewer bytes than this on average:
# reading them as columns takes as long as 20 headers, and passes over all the bytes between them.
_FEW_SAMPLES, _SMALL_SAMPLE = 16, 4096
_CHECK = 0xFFFFFFFF  # the bits of a key's hash that the index keeps beside each sample
_CURE = "Make the index again: wds index --force, or index_shard"


class Piece(NamedTuple):
    """Neighbours in one shard, which one read gets."""

    shard: int  # its number
    first: int  # the first sample, counted in the shard
    stop: int  # the sample after the last


class SampleReader:
    """Reads samples by their numbers, as ``load_wds_shards`` and ``group_by_key`` would give them.

    Each sample is compared with the index: it must lie where the index says, and have the same key. It can be pickled,
    and used in several threads.

    Args:
        index: Where the samples are.
        ranges: Reads the bytes of the shards.
        lowercase, fields, on_duplicate: As in ``group_by_key``. A sample without any of the fields has only
            ``__key__`` and ``__url__``.
    """

    def __init__(
        self,
        index: DatasetIndex,
        ranges: ShardRanges,
        *,
        lowercase: bool = True,
        fields: Iterable[str] | str | None = None,
        on_duplicate: OnDuplicate = "error",
    ) -> None:
        self.index, self.ranges = index, ranges
        self._options: dict[str, Any] = {"lowercase": lowercase, "fields": fields, "on_duplicate": on_duplicate}

    @cached_property
    def _rules(self) -> GroupingRules:
        # The index has found keys that come back: they are samples of their own.
        return grouping_rules(_rule(self.index.keys), **self._options, on_reappearing="allow")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_rules"}

    def read(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        """Reads samples; they come in the order of `numbers`. Raises the first error."""
        samples = []
        for result in self.results(numbers):
            if isinstance(result, Exception):
                raise result
            samples.append(result)
        return samples

    def results(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> list[Result]:
        """Reads samples; those that cannot be read are exceptions in the list."""
        return [result for piece in self.pieces(numbers) for result in self.take(piece, self.fetch(piece))]

    def pieces(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> list[Piece]:
        """Cuts numbers into pieces: the longest stretches that ascend by 1 in one shard, of bounded size."""
        wanted = np.asarray(numbers, np.int64)
        if not len(wanted):
            return []
        bounds = self.index.bounds
        shards = np.searchsorted(bounds, wanted, side="right") - 1
        breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(shards) != 0)) + 1
        begins = [0, *breaks.tolist()]
        lengths = np.diff([*begins, len(wanted)]).tolist()
        pieces = []
        for begin, length in zip(begins, lengths, strict=True):
            shard = int(shards[begin])
            first = int(wanted[begin] - bounds[shard])
            pieces += self._cut(Piece(shard, first, first + length)) if length > 1 else [Piece(shard, first, first + 1)]
        return pieces

    def _cut(self, piece: Piece) -> list[Piece]:
        """Cuts a piece into parts of at most `_LARGEST_PIECE` bytes, with a sample or more in each."""
        shard, first, stop = piece
        offsets, _ = self.index.rows(shard, first, stop)
        if int(offsets[-1] - offsets[0]) <= _LARGEST_PIECE:
            return [piece]
        parts, begin = [], first
        while begin < stop:
            limit = int(offsets[begin - first]) + _LARGEST_PIECE
            end = max(begin + 1, first + int(np.searchsorted(offsets, limit, side="right")) - 1)
            parts.append(Piece(shard, begin, min(end, stop)))
            begin = end
        return parts

    def fetch(self, piece: Piece) -> bytes | Exception:
        """Reads the bytes of a piece; b"" for a shard whose samples are not told by their bytes alone."""
        entry = self.index.shards[piece.shard]
        try:
            if entry.compressed:
                raise _compressed(entry)
            if entry.special:
                return b""
            offsets, _ = self.index.rows(*piece)
            return self.ranges.read(entry.url, int(offsets[0]), int(offsets[-1]), entry.version)
        except WdsError as error:
            return error

    def take(self, piece: Piece, data: bytes | Exception) -> list[Result]:
        """Turns the bytes of a piece into its samples."""
        shard, first, stop = piece
        entry = self.index.shards[shard]
        if isinstance(data, bytes) and not entry.special:
            offsets, checks = self.index.rows(*piece)
            starts = (offsets - offsets[0]).tolist()
            found = self._plain_samples(data, starts, None if checks is None else checks.tolist(), entry.url)
            if found is not None:
                return list(found)
        elif isinstance(data, Exception) and (
            entry.compressed or isinstance(data, ShardOpenError) or stop == first + 1
        ):
            return [data] * (stop - first)
        return [self._single(shard, number) for number in range(first, stop)]

    def _plain_samples(
        self, data: bytes, starts: list[int], checks: list[int] | None, url: str
    ) -> list[dict[str, Any]] | None:
        """Makes samples of plain members that fill `data`; None if anything needs a closer look."""
        is_small = len(data) < _SMALL_SAMPLE * (len(starts) - 1)
        found = _columns(data, url) if is_small and len(starts) > _FEW_SAMPLES else _walked(data, url)
        if found is None:
            return None
        run, begins = found
        columns = split_names(run.names, self._rules.split)
        if columns is None:
            return None
        keys, fields = columns
        rows = [0, *(row for row in range(1, len(keys)) if keys[row] != keys[row - 1])]
        if [begins[row] for row in rows] != starts[:-1]:
            return None
        if checks is not None and [key_check(keys[row]) & _CHECK for row in rows] != checks:
            return None
        return make_samples(run._replace(keys=keys, fields=fields), self._rules, set())

    def _single(self, shard: int, number: int) -> Result:
        """Reads one sample with all that tar allows, and says what is wrong with it."""
        entry = self.index.shards[shard]
        try:
            return self._looked_up(entry, number, *self.index.rows(shard, number, number + 1))
        except WdsError as error:
            return error

    def _looked_up(self, entry: ShardEntry, number: int, offsets: Any, checks: Any) -> dict[str, Any]:
        start, stop = map(int, offsets)
        shown = mask_url(entry.url)
        reopen = partial(open_shard, entry.url, storage_options=self.ranges.storage_options)
        options = ReadOptions(shard=shown, reopen=lambda offset: reopen(offset=offset))
        if entry.special:
            warn_once(
                f"special {shown}",
                f"shard {shown} has hard links or headers for all of its members: it is read from its start for each "
                "of its samples. Write it again, for example with wds cat",
            )
            with reopen() as stream:
                units: Iterable[Unit] = read_marked_members(stream, entry.url, options, Counter())
                part = ShardSlice(entry.url, number, number + 1)
                found = self._grouped(slice_members(units, self._rules.split, part, shard=shown), shown)
        else:
            data = self.ranges.read(entry.url, start, stop, entry.version)
            options = options._replace(offset=start, require_end_marker=False)
            units = read_marked_members(io.BytesIO(data), entry.url, options, Counter())
            found = self._grouped(units, shown)
        is_known = checks is None or [key_check(sample["__key__"]) & _CHECK for sample in found] == checks.tolist()
        if len(found) == 1 and is_known:
            return found[0]
        keys = ", ".join(repr(sample["__key__"]) for sample in found[:3]) or "none"
        raise ChangedShardError(
            f"shard {shown} has other samples than its index says: bytes {start:,} to {stop:,} should be sample "
            f"{number:,} of it, and hold the keys {keys}. The shard has changed since, or the index is another "
            f"shard's. {_CURE}",
            shard=shown,
            kind="index",
        )

    def _grouped(self, units: Iterable[Unit], shown: str) -> list[dict[str, Any]]:
        # Without `fields`, which would leave out a sample that has none of them.
        rules = {**self._options, "fields": None, "keys": self.index.keys, "on_reappearing": "allow"}
        found = list(group_members(units, shown=lambda _: shown, **rules))
        kept = self._rules.fields
        if kept is None:
            return found
        return [
            {name: value for name, value in one.items() if name in kept or name in RESERVED_FIELDS} for one in found
        ]


def _rule(keys: str) -> Literal["first_dot", "last_dot"]:
    return "last_dot" if keys == "last_dot" else "first_dot"


def _walked(data: bytes, url: str) -> tuple[MemberRun, list[int]] | None:
    """Reads the headers of a few plain members one by one; returns them with where each header begins."""
    names, starts, ends, begins = [], [], [], []
    position = 0
    while position < len(data):
        found = read_plain_header(data[position : position + BLOCK])
        if found is None:
            return None
        name, size = found
        begins.append(position)
        names.append(name)
        position += BLOCK
        starts.append(position)
        ends.append(position + size)
        position += size + padding(size)
    return (MemberRun(url, data, names, starts, ends, 0), begins) if position == len(data) and names else None


def _columns(data: bytes, url: str) -> tuple[MemberRun, Sequence[int]] | None:
    """Reads the headers of many plain members at once."""
    window = find_members(data)
    first, last = window.run_at(0)
    if first == last or window.nexts[last - 1] != len(data):
        return None
    rows = slice(first, last)
    run = MemberRun(url, data, window.names[rows], window.starts[rows], window.ends[rows], 0)
    return run, window.begins[rows]


def _compressed(entry: ShardEntry) -> ShardFormatError:
    shown = mask_url(entry.url)
    return ShardFormatError(
        f"shard {shown} is compressed: single samples of it cannot be read. Decompress it, or read it front to back "
        "with load_wds_shards",
        shard=shown,
        kind="unsupported",
    )
