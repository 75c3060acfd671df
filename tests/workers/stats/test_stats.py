"""Loaders tell how long the training loop waited, and what workers, stages and sources did."""

import gc
import json
import multiprocessing
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import is_alive, wait_until
from tests.kits.shards import text_samples, write_tar
from tests.kits.workers_kit import FRONTS, loader_of
from torchdata_wds import WdsLoader, ignore_and_continue


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Four shards of 25 samples each."""
    return [str(write_tar(tmp_path / f"{n}.tar", text_samples(f"s{n}", 25))) for n in range(4)]


def refuse_three(sample: Any) -> Any:
    if sample["__key__"].endswith("3"):
        raise ZeroDivisionError
    return sample


def graph(urls: list[str]) -> IterDataPipe:
    pipe = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key()
    return pipe.wds_map(refuse_three, handler=ignore_and_continue).batch(10)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_counts_are_exact_at_the_end_of_each_epoch(workers: int, front: str, urls: list[str]) -> None:
    """Items, samples, bytes, what each stage took and gave and skipped, and what each source gave."""
    with loader_of(graph(urls), workers, front=front) as loader:
        for epoch in range(2):
            batches = list(loader)
            stats = told_by(loader)
            total = stats.total
            assert (stats.epoch, total.items, total.samples) == (epoch, len(batches), 100)
            assert total.items == total.waits.count == sum(worker.items for worker in total.workers)
            size = sum(Path(url).stat().st_size for url in urls)
            (source,) = total.sources
            assert (source.source, source.shards, total.bytes) == ("local files", 4, size)
            assert source.slowest in urls  # one of this epoch, even if an earlier one was slower
            found = {stage.stage: (stage.items_in, stage.items_out, dict(stage.skipped)) for stage in total.stages}
            kept = sum(map(len, batches))
            assert found["group_by_key()"] == (None, 100, {})
            assert found["wds_map(refuse_three)"] == (100, kept, {"ZeroDivisionError": 100 - kept})
            assert found["batch(10)"] == (kept, len(batches), {})
            assert found["load_wds_shards()"][:2] == (4, None)
            assert json.loads(json.dumps(stats.to_plain()))["total"]["samples"] == 100
            assert len(total.workers) == max(workers, 1)


def told_by(loader: Any) -> Any:
    return (loader if isinstance(loader, WdsLoader) else loader.reading_service).stats()


def slow(item: Any) -> Any:
    time.sleep(0.01)
    return item


def spin(item: Any) -> Any:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    return item


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_time_is_charged_to_the_stage_that_takes_it(workers: int) -> None:
    """Also if one waits and the other computes: a thread that looks must not see the one that lets it look."""
    pipe = IterableWrapper(range(60)).map(slow).map(spin)
    with WdsLoader(pipe, workers) as loader:
        list(loader)
        total = loader.stats().total
    seconds = {stage.stage: stage.seconds for stage in total.stages}
    both = seconds["map(slow)"] + seconds["map(spin)"]
    assert 0.2 < seconds["map(spin)"] / both < 0.8
    (worker,) = total.workers
    assert both > 0.8 * worker.busy > 0.8


def test_waits_and_steps_of_the_training_loop_are_told_apart() -> None:
    """In total, and since the last call."""
    loader = WdsLoader(IterableWrapper(range(20)).map(slow))
    items = iter(loader)
    next(items)
    loader.stats()
    for _ in range(10):
        next(items)
        time.sleep(0.02)
    stats = loader.stats()
    assert (stats.total.items, stats.recent.items) == (11, 10)
    waits = stats.recent.waits
    assert 0.1 < waits.waited < waits.elsewhere
    assert 0.009 < waits.p50 <= waits.p99
    assert (stats.total.waits.first > 0.009, waits.first) == (True, 0.0)


def large(item: int) -> bytes:
    return bytes(200_000)


@pytest.mark.slow
def test_workers_that_run_ahead_are_blocked() -> None:
    """While the training loop is slow."""
    with WdsLoader(IterableWrapper(range(100)).map(large), 1, prefetch_factor=2) as loader:
        for number, _ in enumerate(loader):
            time.sleep(0.1)
            if number == 7:
                break
        stats = loader.stats()
        assert stats.total.workers[0].blocked > 0.3
        assert stats.options["ahead"] >= 1


def test_epoch_that_is_left_keeps_its_figures_until_the_next(urls: list[str]) -> None:
    """And a loader that never ran has none."""
    loader = WdsLoader(graph(urls))
    assert loader.stats().total.items == 0
    items = iter(loader)
    next(items)
    del items
    loader.shutdown()
    assert loader.stats().total.items == 1


def test_figures_keep_no_loader_alive_and_no_thread(urls: list[str]) -> None:
    """The thread that looks ends soon after the last loader."""
    loader = WdsLoader(graph(urls), 1)
    items = iter(loader)
    next(items)
    (pid,) = (process.pid for process in multiprocessing.active_children())
    assert pid is not None
    found = weakref.ref(loader)
    gc.disable()
    try:
        del loader, items
        assert found() is None
        assert not is_alive(pid)
    finally:
        gc.enable()
    assert wait_until(lambda: all(thread.name != "wds-stats" for thread in threading.enumerate()), 5)


def test_stats_of_all_ranks_need_torch_distributed() -> None:
    """And say so."""
    with pytest.raises(RuntimeError, match=r"stats\(all_ranks=True\) needs torch.distributed"):
        WdsLoader(IterableWrapper(range(3))).stats(all_ranks=True)
