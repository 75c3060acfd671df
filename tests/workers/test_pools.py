"""The suite of all pools, for the main process and for worker processes."""

import pytest

from tests.kits.pool_suite import FORKED, LoaderSuite, PoolKind, PoolSuite, ServiceSuite, WorkerSuite
from tests.kits.resume_kit import indexed_shards_in
from tests.kits.shards import text_samples, write_tar, write_text_shards
from tests.kits.workers_kit import FRONTS_QUICK, SIZES


@pytest.fixture(scope="module")
def text_urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The shards of the stored orders."""
    return write_text_shards(tmp_path_factory.mktemp("text"), SIZES)


@pytest.fixture(scope="module")
def indexed_urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Small shards, with an index beside each."""
    return indexed_shards_in(tmp_path_factory.mktemp("indexed"))


@pytest.fixture(scope="module")
def skipping_urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards of five samples with a hidden file each, and one that is not there."""
    folder = tmp_path_factory.mktemp("skipping")
    members = [[*text_samples(f"s{number}", 5), (".hidden", b"x")] for number in range(3)]
    urls = [write_tar(folder / f"{number}.tar", found) for number, found in enumerate(members)]
    return [*urls, str(folder / "gone.tar")]


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
class TestForkedProcessesUnderService(ForkedProcesses, ServiceSuite):
    """DataLoader2 with WorkersReadingService(2)."""


@pytest.mark.parametrize("front", ["loader"])
class TestForkedProcessesUnderLoader(ForkedProcesses, LoaderSuite):
    """WdsLoader with workers."""
