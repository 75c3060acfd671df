"""What a pool promises about states: they are exact, and go on in any other pool."""

from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits import resume_kit
from tests.kits.pool_suite.kind import FORKED, PoolKind
from tests.kits.resume_kit import SEED, Cut, Graph, augment, fail_on_one, row, states_at
from torchdata_wds.handlers import ignore_and_continue


def begun_and_left(urls: list[str]) -> Any:
    """Epochs of a stream that goes on, batched after them."""
    return resume_kit.plain(urls).wds_epoch(22).batch(3)


#: Graphs whose items before a state are skipped, and others whose items are made again; some only in the long run.
GRAPHS: list[Any] = [
    resume_kit.filtered,
    begun_and_left,
    *(
        pytest.param(graph, marks=pytest.mark.slow)
        for graph in (
            resume_kit.batched,
            resume_kit.resampled,
            resume_kit.joined,
            resume_kit.handled,
            resume_kit.split,
            resume_kit.batches_in_epochs,
        )
    ),
]


def in_order(urls: list[str]) -> Any:
    """A global order, with samples that are skipped."""
    pipe = IterableWrapper(urls).load_in_order(index=True, run=2).wds_decode()
    return pipe.wds_map(fail_on_one, handler=ignore_and_continue).map(augment).map(row)


def cuts_for(pool: PoolKind, graph: Graph, length: int) -> list[Cut]:
    """Every kind of place where that is cheap, otherwise one in the middle of an epoch."""
    middle = 1 + len(graph.__name__) % (length - 2)
    return [middle] if pool.workers else [0, middle, length - 1, length, "between"]


class StateSuite:
    """States in the middle of an epoch, at its ends, and between two."""

    @pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
    def test_state_resumes_at_the_next_item(self, pool: PoolKind, graph: Graph, indexed_urls: list[str]) -> None:
        """After an epoch that was left early; the next epoch is the same too."""
        pipe = graph(indexed_urls)
        with pool.loader(pipe, seed=SEED) as loader:
            next(iter(loader))
            cuts = cuts_for(pool, graph, 6)
            states, items = states_at(loader, cuts)
            following = [list(loader)]
        for cut, state in zip(cuts, states, strict=True):
            expected = following if cut == "between" else [items[cut:], *following]  # type: ignore[misc]
            with pool.elsewhere.resumed(pool.sent(state), pipe, seed=SEED) as again:
                assert [list(again) for _ in expected] == expected

    @pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.slow), SEED])
    def test_state_resumes_wherever_it_was_taken(
        self, pool: PoolKind, seed: int | None, indexed_urls: list[str]
    ) -> None:
        """Before the first item, after it, before the last, at the end, and between two epochs."""
        pipe = resume_kit.in_epochs(indexed_urls)
        cuts: list[Cut] = [0, 1, 25, 26, "between"]
        with pool.loader(pipe, seed=seed) as loader:
            list(loader)
            states, items = states_at(loader, cuts)
            assert len(items) == 26
            following = list(loader)
        for cut, state in zip(cuts, states, strict=True):
            with pool.elsewhere.resumed(pool.sent(state), pipe, seed=seed) as again:
                if cut != "between":
                    assert list(again) == items[cut:]  # type: ignore[misc]
                assert seed is None or list(again) == following

    def test_state_before_the_first_epoch_begins_it(self, pool: PoolKind, indexed_urls: list[str]) -> None:
        """A loader that was never iterated has a state, too."""
        pipe = resume_kit.batched(indexed_urls)
        with pool.loader(pipe, seed=SEED) as loader:
            state = pool.sent(loader.state_dict())
            with pool.elsewhere.resumed(state, pipe, seed=SEED) as again:
                assert list(again) == list(loader)

    @pytest.mark.parametrize(
        "graph",
        [pytest.param(resume_kit.plain, marks=pytest.mark.slow), begun_and_left],
        ids=lambda graph: graph.__name__,
    )
    def test_state_moves_from_pool_to_pool(self, pool: PoolKind, graph: Graph, indexed_urls: list[str]) -> None:
        """From forked processes to this pool and back, at other items; the main process is like one worker."""
        pipe, forked = graph(indexed_urls), PoolKind(pool.front, pool.streams, FORKED)
        with forked.loader(pipe, seed=SEED) as loader:
            states, items = states_at(loader, [3])
            following = [list(loader), list(loader)]
        with pool.resumed(forked.sent(states[0]), pipe, seed=SEED) as loader:
            iterator = iter(loader)
            assert [next(iterator) for _ in range(3)] == items[3:6]
            state = pool.sent(loader.state_dict())
        with forked.resumed(state, pipe, seed=SEED) as loader:
            assert [list(loader) for _ in range(3)] == [items[6:], *following]

    def test_state_of_a_global_order_moves_to_another_number_of_workers(
        self, pool: PoolKind, indexed_urls: list[str]
    ) -> None:
        """A position says it all; samples that were skipped count."""
        pipe = in_order(indexed_urls)
        with PoolKind(pool.front, 3, FORKED).loader(pipe, seed=SEED) as loader:
            states, items = states_at(loader, [7])
            following = list(loader)
        with pool.resumed(states[0], pipe, seed=SEED) as loader:
            iterator = iter(loader)
            assert [next(iterator) for _ in range(5)] == items[7:12]
            state = pool.sent(loader.state_dict())
            assert [list(iterator), list(loader)] == [items[12:], following]
        with PoolKind(pool.front, 1, FORKED).resumed(state, pipe, seed=SEED) as loader:
            assert list(loader) == items[12:]
