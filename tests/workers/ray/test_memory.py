"""A worker that the cluster kills because its node runs low on memory."""

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.ray_kit import DATA, data_cluster
from torchdata_wds import RayPool, WdsLoader

pytestmark = pytest.mark.slow


def test_worker_killed_for_memory_is_replaced_and_then_an_error_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The limit of this cluster is one percent of the memory, so that each replacement is killed too."""
    pytest.importorskip("ray")
    limit = {"memory_monitor_refresh_ms": 100, "memory_usage_threshold": 0.01}
    with data_cluster(1, system_config=limit) as cluster:
        pool = RayPool(actor_options={"resources": {DATA: 1}}, max_restarts=1)
        with (
            WdsLoader(IterableWrapper(range(9)).sharding_filter(), 1, pool=pool) as loader,
            pytest.raises(RuntimeError, match=r"worker 0 of 1 was lost 2 times in a row .*running low on memory"),
        ):
            list(loader)
        assert pool.restarts == 1
        assert "running low on memory" in caplog.text
        assert not cluster.actors()
