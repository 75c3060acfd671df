"""The global order: permutations that are the same everywhere, and runs of neighbours cut on all samples."""

import math
import pickle
from collections import Counter
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.pipes.order import permutation
from torchdata_wds.pipes.order.permutation import Order, Permutation


def whole(order: Permutation) -> list[int]:
    """All values of a permutation."""
    return order.forward(np.arange(order.count, dtype=np.uint64)).tolist()


def chi_squared(counts: list[int], bins: int) -> float:
    """How far counts are from equal, in standard deviations of what chance does."""
    mean = sum(counts) / bins
    statistic = sum((count - mean) ** 2 for count in counts) / mean + (bins - len(counts)) * mean
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 1024, 1025, 1056, 1089, 5000])
def test_permutation_has_each_value_once_and_an_inverse(count: int) -> None:
    """Also with no values, with one, and where the table ends."""
    order = Permutation(count, "key", 3)
    values = whole(order)
    assert sorted(values) == list(range(count))
    assert [order.inverse(value) for value in values[:50]] == list(range(min(count, 50)))


@settings(deadline=None)
@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), min_size=1, max_size=40), st.integers())
def test_permutation_is_the_same_one_by_one_and_on_arrays(count: int, places: list[int], key: int) -> None:
    """Few values are computed with Python's ints, many with numpy's."""
    order = Permutation(count, key)
    places = [place % count for place in places]
    values = order.forward(np.array(places, dtype=np.uint64))
    assert values.dtype == np.uint64
    assert [order.inverse(value) for value in values.tolist()] == places
    singly = [int(order.forward(np.array([place], dtype=np.uint64))[0]) for place in places]
    with mock.patch.object(permutation, "_FEW", 0):
        assert order.forward(np.array(places, dtype=np.uint64)).tolist() == singly == values.tolist()


@settings(deadline=None)
@given(st.integers(1, 60), st.integers())
def test_network_permutes_few_values_too(count: int, key: int) -> None:
    """The network goes round until a result is in range, whatever share of them is."""
    with mock.patch.object(permutation, "_TABLE", 0):
        order = Permutation(count, key)
    values = whole(order)
    assert sorted(values) == list(range(count))
    assert [order.inverse(value) for value in values] == list(range(count))


def test_permutation_is_the_same_on_all_machines() -> None:
    """States of years ago still mean the same samples."""
    assert whole(Permutation(8, "order", 0, 0)) == [7, 6, 3, 5, 4, 0, 2, 1]
    places = np.array([0, 1, 2, 999_999, 10**12 - 1], dtype=np.uint64)
    assert Permutation(10**6, "order", 7, 3).forward(places[:4]).tolist() == [528135, 581285, 914737, 963601]
    assert Permutation(10**12, -1, "é").forward(places).tolist() == [
        916988769172,
        985235294275,
        393011028546,
        224796202618,
        617869459467,
    ]
    assert Order(20, run=3, seed=5, epoch=2).numbers(0, 20).tolist() == [
        0,
        1,
        2,
        18,
        19,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        17,
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    assert Order(10**9, run=16, seed=5, epoch=2).numbers(14, 18).tolist() == [
        550353294,
        550353295,
        627356912,
        627356913,
    ]


def test_permutation_depends_on_each_part_of_its_key() -> None:
    """A numpy integer is the int, and a string of digits is not."""
    keys: list[tuple[int | str, ...]] = [(), (0,), (1,), (-1,), ("1",), (0, 1), (1, 0), (2**70,)]
    for count in (20, 2000):
        assert len({tuple(whole(Permutation(count, *key))) for key in keys}) == len(keys)
        assert whole(Permutation(count, np.int64(7))) == whole(Permutation(count, 7))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_orders_of_few_values_are_equally_likely(count: int) -> None:
    """Over seeds and epochs, each of the n! orders comes about equally often."""
    orders = Counter(tuple(whole(Permutation(count, "order", key // 50, key % 50))) for key in range(6000))
    assert len(orders) == math.factorial(count)
    assert chi_squared(list(orders.values()), math.factorial(count)) < 4


@pytest.mark.parametrize("count", [1000, 1025, 1089, 3000])
def test_places_and_distances_look_random(count: int) -> None:
    """Where a value goes, and how far its neighbours by number or by row of the network land from it."""
    step = math.isqrt(count - 1) + 1
    values = np.array(
        [Permutation(count, key).forward(np.arange(4 * step, dtype=np.uint64)).astype(np.int64) for key in range(300)]
    )
    assert chi_squared(np.bincount(values.ravel(), minlength=count).tolist(), count) < 4
    for apart in (1, 2, step - 1, step, step + 1, 2 * step):
        distances = (values[:, apart:] - values[:, :-apart]) % count
        assert chi_squared(np.bincount(distances.ravel(), minlength=count)[1:].tolist(), count - 1) < 4.5


@pytest.mark.parametrize("count", [500, 10**5, 10**12])
def test_successive_values_do_not_correlate(count: int) -> None:
    """Neither do the values with their places."""
    shown = min(count, 20_000)
    values = Permutation(count, "serial").forward(np.arange(shown, dtype=np.uint64)).astype(float)
    bound = 5 / math.sqrt(shown)
    for lag in (1, 2, 3, 16):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < bound
    assert abs(np.corrcoef(values, np.arange(shown))[0, 1]) < bound


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 64), st.booleans(), st.integers(0, 9), st.data())
def test_order_has_each_sample_once_however_it_is_cut(
    total: int, run: int, shuffle: bool, epoch: int, data: st.DataObject
) -> None:
    """Runs stay together, wherever the last and shorter one stands."""
    order = Order(total, run=run, shuffle=shuffle, epoch=epoch)
    numbers = order.numbers(0, total)
    assert numbers.dtype == np.int64
    assert sorted(numbers.tolist()) == list(range(total))
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    assert [number for cut in pairwise(cuts) for number in order.numbers(*cut).tolist()] == numbers.tolist()
    starts = {place for place, number in enumerate(numbers.tolist()) if number % run == 0}
    assert all(place in starts or numbers[place] == numbers[place - 1] + 1 for place in range(total))
    assert len(starts) == -(-total // run)


def test_order_without_shuffle_is_as_numbered() -> None:
    """Nothing depends on the run, the seed or the epoch then."""
    assert Order(100, run=7, shuffle=False, seed=4, epoch=2).numbers(5, 95).tolist() == list(range(5, 95))


def test_last_run_stands_anywhere() -> None:
    """The shorter run is not always the last one."""
    places = Counter(Order(10, run=4, epoch=epoch).numbers(0, 10).tolist().index(8) for epoch in range(600))
    assert set(places) == {0, 4, 8}
    assert chi_squared(list(places.values()), 3) < 4


def test_order_of_a_huge_data_set_is_computed_in_place() -> None:
    """Any part of 10**12 samples is reached directly, also with huge runs."""
    for run in (1, 16, 10**11, 10**12, 2**62):
        order = Order(10**12 + 1, run=run, seed=1)
        for first in (0, 10**6 + 5, 10**12 - 99):
            numbers = order.numbers(first, first + 100).tolist()
            assert len(set(numbers)) == 100
            assert 0 <= min(numbers) <= max(numbers) <= 10**12
        assert order.numbers(10**11 + 7, 10**11 + 8).tolist() == order.numbers(10**11, 10**11 + 8).tolist()[7:]
    assert len(pickle.dumps(Order(10**12, run=1))) < 1000


def test_order_refuses_what_it_cannot_do() -> None:
    """Positions past the end are errors, not samples."""
    order = Order(10, run=3)
    for first, stop in ((-1, 3), (0, 11), (5, 4)):
        with pytest.raises(ValueError, match="positions"):
            order.numbers(first, stop)
    for total, run in ((-1, 1), (10, 0), (2**62 + 1, 1)):
        with pytest.raises(ValueError, match="must be"):
            Order(total, run=run)
    with pytest.raises(TypeError, match="shuffle"):
        Order(10, shuffle=1)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5000), st.integers(1, 20), st.integers(0, 2**63))
def test_epochs_and_seeds_have_orders_of_their_own(total: int, run: int, seed: int) -> None:
    """Unless there are so few runs that chance makes them equal."""
    if total // run > 12:
        orders = [Order(total, run=run, seed=seed + more, epoch=epoch) for more in (0, 1) for epoch in (0, 1)]
        assert len({order.numbers(0, total).tobytes() for order in orders}) == 4
