"""What a pool promises about orders and seeds, and about stages on both sides of its border."""

import random
from collections import deque
from collections.abc import Sequence
from operator import neg
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.kind import PoolKind
from tests.kits.workers_kit import SIZES, SeedTeller, expand, items_of, uneven_pipe, with_pid
from tests.workers.test_seeds import DIGESTS, GRAPHS, IN_ALL_POOLS, digest, scramble


def in_turn(sizes: Sequence[int], streams: int) -> list[Any]:
    """The items of sources that are dealt to streams, one of each stream that has not ended in turn."""
    sources = list(enumerate(sizes))
    queue = deque(
        deque(item for source in sources[number::streams] for item in expand(source)) for number in range(streams)
    )
    found = []
    while queue:
        if queue[0]:
            found.append(queue[0].popleft())
            queue.rotate(-1)
        else:
            queue.popleft()
    return found


def global_draws(item: Any) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def generator_states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def worker_place(item: Any) -> tuple[int, int, int] | None:
    worker = get_worker_info()
    return (worker.id, worker.num_workers, worker.seed) if worker else None


def orders_of(pool: PoolKind, pipe: IterDataPipe, count: int = 3, **options: Any) -> list[list[Any]]:
    """The first epochs of a loader."""
    with pool.loader(pipe, **options) as loader:
        return [list(loader) for _ in range(count)]


def distinct(orders: list[list[Any]]) -> int:
    return len({tuple(order) for order in orders})


class OrderSuite:
    """The items of an epoch, their order, and what stages draw."""

    def test_items_come_in_turn(self, pool: PoolKind) -> None:
        """One of each stream at a time, also where one is empty and others end early; in each epoch."""
        sizes = (9, 0, 3, 2, 0, 0, 1)
        pipe = IterableWrapper(list(enumerate(sizes))).sharding_filter().map(expand).unbatch()
        kind = pool.of(3)
        assert orders_of(kind, pipe, 2) == [in_turn(sizes, kind.streams)] * 2

    def test_epochs_are_empty_when_all_streams_are(self, pool: PoolKind) -> None:
        """Which is not an error; nor are more workers than sources."""
        assert orders_of(pool.of(3), uneven_pipe((0, 0)), 2) == [[], []]

    @pytest.mark.parametrize("seed", [None, 7])
    def test_orders_differ_by_epoch_and_follow_from_the_seed(self, pool: PoolKind, seed: int | None) -> None:
        """Every item comes once per epoch; without a seed, torch.manual_seed decides."""
        runs = []
        for global_seed in (3, 3 if seed is None else 4):
            scramble()
            torch.manual_seed(global_seed)
            runs.append(orders_of(pool.elsewhere if runs else pool, uneven_pipe(), seed=seed))
        assert runs[0] == runs[1]
        assert distinct(runs[0]) == 3
        assert all(sorted(order) == items_of(SIZES) for order in runs[0])

    @pytest.mark.parametrize("name", IN_ALL_POOLS)
    def test_orders_are_the_stored_ones(self, pool: PoolKind, name: str, text_urls: list[str]) -> None:
        """They are the same in every pool, for both fronts, and from any state of the global generators."""
        scramble()
        assert digest(orders_of(pool, GRAPHS[name](text_urls), 2, seed=7)) == DIGESTS["service", pool.workers][name]

    def test_augmentations_draw_anew_and_repeat_with_the_seed(self, pool: PoolKind) -> None:
        """From all three global generators, which are left alone in the program itself."""
        pipe = IterableWrapper(range(8)).sharding_filter().map(global_draws)
        before = generator_states()
        found = orders_of(pool, pipe, 2, seed=1)
        assert generator_states() == before
        for kind in range(3):
            assert len({draws[kind] for order in found for draws in order}) == 16
        assert orders_of(pool.elsewhere, pipe, 2, seed=1) == found

    def test_pipes_are_seeded_alike_before_the_split_and_apart_after_it(self, pool: PoolKind) -> None:
        """After the border, where the main process runs them, they have another seed; all change with the epoch."""
        split = SeedTeller(SeedTeller(IterableWrapper(range(6))).sharding_filter())
        seeds: list[set[int | None]] = []
        for order in orders_of(pool, SeedTeller(split.join_workers()), 2, seed=1):
            epoch = [{item[0][0][1] for item in order}, {item[0][1] for item in order}, {item[1] for item in order}]
            assert list(map(len, epoch)) == [1, pool.streams, 1]
            assert {item[0][2] for item in order} == (set(range(pool.workers)) or {None})
            assert {item[2] for item in order} == {None}
            seeds += epoch
        assert len(set().union(*seeds)) == sum(map(len, seeds))

    def test_stages_know_their_worker(self, pool: PoolKind) -> None:
        """As in torch's DataLoader; the main process has no such info."""
        (found,) = orders_of(pool, IterableWrapper(range(4)).sharding_filter().map(worker_place), 1)
        if not pool.workers:
            assert found == [None] * 4
            return
        assert [place[:2] for place in found] == [(0, 2), (1, 2)] * 2
        assert found[:2] == found[2:]
        assert found[0][2] != found[1][2]


class BorderSuite:
    """Stages and branches on both sides of ``.join_workers()``."""

    def test_each_branch_has_workers_of_its_own(self, pool: PoolKind) -> None:
        """Two joined branches, zipped, yield all their items, each in its own order."""
        one, two = (
            IterableWrapper(range(10)).shuffle().sharding_filter().map(with_pid).join_workers() for _ in range(2)
        )
        for order in orders_of(pool, one.zip(two), 2, seed=1):
            lefts, rights = zip(*order, strict=True)
            assert sorted(item for item, _ in lefts) == sorted(item for item, _ in rights) == list(range(10))
            assert [item for item, _ in lefts] != [item for item, _ in rights]
            assert len({pid for _, pid in lefts + rights}) == (2 * pool.workers or 1)

    @pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted")
    def test_branches_of_a_fork_stay_in_step(self, pool: PoolKind) -> None:
        """Workers of both shuffle alike what the branches have in common."""
        one, two = IterableWrapper(range(23)).shuffle().sharding_filter().wds_shuffle(4).fork(2)
        pipe = one.join_workers().zip(two.map(abs).map(neg).join_workers())
        for pairs in orders_of(pool, pipe, 2, seed=1):
            assert sorted(item for item, _ in pairs) == list(range(23))
            assert all(item == -other for item, other in pairs)

    def test_side_branch_is_read_once(self, pool: PoolKind) -> None:
        """Labels zipped to a joined stream stay in the main process."""
        pipe = IterableWrapper(range(6)).sharding_filter().join_workers().zip(IterableWrapper("abcdef"))
        assert orders_of(pool, pipe, 2) == [list(zip(range(6), "abcdef", strict=True))] * 2

    def test_batches_are_made_anew_after_the_border(self, pool: PoolKind) -> None:
        """Over all workers, and nothing is lost."""
        for order in orders_of(pool, uneven_pipe().batch(4).join_workers().unbatch().batch(5), 2):
            assert [len(batch) for batch in order] == [5] * 6 + [1]
            assert sorted(item for batch in order for item in batch) == items_of(SIZES)

    def test_every_pass_of_a_cycle_is_whole(self, pool: PoolKind) -> None:
        """A stage that reads the joined stream several times gets each item each time, in a new order."""
        (order,) = orders_of(pool, uneven_pipe().join_workers().cycle(3), 1, seed=1)
        passes = [order[start : start + 31] for start in (0, 31, 62)]
        assert all(sorted(items) == items_of(SIZES) for items in passes)
        assert distinct(passes) == 3
