"""The suite of all pools, for actors of a Ray cluster; most tests use the actors of others again."""

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kits.actor_stock import ActorStock
from tests.kits.pool_suite import EndSuite, LoaderSuite, PoolKind, ServiceSuite, WorkerSuite
from tests.kits.torchdata import RayReadingService
from torchdata_wds import RayPool
from torchdata_wds.workers.ray.item_groups import MOST_ITEMS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One cluster on this machine; the folder of its sockets has a short name, as their paths may have 107 bytes."""
    ray = pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "_temp_dir": folder}
        ray.init("local", num_cpus=8, object_store_memory=100 * 2**20, **options)
        try:
            yield
        finally:
            STOCK.actors.clear()
            ray.shutdown()


STOCK = ActorStock()


def actors_in_use() -> list[Any]:
    """The actors that live, or are about to, and belong to a loader."""
    from ray._private.state import actors as table

    kept = {actor._actor_id.hex() for actor in STOCK.actors}
    return [name for name, actor in table().items() if actor["State"] != "DEAD" and name not in kept]


class NewActors:
    @pytest.fixture
    def pool(self, front: str) -> PoolKind:
        options: Any = {"pool": RayPool()} if front == "loader" else {}
        known: Any = {"left": actors_in_use, "group": MOST_ITEMS, "spare": 2, "service": RayReadingService}
        return PoolKind(front, 2, options, is_slow=True, **known)


class Actors(NewActors):
    @pytest.fixture(autouse=True)
    def _actors_of_others(self) -> Iterator[None]:
        with STOCK.in_use():
            yield


@pytest.mark.parametrize("front", ["loader"])
class TestNewActors(NewActors, EndSuite):
    """Two actors of each loader's own."""


@pytest.mark.parametrize("front", ["loader"])
class TestActors(Actors, WorkerSuite):
    """Two actors."""


@pytest.mark.parametrize("front", ["service"])
class TestActorsUnderService(Actors, ServiceSuite):
    """DataLoader2 with RayReadingService(2)."""


@pytest.mark.parametrize("front", ["loader"])
class TestActorsUnderLoader(Actors, LoaderSuite):
    """WdsLoader with a RayPool."""
