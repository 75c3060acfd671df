"""A job in an order, on real ranks and workers, that goes on with others."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits import order_kit
from tests.kits.framework_kit import RankServer
from tests.kits.order_kit import SEED, Grid, Shards, by_position, drawn, flat, key_of, sent
from tests.kits.workers_kit import FRONTS, loader_of, resumed_loader
from tests.workers.test_order import CUTS, RUNS, check_chain
from torchdata_wds import WdsLoader
from torchdata_wds.workers.resume.checkpoints import Checkpoint

SIZES = (9, 0, 14, 3, 21, 6, 30)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return order_kit.shards_in(tmp_path_factory.mktemp("ranks"), SIZES)


# --------------------------------------------------------------------------------------------------------- real workers
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("front", FRONTS)
def test_real_workers_follow_the_order(shards: Shards, front: str, context: str) -> None:
    """With random functions, in all epochs, and after a resume in workers of another number."""
    pipe = shards.pipe(run=4).map(drawn).batch(5)
    alone = loader_of(pipe, 0, front="loader", seed=SEED)
    epochs = [list(alone) for _ in range(3)]
    assert [key for key, *_ in flat(epochs[0])] == shards.order(run=4)
    loader = loader_of(pipe, 2, front=front, seed=SEED, multiprocessing_context=context)
    assert list(loader) == epochs[0]
    iterator = iter(loader)
    assert [next(iterator) for _ in range(5)] == epochs[1][:5]
    other = resumed_loader(loader.state_dict(), pipe, 1, front=front, seed=SEED, multiprocessing_context=context)
    assert list(other) == list(iterator) == epochs[1][5:]
    assert list(other) == epochs[2]
    loader.shutdown()
    other.shutdown()


@pytest.mark.slow
def test_real_workers_skip_whole_batches(shards: Shards) -> None:
    """And positions count them."""
    order = shards.order(run=4)
    pipe = shards.pipe(run=4).wds_map(with_even_number)
    kept = [key for key in order if int(key[-5:]) % 2 == 0]
    with WdsLoader(pipe.map(key_of), 2, seed=SEED) as loader, WdsLoader(pipe.map(key_of).batch(3), 2) as other:
        iterator = iter(loader)
        for key in kept[:7]:
            assert next(iterator) == key
            assert loader.position == order.index(key) + 1
        other.load_state_dict(sent(loader.state_dict()))
        assert list(iterator) == kept[7:] == flat(other)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(RUNS, st.lists(st.builds(Grid, st.integers(1, 2), st.integers(1, 2), st.integers(1, 9)), min_size=4), CUTS)
def test_chain_of_real_workers_gives_the_unbroken_run(
    shards: Shards, run: int, grids: list[Grid], cuts: list[float]
) -> None:
    """Of one or two on each of one or two ranks."""
    check_chain(shards, [0, 2, 4, 5], run, grids[:4], cuts)


def with_even_number(sample: dict[str, Any]) -> Any:
    return sample if int(sample["__key__"][-5:]) % 2 == 0 else None


# ----------------------------------------------------------------------------------------------------------- gloo ranks
#: Trains for some steps, or to the end of the epoch and one more, and saves the state in rank 0 alone.
SCRIPT = """
import base64, json, os, pickle, sys
from pathlib import Path
import torch.distributed as dist
from torch.utils.data.datapipes.iter import IterableWrapper
from tests.kits.order_kit import drawn
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from torchdata_wds import WdsLoader

FILE = Path("state.json")

def packed(state):
    return base64.b64encode(pickle.dumps(state)).decode()

def unpacked(text):
    return pickle.loads(base64.b64decode(text))

def work(front, workers, batch, steps, urls):
    pipe = IterableWrapper(urls).load_in_order(run=3, index_dir="index").map(drawn).batch(batch)
    if front == "loader":
        loader = WdsLoader(pipe, workers)
    else:
        loader = DataLoader2(pipe, reading_service=WorkersReadingService(workers, ranks="auto"))
    if FILE.exists():
        state = json.loads(FILE.read_text())
        loader.load_state_dict(state if front == "loader" else unpacked(state))
    trained = []
    for items in loader:
        trained.append(items)
        if len(trained) == steps:
            break
    state = loader.state_dict() if front == "loader" else packed(loader.state_dict())
    epochs = [trained] if steps else [trained, list(loader)]
    loader.shutdown()
    return state, epochs

if __name__ == "__main__":
    arguments = map(json.loads, sys.argv[1:])
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    state, epochs = work(*arguments)
    Path(f"trained-{rank}.json").write_text(json.dumps([epochs, state]))
    if "RANK" in os.environ:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        FILE.write_text(json.dumps(state))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer() as server:
        yield server


def trained_by(server: RankServer, folder: Path, front: str, grid: Grid, steps: int | None, urls: list[str]) -> Any:
    """The samples that a job of such ranks trains on in each epoch, by position, and the states of all ranks."""
    arguments = [json.dumps(value) for value in (front, grid.workers, grid.batch, steps, urls)]
    done = server.launch(SCRIPT, folder, *arguments, world=grid.ranks, seconds=90)
    assert [rank.returncode for rank in done] == [0] * grid.ranks, [rank.stderr for rank in done]
    ranks, states = zip(
        *(json.loads((folder / f"trained-{rank}.json").read_text()) for rank in range(grid.ranks)), strict=True
    )
    return [[tuple(row) for row in flat(by_position(epochs))] for epochs in zip(*ranks, strict=True)], states


GRIDS = [Grid(2, 2, 4), Grid(3, 1, 5), Grid(1, 4, 3)]


@pytest.mark.slow
def test_job_goes_on_with_other_ranks_and_workers(shards: Shards, tmp_path: Path, server: RankServer) -> None:
    """2 ranks x 2 workers stop in mid-epoch and go on as 3 x 1, then 1 x 4: together they are the unbroken run."""
    trained = []
    for grid, steps in zip(GRIDS, (3, 2, None), strict=True):
        (found, *later), states = trained_by(server, tmp_path, "loader", grid, steps, shards.urls)
        trained += found
        assert all(state == states[0] for state in states)
        assert len((tmp_path / "state.json").read_bytes()) < 300
        assert states[0]["position"] == (len(trained) if steps else 0)
    seed = states[0]["seed"]
    assert [key for key, *_ in trained] == shards.order(run=3, seed=seed)
    unbroken = WdsLoader(shards.pipe(run=3).map(drawn), 0, seed=seed)
    assert trained == list(unbroken)
    assert later == [list(unbroken)]


@pytest.mark.slow
def test_job_of_data_loader2_goes_on_with_other_ranks(shards: Shards, tmp_path: Path, server: RankServer) -> None:
    """Whose states hold the graph, so that the size of batches stays."""
    trained = []
    for grid, steps in zip(GRIDS, (3, 2, None), strict=True):
        (found, *later), states = trained_by(server, tmp_path, "service", grid._replace(batch=4), steps, shards.urls)
        trained += found
    checkpoint = Checkpoint.load(pickle.loads(base64.b64decode(states[0]))["reading_service_state"])
    assert checkpoint.order is not None
    unbroken = WdsLoader(shards.pipe(run=3).map(drawn), 0, seed=checkpoint.order.seed)
    assert [trained, *later] == [list(unbroken) for _ in range(2)]


OTHER_LISTS = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import ShardListError, WdsLoader

if __name__ == "__main__":
    urls, kind = json.loads(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if rank and kind == "reversed":
        urls.reverse()
    if rank and kind == "fewer":
        urls.pop()
    pipes = [IterableWrapper(urls).load_in_order(index_dir="index", shuffle=shuffle) for shuffle in (True, False)]
    loaders = [WdsLoader(pipe, seed=3) for pipe in pipes]
    failed = ""
    try:
        for loader in (*loaders, *loaders):
            list(loader)
    except ShardListError as error:
        failed = str(error)
    Path(f"failed-{rank}.txt").write_text(failed)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "reversed", "fewer"])
def test_ranks_with_other_lists_are_an_error(shards: Shards, tmp_path: Path, server: RankServer, kind: str) -> None:
    """In the rank that begins later, without waiting for one another; several loaders and epochs are told apart."""
    done = server.launch(OTHER_LISTS, tmp_path, json.dumps(shards.urls), kind, world=2, seconds=90)
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr for rank in done]
    failed = [(tmp_path / f"failed-{rank}.txt").read_text() for rank in range(2)]
    if kind == "same":
        assert failed == ["", ""]
    else:
        assert any("load_in_order lists other shards in rank" in text for text in failed)
