"""Samples that share content or a key, found among the hashes of all samples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.cli.stats.keys import Hashes, KeyTally
from torchdata_wds.cli.stats.tallies import MOST_EXAMPLES, Integers, Place

MOST_GROUPS = 10  # as examples


class Group(NamedTuple):
    """Samples that share something."""

    samples: int
    first: list[Place]


class Repeats(NamedTuple):
    """Groups of samples that share something: how many groups and samples, and the largest groups."""

    groups: int = 0
    samples: int = 0  # in these groups
    examples: Sequence[Group] = ()

    @property
    def repeated(self) -> int:
        """The number of samples that repeat an earlier one."""
        return self.samples - self.groups


class Places:
    """Finds shard and key of a sample by its number; unpacks the keys of one shard at a time."""

    def __init__(self, keys: Sequence[KeyTally]) -> None:
        self._keys = keys
        self._stops = np.cumsum([len(tally.hashes) for tally in keys], dtype=np.int64)

    def at(self, numbers: Integers) -> list[Place]:
        """Returns the places of samples in ascending order of their numbers."""
        found = []
        keys: list[str] = []
        opened = -1
        for number in numbers.tolist():
            shard = int(np.searchsorted(self._stops, number, side="right"))
            if shard != opened:
                keys, opened = self._keys[shard].keys(), shard
            first = int(self._stops[shard - 1]) if shard else 0
            found.append(Place(self._keys[shard].shard, keys[number - first]))
        return found


def find_repeats(hashes: Integers, places: Places, *others: Integers) -> Repeats:
    """Finds the samples that share a hash, one row a sample; with `others`, only groups in which these hashes differ.

    Rows of zeros share nothing.
    """
    order, starts = _grouped(hashes)
    sizes = np.diff(np.append(starts, len(order)))
    chosen = sizes > 1
    if len(order) and others:
        different = np.zeros(len(order), bool)
        for other in others:
            rows = _rows(other)[order]
            different[1:] |= (rows[1:] != rows[:-1]).any(axis=1)
        different[starts] = False  # compared with the group before
        chosen &= np.add.reduceat(different, starts) > 0
    if hashes.ndim > 1:
        chosen &= _rows(hashes)[order][starts].any(axis=1) if len(order) else False
    starts, sizes = starts[chosen], sizes[chosen]
    largest = np.lexsort((order[starts], -sizes))[:MOST_GROUPS]
    groups = [
        Group(size, places.at(np.sort(order[start : start + min(size, MOST_EXAMPLES)])))
        for start, size in zip(starts[largest].tolist(), sizes[largest].tolist(), strict=True)
    ]
    return Repeats(len(starts), int(sizes.sum()), groups)


def _grouped(hashes: Integers) -> tuple[Integers, Integers]:
    """Returns an order in which equal rows are next to each other, and where in it each group of them starts."""
    rows = _rows(hashes)
    order = np.lexsort(rows.T)  # stable: samples of a group stay in their order
    if not len(order):
        return order, np.empty(0, np.int64)
    ordered = rows[order]
    is_new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))
    return order, np.flatnonzero(is_new)


def _rows(hashes: Integers) -> Integers:
    return hashes if hashes.ndim > 1 else hashes[:, np.newaxis]


def joined(parts: Sequence[Any], columns: int = 0) -> Integers:
    """Returns the hashes of all shards as one array."""
    empty = np.empty((0, columns) if columns else 0, np.uint64)
    return np.concatenate([empty, *parts])


def joined_keys(keys: Sequence[KeyTally]) -> tuple[Hashes, Hashes | None]:
    """Returns the hashes of all keys, and of their folded forms if any key differs from its own."""
    exact = joined([tally.hashes for tally in keys])
    if all(tally.folded is None for tally in keys):
        return exact, None
    return exact, joined([tally.hashes if tally.folded is None else tally.folded for tally in keys])
