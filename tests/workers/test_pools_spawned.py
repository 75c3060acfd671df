"""The suite of all pools, for worker processes that have nothing of the main process but what is sent to them.

Each spawned worker imports torch anew, which takes seconds. A server that has imported it forks others at once.
"""

import multiprocessing

import pytest

from tests.kits.pool_suite import LoaderSuite, PoolKind, ServiceSuite, WorkerSuite
from tests.kits.pool_suite.ends import EndSuite
from tests.kits.pool_suite.orders import OrderSuite

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _imported_by_the_server() -> None:
    multiprocessing.set_forkserver_preload(["torchdata_wds", "tests.kits.pool_suite"])


class SpawnedProcesses:
    @pytest.fixture
    def pool(self, front: str) -> PoolKind:
        return PoolKind(front, 2, {"multiprocessing_context": "spawn"}, is_slow=True)


class ServedProcesses:
    test_exception_of_the_main_module_keeps_its_type = None  # they cannot import pytest's own main module

    @pytest.fixture
    def pool(self, front: str) -> PoolKind:
        return PoolKind(front, 2, {"multiprocessing_context": "forkserver"}, multiprocessing.active_children)


@pytest.mark.parametrize("front", ["loader"])
class TestSpawnedProcesses(SpawnedProcesses, OrderSuite, EndSuite):
    """Two spawned workers."""


@pytest.mark.parametrize("front", ["loader"])
class TestServedProcesses(ServedProcesses, WorkerSuite):
    """Two workers that a server forks."""


@pytest.mark.parametrize("front", ["service"])
class TestServedProcessesUnderService(ServedProcesses, ServiceSuite):
    """DataLoader2 with WorkersReadingService(2)."""


@pytest.mark.parametrize("front", ["loader"])
class TestServedProcessesUnderLoader(ServedProcesses, LoaderSuite):
    """WdsLoader with workers."""
