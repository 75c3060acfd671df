"""Actors and nodes that are lost while a graph runs on a cluster: the same items, and nothing left."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.loss_graphs import GRAPHS, SEED, digests, in_epochs, rest_of, samples, shards_in, shuffled, undisturbed
from tests.kits.processes import wait_until
from tests.kits.ray_campaign import WORKERS, Campaign, events
from tests.kits.ray_kit import DATA, DataCluster, data_cluster
from tests.kits.torchdata import DataLoader2, RayReadingService
from tests.kits.workers_kit import ROOT
from torchdata_wds import RayPool, WdsLoader
from torchdata_wds.handlers import ignore_and_continue
from torchdata_wds.workers.ray import actor_link, actor_stacks

pytestmark = pytest.mark.slow

#: How many losses there are for each graph. More come from ``python -m tests.kits.ray_campaign``.
LOSSES = 4

ON_DATA_NODES: dict[str, Any] = {"actor_options": {"resources": {DATA: 1}}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[DataCluster]:
    pytest.importorskip("ray")
    with data_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return shards_in(tmp_path_factory.mktemp("losses"))


def kill_actors(cluster: DataCluster) -> None:
    """Kills all actors, and waits until the cluster knows that."""
    for actor in cluster.actors():
        os.kill(actor.pid, signal.SIGKILL)
    assert wait_until(lambda: not cluster.actors())


def left_in(cluster: DataCluster, *, after_error: bool = False) -> list[Any]:
    """What is still in the cluster after it had time to clean up.

    An error holds what was running, also in a cycle with itself; the loader that raised it keeps it.
    """
    if after_error:
        gc.collect()
    wait_until(cluster.is_empty, 60)
    return cluster.left()


@pytest.mark.parametrize("name", GRAPHS)
def test_items_are_those_of_an_undisturbed_run_when_something_is_lost(
    name: str, cluster: DataCluster, urls: list[str]
) -> None:
    """At random moments; a state resumes elsewhere; no actor, object or process is left."""
    campaign = Campaign(cluster, GRAPHS[name], urls)
    expected = undisturbed(GRAPHS[name], urls, WORKERS, LOSSES)
    for event, items in zip(events([*GRAPHS].index(name), LOSSES), expected, strict=True):
        campaign.run(event, items)
    campaign.close()


def ends_its_process(number: int) -> int:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_error_names_worker_node_process_and_cause_when_actors_are_lost_again_and_again(
    cluster: DataCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """After `max_restarts` replacements in a row, each with a warning."""
    pool = RayPool(**ON_DATA_NODES, max_restarts=2)
    found = []
    with WdsLoader(IterableWrapper(range(20)).sharding_filter().map(ends_its_process), 2, pool=pool) as loader:
        with pytest.raises(
            RuntimeError,
            match=r"worker 1 of 2 was lost 3 times in a row .*on node [\d.]+ \(\w+\), pid \d+.* Ray says: The actor "
            r"died unexpectedly.* actor_id: \w+ .*worker process has died",
        ) as raised:
            found.extend(loader)
        assert found == [*range(len(found))]
        assert len(found) <= 7
        assert (pool.restarts, len(caplog.messages)) == (2, 2)
        named = {re.search(r"pid (\d+)", text)[1] for text in [str(raised.value), *caplog.messages]}  # type: ignore[index]
        assert len(named) == 3
    del raised, loader
    assert not left_in(cluster, after_error=True)


def test_epoch_begins_when_actors_were_lost_after_an_epoch_that_was_left_early(
    cluster: DataCluster, urls: list[str]
) -> None:
    """With the first item of its own order."""
    expected = undisturbed(shuffled, urls, 2, 2)
    pool = RayPool(**ON_DATA_NODES)
    with WdsLoader(shuffled(urls), 2, seed=SEED, pool=pool) as loader:
        assert digests(islice(loader, 9)) == expected[0][:9]
        kill_actors(cluster)
        assert digests(loader) == expected[1]
        assert pool.restarts == 2
    assert not left_in(cluster)


def test_state_at_the_beginning_of_an_epoch_is_known_when_actors_are_lost(
    cluster: DataCluster, urls: list[str]
) -> None:
    """It depends on what actors report about where their streams continue."""
    expected = undisturbed(in_epochs, urls, 2, 2)
    with WdsLoader(in_epochs(urls), 2, seed=SEED, pool=RayPool(**ON_DATA_NODES)) as loader:
        assert digests(loader) == expected[0]
        kill_actors(cluster)
        items = iter(loader)
        state = loader.state_dict()
        assert digests(items) == expected[1]
    assert rest_of(in_epochs, urls, 2, state) == expected[1]
    assert not left_in(cluster)


def test_stages_of_the_main_process_read_on_in_a_thread_when_actors_are_lost(
    cluster: DataCluster, urls: list[str]
) -> None:
    """The loss is met in that thread."""
    expected = undisturbed(shuffled, urls, 2, 1)[0]
    graph = shuffled(urls).join_workers().prefetch(2)
    with WdsLoader(graph, 2, seed=SEED, pool=RayPool(**ON_DATA_NODES)) as loader:
        items = iter(loader)
        found = digests(islice(items, 11))
        kill_actors(cluster)
        assert found + digests(items) == expected
    assert not left_in(cluster)


def fails_for_some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 4:
        raise ValueError("four")
    return sample


def test_skipped_samples_are_counted_once_when_actors_are_lost(cluster: DataCluster, urls: list[str]) -> None:
    """A replaced actor reads some samples again."""
    graph = samples(urls).wds_decode()
    graph = graph.wds_map(fails_for_some, handler=ignore_and_continue).map(slowly)
    with (
        WdsLoader(graph, 2, seed=SEED) as local,
        WdsLoader(graph, 2, seed=SEED, pool=RayPool(**ON_DATA_NODES)) as loader,
    ):
        expected = [*local]
        items = iter(loader)
        found = [*islice(items, 40)]
        kill_actors(cluster)
        found += items
        assert found == expected
        assert loader.skipped() == local.skipped() != {}
    assert not left_in(cluster)


def slowly(sample: dict[str, Any]) -> str:
    time.sleep(0.01)
    return str(sample["__key__"])


def test_ranks_have_their_own_actors_in_one_cluster(cluster: DataCluster, urls: list[str]) -> None:
    """Each rank yields what it does alone, also if a node is lost on which both have some."""
    expected, loaders = [], []
    for rank in range(2):
        with WdsLoader(shuffled(urls), 1, seed=SEED, ranks=(rank, 2)) as local:
            expected.append(digests(local))
        loaders.append(WdsLoader(shuffled(urls), 1, seed=SEED, ranks=(rank, 2), pool=RayPool(**ON_DATA_NODES)))
    running = [iter(loader) for loader in loaders]
    found = [digests(islice(items, 5)) for items in running]
    cluster.kill_node(next(node for node in cluster.nodes if node.node_id == cluster.actors()[0].node))
    for rank, items in enumerate(running):
        found[rank] += digests(items)
    cluster.add_node()
    assert found == expected
    for loader in loaders:
        loader.shutdown()
    assert not left_in(cluster)


def test_node_that_joins_is_used_at_the_next_start(cluster: DataCluster) -> None:
    """Actors spread over the nodes that there are."""
    cluster.kill_node(cluster.nodes[0])
    for _ in range(2):
        with WdsLoader(IterableWrapper(range(9)).sharding_filter(), 2, pool=RayPool(**ON_DATA_NODES)) as loader:
            assert [*loader] == [*range(9)]
            assert {actor.node for actor in cluster.actors()} == {node.node_id for node in cluster.nodes}
        assert not left_in(cluster)
        if len(cluster.nodes) == 1:
            cluster.add_node()


TRAINER = """
import logging, sys
from tests.kits.loss_graphs import shuffled
from torchdata_wds import RayPool, WdsLoader
pool = RayPool(sys.argv[1], actor_options={"resources": {"data": 1}})
loader = WdsLoader(shuffled(sys.argv[2:]), 2, pool=pool)
for item in loader:
    print(item[0], flush=True)
"""


def test_trainer_that_dies_leaves_no_actor(cluster: DataCluster, urls: list[str]) -> None:
    """Nor its objects: the cluster ends what belongs to its job."""
    command = [sys.executable, "-c", TRAINER, cluster.address, *urls]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline()
        assert wait_until(lambda: len(cluster.actors()) == 2, 60)  # the first item needs one of them only
        trainer.kill()
        trainer.wait(60)
    assert not left_in(cluster)


def test_error_says_so_when_an_actor_does_not_answer(cluster: DataCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `timeout`; a process that does not run cannot be told from a slow one. The loader ends it."""
    monkeypatch.setattr(actor_stacks, "_TASK", 120)
    with WdsLoader(
        IterableWrapper(range(600)).sharding_filter().map(slow_number), 2, timeout=5, pool=RayPool(**ON_DATA_NODES)
    ) as loader:
        items = iter(loader)
        assert [next(items), next(items)] == [0, 1]  # both actors run now
        stopped = cluster.actors()[0].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            found = (
                rf"(?s)worker \d of 2 did not send its next item within timeout=5.*\(pid {stopped} on node [0-9.]+\): "
            )
            with pytest.raises(RuntimeError, match=found + r"([^\n]*; )?is stopped \(SIGSTOP\)"):
                list(items)
        finally:
            os.kill(stopped, signal.SIGCONT)
    del items, loader
    assert not left_in(cluster, after_error=True)


class Loads:
    """A function of a graph that does something as it arrives in another process, as one that imports packages."""

    def __init__(self, does: Callable[[], object], process: int) -> None:
        self._parts = does, process
        if os.getpid() != process:
            does()

    def __reduce__(self) -> Any:
        return Loads, self._parts

    def __call__(self, number: int) -> int:
        return number


def loading(does: Callable[[], object]) -> Any:
    return IterableWrapper(range(9)).sharding_filter().map(Loads(does, os.getpid()))


def takes_its_time() -> None:
    time.sleep(3)


def ends_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_time_in_which_an_actor_imports_is_not_that_of_an_item(
    cluster: DataCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take longer than `timeout`; a warning says what the loader waits for."""
    monkeypatch.setattr(actor_link, "_SLOW_START", 1)
    with WdsLoader(loading(takes_its_time), 1, timeout=2, pool=RayPool(**ON_DATA_NODES)) as loader:
        assert [*loader] == [*range(9)]
    found = [text for text in caplog.messages if re.search(r"^worker 0 of 1 has waited \d s for its actor", text)]
    assert re.search(r"on node \S+ \(\w+\), pid \d+ to import what the graph needs$", found[-1])


def test_error_has_the_stack_when_an_actor_is_stuck_while_it_imports(
    cluster: DataCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_link, "_MOST_IMPORT", 1)
    monkeypatch.setattr(actor_stacks, "_TASK", 120)
    found = r"(?s)worker 0 \(pid \d+ on node [0-9.]+\): imports what the graph needs, for \d+ s; in dead_lock, "
    check_error(found, loading(partial(dead_lock, 0)), cluster)


def test_actors_that_end_while_they_import_count_as_lost(cluster: DataCluster) -> None:
    pool = RayPool(**ON_DATA_NODES, max_restarts=1)
    found = r"worker 0 of 1 was lost 2 times in a row .*on node [\d.]+ \(\w+\), pid \d+"
    with WdsLoader(loading(ends_at_once), 1, pool=pool) as loader, pytest.raises(RuntimeError, match=found):
        list(loader)
    del loader
    assert not left_in(cluster, after_error=True)


def test_error_has_the_stack_when_an_actor_is_stuck(cluster: DataCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task on its node, where the program does not run, asks for it by a signal."""
    monkeypatch.setattr(actor_stacks, "_TASK", 120)
    found = r"(?s)within timeout=5.*worker 0 \(pid \d+ on node [0-9.]+\): in dead_lock, line \d+.* lock.acquire\(\)"
    check_error(found, IterableWrapper(range(9)).sharding_filter().map(dead_lock), cluster)


def check_error(found: str, pipe: Any, cluster: DataCluster) -> None:
    """A loader whose actor is stuck raises an error that matches, and leaves nothing in the cluster."""
    with (
        WdsLoader(pipe, 1, timeout=5, pool=RayPool(**ON_DATA_NODES)) as loader,
        pytest.raises(RuntimeError, match=found),
    ):
        list(loader)
    del loader
    assert not left_in(cluster, after_error=True)


def dead_lock(number: int) -> int:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return number


def slow_number(number: int) -> int:
    time.sleep(0.02)
    return number


def test_reading_service_counts_replaced_actors(
    cluster: DataCluster, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """On the service that was made, and in one warning for each loss."""
    service = RayReadingService(2, seed=SEED, **ON_DATA_NODES)
    loader = DataLoader2(shuffled(urls), reading_service=service)
    items = iter(loader)
    found = digests(islice(items, 20))
    with caplog.at_level(logging.WARNING):
        kill_actors(cluster)
        found += digests(items)
    assert found == undisturbed(shuffled, urls, 2, 1)[0]
    assert service.restarts == 2
    assert 1 <= len([text for text in caplog.messages if "lost the actor" in text]) <= 2
    loader.shutdown()
    assert not left_in(cluster)
