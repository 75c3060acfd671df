"""The suite of all pools, for the main process and for worker processes."""

import pytest

from tests.kits.pool_suite import FORKED, LoaderSuite, PoolKind, PoolSuite, ServiceSuite, WorkerSuite
from tests.kits.workers_kit import FRONTS_QUICK


class MainProcess:
    @pytest.fixture
    def pool(self, front: str) -> PoolKind:
        return PoolKind(front, 0)


class ForkedProcesses:
    @pytest.fixture
    def pool(self, front: str) -> PoolKind:
        return PoolKind(front, 2, FORKED)


@pytest.mark.parametrize("front", FRONTS_QUICK)
class TestMainProcess(MainProcess, PoolSuite):
    """The graph as one stream here."""


@pytest.mark.parametrize("front", ["service"])
class TestMainProcessUnderService(MainProcess, ServiceSuite):
    """DataLoader2 with WorkersReadingService(0)."""


@pytest.mark.parametrize("front", ["loader"])
class TestMainProcessUnderLoader(MainProcess, LoaderSuite):
    """WdsLoader without workers."""


@pytest.mark.parametrize("front", FRONTS_QUICK)
class TestForkedProcesses(ForkedProcesses, WorkerSuite):
    """Two forked workers."""


@pytest.mark.parametrize("front", ["service"])
@pytest.mark.slow
class TestForkedProcessesUnderService(ForkedProcesses, ServiceSuite):
    """DataLoader2 with WorkersReadingService(2)."""


@pytest.mark.parametrize("front", ["loader"])
class TestForkedProcessesUnderLoader(ForkedProcesses, LoaderSuite):
    """WdsLoader with workers."""
