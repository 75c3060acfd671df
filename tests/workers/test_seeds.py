"""Seeds: every order is a function of the seed, the epoch and the place, and the same on every machine."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.ranks import ranks_of
from tests.kits.shards import write_text_shards
from tests.kits.torchdata import StatefulDataLoader
from tests.kits.workers_kit import SIZES, loader_of, run_script, time_limit
from torchdata_wds import StatefulPipeline, WdsLoader

Urls = list[str]


#: No function of the tests: with one, the generators that it might draw from would be seeded and put aside.
key_of = itemgetter("__key__")


def shuffled(urls: Urls) -> IterDataPipe[Any]:
    """Native shuffle of the shards, ours of the samples."""
    return samples_of(IterableWrapper(urls).shuffle().sharding_filter()).wds_shuffle(7, initial=3).map(key_of)


def natively(urls: Urls) -> IterDataPipe[Any]:
    """Native shuffles of both."""
    return samples_of(IterableWrapper(urls).shuffle().sharding_filter()).map(key_of).shuffle(buffer_size=6)


def resampled(urls: Urls) -> IterDataPipe[Any]:
    """Shards drawn with and without replacement."""
    pipes = [
        samples_of(IterableWrapper(urls).shuffle().resample_shards(5, replacement=replacement))
        for replacement in (True, False)
    ]
    return pipes[0].concat(pipes[1]).map(key_of)


def mixed(urls: Urls) -> IterDataPipe[Any]:
    """Two sources by weights, the shorter one over and over."""
    pipes = [samples_of(IterableWrapper(part).shuffle().sharding_filter()) for part in (urls[:3], urls[4:])]
    return pipes[0].wds_mix(pipes[1], weights=(1, 2), stop="cycle").map(key_of)


def split(urls: Urls) -> IterDataPipe[Any]:
    """Shards divided by samples, some of which are left out."""
    counts = {Path(url).name: size for url, size in zip(urls, SIZES, strict=True)}
    return samples_of(IterableWrapper(urls).shuffle().split_shards(counts, even="drop")).map(key_of)


def counted(urls: Urls) -> IterDataPipe[Any]:
    """Epochs of a stream that goes on, whose passes are seeded by themselves."""
    return shuffled(urls).wds_epoch(44)


def drawing(urls: Urls) -> IterDataPipe[Any]:
    """Draws from Python's global generator."""
    return shuffled(urls).map(with_draw)


def augmented(urls: Urls) -> IterDataPipe[Any]:
    """Draws from Python's global generator, behind batches."""
    return shuffled(urls).batch(3).map(with_draw)


def samples_of(shards: IterDataPipe[Any]) -> IterDataPipe[Any]:
    return shards.load_wds_shards().group_by_key()


def with_draw(item: Any) -> tuple[list[str], str]:
    return list(item), f"{random.random():.9f}"


GRAPHS: dict[str, Callable[[Urls], IterDataPipe[Any]]] = {
    make.__name__: make for make in (shuffled, natively, resampled, mixed, split, counted, drawing, augmented)
}

#: Two epochs with seed 7, by who runs the graph with how many workers; in its own process a DataLoader seeds nothing
#: that `drawing` and `augmented` draw from. Whoever changes a digest changes every user's orders.
DIGESTS: dict[tuple[str, int], dict[str, str]] = {
    run: dict(zip(GRAPHS, row.split(), strict=False))
    for run, row in {
        ("service", 0): "3b5704d5bbf61eac b6d88161320ab7e1 c3405969f215b002 42ba1c2313dba496 "
        "5c971d3b535a76cf 4b2b8d736cd2cef4 da2070e50ba0fdad 1042c902b2c51267",
        ("service", 2): "6b1d36cdce914913 aecf639baebec821 e9d4fb60c1bd4b28 4686e9e030f27eeb "
        "5c1e1bea33792ff6 a53ce4d9f531c796 38c0d814e1120293 7ff9b05f1af1cfbf",
        ("dataloader", 0): "44f53b75d9ff54f4 ce834feb2ccc9d97 4e151183d684055f 29ce71ae72c402cb "
        "210f806afd1f2d51 59f1d47210a56bd8",
        ("dataloader", 2): "aef9e784266738a5 a3b618d4bd537e36 8a1d6f67ff1ee494 3e299f3c3bbcd62f "
        "31e503763ed8d96f 36671cd9eb51adf3 8aaa07d69650e392 95f8283ef80ce5d8",
    }.items()
}
# num_workers=0 and 1 are one consumer, to which the seeds give one order; so do all of this package's loaders.
DIGESTS["service", 1] = DIGESTS["service", 0]
DIGESTS |= {(kind, workers): DIGESTS["service", workers] for kind in ("loader", "stateful") for workers in (0, 2)}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Urls:
    """Seven shards of uneven size, one of them empty."""
    return write_text_shards(tmp_path_factory.mktemp("seeds"), SIZES)


def scramble() -> None:
    """Puts all global generators into states that nobody knows."""
    random.seed()
    np.random.seed()
    torch.seed()


def service_epochs(
    pipe: IterDataPipe[Any],
    workers: int,
    *,
    count: int = 2,
    dl_seed: int | None = None,
    seconds: int = 60,
    **options: Any,
) -> list[list[Any]]:
    with time_limit(seconds), loader_of(pipe, workers, timeout=seconds, **options) as loader:
        if dl_seed is not None:
            loader.seed(dl_seed)
        return [list(loader) for _ in range(count)]


@contextmanager
def torch_loader(kind: str, pipe: IterDataPipe[Any], workers: int, seed: int) -> Iterator[Any]:
    """Torch's DataLoader after torch.manual_seed, or StatefulDataLoader; their workers are ended behind the block."""
    options: Any = {"batch_size": None, "num_workers": workers, "collate_fn": as_it_is}
    options |= {"persistent_workers": True, "timeout": 60} if workers else {}
    if kind == "dataloader":
        torch.manual_seed(seed)
        loader: Any = DataLoader(pipe, **options)
    else:
        loader = StatefulDataLoader(StatefulPipeline(pipe, seed=seed), **options)
    with time_limit(60):
        try:
            yield loader
        finally:
            if workers and loader._iterator is not None:
                loader._iterator._shutdown_workers()


def as_it_is(item: Any) -> Any:
    return item


def epochs_of(kind: str, workers: int, pipe: IterDataPipe[Any], seed: int = 7) -> list[list[Any]]:
    """Two epochs, after the global generators were put into an unknown state."""
    scramble()
    if kind == "service":
        return service_epochs(pipe, workers, seed=seed, dl_seed=random.randrange(2**32))
    if kind == "loader":
        with time_limit(60), WdsLoader(pipe, workers, seed=seed, timeout=60) as loader:
            return [list(loader) for _ in range(2)]
    with torch_loader(kind, pipe, workers, seed) as loader:
        return [list(loader) for _ in range(2)]


def digest(epochs: Any) -> str:
    return hashlib.blake2b(repr(epochs).encode(), digest_size=8).hexdigest()


#: Graphs whose orders the suite of all pools checks, for both fronts.
IN_ALL_POOLS = ("counted", "mixed", "augmented")

#: Worker processes for some graphs only in the short run.
QUICK = [
    *((kind, 0, name) for kind in ("service", "loader", "dataloader", "stateful") for name in GRAPHS),
    *(("service", 2, name) for name in ("resampled", "split")),
]
SETTINGS = [
    (kind, workers, name)
    if (kind, workers, name) in QUICK
    else pytest.param(kind, workers, name, marks=pytest.mark.slow)
    for (kind, workers), digests in DIGESTS.items()
    for name in digests
    if name not in IN_ALL_POOLS or kind not in ("service", "loader") or workers == 1
]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch's, by StatefulDataLoader
@pytest.mark.parametrize(("kind", "workers", "name"), SETTINGS)
def test_orders_are_the_stored_ones_when_seeded(kind: str, workers: int, name: str, urls: Urls) -> None:
    """Whatever the global generators and DataLoader2's own seed are: these digests were written down."""
    assert digest(epochs_of(kind, workers, GRAPHS[name](urls))) == DIGESTS[kind, workers][name]


def test_stored_orders_differ_when_graphs_do() -> None:
    """No two settings share an order by which one could be mistaken for another."""
    settings = [("service", 0), ("service", 2), ("dataloader", 0), ("dataloader", 2)]
    digests = [value for setting in settings for value in DIGESTS[setting].values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("name", "workers"), [("shuffled", 0), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in GRAPHS)]
)
def test_service_orders_differ_when_epochs_or_seeds_do(name: str, workers: int, urls: Urls) -> None:
    """Three epochs of two seeds have six orders."""
    orders = []
    for seed in (0, 2**64 - 1):
        orders += service_epochs(GRAPHS[name](urls), workers, count=3, seed=seed)
    assert len({repr(order) for order in orders}) == 6


def test_service_orders_differ_when_workers_do() -> None:
    """Workers that have the same number of equal items shuffle them differently; the same worker does so again."""
    pipe = IterableWrapper(range(4)).sharding_filter().wds_compose(nine).wds_shuffle(9).map(with_worker)
    for order in service_epochs(pipe, 2, seed=5):
        found: dict[int, list[int]] = {0: [], 1: []}
        for worker, item in order:
            found[worker].append(item)
        assert sorted(found[0]) == sorted(found[1]) == list(range(9))
        assert found[0] != found[1]


def nine(stream: Iterator[Any]) -> range:
    assert len(list(stream)) == 2
    return range(9)


def with_worker(item: Any) -> tuple[int, Any]:
    info = get_worker_info()
    assert info is not None
    return info.id, item


@pytest.mark.parametrize("name", ["shuffled", pytest.param("augmented", marks=pytest.mark.slow)])
def test_service_orders_follow_from_the_number_of_the_epoch_when_others_were_left_early(name: str, urls: Urls) -> None:
    """How far the epochs before were read makes no difference to the third."""
    expected = service_epochs(GRAPHS[name](urls), 2, count=3, seed=5)
    with time_limit(60), loader_of(GRAPHS[name](urls), 2, seed=5, timeout=60) as loader:
        assert list(islice(iter(loader), 1)) == expected[0][:1]
        assert list(islice(iter(loader), 5)) == expected[1][:5]
        assert list(loader) == expected[2]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["shuffled", pytest.param("counted", marks=pytest.mark.slow), "split"])
def test_service_orders_follow_from_the_loader_when_it_alone_is_seeded(workers: int, name: str, urls: Urls) -> None:
    """dl.seed(s) once: the same epochs from any global state, others for another seed, and each epoch its own."""
    runs = []
    for seed in (3, 3, 4):
        scramble()
        runs.append(service_epochs(GRAPHS[name](urls), workers, dl_seed=seed))
    assert runs[0] == runs[1]
    assert len({repr(order) for run in (runs[0], runs[2]) for order in run}) == 4


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["shuffled", pytest.param("counted", marks=pytest.mark.slow)])
def test_service_orders_obey_torch_when_nothing_else_is_seeded(workers: int, name: str, urls: Urls) -> None:
    """torch.manual_seed decides, and each epoch has a new order."""
    runs = []
    for seed in (3, 3, 4):
        scramble()
        torch.manual_seed(seed)
        runs.append(service_epochs(GRAPHS[name](urls), workers))
    assert runs[0] == runs[1]
    assert len({repr(order) for run in (runs[0], runs[2]) for order in run}) == 4


ELSEWHERE = """
import json, sys
from tests.workers.test_seeds import DIGESTS, GRAPHS, digest, epochs_of
urls = sys.argv[1:]
print(json.dumps([digest(epochs_of("service", 0, GRAPHS[name](urls))) for name in GRAPHS]))
"""


@pytest.mark.slow
def test_service_orders_are_the_stored_ones_when_strings_hash_otherwise(
    urls: Urls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing follows the order of a set, or an address."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    done = run_script(ELSEWHERE, *urls)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(DIGESTS["service", 0].values())


RANKS = """
import sys
from tests.kits.ranks import run_ranks
from tests.workers.test_seeds import GRAPHS, digest, scramble, service_epochs

folder, urls = sys.argv[1], sys.argv[2:]

def run(rank):
    scramble()
    found = {name: digest(service_epochs(GRAPHS[name](urls), 1, seed=7, distributed=True)) for name in GRAPHS}
    return found

if __name__ == "__main__":
    run_ranks(run, folder)
"""

#: As DIGESTS, of one worker in each of two ranks.
RANK_DIGESTS: list[dict[str, str]] = [
    {
        "shuffled": "1e7c4b5469b7b305",
        "natively": "94666b4b1d106d82",
        "resampled": "91456bd88ad55257",
        "mixed": "5ef77332f3bc6361",
        "split": "4b72e08aa03a236f",
        "counted": "f0b30c822d024e0e",
        "drawing": "ad5dffa77fbae2da",
        "augmented": "cb0fced7f3e089a5",
    },
    {
        "shuffled": "7f1b1a0d9302aa34",
        "natively": "33c568fb6c33d720",
        "resampled": "31e1e575fc8221a2",
        "mixed": "dfa6a2b14299e93a",
        "split": "878886d576d53ea6",
        "counted": "d1a57a37b34f102d",
        "drawing": "d62535e299ac74da",
        "augmented": "701f67df60fb8d88",
    },
]


@pytest.mark.slow
def test_service_orders_are_the_stored_ones_when_there_are_ranks(urls: Urls, tmp_path: Path) -> None:
    """Two gloo ranks of a worker each, in whatever state their generators are."""
    assert ranks_of(RANKS, tmp_path, *urls) == RANK_DIGESTS


def test_program_keeps_its_generators_when_items_of_wds_epoch_draw_in_the_main_process() -> None:
    """The stage of the epoch seeds the generators for each of its items, and they are put back after it."""
    random.seed(1)
    before = random.getstate()
    assert len(list(StatefulPipeline(IterableWrapper("abcdefghi").map(with_draw).wds_epoch(4), seed=3))) == 4
    assert random.getstate() == before
