"""Summaries and histograms of whole numbers."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.cli.stats.numbers import summarize_numbers
from torchdata_wds.cli.stats.tallies import Numbers


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1 << 40) | st.integers(0, 300), max_size=30), max_size=4))
def test_numbers_are_summarized_exactly(parts: list[list[int]]) -> None:
    """Over all parts; the histogram counts each number once, in the bin that holds it."""
    numbers = Numbers()
    for part in parts:
        other = Numbers()
        for number in part:
            other.append(number)
        numbers.update(other)
    values = sorted(value for part in parts for value in part)
    found = summarize_numbers(numbers)
    assert len(numbers) == len(values)
    if not values:
        assert found is None
        return
    assert found is not None
    assert (found.minimum, found.maximum, found.total) == (values[0], values[-1], sum(values))
    assert found.median == values[(len(values) + 1) // 2 - 1]
    assert found.p95 == values[-(-95 * len(values) // 100) - 1]
    edges, counts, _ = found.histogram
    assert edges == sorted(set(edges))
    assert len(counts) == len(edges) - 1 <= 150
    assert counts == [sum(low <= value < high for value in values) for low, high in pairwise(edges)]
    assert np.sum(counts) == len(values)
