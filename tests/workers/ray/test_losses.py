"""Actors and nodes that are lost while a graph runs on a cluster: the same items, and nothing left."""

from collections.abc import Iterator

import pytest

from tests.kits.loss_graphs import GRAPHS, shards_in, undisturbed
from tests.kits.ray_campaign import WORKERS, Campaign, events
from tests.kits.ray_kit import DataCluster, data_cluster

pytestmark = pytest.mark.slow

#: How many losses there are for each graph. More come from ``python -m tests.kits.ray_campaign``.
LOSSES = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[DataCluster]:
    with data_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return shards_in(tmp_path_factory.mktemp("losses"))


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
