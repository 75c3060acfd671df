"""What a pool promises about its end, and about what stages skip."""

import gc
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.kind import PoolKind
from tests.kits.processes import wait_until
from tests.kits.workers_kit import SIZES, items_of, skipped_by, uneven_pipe
from torchdata_wds import ignore_and_continue


def number_of(sample: Any) -> int:
    return int(sample["__key__"][-1])


def refuse_three(sample: Any) -> Any:
    if number_of(sample) == 3:
        raise ZeroDivisionError("three")
    return None if number_of(sample) == 2 else sample


def refuse_one(sample: Any) -> Any:
    if number_of(sample) == 1:
        raise KeyError("one")
    return sample


def broken(url: str) -> str:
    if url.endswith("gone.tar"):
        raise OSError("gone")
    return url


class EndSuite:
    """Loaders that are shut down or forgotten."""

    def test_shutdown_ends_everything(self, pool: PoolKind) -> None:
        """In the middle of an epoch; before the first, and a second time, it does nothing."""
        pool.loader(uneven_pipe()).shutdown()
        loader = pool.loader(uneven_pipe())
        next(iter(loader))
        assert bool(pool.left()) == bool(pool.workers)
        loader.shutdown()
        loader.shutdown()
        assert not pool.left()
        with pytest.raises(RuntimeError, match="shut down"):
            iter(loader)

    def test_forgotten_loader_leaves_nothing(self, pool: PoolKind) -> None:
        """Garbage collection ends the workers, in the middle of an epoch and after one."""
        for taken in (1, len(items_of(SIZES))):
            loader = pool.loader(uneven_pipe())
            items = iter(loader)
            for _ in range(taken):
                next(items)
            assert bool(pool.left()) == bool(pool.workers)
            del loader, items
            gc.collect()
            assert wait_until(lambda: not pool.left())


class SkipSuite:
    """What stages skip is counted over all processes."""

    def samples(self, urls: list[str]) -> IterDataPipe:
        pipe = IterableWrapper(urls).wds_map(broken, handler=ignore_and_continue).sharding_filter()
        pipe = pipe.load_wds_shards(handler=ignore_and_continue).group_by_key()
        return pipe.wds_map(refuse_three, handler=ignore_and_continue)

    def test_skips_are_counted_wherever_stages_run(self, pool: PoolKind, skipping_urls: list[str]) -> None:
        """In workers and in the main process, once where all workers skip the same, in each epoch anew."""
        pipe = self.samples(skipping_urls).join_workers().wds_map(refuse_one, handler=ignore_and_continue)
        lost = {
            "wds_map(broken)": {"OSError": 1},
            "wds_map(refuse_three)": {"ZeroDivisionError": 3},
            "wds_map(refuse_one)": {"KeyError": 3},
        }
        by_rule = {**lost, "group_by_key()": {"hidden file": 3}}
        by_rule["wds_map(refuse_three)"] = {"ZeroDivisionError": 3, "None": 3}
        with pool.loader(pipe) as loader:
            assert skipped_by(loader) == {}
            for _ in range(2):
                items = iter(loader)
                while not skipped_by(loader):
                    next(items)
                assert len(list(loader)) == 6
                assert skipped_by(loader) == lost
                assert skipped_by(loader, by_rule=True) == by_rule
        assert skipped_by(loader) == lost

    def test_skips_of_all_passes_are_counted(self, pool: PoolKind, skipping_urls: list[str]) -> None:
        """A native cycle in the main process asks the workers again."""
        with pool.loader(self.samples(skipping_urls).join_workers().cycle(3)) as loader:
            assert len(list(loader)) == 27
            assert skipped_by(loader)["wds_map(refuse_three)"] == {"ZeroDivisionError": 9}

    def test_skips_are_counted_in_each_epoch_of_a_stream_that_goes_on(
        self, pool: PoolKind, skipping_urls: list[str]
    ) -> None:
        """What workers made ahead counts where it was made."""
        with pool.loader(self.samples(skipping_urls).wds_epoch(30)) as loader:
            for _ in range(3):
                assert len(list(loader)) == 30
                count = skipped_by(loader)["wds_map(refuse_three)"]["ZeroDivisionError"]
                assert 8 <= count <= 14  # three in nine samples, and what workers made ahead
