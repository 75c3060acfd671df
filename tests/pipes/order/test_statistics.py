"""What an order gives for training: how far samples travel, what a batch is made of, how epochs differ."""

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from torchdata_wds.pipes.order.permutation import Order

TOTAL = 64_000
RUNS = [1, 16, 64]


def numbers(run: int, epoch: int = 0, seed: int = 0) -> NDArray[np.int64]:
    """The order of a whole epoch."""
    return Order(TOTAL, run=run, seed=seed, epoch=epoch).numbers(0, TOTAL)


def within(value: float, expected: float, deviation: float) -> bool:
    """Returns whether a value is within five standard deviations of what chance gives."""
    return abs(value - expected) < 5 * deviation


@pytest.mark.parametrize("run", RUNS)
def test_samples_travel_as_far_as_under_any_perfect_shuffle(run: int) -> None:
    """A third of the data set on average, whatever the run: a shuffle buffer moves them by its own size."""
    travelled = np.abs(numbers(run) - np.arange(TOTAL)) / TOTAL
    count = TOTAL // run
    assert within(float(travelled.mean()), 1 / 3, math.sqrt(1 / 18 / count))
    for far in (0.01, 0.1, 0.5):
        share = 1 - (1 - far) ** 2
        assert within(float((travelled < far).mean()), share, math.sqrt(share * (1 - share) / count))


@pytest.mark.parametrize("run", RUNS)
def test_neighbours_part_at_the_ends_of_runs_only(run: int) -> None:
    """Of 16 samples in a row 15 have the next one behind them with runs of 16, and by chance none with runs of 1."""
    apart = np.count_nonzero(np.diff(numbers(run)) != 1)
    assert TOTAL // run - 8 < apart < TOTAL // run


@pytest.mark.parametrize("run", RUNS)
def test_each_part_of_an_epoch_has_its_share_of_each_part_of_the_data(run: int) -> None:
    """A tenth of an epoch holds a tenth of the first tenth of the data, and so on."""
    found = np.zeros((10, 10))
    np.add.at(found, (np.arange(TOTAL) * 10 // TOTAL, numbers(run) * 10 // TOTAL), 1 / run)
    expected = TOTAL / run / 100
    assert ((found - expected) ** 2 / expected).sum() < 81 + 5 * math.sqrt(2 * 81)


@pytest.mark.parametrize("run", RUNS)
def test_a_batch_has_samples_of_as_many_shards_as_chance_gives(run: int) -> None:
    """Batches of 256 from 200 shards of 320: 145 shards with runs of 1, 15 with runs of 16, and 4 with runs of 64."""
    batches = (numbers(run) // 320).reshape(-1, 256)
    expected = 200 * (1 - (1 - 1 / 200) ** (256 // run))
    assert np.mean([len(set(batch)) for batch in batches.tolist()]) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}, {"epoch": 1, "seed": 1}])
def test_epochs_and_seeds_have_unrelated_orders(run: int, other: dict[str, int]) -> None:
    """Samples neither keep their positions, nor their distance to them, nor the run that follows theirs."""
    one, two = numbers(run), numbers(run, **other)
    assert np.count_nonzero(one == two) <= 8 * run
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(TOTAL / run)
    assert np.bincount((one - two)[::run] % TOTAL).max() <= 10
    starts = [(order[::run] // run).tolist() for order in (one, two)]
    following = [set(pairwise(order)) for order in starts]
    assert len(following[0] & following[1]) <= 8


def test_an_epoch_begins_anywhere() -> None:
    """Over 1,000 epochs, the first sample is from each tenth of the data about equally often."""
    for total, run in ((500, 1), (500, 16), (20_000, 1)):
        runs = -(-total // run)
        heads = np.array([Order(total, run=run, seed=3, epoch=epoch).numbers(0, 1)[0] for epoch in range(1000)]) // run
        counts = np.bincount(heads * 10 // runs, minlength=10)
        expected = np.bincount(np.arange(runs) * 10 // runs) * 1000 / runs
        assert ((counts - expected) ** 2 / expected).sum() < 9 + 5 * math.sqrt(18)
