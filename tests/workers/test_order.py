"""One global order: the same samples by position on every grid, and states that resume on any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kits import order_kit
from tests.kits.order_kit import (
    SIZES,
    Grid,
    Job,
    Shards,
    by_position,
    drawn,
    flat,
    key_of,
    local_workers,
    marked_key,
    share_of,
    steps_left,
)
from torchdata_wds import IndexedMix, IndexedShards

GRIDS = st.builds(Grid, ranks=st.integers(1, 6), workers=st.integers(0, 4), batch=st.integers(1, 32))
SOME = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=6, unique=True).filter(
    lambda numbers: sum(SIZES[number] for number in numbers) >= 6
)
RUNS = st.integers(1, 64)
EVEN = st.sampled_from(["drop", "pad"])
CHAINS = st.lists(GRIDS, min_size=4, max_size=4)
CUTS = st.lists(st.floats(0, 1), min_size=3, max_size=3)

#: Few examples by default, and many among the slow tests.
FEW = 4
EXAMPLES = pytest.mark.parametrize("examples", [FEW, pytest.param(150, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return order_kit.shards_in(tmp_path_factory.mktemp("order"))


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Any:
    with local_workers():
        yield


def check_many(check: Callable[..., None], shards: Shards, examples: int, *strategies: Any) -> None:
    """Calls a check with many examples of what the strategies draw."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples <= FEW,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*strategies))
    def run(case: tuple[Any, ...]) -> None:
        check(shards, *case)

    run()


def fitted(grid: Grid, total: int) -> Grid:
    """A grid with blocks small enough for each rank to get samples without even=."""
    return grid._replace(batch=min(grid.batch, (total - 1) // max(grid.ranks - 1, 1))) if grid.ranks > 1 else grid


def graph_of(shards: Shards, **options: Any) -> order_kit.Graph:
    return lambda batch: shards.pipe(**options).map(key_of).batch(batch)


def check_grid(shards: Shards, numbers: list[int], run: int, grid: Grid, shuffle: bool) -> None:
    """Position p has the same sample for all ranks, workers and batch sizes, and each sample comes once an epoch."""
    some = shards.some(numbers)
    grid = fitted(grid, len(some.keys))
    job = Job(graph_of(some, run=run, shuffle=shuffle), grid)
    for epoch in range(2):
        order = some.order(run=run, shuffle=shuffle, epoch=epoch)
        ranks = job.epoch()
        assert ranks == [share_of(order, 0, grid, rank) for rank in range(grid.ranks)]
        assert flat(by_position(ranks)) == order
        assert sorted(order) == sorted(some.keys)


def check_chain(shards: Shards, numbers: list[int], run: int, grids: list[Grid], cuts: list[float]) -> None:
    """A run that resumes three times, each time on another grid and batch size, is the run that was never stopped."""
    some = shards.some(numbers)
    graph, order = graph_of(some, run=run, read_ahead=run % 3), some.order(run=run)
    state: Any = None
    trained: list[str] = []
    *firsts, last = [fitted(grid, len(order)) for grid in grids]
    for grid, cut in zip(firsts, cuts, strict=True):
        job = Job(graph, grid, state)
        trained += flat(by_position(job.steps(round(cut * steps_left(len(order), len(trained), grid)))))
        state = job.state()
        assert [loader.position for loader in job.loaders] == [len(trained)] * grid.ranks
        assert len(json.dumps(state)) < 300
    job = Job(graph, last, state)
    assert trained + flat(by_position(job.epoch())) == order
    assert flat(by_position(job.epoch())) == some.order(run=run, epoch=1)


def check_even(shards: Shards, numbers: list[int], even: Any, grids: list[Grid], cut: float) -> None:
    """All ranks get as many batches of the same sizes; what is repeated is marked, and fewer samples than ranks."""
    some = shards.some(numbers)
    order = some.order()

    def graph(batch: int) -> Any:
        return some.pipe(even=even).map(marked_key).batch(batch)

    first, second = grids[:2]
    job = Job(graph, first)
    trained = job.steps(int(cut * (len(order) // (first.ranks * first.batch))))
    job = Job(graph, second, job.state())
    rest = job.epoch()
    for ranks in (trained, rest, job.epoch()):
        assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    found = flat(by_position(trained)) + flat(by_position(rest))
    real = [key for key, is_pad in found if not is_pad]
    padding = [key for key, is_pad in found if is_pad]
    assert len(padding) < second.ranks
    if even == "pad":
        assert real == order
        assert padding == (order * second.ranks)[: len(padding)]
    else:
        assert real == order[: len(real)]
        assert len(order) - len(real) < second.ranks
        assert not padding


def check_mixture(
    shards: Shards, weights: list[float], run: int, length: int | None, grids: list[Grid], cuts: list[float]
) -> None:
    """A mixture that resumes three times, each time on another grid, is the one that was never stopped."""
    parts = [shards.some(numbers) for numbers in ((0, 1, 3), (4,), (6, 9, 10))]
    sets = {IndexedShards(part.urls, index=part.index): weight for part, weight in zip(parts, weights, strict=True)}

    def graph(batch: int) -> Any:
        return IndexedMix(sets, length=length, run=run, read_ahead=run % 3).map(drawn).batch(batch)

    whole = Job(graph, Grid())
    epochs = [flat(by_position(whole.epoch())) for _ in range(2)]
    total = len(epochs[0])
    assert total == (length or sum(len(part.keys) for part in parts))
    state: Any = None
    trained: list[Any] = []
    *firsts, last = [fitted(grid, total) for grid in grids]
    for grid, cut in zip(firsts, cuts, strict=True):
        job = Job(graph, grid, state)
        trained += flat(by_position(job.steps(round(cut * steps_left(total, len(trained), grid)))))
        state = job.state()
        assert state["position"] == len(trained)
    job = Job(graph, last, state)
    assert trained + flat(by_position(job.epoch())) == epochs[0]
    assert flat(by_position(job.epoch())) == epochs[1]


@pytest.mark.slow
def test_chain_of_resumes_of_a_mixture(shards: Shards) -> None:
    """With random functions; the next epoch continues each set where this one left it."""
    weights = st.lists(st.floats(0.05, 1), min_size=3, max_size=3)
    check_many(check_mixture, shards, 60, weights, RUNS, st.sampled_from([None, 20, 37, 200]), CHAINS, CUTS)


@EXAMPLES
def test_order_is_the_same_on_every_grid(shards: Shards, examples: int) -> None:
    """For any sizes of shards, empty ones too."""
    check_many(check_grid, shards, examples, SOME, RUNS, GRIDS, st.booleans())


@pytest.mark.slow
@EXAMPLES
def test_chain_of_resumes_gives_the_unbroken_run(shards: Shards, examples: int) -> None:
    """Through JSON, at any positions, the end of the epoch too."""
    check_many(check_chain, shards, examples, SOME, RUNS, CHAINS, CUTS)


@EXAMPLES
def test_even_ranks_stay_in_step(shards: Shards, examples: int) -> None:
    """With even=, also after a resume on another grid."""
    check_many(check_even, shards, examples, SOME, EVEN, CHAINS, st.floats(0, 1))
