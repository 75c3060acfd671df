"""The suite of all pools, for worker processes that have nothing of the main process but what is sent to them.

Each spawned worker imports torch anew, which takes seconds. A server that has imported it forks others at once.
"""

import atexit
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite import LoaderSuite, PoolKind, ServiceSuite, WorkerSuite
from tests.kits.pool_suite.ends import EndSuite
from tests.kits.pool_suite.orders import OrderSuite
from torchdata_wds import WdsLoader

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


class Leaver:
    """Writes a file when its process ends normally."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, item: int) -> int:
        if item == 0:
            atexit.register(self.path.write_text, "left")
        return item


def test_spawned_worker_runs_what_is_registered_for_its_exit(tmp_path: Path) -> None:
    """It ends without taking torch apart, but not without the program's own functions."""
    loader = WdsLoader(IterableWrapper(range(3)).map(Leaver(tmp_path / "exit")), 1, multiprocessing_context="spawn")
    assert list(loader) == [0, 1, 2]
    loader.shutdown()
    assert (tmp_path / "exit").read_text() == "left"


SERVED = """
import multiprocessing, multiprocessing.forkserver as forkserver, sys
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import WdsLoader
if __name__ == "__main__":
    if sys.argv[1:]:
        multiprocessing.set_forkserver_preload(sys.argv[1:])
    with WdsLoader(IterableWrapper(range(2)).wds_map(int), 1, multiprocessing_context="forkserver") as loader:
        list(loader)
    print(*forkserver._forkserver._preload_modules)
"""


@pytest.mark.parametrize(
    ("chosen", "imported", "is_all"),
    [
        ((), ["__main__", "torchdata_wds.workers.processes.worker", "torchdata_wds.pipes.samples.map"], False),
        (("json",), ["json"], True),
    ],
)
def test_server_imports_torch_unless_told_otherwise(
    chosen: tuple[str, ...], imported: list[str], is_all: bool, tmp_path: Path
) -> None:
    """The server of a program imports what workers need once, their pipes too; a program's own choice counts."""
    (tmp_path / "main.py").write_text(SERVED)
    run = subprocess.run([sys.executable, tmp_path / "main.py", *chosen], capture_output=True, text=True, check=True)
    found = run.stdout.split()
    assert set(imported) <= set(found)
    assert not is_all or found == imported
