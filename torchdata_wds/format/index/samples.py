"""Samples of indexed shards, read by their numbers: one read for neighbours, and a check of every sample."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.headers import padding
from torchdata_wds.format.index.dataset import DatasetIndex, ShardEntry, key_check
from torchdata_wds.format.index.slices import ShardSlice, slice_members
from torchdata_wds.format.samples.grouping import group_members, make_samples
from torchdata_wds.format.samples.names import RESERVED_FIELDS, GroupingRules, grouping_rules, split_names
from torchdata_wds.format.tar import ReadOptions, read_marked_members
from torchdata_wds.format.tar.members import MemberRun, Unit
from torchdata_wds.format.windows import find_members
from torchdata_wds.format.windows.walking import walk_members
from torchdata_wds.handlers import warn_once
from torchdata_wds.option_types import OnDuplicate
from torchdata_wds.storage import ByteStream, mask_url, open_shard
from torchdata_wds.storage.ranges import ShardRanges

#: A sample, or why it cannot be read.
Result = dict[str, Any] | Exception

# How many bytes are read at once. More of a local file would take fresh pages of memory each time; a request to a
# server should be large.
LARGEST_LOCAL_PIECE, LARGEST_REMOTE_PIECE = 1 << 20, 16 << 20
# Headers are read one by one, unless a piece has at least this many samples, of fewer bytes than this on average:
# reading them as columns passes over all the bytes between them.
_FEW_SAMPLES, _SMALL_SAMPLE = 16, 4096
_CHECK = 0xFFFFFFFF  # the bits of a key's hash that the index keeps beside each sample
_CURE = "Make the index again: wds index --force, or index_shard"
_ELSEWHERE = ("no-tar", "bad-header", "cut", "damage")  # what the bytes look like where no sample begins or ends


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbours in one shard, which one read gets."""

    shard: int  # its number
    first: int  # the first sample, counted in the shard
    starts: list[int]  # where each sample begins, and the last one ends, in bytes of the shard
    checks: list[int] | None  # what the index keeps of the samples' keys

    def __len__(self) -> int:
        return len(self.starts) - 1


class SampleReader:
    """Reads samples by their numbers, as ``load_wds_shards`` and ``group_by_key`` would give them.

    Each sample is compared with the index: it must lie where the index says, and have the same key. It can be pickled,
    and used in several threads.

    Args:
        index: Where the samples are.
        ranges: Reads the bytes of the shards.
        lowercase, fields, on_duplicate: As in ``group_by_key``. A sample without any of the fields has only
            ``__key__`` and ``__url__``.
        largest: How many bytes are read at once, unless a single sample has more.
    """

    def __init__(
        self,
        index: DatasetIndex,
        ranges: ShardRanges,
        *,
        lowercase: bool = True,
        fields: Iterable[str] | str | None = None,
        on_duplicate: OnDuplicate = "error",
        largest: int = LARGEST_LOCAL_PIECE,
    ) -> None:
        self.index, self.ranges, self.largest = index, ranges, largest
        self._copies: dict[int, str | None] = {}  # by shard, the path of its copy in the cache
        self._options: dict[str, Any] = {"lowercase": lowercase, "fields": fields, "on_duplicate": on_duplicate}

    @cached_property
    def _rules(self) -> GroupingRules:
        # The index has found keys that come back: they are samples of their own.
        return grouping_rules(_rule(self.index.keys), **self._options, on_reappearing="allow")

    @cached_property
    def _ends(self) -> list[int]:
        """How many samples lie before the end of each shard."""
        ends: list[int] = self.index.bounds[1:].tolist()
        return ends

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_rules", "_ends")}

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
        if len(numbers) == 1:
            number = int(numbers[0])
            shard = bisect_right(self._ends, number)
            first = number - (self._ends[shard - 1] if shard else 0)
            return [Piece(shard, first, *self.index.row_lists(shard, first, first + 1))]
        wanted = np.asarray(numbers, np.int64)
        if not len(wanted):
            return []
        bounds = self.index.bounds
        shards = np.searchsorted(bounds, wanted, side="right") - 1
        breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(shards) != 0)) + 1
        begins = np.concatenate(([0], breaks))
        lengths = np.diff(np.append(begins, len(wanted)))
        columns = (shards[begins], wanted[begins] - bounds[shards[begins]], lengths)
        pieces = []
        for shard, first, length in zip(*(column.tolist() for column in columns), strict=True):
            piece = Piece(shard, first, *self.index.row_lists(shard, first, first + length))
            pieces += self._cut(piece) if length > 1 else [piece]
        return pieces

    def _cut(self, piece: Piece) -> list[Piece]:
        """Cuts a piece into parts of at most `largest` bytes, with a sample or more in each."""
        shard, first, starts, checks = piece.shard, piece.first, piece.starts, piece.checks
        if starts[-1] - starts[0] <= self.largest:
            return [piece]
        parts, begin = [], 0
        while begin < len(starts) - 1:
            end = max(begin + 1, bisect_right(starts, starts[begin] + self.largest) - 1)
            known = None if checks is None else checks[begin:end]
            parts.append(Piece(shard, first + begin, starts[begin : end + 1], known))
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
            return self.ranges.read(entry.url, piece.starts[0], piece.starts[-1], entry.version)
        except WdsError as error:
            return error

    def take(self, piece: Piece, data: bytes | Exception) -> list[Result]:
        """Turns the bytes of a piece into its samples."""
        results = self._taken(piece, data)
        if self.ranges.cache is not None and (path := self._copy_path(piece.shard)) is not None:
            for result in results:
                if isinstance(result, dict) and len(result) > 2:
                    result["__local_path__"] = path
        return results

    def _copy_path(self, shard: int) -> str | None:
        if shard not in self._copies:
            self._copies[shard] = self.ranges.copy_path(self.index.shards[shard].url)
        return self._copies[shard]

    def _taken(self, piece: Piece, data: bytes | Exception) -> list[Result]:
        entry = self.index.shards[piece.shard]
        count = len(piece)
        if isinstance(data, bytes):
            found = self._scanned(entry, piece) if entry.special else self._plain_samples(data, piece, entry.url)
            if found is not None:
                return list(found)
        elif isinstance(data, Exception) and (entry.compressed or isinstance(data, ShardOpenError) or count == 1):
            return [data] * count
        return [self._single(entry, piece, place) for place in range(count)]

    def _plain_samples(self, data: bytes, piece: Piece, url: str) -> list[dict[str, Any]] | None:
        """Makes samples of plain members that fill `data`; None if anything needs a closer look."""
        count, checks = len(piece), piece.checks
        is_small = len(data) < _SMALL_SAMPLE * count
        run = _plain_run(data, url, are_many=is_small and count >= _FEW_SAMPLES)
        if run is None:
            return None
        if count == 1 and self._rules.fields is None:
            return self._plain_sample(run, checks)
        columns = split_names(run.names, self._rules.split)
        if columns is None:
            return None
        keys, fields = columns
        rows = [0, *(row for row in range(1, len(keys)) if keys[row] != keys[row - 1])]
        ends, base = run.ends, piece.starts[0]
        begins = [base, *(base + ends[row - 1] + padding(ends[row - 1]) for row in rows[1:])]
        if begins != piece.starts[:-1]:
            return None
        if checks is not None and [key_check(keys[row]) & _CHECK for row in rows] != checks:
            return None
        return make_samples(run._replace(keys=keys, fields=fields), self._rules, set())

    def _plain_sample(self, run: MemberRun, checks: list[int] | None) -> list[dict[str, Any]] | None:
        """Does the same for one sample, whose columns would cost more than its members."""
        split, lowercase = self._rules.split, self._rules.lowercase
        sample: dict[str, Any] = {"__key__": "", "__url__": run.url}
        known, data = "", run.data
        for name, start, end in zip(run.names, run.starts, run.ends, strict=True):
            parts = split(name)
            if parts is None or parts[0] != (known or parts[0]):
                return None
            known, field = parts
            if lowercase:
                field = field.lower()
            if field in sample or field in RESERVED_FIELDS:
                return None
            sample[field] = data[start:end]
        if checks is not None and key_check(known) & _CHECK != checks[0]:
            return None
        sample["__key__"] = known
        return [sample]

    def _single(self, entry: ShardEntry, piece: Piece, place: int) -> Result:
        """Reads one sample of a piece with all that tar allows, and says what is wrong with it."""
        try:
            return self._looked_up(entry, piece, place)
        except WdsError as error:
            return error

    def _looked_up(self, entry: ShardEntry, piece: Piece, place: int) -> dict[str, Any]:
        number, (start, stop) = piece.first + place, piece.starts[place : place + 2]
        shown = mask_url(entry.url)
        if entry.special:
            found = self._from_start(entry, number, number + 1)
        else:
            data = self.ranges.read(entry.url, start, stop, entry.version)
            options = ReadOptions(shard=shown, offset=start, reopen=self._reopen(entry), require_end_marker=False)
            try:
                found = self._grouped(read_marked_members(io.BytesIO(data), entry.url, options, Counter()), shown)
            except ShardFormatError as error:
                if error.kind not in _ELSEWHERE or isinstance(error, ChangedShardError):
                    raise
                # Bytes in the middle of a shard are no archive if they are not what the index says.
                why = "no tar header is there" if error.kind == "no-tar" else str(error).rstrip(".")
                raise ChangedShardError(
                    f"sample {number:,} of shard {shown} is not at bytes {start:,} to {stop:,}, where its index says "
                    f"it is: {why}. The shard is damaged there, or has changed since. {_CURE}",
                    shard=shown,
                    kind="index",
                    offset=start,
                ) from error
        wanted = None if piece.checks is None else piece.checks[place]
        if len(found) == 1 and wanted in (None, key_check(found[0]["__key__"]) & _CHECK):
            return found[0]
        keys = ", ".join(repr(sample["__key__"]) for sample in found[:3]) or "none"
        raise ChangedShardError(
            f"shard {shown} has other samples than its index says: bytes {start:,} to {stop:,} should be sample "
            f"{number:,} of it, and hold the keys {keys}. The shard has changed since, or the index is another "
            f"shard's. {_CURE}",
            shard=shown,
            kind="index",
        )

    def _scanned(self, entry: ShardEntry, piece: Piece) -> list[dict[str, Any]] | None:
        """Reads the samples of a piece of a special shard at once; None if anything is wrong."""
        try:
            found = self._from_start(entry, piece.first, piece.first + len(piece))
        except WdsError:
            return None
        if len(found) != len(piece):
            return None
        checks = [key_check(sample["__key__"]) & _CHECK for sample in found]
        return found if piece.checks in (None, checks) else None

    def _from_start(self, entry: ShardEntry, first: int, stop: int) -> list[dict[str, Any]]:
        """Reads samples of a special shard, from its start up to the last of them."""
        shown = mask_url(entry.url)
        warn_once(
            f"special {shown}",
            f"shard {shown} has hard links, or headers for all of its members: each access reads it from its start. "
            "Write it again, for example with wds cat",
        )
        if entry.version is not None:
            self.ranges.read(entry.url, 0, 1, entry.version)  # which compares the version
        reopen = self._reopen(entry)
        with reopen(0) as stream:
            options = ReadOptions(shard=shown, reopen=reopen)
            units = read_marked_members(stream, entry.url, options, Counter())
            part = ShardSlice(entry.url, first, stop)
            return self._grouped(slice_members(units, self._rules.split, part, shard=shown), shown)

    def _reopen(self, entry: ShardEntry) -> Callable[[int], ByteStream]:
        options = self.ranges.storage_options
        return lambda offset: open_shard(entry.url, offset=offset, storage_options=options)

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


def _plain_run(data: bytes, url: str, *, are_many: bool) -> MemberRun | None:
    """Returns the plain members that fill `data`; None if anything else is there."""
    names, starts, ends, end = find_members(data).members_at(0) if are_many else walk_members(data)
    return MemberRun(url, data, names, starts, ends, 0) if names and end == len(data) else None


def _compressed(entry: ShardEntry) -> ShardFormatError:
    shown = mask_url(entry.url)
    return ShardFormatError(
        f"shard {shown} is compressed: single samples of it cannot be read. Decompress it, or read it front to back "
        "with load_wds_shards",
        shard=shown,
        kind="unsupported",
    )
