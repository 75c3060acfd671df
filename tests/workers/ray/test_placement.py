"""An actor in place of a lost one runs on another node, before the cluster knows that the node is gone."""

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.ray_kit import DATA, data_cluster
from torchdata_wds import RayPool, WdsLoader
from torchdata_wds.workers.ray.placement import away_from

SPREAD = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


def test_options_avoid_the_lost_node_unless_no_other_has_room() -> None:
    """The options' own choice of nodes holds in both cases."""
    assert away_from(SPREAD, None) == SPREAD
    assert away_from(SPREAD, "a1") == {
        **SPREAD,
        "label_selector": {"ray.io/node-id": "!in(a1)"},
        "fallback_strategy": [{"label_selector": {}}],
    }
    found = away_from({"label_selector": {"disk": "ssd"}}, "a1")
    assert found["label_selector"] == {"disk": "ssd", "ray.io/node-id": "!in(a1)"}
    assert found["fallback_strategy"] == [{"label_selector": {"disk": "ssd"}}]


@pytest.mark.parametrize(
    "options",
    [
        {"scheduling_strategy": object()},  # of a placement group, or one node
        {"placement_group": object()},
        {"label_selector": {"ray.io/node-id": "b2"}},
        {"fallback_strategy": [{"label_selector": {"disk": "hdd"}}]},
    ],
)
def test_options_stay_as_they_are_when_they_name_the_place(options: dict[str, Any]) -> None:
    """What the program decides is not changed."""
    assert away_from(options, "a1") == options


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two data nodes in a cluster that notices a death as late as any other, not as soon as those of other tests."""
    pytest.importorskip("ray")
    late = {"health_check_period_ms": 3000, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 5}
    with data_cluster(system_config=late) as cluster:
        yield cluster


def with_node(number: int) -> tuple[int, str]:
    """A slow item, with the node on which it was made."""
    import ray

    time.sleep(0.005)
    return number, ray.get_runtime_context().get_node_id()


@pytest.mark.slow
def test_actors_of_a_killed_node_start_once_elsewhere_and_end_with_a_loader_that_is_dropped(cluster: Any) -> None:
    """Each actor is replaced once: none is placed on the node that is gone. The loader is never closed."""
    import ray

    pool = RayPool(actor_options={"resources": {DATA: 1}})
    loader = WdsLoader(IterableWrapper(range(600)).sharding_filter().map(with_node), 2, pool=pool)
    items = iter(loader)
    found = [next(items), next(items)]
    lost = found[0][1]
    cluster.kill_raylet(next(node for node in cluster.nodes if node.node_id == lost))
    found += items
    assert [number for number, _ in found] == [*range(600)]
    assert pool.restarts == sum(node == lost for _, node in found[:2])

    dropped = weakref.ref(loader)
    del items, loader
    gc.collect()
    assert dropped() is None
    end = time.monotonic() + 30
    while (free := ray.available_resources().get(DATA, 0)) != 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert free == 2
