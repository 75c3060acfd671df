"""A pool of actors: the items and states of local workers."""

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import RayPool, WdsLoader


@pytest.fixture
def _short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray's sockets have paths, of at most 107 bytes, in the temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def graph() -> IterDataPipe[tuple[int, np.ndarray]]:
    """Some items with large arrays, made by an inner function."""

    def with_array(number: int) -> tuple[int, np.ndarray]:
        return number, np.full(20_000, number)

    return IterableWrapper(range(30)).shuffle().sharding_filter().wds_map(with_array)


@pytest.mark.slow
@pytest.mark.usefixtures("_short_folder")
def test_items_and_states_are_those_of_local_workers() -> None:
    """On a cluster that is started and ended here; a state goes on with local workers."""
    with WdsLoader(graph(), 2, seed=1) as local, WdsLoader(graph(), 2, seed=1, pool=RayPool()) as loader:
        expected = [number for number, _ in local]
        items = iter(loader)
        found = [next(items) for _ in range(7)]
        assert all((array == number).all() for number, array in found)
        found[0][1][:] = -1  # arrays are writable
        local.load_state_dict(loader.state_dict())
        assert [number for number, _ in found] + [number for number, _ in local] == expected
        assert [number for number, _ in items] == expected[7:]


@pytest.mark.slow
@pytest.mark.usefixtures("_short_folder")
def test_loader_says_that_the_program_has_ended_its_connection() -> None:
    """Ray itself would end the process; and arrays that are held can still be used."""
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "num_cpus": 2}
    with WdsLoader(graph(), 2, seed=1, pool=RayPool()) as loader:
        ray.init("local", **options)
        items = iter(loader)
        number, array = next(items)
        ray.shutdown()
        with pytest.raises(RuntimeError, match=r"ended its connection to the Ray cluster.*make another loader"):
            list(items)
        assert loader.state_dict()["item"] == 1
        with pytest.raises(RuntimeError, match=r"ended its connection to the Ray cluster.*make another loader"):
            list(loader)
        assert (array == number).all()
