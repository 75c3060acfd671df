"""Positions divided among ranks and workers: each once, in the same order on every grid."""

from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.option_types import Even
from torchdata_wds.pipes.order.blocks import Block, Share, blocks, count_samples, step_end

EVEN = st.sampled_from([None, "drop", "pad"])
#: Ranks, workers and block size.
GRIDS = st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(1, 32))


def dealt(total: int, base: int, ranks: int, block: int, even: Even) -> list[list[list[int]]]:
    """The items of each rank as lists of positions, one position dealt after the other; repeated ones as -1 - x."""
    items: list[list[list[int]]] = [[] for _ in range(ranks)]
    left = list(range(base, total))
    while len(left) >= ranks * block:
        for rank in range(ranks):
            items[rank].append([left.pop(0) for _ in range(block)])
    repeated = 0
    while even == "pad" and left and len(left) % ranks:
        left.append(-1 - repeated % total)
        repeated += 1
    while even == "drop" and len(left) % ranks:
        left.pop()
    for rank in range(ranks):
        size = block if even is None else len(left) // (ranks - rank)
        if last := [left.pop(0) for _ in range(min(size, len(left)))]:
            items[rank].append(last)
    return items


def positions(block: Block) -> list[int]:
    """The positions of a block, repeated ones as -1 - x."""
    return [-1 - place if block.padding else place for place in range(block.start, block.stop)]


def dealt_items(total: int, base: int, ranks: int, block: int, even: Even) -> list[list[list[int]]]:
    """The items that `blocks` gives, step by step: one list of positions for each rank."""
    lists = []
    for rank in range(ranks):
        flat = [x for piece in blocks(total, base, Share(ranks, rank), block, even) for x in positions(piece)]
        lists.append([flat[first : first + block] for first in range(0, len(flat), block)])
    return [[item or [] for item in step] for step in zip_longest(*lists)]


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 400), GRIDS, EVEN)
def test_blocks_are_what_dealing_one_by_one_gives(
    total: int, base: int, grid: tuple[int, int, int], even: Even
) -> None:
    """Workers take the items of their rank in turn, and no block is empty."""
    base = min(base, total)
    ranks, workers, block = grid
    expected = dealt(total, base, ranks, block, even)
    for rank in range(ranks):
        for worker in range(max(workers, 1)):
            share = Share(ranks, rank, workers, worker)
            given = list(blocks(total, base, share, block, even))
            assert all(block.start < block.stop for block in given)
            wanted = expected[rank][worker :: max(workers, 1)]
            assert [place for block in given for place in positions(block)] == [x for item in wanted for x in item]
            assert sum(len(item) for item in wanted) == count_samples(total, base, share, block, even)


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 400), GRIDS, EVEN)
def test_all_consumers_together_read_each_position_once(
    total: int, base: int, grid: tuple[int, int, int], even: Even
) -> None:
    """Step by step, rank by rank and worker by worker, positions come in order; the ends are as `even` says."""
    base = min(base, total)
    ranks, workers, block = grid
    steps = dealt_items(total, base, ranks, block, even)
    found = [place for step in steps for item in step for place in item]
    real = [place for place in found if place >= 0]
    if even == "drop":
        assert total - base - len(real) < ranks
        assert real == list(range(base, base + len(real)))
    else:
        assert sorted(real) == list(range(base, total))
        assert even == "pad" or real == sorted(real)
    assert len(found) - len(real) < ranks
    if even:
        lengths = {count_samples(total, base, Share(ranks, rank), block, even) for rank in range(ranks)}
        assert len(lengths) == 1
    together = sum(
        count_samples(total, base, Share(ranks, rank, workers, worker), block, even)
        for rank in range(ranks)
        for worker in range(max(workers, 1))
    )
    assert together == len(found)


@settings(deadline=None)
@given(st.integers(0, 600), st.lists(st.tuples(GRIDS, st.integers(0, 4)), min_size=1, max_size=4), EVEN)
def test_other_grids_continue_where_one_stopped(
    total: int, parts: list[tuple[tuple[int, int, int], int]], even: Even
) -> None:
    """A chain of resumes on other grids reads what one unbroken epoch reads, in its order."""
    base = 0
    found: list[int] = []
    for number, ((ranks, _, block), items) in enumerate(parts):
        steps = dealt_items(total, base, ranks, block, even)
        if number < len(parts) - 1:
            steps = steps[:items]
        found += [place for step in steps for item in step for place in item if place >= 0]
        base = step_end(total, base, ranks, block, len(steps))
    left_out = max(ranks for (ranks, _, _), _ in parts) - 1 if even == "drop" else 0
    assert found == list(range(len(found)))
    assert total - left_out <= len(found) <= total


@pytest.mark.parametrize(
    ("even", "expected"),
    [
        (None, [[(10, 15, False)], [(15, 18, False)], []]),
        ("drop", [[(10, 12, False)], [(12, 14, False)], [(14, 16, False)]]),
        ("pad", [[(10, 13, False)], [(13, 16, False)], [(16, 18, False), (0, 1, True)]]),
    ],
)
def test_last_step_is_divided_as_even_says(even: Even, expected: list[list[tuple[int, int, bool]]]) -> None:
    """8 samples remain for 3 ranks that take 5 at a time."""
    given = [[tuple(block) for block in blocks(18, 10, Share(3, rank), 5, even)] for rank in range(3)]
    assert given == expected


def test_fewer_samples_than_ranks_are_repeated_in_turn() -> None:
    """Each rank has one, and padding says which ones are repeated."""
    given = [[tuple(block) for block in blocks(2, 0, Share(6, rank), 4, "pad")] for rank in range(6)]
    pads = [[(0, 1, True)], [(1, 2, True)]] * 2
    assert given == [[(0, 1, False)], [(1, 2, False)], *pads]


def test_nothing_comes_after_the_end() -> None:
    """An epoch that is over gives nothing, padding neither."""
    for even in (None, "drop", "pad"):
        for total, base in ((0, 0), (7, 7), (7, 9)):
            assert list(blocks(total, base, Share(2, 1), 3, even)) == []
            assert count_samples(total, base, Share(2, 1), 3, even) == 0


def test_any_position_is_reached_directly() -> None:
    """Starting late in 10**15 samples takes no walk over what comes before."""
    total = 10**15
    base = step_end(total, 0, 7, 64, 10**12)
    assert base == 7 * 64 * 10**12
    assert next(blocks(total, base, Share(7, 3, 2, 1), 64)) == (base + (7 + 3) * 64, base + (7 + 3) * 64 + 64, False)
    assert step_end(10, 0, 2, 3, 99) == 10
    assert step_end(10, 12, 2, 3, 1) == 12
