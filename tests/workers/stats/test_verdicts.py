"""A loader that is held back by something, in both fronts: its report names it."""

import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.shards import tar_bytes, write_text_shards
from tests.kits.workers_kit import FRONTS, loader_of
from torchdata_wds import WdsLoader
from torchdata_wds.workers.stats.loader_stats import LoaderStats
from torchdata_wds.workers.stats.reports.verdict import Verdict

STEP = 0.002  # what a training step takes where it is not the limit


def stats_of(loader: Any) -> LoaderStats:
    front = loader if isinstance(loader, WdsLoader) else loader.reading_service
    found: LoaderStats = front.stats()
    return found


def judged(
    kind: str, front: str, pipe: IterDataPipe[Any], workers: int, *, step: float = STEP, **options: Any
) -> Verdict:
    """The verdict on an epoch of a training loop whose step takes some seconds; the report ends with its sentence.

    If it is of another kind, up to two more epochs are judged: other programs may have held up this one.
    """
    verdicts = [judged_once(front, copy.deepcopy(pipe), workers, step, options)]
    while verdicts[-1].kind != kind and len(verdicts) < 3:
        verdicts.append(judged_once(front, copy.deepcopy(pipe), workers, step, options))
    assert kind in [verdict.kind for verdict in verdicts]
    return verdicts[-1]


def judged_once(front: str, pipe: IterDataPipe[Any], workers: int, step: float, options: dict[str, Any]) -> Verdict:
    with loader_of(pipe, workers, front=front, **options) as loader:
        for _ in loader:
            time.sleep(step)
        stats = stats_of(loader)
    verdict, text = stats.verdict(), " ".join(stats.report().split())
    print(stats.report())  # noqa: T201 - for the log of a test that fails
    assert text.endswith(stats.sentence())
    assert verdict.subject[-20:] in text
    return verdict


def sleeping(key: str, data: bytes) -> bytes:
    time.sleep(0.012)
    return data


def burning(sample: Any) -> Any:
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    return sample


def sleeping_item(item: Any) -> Any:
    time.sleep(0.03)
    return item


def large(number: int) -> Any:
    """An item that is not sent together with others."""
    return np.full(50_000, number)


def in_bursts(item: Any) -> Any:
    if int(item[0]) % 20 < 2:  # the tenth item of each of two workers, in the same turn
        time.sleep(0.4)
    return item


def list_up_to(count: int) -> list[int]:
    return list(range(count))


def slow_in_one(item: Any) -> Any:
    worker = get_worker_info()
    time.sleep(0.1 if worker is not None and worker.id == 1 else 0.004)
    return item


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_text_shards(tmp_path, [24, 24])


def samples(urls: list[str]) -> Any:
    return IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key()


#: Both fronts with workers; without workers they run the same.
RUNS = [("loader", 2), ("service", 2), ("loader", 0)]
runs = pytest.mark.parametrize(("front", "workers"), RUNS)


@contextmanager
def served(faults: list[Fault | None], count: int = 20, size: int = 20_000) -> Iterator[list[str]]:
    """Shards on a server; each request for a shard meets its fault."""
    fields = [("txt", b"x" * size)]
    members = [
        [(f"{shard}-{key}.{name}", data) for key in range(count) for name, data in fields]
        for shard in range(len(faults))
    ]
    site = Site({f"/{number}.tar": tar_bytes(found) for number, found in enumerate(members)})
    site.plans = {f"/{number}.tar": itertools.repeat(fault) for number, fault in enumerate(faults)}
    with serve_site(site) as base:
        yield [base + path for path in site.objects]


@pytest.mark.slow
@pytest.mark.parametrize(("front", "workers"), RUNS)
def test_slow_decode_is_named(front: str, workers: int, shards: list[str]) -> None:
    """A function of the user that only sleeps."""
    verdict = judged("stage", front, samples(shards).wds_decode(sleeping), workers)
    assert verdict.subject == "wds_decode(sleeping)"


@pytest.mark.slow
@runs
def test_stage_that_computes_is_named(front: str, workers: int) -> None:
    """Before batches are made."""
    pipe = IterableWrapper(range(30 * max(workers, 1))).sharding_filter().wds_map(burning).batch(2)
    verdict = judged("stage", front, pipe, workers)
    assert verdict.subject == "wds_map(burning)"


@pytest.mark.slow
@runs
def test_slow_server_is_named(front: str, workers: int) -> None:
    """By its first byte, or by its rate."""
    for fault, kind in (
        (Fault("late", seconds=0.4), "latency"),
        (Fault("slow", size=40_000, seconds=0.05), "bandwidth"),
    ):
        with served([fault] * 3 * max(workers, 1)) as urls:
            verdict = judged(kind, front, samples(urls), workers)
        assert verdict.subject == urls[0].rpartition("/")[0]
        assert "read_ahead" in verdict.hints


@pytest.mark.slow
@runs
def test_slow_training_step_is_named(front: str, workers: int, shards: list[str]) -> None:
    """Nothing is to be done about the loader."""
    verdict = judged("trainer", front, samples(shards).wds_decode(), workers, step=0.02)
    assert verdict.hints == ()


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_starved_queue_is_named(front: str) -> None:
    """Items come in bursts, and the queue is too short to bridge them."""
    pipe = IterableWrapper(range(60)).sharding_filter().map(large).wds_map(in_bursts)
    verdict = judged("bursts", front, pipe, 2, step=0.03, prefetch_factor=1)
    assert (verdict.subject, verdict.hints) == ("wds_map(in_bursts)", ("prefetch_factor",))


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_worker_with_a_slow_stage_is_named(front: str) -> None:
    """The other waits for it, since items come from both in turn."""
    pipe = IterableWrapper(range(40)).sharding_filter().map(large).wds_map(slow_in_one)
    verdict = judged("worker", front, pipe, 2)
    assert (verdict.worker, verdict.subject) == (1, "wds_map(slow_in_one)")


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_worker_with_a_slow_shard_is_named(front: str) -> None:
    """The shard is named too."""
    with served([None, Fault("slow", size=60_000, seconds=0.1)], size=60_000) as urls:
        verdict = judged("worker", front, samples(urls), 2)
    assert (verdict.worker, verdict.subject) == (1, urls[1])


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_stage_in_the_main_process_is_named(front: str) -> None:
    """It follows the border of the workers."""
    pipe = IterableWrapper(range(40)).sharding_filter().join_workers().wds_map(sleeping_item)
    verdict = judged("main", front, pipe, 2)
    assert (verdict.subject, verdict.hints) == ("wds_map(sleeping_item)", ("move_stage",))


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_many_small_items_are_named(front: str) -> None:
    """Sending and taking them costs more than making them."""
    with loader_of(IterableWrapper(range(400_000)).sharding_filter(), 2, front=front) as loader:
        for _ in loader:
            pass
        verdict = stats_of(loader).verdict()
    assert (verdict.kind, verdict.hints) == ("transport", ("batch",))


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_worker_with_all_the_work_is_named(front: str) -> None:
    """The other got no source."""
    pipe = IterableWrapper([40]).sharding_filter().map(list_up_to).unbatch().wds_map(sleeping_item)
    verdict = judged("uneven", front, pipe, 2)
    assert (verdict.worker, verdict.hints) == (0, ("even_shards",))
