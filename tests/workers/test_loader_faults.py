"""WdsLoader in programs that misuse it or are interrupted: no item is lost, no file or process is left."""

import gc
import os
import signal
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children, in_child, is_alive, open_files, wait_until
from tests.kits.resume_kit import SMALL, shards_in
from tests.kits.shards import text_keys
from tests.kits.workers_kit import FRONTS, engine_of, loader_of, resumed_loader
from torchdata_wds import WdsLoader
from torchdata_wds.workers import engine as engines


@pytest.fixture
def keys(tmp_path: Path) -> IterDataPipe[Any]:
    shards = IterableWrapper(shards_in(tmp_path, SMALL)).shuffle().sharding_filter()
    return shards.load_wds_shards().group_by_key().map(itemgetter("__key__"))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_state_is_right_when_the_beginning_of_an_epoch_was_interrupted(
    workers: int, front: str, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that saves its state at Ctrl-C resumes with that epoch, and so does the loader itself."""
    with loader_of(keys, workers, front=front, seed=1) as loader:
        whole = [list(loader) for _ in range(3)]
    for epoch in range(2):
        with loader_of(keys, workers, front=front, seed=1) as loader:
            assert [list(loader) for _ in range(epoch)] == whole[:epoch]
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(engines, "seed_graph", interrupt)
                iter(loader)
            state = loader.state_dict()
            assert [list(loader), list(loader)] == whole[epoch : epoch + 2]
        with resumed_loader(state, keys, workers, front=front, seed=1) as again:
            assert list(again) == whole[epoch]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaded_state_stays_when_the_beginning_of_its_epoch_was_interrupted(
    workers: int, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was taken from that epoch yet."""
    with WdsLoader(keys, workers, seed=1) as loader:
        items = iter(loader)
        for _ in range(5):
            next(items)
        state = loader.state_dict()
        rest = list(items)
        loader.load_state_dict(state)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engines, "seed_graph", interrupt)
            iter(loader)
        assert loader.state_dict() == state
        assert list(loader) == rest


def test_state_is_refused_when_a_stream_was_interrupted_as_its_next_epoch_began(
    keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its workers know where wds_epoch continues; the next iteration gets that from them."""
    with WdsLoader(keys.wds_epoch(10), 2, seed=1) as loader, monkeypatch.context() as patch:
        assert len(list(loader)) == 10
        patch.setattr(engines, "seed_graph", interrupt)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        with pytest.raises(RuntimeError, match="Iterate over the loader again"):
            loader.state_dict()
        patch.undo()
        assert len(list(loader)) == 10
        assert loader.state_dict()["epoch"] == 2


def test_files_are_closed_when_an_epoch_is_left(keys: Any) -> None:
    """By another epoch, a loaded state, and shutdown, though an iterator of it is kept."""
    list(WdsLoader(keys))
    loader = WdsLoader(keys, seed=1)
    gc.collect()
    gc.disable()  # by reference counts alone
    try:
        before = open_files(collect=False)
        for leave in (loader.__iter__, lambda: loader.load_state_dict(loader.state_dict()), loader.shutdown):
            items = iter(loader)
            next(items)
            assert open_files(collect=False) == before + 1
            others = leave()
            assert open_files(collect=False) == before
            del others
    finally:
        gc.enable()


def kill_worker(loader: Any) -> None:
    killed = engine_of(loader).graph.runs[0]._links[1]._process.pid
    os.kill(killed, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(killed))


def test_loader_resumes_when_a_worker_died() -> None:
    """In the middle of an epoch or between two: the state is that of the last item, and other workers go on."""
    with WdsLoader(IterableWrapper(range(4000)).sharding_filter(), 2, seed=1) as loader:
        items, found = iter(loader), []
        found.append(next(items))
        for _ in range(2):
            kill_worker(loader)
            with pytest.raises(RuntimeError, match=r"worker 1 of 2 .* was killed by SIGKILL"):
                for item in items:
                    found.append(item)
            loader.load_state_dict(loader.state_dict())
            assert [*found, *loader] == [*range(4000)]
            items, found = loader, []


@pytest.mark.parametrize("workers", [0, 2])
def test_iterator_is_refused_in_a_forked_process(workers: int, keys: Any) -> None:
    """Without workers too: there it would move the position in files that both processes have open."""
    with WdsLoader(keys, workers, seed=1) as loader:
        items = iter(loader)
        begun = [next(items) for _ in range(2)]

        def iterate() -> None:
            with pytest.raises(RuntimeError, match="Make a separate loader in each process"):
                next(items)

        assert in_child(iterate) == 0
        assert sorted([*begun, *items]) == sorted(text_keys(SMALL))


class Nested(IterDataPipe[Any]):
    """Yields the items of a loader."""

    def __init__(self, loader: WdsLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (2, 0), (0, 2)])
def test_loader_runs_inside_a_pipe(inner: int, outer: int, keys: Any) -> None:
    """Also of another loader; but workers of that one, being daemons, may not start workers of their own."""
    with WdsLoader(keys, inner, seed=1) as loader:
        assert sorted(Nested(loader)) == sorted(text_keys(SMALL))
    pipe = Nested(WdsLoader(keys, inner, seed=1)).sharding_filter()
    with WdsLoader(pipe, outer, seed=1) as loader:
        assert sorted(loader) == sorted(loader) == sorted(text_keys(SMALL))
    del pipe, loader
    gc.collect()
    assert not children()


class Hidden(IterDataPipe[Any]):
    """Runs in the main process, and holds its source where the pool cannot replace it."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.sources = {source}

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        for source in self.sources:
            yield from source


@pytest.mark.parametrize("front", FRONTS)
def test_loader_does_not_run_a_graph_that_could_not_be_divided(front: str) -> None:
    pipe = Hidden(IterableWrapper(range(4)).sharding_filter())
    with loader_of(pipe, 2, front=front, seed=1) as loader:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Hidden, the stage after it, holds it where it cannot be replaced"):
                list(loader)
            loader.state_dict()
