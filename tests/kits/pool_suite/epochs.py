"""What a pool promises about epochs that are left early or paused."""

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.kind import PoolKind
from tests.kits.workers_kit import SIZES, items_of, uneven_pipe


class EpochSuite:
    """Epochs that are begun, left and paused."""

    @pytest.mark.parametrize("tail", ["join_workers", "prefetch"])
    def test_next_epoch_is_whole_after_an_early_break(self, pool: PoolKind, tail: str) -> None:
        """Also where a thread of the main process was reading ahead."""
        pipe = uneven_pipe().join_workers()
        with pool.loader(pipe.prefetch(5) if tail == "prefetch" else pipe) as loader:
            for taken in (1, 3, 0, 7):
                items = iter(loader)
                for _ in range(taken):
                    next(items)
                assert sorted(loader) == items_of(SIZES)

    def test_epoch_does_not_count_when_nothing_was_taken_from_it(self, pool: PoolKind) -> None:
        """A framework may call iter() to see whether that works."""
        with pool.loader(uneven_pipe(), seed=1) as loader, pool.elsewhere.loader(uneven_pipe(), seed=1) as other:
            for _ in range(2):
                iter(loader)
                iter(loader)
                assert list(loader) == list(other)

    def test_iterator_pauses_at_a_limit_and_goes_on(self, pool: PoolKind) -> None:
        """Each resume yields as many items again, until the limit is removed; the state is that of the last item."""
        with pool.loader(uneven_pipe(), seed=1) as loader, pool.elsewhere.loader(uneven_pipe(), seed=1) as other:
            whole = list(other)
            items = iter(loader)
            items.limit(3)
            assert list(items) == whole[:3]
            assert list(items) == []
            with pytest.raises(RuntimeError, match="call resume"):
                iter(loader)
            items.resume()
            assert list(items) == whole[3:6]
            state = loader.state_dict()
            items.limit(None)
            items.resume()
            assert list(items) == whole[6:]
            assert sorted(loader) == items_of(SIZES)
        with pool.elsewhere.resumed(pool.sent(state), uneven_pipe(), seed=1) as again:
            assert list(again) == whole[6:]

    def test_iterator_goes_on_after_a_limit_when_a_stage_knows_another_resume(self, pool: PoolKind) -> None:
        """`wds_shuffle` has a method of that name, which is about states."""
        with pool.loader(IterableWrapper(range(10)).sharding_filter().join_workers().wds_shuffle(3)) as loader:
            items = iter(loader)
            items.limit(3)
            found = list(items)
            items.limit(None)
            items.resume()
            assert sorted([*found, *items]) == list(range(10))

    def test_prefetch_goes_on_after_a_pause(self, pool: PoolKind) -> None:
        """A thread of the main process loses nothing."""
        with pool.loader(IterableWrapper(range(30)).sharding_filter().join_workers().prefetch(4)) as loader:
            items = iter(loader)
            items.limit(5)
            found = list(items)
            while len(found) < 30:
                items.resume()
                found += list(items)
            assert found == [*range(30)]
