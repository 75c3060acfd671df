"""Streams that go on from epoch to epoch, where an epoch is left before all of them have begun."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.resume_kit import SMALL, shards_in
from tests.kits.shards import text_keys
from tests.kits.workers_kit import FRONTS, loader_of, resumed_loader
from torchdata_wds import WdsLoader
from torchdata_wds.workers.processes import link


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    shards = IterableWrapper(shards_in(tmp_path, SMALL)).shuffle().sharding_filter()
    return shards.load_wds_shards().group_by_key().map(itemgetter("__key__")).wds_epoch(6)


@contextmanager
def late_worker(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets worker 1 start only once the block has ended."""
    run = link.run_worker

    def run_late(stacks: Any, graph: Any, worker: int, *arguments: Any) -> None:
        while worker and not file.exists():
            time.sleep(0.001)
        run(stacks, graph, worker, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(link, "run_worker", run_late)
        yield
    file.touch()


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_passes_and_states_are_whole_when_a_worker_was_late(
    front: str, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It divides the shards as the others do, from its first order on, though it never took that up."""
    options: dict[str, Any] = {"seed": 1, "multiprocessing_context": "fork"}
    with loader_of(pipe, front=front, **options) as loader:
        with late_worker(tmp_path / "go", monkeypatch):
            next(iter(loader))
            items = iter(loader)
            found = [next(items)]
        found.append(next(items))
        state = loader.state_dict()
        rest = list(items)
        found += [*rest, *loader]
        assert len(set(found)) == len(found) == 12  # of 24 in a pass
    with resumed_loader(state, pipe, front=front, **options) as again:
        assert list(again) == rest


@pytest.mark.slow
def test_pass_goes_on_when_a_worker_was_late_in_a_resumed_epoch(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had yielded before the state does not come again."""
    with WdsLoader(pipe, 2, seed=1) as loader:
        items = iter(loader)
        found = [next(items) for _ in range(5)]
        state = loader.state_dict()
    with WdsLoader(pipe, 2, seed=1, multiprocessing_context="fork") as loader:
        loader.load_state_dict(state)
        with late_worker(tmp_path / "go", monkeypatch):
            items = iter(loader)
            loader.set_epoch(3)
            items = iter(loader)
            found.append(next(items))
        found += [*items, *loader]
        assert len(set(found)) == len(found) == 17
        state = loader.state_dict()
        following = list(loader)
        assert set(found) | set(following) <= set(text_keys(SMALL))
    with WdsLoader(pipe, 2, seed=1) as again:
        again.load_state_dict(state)
        assert list(again) == following


def test_state_is_exact_when_the_main_process_left_an_epoch_before_its_first_item(pipe: Any) -> None:
    """set_epoch begins another epoch; the stream began with the first one."""
    with WdsLoader(pipe, seed=1) as loader:
        iter(loader)
        loader.set_epoch(4)
        items = iter(loader)
        found = [next(items), next(items)]
        state = loader.state_dict()
        rest = list(items)
        found += [*rest, *loader]
        assert len(set(found)) == len(found) == 12
    with WdsLoader(pipe, seed=1) as again:
        again.load_state_dict(state)
        assert list(again) == rest
