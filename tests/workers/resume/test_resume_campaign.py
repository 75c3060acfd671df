"""Resuming under WorkersReadingService, at many places of many graphs: in new processes, over ranks, when spawned."""

import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kits.ranks import ranks_of
from tests.kits.resume_kit import (
    Cut,
    Graph,
    augment,
    batched,
    filtered,
    in_epochs,
    in_odd_epochs,
    joined,
    left_of,
    loader_of,
    resampled,
    resumed,
    row,
    run,
    samples,
    shards_in,
    split,
    states_at,
)
from tests.kits.workers_kit import run_script
from torchdata_wds import index_shard

pytestmark = pytest.mark.slow

#: Epochs counted from 0, and the cuts of each beside random ones. "last" is before the last item, "end" before the end
#: is known.
EPOCHS = {0: (0, "random"), 1: ("last", "between"), 3: ("random", "end")}

GRAPHS = [batched, in_epochs, in_odd_epochs, resampled, filtered, split, joined]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = shards_in(tmp_path_factory.mktemp("campaign"))
    for url in found:
        index_shard(url)
    return found


RESUMER = """
import pickle, sys
from tests.kits.resume_kit import resumed
from tests.kits.workers_kit import time_limit

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        jobs = pickle.load(file)
    with time_limit(150):
        found = [resumed(state, workers, epochs, **options) for state, workers, epochs, options in jobs]
    with open(sys.argv[2], "wb") as file:
        pickle.dump(found, file)
"""


def resumed_elsewhere(folder: Path, jobs: list[tuple[Any, int, int, Any]]) -> list[list[list[Any]]]:
    """Goes on from states in one new process, where Python hashes strings in another way."""
    before, after = folder / "states", folder / "found"
    before.write_bytes(pickle.dumps(jobs))
    done = run_script(RESUMER, str(before), str(after), seconds=180)
    assert done.returncode == 0, done.stderr
    found: list[list[list[Any]]] = pickle.loads(after.read_bytes())
    return found


def placed(cut: Cut, length: int, draw: random.Random) -> Cut:
    places: dict[Any, Cut] = {0: 0, "between": "between", "last": length - 1, "end": length}
    return draw.randrange(1, length) if cut == "random" else places[cut]


def cut_at_random(graph: Graph, urls: list[str]) -> tuple[list[Any], list[list[list[Any]]]]:
    """States of a graph, each with its options, and what must come after each."""
    draw = random.Random(graph.__name__)
    first = GRAPHS.index(graph)
    jobs, expected = [], []
    for place, (epoch, kinds) in enumerate(EPOCHS.items()):
        workers = (first + 2 * place) % 5
        whole = run(graph(urls), workers, epoch + 3)
        cuts = [placed(kind, len(whole[epoch]), draw) for kind in kinds]
        with loader_of(graph(urls), workers) as loader:
            for number in range(epoch):
                assert list(loader) == whole[number]
            states, items = states_at(loader, cuts)
        assert items == whole[epoch]
        for cut, state in zip(cuts, states, strict=True):
            assert len(state["reading_service_state"]) < 10_000
            expected.append(left_of(whole, epoch, cut, more=2))
            jobs.append((state, workers, len(expected[-1]), {}))
    return jobs, expected


@pytest.fixture(scope="module")
def cuts(urls: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What comes after each cut of a graph, and what must come, by graph; all are resumed in one new process."""
    made = [cut_at_random(graph, urls) for graph in GRAPHS]
    found = iter(resumed_elsewhere(tmp_path_factory.mktemp("cuts"), [job for jobs, _ in made for job in jobs]))
    return {
        graph.__name__: ([next(found) for _ in jobs], expected)
        for graph, (jobs, expected) in zip(GRAPHS, made, strict=True)
    }


@pytest.mark.parametrize("graph", [graph.__name__ for graph in GRAPHS])
def test_resume_is_exact_when_cut_at_random(graph: str, cuts: dict[str, tuple[Any, Any]]) -> None:
    """Six cuts a graph in epochs 1, 2 and 4, 0 to 4 workers: the rest and two more epochs are as if never stopped."""
    found, expected = cuts[graph]
    assert found == expected


def random_epochs(urls: list[str], draw: random.Random) -> Any:
    """Epochs of a random n, mostly with batches before them or behind."""
    pipe = samples(urls)
    pipe = pipe.wds_shuffle(7, initial=3) if draw.random() < 0.6 else pipe
    pipe = pipe.wds_decode().map(augment).map(row)
    kind = draw.choice(["samples", "batches before", "batches behind", "shuffled behind"])
    pipe = pipe.batch(draw.choice([2, 3])) if kind == "batches before" else pipe
    pipe = pipe.wds_epoch(draw.choice([1, 2, 3, 5, 7, 11, 14, 23]))
    pipe = pipe.batch(2) if kind == "batches behind" else pipe
    return pipe.wds_shuffle(4) if kind == "shuffled behind" else pipe


@pytest.mark.parametrize("workers", range(5))
def test_resume_is_exact_when_the_workers_shares_differ(workers: int, urls: list[str]) -> None:
    """Random n, also fewer than workers: cut anywhere in the first four epochs, twice in a row."""
    for seed in range(workers, 15, 5):
        build = partial(random_epochs, urls)
        epoch = seed % 4
        whole = run(build(random.Random(seed)), workers, epoch + 3)
        draw = random.Random(f"cut {seed}")
        cuts = sorted({draw.randrange(len(whole[epoch]) + 1) for _ in range(2)})
        with loader_of(build(random.Random(seed)), workers) as loader:
            assert [list(loader) for _ in range(epoch)] == whole[:epoch]
            states, items = states_at(loader, [*cuts, "between"])
            assert (seed, items) == (seed, whole[epoch])
        for cut, state in zip([*cuts, "between"], states, strict=True):
            expected = left_of(whole, epoch, cut, more=2)
            assert (seed, cut, resumed(state, workers, len(expected))) == (seed, cut, expected)


#: Two ranks of two workers: the graph, the service's options, whether a DistributedReadingService is before it, a cut.
RANK_CASES: dict[str, tuple[str, Any, bool, int]] = {
    "distributed, wds_epoch, seed=": ("in_epochs", {"distributed": True, "seed": 5}, False, 4),
    "distributed, dl.seed": ("batched", {"distributed": True}, False, 3),
    "sequential": ("batched", {}, True, 2),
    "sequential, wds_epoch": ("in_epochs", {}, True, 5),
    "distributed, odd shares": ("in_odd_epochs", {"distributed": True, "seed": 5}, False, 3),
}

RANKS = """
import pickle, sys, warnings
from tests.kits.ranks import run_ranks
from tests.kits.resume_kit import GRAPHS
from tests.kits.workers_kit import time_limit
from torchdata_wds.workers.service import DataLoader2, WorkersReadingService
from torchdata.dataloader2 import DistributedReadingService, SequentialReadingService

folder = sys.argv[1]
with open(f"{folder}/cases", "rb") as file:
    urls, cases = pickle.load(file)
# torchdata says so of its own service, which has no state.
warnings.filterwarnings("ignore", ".*DistributedReadingService.* doesn't support `(checkpoint|restore)`")

def service(options, sequential):
    ours = WorkersReadingService(2, **options)
    return SequentialReadingService(DistributedReadingService(), ours) if sequential else ours

def begun_loader(graph, options, sequential):
    loader = DataLoader2(GRAPHS[graph](urls), reading_service=service(options, sequential))
    loader.seed(3)
    return loader

def epochs_of(loader):
    found = [list(loader) for _ in range(3)]
    loader.shutdown()
    return found

def answer(graph, options, sequential, cut):
    whole = epochs_of(begun_loader(graph, options, sequential))
    loader = begun_loader(graph, options, sequential)
    iterator = iter(loader)
    begun = [next(iterator) for _ in range(cut)]
    state = loader.state_dict()
    loader.shutdown()
    rest, *behind = epochs_of(DataLoader2.from_state(state, service(options, sequential)))
    return whole, [begun + rest, *behind], begun

def run(rank):
    with time_limit(100):
        found = {name: answer(*case) for name, case in cases.items()}
    return found

if __name__ == "__main__":
    run_ranks(run, folder)
"""


@pytest.fixture(scope="module")
def ranks(urls: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks gives when never stopped and when stopped in the first epoch, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases").write_bytes(pickle.dumps((urls, RANK_CASES)))
    found: list[dict[str, Any]] = ranks_of(RANKS, folder, seconds=120)
    return found


@pytest.mark.parametrize("case", RANK_CASES)
def test_resume_is_exact_when_two_ranks_are_cut(case: str, ranks: list[dict[str, Any]]) -> None:
    """Both ranks go on with their own parts; fullsync, which runs ahead of what was delivered, does not matter."""
    for rank in ranks:
        whole, found, begun = rank[case]
        assert found == whole
        assert 0 < len(begun) < len(whole[0])
    first, second = (rank[case][0] for rank in ranks)
    assert first != second
