"""Orders of a whole data set as pure functions: nothing is kept per sample, and any position is reached directly."""

from __future__ import annotations

import hashlib
import math
import operator
from typing import TYPE_CHECKING

import numpy as np

from torchdata_wds.checks import check_flags, checked_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Samples a data set may have: the sum of two positions still fits into 63 bits.
MOST_SAMPLES = 2**62
#: Up to this many values are ordered by a table of 8 KB.
_TABLE = 1024
#: Over 6,000 keys with 1,025 to 3,000 values, pairs of neighbours show a bias up to round 5, and none from round 6 on.
_ROUNDS = 7
#: Up to this many values are computed one by one: rounds on arrays cost as much as about 16 values.
_FEW = 16

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*parts: int | str) -> int:
    """Returns a uint64 that depends on every part, the same on all machines and Python versions."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Permutation:
    """A pseudorandom permutation of 0..count-1, the same on all machines and Python versions.

    Few values are sorted by random numbers. Many go through a Feistel network, in memory that does not grow with
    `count`.

    Args:
        count: How many values to permute, at most 2**62.
        *key: What the permutation depends on: ints and strings.

    Example:
        >>> order = Permutation(5, "seed", 7)
        >>> sorted(order.forward(np.arange(5, dtype=np.uint64)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, *key: int | str) -> None:
        self.count = checked_int("count", count, 0, MOST_SAMPLES)
        # numpy's integers have a repr of their own, and it differs between its versions.
        seed = mix(*(part if isinstance(part, str) else operator.index(part) for part in key))
        self._table = _sorted_at_random(self.count, seed) if self.count <= _TABLE else None
        # A value x below left * right is the pair (x // right, x % right), and each round adds a function of one half
        # to the other. 1,000,003 values: 1,001 * 1,000 = 1,001,000. A result from 1,000,003 on goes through again
        # until it is below, which is 1 in 1,000 here, and never more than 1 in `right`.
        self._left = math.isqrt(max(self.count - 1, 0)) + 1
        self._right = max(-(-self.count // self._left), 1)
        self._keys = [mix(seed, number) for number in range(_ROUNDS)]

    def forward(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns what stands at each of an array of places, as uint64; each must be below `count`."""
        if self._table is not None:
            return self._table[values]
        if len(values) <= _FEW:
            return np.array([self._forward_one(value) for value in values.tolist()], dtype=np.uint64)
        result = self._rounds(values.astype(np.uint64))
        while len(beyond := np.flatnonzero(result >= np.uint64(self.count))):
            result[beyond] = self._rounds(result[beyond])
        return result

    def inverse(self, value: int) -> int:
        """Returns the place at which a value stands."""
        if self._table is not None:
            return int(np.flatnonzero(self._table == np.uint64(value))[0])
        place = self._inverse_rounds(value)
        while place >= self.count:
            place = self._inverse_rounds(place)
        return place

    def _rounds(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        sizes = np.uint64(self._left), np.uint64(self._right)
        left, right = np.divmod(values, sizes[1])
        for number, key in enumerate(self._keys):
            changed, other, size = (right, left, sizes[1]) if number % 2 else (left, right, sizes[0])
            changed += scrambled(other, key) % size
            np.subtract(changed, size, out=changed, where=changed >= size)
        left *= sizes[1]
        left += right
        return left

    def _forward_one(self, value: int) -> int:
        while True:
            left, right = divmod(value, self._right)
            for number, key in enumerate(self._keys):
                if number % 2:
                    right = (right + _scrambled_one(left, key)) % self._right
                else:
                    left = (left + _scrambled_one(right, key)) % self._left
            value = left * self._right + right
            if value < self.count:
                return value

    def _inverse_rounds(self, value: int) -> int:
        left, right = divmod(value, self._right)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                right = (right - _scrambled_one(left, key)) % self._right
            else:
                left = (left - _scrambled_one(right, key)) % self._left
        return left * self._right + right


def _sorted_at_random(count: int, seed: int) -> NDArray[np.uint64]:
    # All orders are equally likely. A Feistel network on so few values is far from that: with 7 rounds, some of the
    # 720 orders of 6 values are 2.9 times as likely as they should be, and others 0.4 times.
    return np.argsort(scrambled(np.arange(count, dtype=np.uint64), seed), kind="stable").astype(np.uint64)


def scrambled(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Returns an evenly distributed uint64 for each uint64, a function of it and the key."""
    # The finaliser of splitmix64: one changed bit of value or key changes half of the result's 64 bits.
    mixed = values * np.uint64(_STEP)
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _scrambled_one(value: int, key: int) -> int:
    mixed = (value * _STEP + key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)


class Order:
    """The order of one epoch: position -> number of the sample.

    Args:
        total: How many samples there are.
        run: How many neighbours stay together; 1 is a perfect shuffle.
        shuffle: False for the samples as numbered.
        seed, epoch: What the order depends on.

    Example:
        >>> Order(10, run=4, shuffle=False).numbers(3, 6).tolist()
        [3, 4, 5]
        >>> sorted(Order(10, run=4).numbers(0, 10).tolist()) == list(range(10))
        True
    """

    def __init__(self, total: int, *, run: int = 16, shuffle: bool = True, seed: int = 0, epoch: int = 0) -> None:
        self.total = checked_int("total", total, 0, MOST_SAMPLES)
        self.run = checked_int("run", run, 1, MOST_SAMPLES)
        check_flags(shuffle=shuffle)
        runs = -(-self.total // self.run)
        self._runs = Permutation(runs, "order", seed, epoch) if shuffle and runs > 1 else None
        # 10 samples in runs of 4: run 2 has two samples instead of 4. If it stands at place 1, positions 4 and 5 are
        # its own, and position 6 is the place that 6 + 2 would be if all runs were full.
        self._missing = runs * self.run - self.total
        self._short_end = self.total
        if self._runs is not None and self._missing:
            self._short_end = (self._runs.inverse(runs - 1) + 1) * self.run - self._missing

    def numbers(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the numbers of the samples at positions `first` to `stop` (exclusive), as int64."""
        if not 0 <= first <= stop <= self.total:
            raise ValueError(f"positions {first} to {stop} are not within 0 to {self.total}")
        if self._runs is None or first == stop:
            return np.arange(first, stop, dtype=np.int64)
        places = np.arange(first, stop, dtype=np.int64)
        if self._missing:
            places[places >= self._short_end] += self._missing
        slots, offsets = np.divmod(places, self.run)
        first_slot, last_slot = int(slots[0]), int(slots[-1])
        runs = self._runs.forward(np.arange(first_slot, last_slot + 1, dtype=np.uint64)).astype(np.int64)
        numbers: NDArray[np.int64] = runs[slots - first_slot] * self.run + offsets
        return numbers
