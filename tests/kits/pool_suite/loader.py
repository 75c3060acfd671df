"""What a pool promises under WdsLoader alone."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.kind import PoolKind
from tests.kits.workers_kit import SIZES, items_of, uneven_pipe


class Note:
    """Notes, in a folder, which workers have called it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.id == worker
        with (self.folder / f"{worker} of {info.num_workers}").open("a") as file:
            file.write("x")


class LoaderSuite:
    """WdsLoader, also in several threads, which DataLoader2 is not made for."""

    def test_worker_init_fn_is_called_once_in_each_worker(self, pool: PoolKind, tmp_path: Path) -> None:
        """With its number, as by torch's DataLoader; the main process is not a worker."""
        with pool.loader(uneven_pipe(), worker_init_fn=Note(tmp_path)) as loader:
            assert sorted(loader) == sorted(loader) == items_of(SIZES)
        names = [f"{worker} of {pool.workers}" for worker in range(pool.workers)]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert all(path.read_text() == "x" for path in tmp_path.iterdir())

    @pytest.mark.parametrize("fresh", [False, True])
    def test_iterator_ends_when_another_begins(self, pool: PoolKind, fresh: bool) -> None:
        """One iterator at a time: an old one raises, and never takes the items of the new one."""
        with pool.loader(uneven_pipe()) as loader:
            first = iter(loader)
            if not fresh:
                next(first)
            second = iter(loader)
            with pytest.raises(RuntimeError, match="one iterator at a time"):
                next(first)
            assert sorted(second) == items_of(SIZES)

    def test_loader_is_whole_again_when_another_thread_took_its_items(self, pool: PoolKind) -> None:
        """The thread gets an error in place of items that belong to the new iterator."""
        errors: list[Exception] = []
        begun, goes_on = threading.Event(), threading.Event()

        def iterate(loader: Any) -> None:
            try:
                for _ in loader:
                    begun.set()
                    goes_on.wait(60)
            except RuntimeError as error:
                errors.append(error)

        with pool.loader(uneven_pipe(), seed=1) as loader:
            thread = threading.Thread(target=iterate, args=(loader,))
            thread.start()
            assert begun.wait(60)
            items = iter(loader)
            goes_on.set()
            thread.join(60)
            assert "one iterator at a time" in str(errors)
            assert sorted(items) == items_of(SIZES)

    def test_loaders_in_several_threads_do_not_disturb_each_other(self, pool: PoolKind) -> None:
        """Torch changes how all pipes are pickled and copied while it walks a graph."""
        interval = sys.getswitchinterval()
        found: dict[int, Any] = {}
        pool = pool.of(1)

        def run(number: int) -> None:
            pipe = IterableWrapper(range(20)).shuffle().sharding_filter().map(str).batch(2)
            for _ in range(1 if pool.workers else 10):
                with pool.loader(pipe, seed=1) as loader:
                    items = iter(loader)
                    begun = [next(items) for _ in range(3)]
                    with pool.elsewhere.resumed(loader.state_dict(), pipe, seed=1) as again:
                        found[number] = begun + list(again), begun + list(items)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert len(found) == 3  # otherwise a thread has ended with an error
        assert len({str(pair) for pairs in found.values() for pair in pairs}) == 1
