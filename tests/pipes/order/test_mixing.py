"""The global order of a mixture: shares by weight, each source pass after pass, the same however it is cut."""

import math
import pickle
import random
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.order import mixing
from torchdata_wds.pipes.order.mixing import MixedOrder

#: Totals and weights of a mixture.
MIXTURES = st.lists(st.tuples(st.integers(1, 40), st.floats(1e-6, 1e6)), min_size=1, max_size=6)


def pairs(mixed: MixedOrder, first: int, stop: int) -> list[tuple[int, int]]:
    """Sources and numbers, as pairs."""
    sources, numbers = mixed.numbers(first, stop)
    assert sources.dtype == numbers.dtype == np.int64
    return list(zip(sources.tolist(), numbers.tolist(), strict=True))


def test_each_source_has_its_share_after_any_number_of_positions() -> None:
    """Random weights of 1 to 20 sources; a fair draw would be off by hundreds."""
    rng = random.Random(5)
    for seed in range(25):
        weights = [rng.random() ** rng.choice((1, 4)) + 1e-6 for _ in range(rng.randint(1, 20))]
        mixed = MixedOrder([10**6] * len(weights), weights, length=10**5, seed=seed, run=64)
        sources, _ = mixed.numbers(0, 10**5)
        for source, weight in enumerate(weights):
            expected = np.arange(1, 10**5 + 1) * (weight / sum(weights))
            assert np.abs(np.cumsum(sources == source) - expected).max() < 8


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.integers(1, 9), st.booleans(), st.integers(0, 5), st.data())
def test_mixture_is_the_same_however_it_is_cut(
    mixture: list[tuple[int, float]], run: int, shuffle: bool, epoch: int, data: st.DataObject
) -> None:
    """In pieces, out of order and from a new object, with counts continued or by sums."""
    totals, weights = zip(*mixture, strict=True)
    made = lambda: MixedOrder(totals, weights, run=run, shuffle=shuffle, seed=3, epoch=epoch)  # noqa: E731
    length = sum(totals)
    whole = pairs(made(), 0, length)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    pieces = list(pairwise(cuts))
    mixed = made()
    for near in (0, 500):
        with mock.patch.object(mixing, "_NEAR", near):
            for first, stop in (*pieces, *reversed(pieces)):
                assert pairs(mixed, first, stop) == whole[first:stop]
    assert pairs(pickle.loads(pickle.dumps(mixed)), 0, length) == whole


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.integers(1, 9), st.booleans())
def test_epochs_are_one_stream_of_whole_passes(mixture: list[tuple[int, float]], run: int, shuffle: bool) -> None:
    """A source repeats nothing within a pass, also where an epoch ends inside it."""
    totals, weights = zip(*mixture, strict=True)
    length = 37
    stream = [
        pair
        for epoch in range(6)
        for pair in pairs(
            MixedOrder(totals, weights, length=length, run=run, shuffle=shuffle, seed=1, epoch=epoch), 0, length
        )
    ]
    for source, total in enumerate(totals):
        numbers = [number for chosen, number in stream if chosen == source]
        for first in range(0, len(numbers), total):
            part = numbers[first : first + total]
            assert len(set(part)) == len(part)
            assert set(part) <= set(range(total))
            assert shuffle or part == list(range(len(part)))


def test_passes_and_sources_have_orders_of_their_own() -> None:
    """Two sources of equal length are not in step, and no pass repeats the last one's order."""
    sources, numbers = MixedOrder([50, 50], [1, 1], length=400, run=1).numbers(0, 400)
    orders = [numbers[sources == source][first : first + 50].tolist() for source in (0, 1) for first in (0, 50, 100)]
    assert len(set(map(tuple, orders))) == 6
    seeds = {MixedOrder([50, 50], [1, 1], run=1, seed=seed).numbers(0, 100)[0].tobytes() for seed in range(9)}
    assert len(seeds) == 9


def test_mixture_is_the_same_on_all_machines() -> None:
    """States of years ago still mean the same samples."""
    mixed = MixedOrder([5, 3], [3, 1], run=2, seed=9, epoch=1)
    assert pairs(mixed, 0, 8) == [(0, 4), (0, 2), (0, 3), (1, 1), (0, 0), (0, 1), (1, 2), (0, 2)]
    huge = MixedOrder([10**12, 10**9, 7], [0.7, 0.2, 0.1], run=16, seed=9, epoch=3)
    assert pairs(huge, 10**11 + 1, 10**11 + 5) == [
        (0, 652630125380),
        (0, 652630125381),
        (0, 652630125382),
        (0, 652630125383),
    ]


def test_any_position_of_a_huge_mixture_is_reached_directly() -> None:
    """Counts before it are exact: walking there in two steps gives the same."""
    mixed = MixedOrder([10**12, 10**9], [1, 3], length=10**12, seed=1, epoch=5)
    there = pairs(mixed, 10**11, 10**11 + 3000)
    assert pairs(mixed, 10**11 + 2990, 10**11 + 3000) == there[2990:]
    assert (
        pairs(MixedOrder([10**12, 10**9], [1, 3], length=10**12, seed=1, epoch=5), 10**11 + 7, 10**11 + 9) == there[7:9]
    )
    assert len(pickle.dumps(mixed)) < 3000


@pytest.mark.parametrize("consumers", [2, 3, 8, 34, 55, 89])
def test_consumers_that_take_samples_in_turn_have_mixed_batches(consumers: int) -> None:
    """Also if their number resonates with the golden section: batches are at least as even as a fair draw."""
    sources, _ = MixedOrder([10**6] * 2, [1, 1]).numbers(0, consumers * 32 * 100)
    for consumer in range(0, consumers, 7):
        batches = sources[consumer::consumers].reshape(-1, 32).sum(axis=1)
        assert batches.std() < 1.3 * math.sqrt(32 / 4)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 10**4), st.integers(0, 10**4), st.integers(0, 10**5))
def test_floor_sum_is_the_sum(count: int, divisor: int, factor: int, start: int) -> None:
    """Of what a plain loop adds up."""
    expected = sum((number * factor + start) // divisor for number in range(count))
    assert mixing._floor_sum(count, divisor, factor, start) == expected


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, 0], [1, -1], [1, math.inf], [1, math.nan], [1, "2"], 5])
def test_wrong_weights_are_refused(weights: object) -> None:
    """One finite number above 0 for each source."""
    with pytest.raises(ValueError, match="weights must be"):
        MixedOrder([3, 4], weights)  # type: ignore[arg-type]


def test_wrong_sources_and_positions_are_refused() -> None:
    """An empty source is named by its place."""
    with pytest.raises(ShardListError, match="source 1 of the mixture, counted from 0, has no samples"):
        MixedOrder([3, 0, 4], [1, 1, 1])
    with pytest.raises(ValueError, match="at least one source"):
        MixedOrder([], [])
    for options in ({"length": -1}, {"run": 0}, {"epoch": -1}, {"epoch": 2**62}):
        with pytest.raises(ValueError, match="must be"):
            MixedOrder([3], [1], **options)  # type: ignore[arg-type]
    mixed = MixedOrder([3, 4], [1, 1])
    assert mixed.length == 7
    assert pairs(mixed, 7, 7) == []
    for first, stop in ((-1, 3), (0, 8), (5, 4)):
        with pytest.raises(ValueError, match="positions"):
            mixed.numbers(first, stop)
