"""Whether the work of a graph is divided: the wrong uses are said once, and the right ones stay silent."""

from __future__ import annotations

import json
import pickle
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph_settings import apply_sharding

from tests.kits.shards import text_keys, write_text_shards
from tests.kits.torchdata import (
    DataLoader2,
    MapToIterConverter,
    MultiProcessingReadingService,
    StatefulDataLoader,
    WorkersReadingService,
    is_installed,
    needs_torchdata,
)
from tests.kits.workers_kit import logged_in, run_script
from torchdata_wds import DivisionError, StatefulPipeline, WdsLoader, WebDataset, handlers
from torchdata_wds.pipes import division, running

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Please use `InProcessReadingService`"),
]

SIZES = (3, 2, 4, 1)
KEYS = sorted(text_keys(SIZES))

Graph = Callable[[list[str]], Any]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "said", set())
    monkeypatch.setattr(division, "_checked", None)
    monkeypatch.setattr(running, "_noted", None)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_text_shards(tmp_path_factory.mktemp("division"), SIZES)


def in_forks(dataset: Any) -> DataLoader[Any]:
    """Torch's loader with two workers that log where `said` reads, whatever Python's default for workers."""
    return DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """What has been logged since the last call, by forked workers too."""
    file = tmp_path / "said"

    def take() -> list[str]:
        lines = file.read_text().splitlines()
        file.write_text("")
        handlers.said.clear()
        return lines

    with logged_in(file):
        yield take


def key_of(sample: Any) -> str:
    return sample["__key__"]


def samples(urls: list[str]) -> Any:
    return IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards().group_by_key().map(key_of)


def unfiltered(urls: list[str]) -> Any:
    return IterableWrapper(urls).load_wds_shards().group_by_key().map(key_of)


def late(urls: list[str]) -> Any:
    return unfiltered(urls).sharding_filter()


class Around(IterableDataset):
    """A dataset that holds another."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Pairs(IterDataPipe):
    """A stage of the user's with two sources."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second

    def __iter__(self) -> Iterator[Any]:
        yield from zip(self.first, self.second, strict=False)


class Draws(IterDataPipe):
    """A source that draws at random."""

    def set_seed(self, seed: int) -> Draws:
        self.seed = seed
        return self

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Chooses(IterDataPipe):
    """A source that heeds the worker's number."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield 0 if worker is None else worker.id


class World:
    """This process as a worker or a rank, with shards to read and what it has logged."""

    def __init__(self, urls: list[str], patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.urls, self._patch, self._caplog = urls, patch, caplog

    @property
    def messages(self) -> list[str]:
        return self._caplog.messages

    def forget(self) -> None:
        handlers.said.clear()
        self._caplog.clear()

    def as_worker(self, dataset: Any, workers: int = 2, number: int = 0) -> None:
        """Lets this process look like a worker of torch's DataLoader."""
        info = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=1, dataset=dataset)
        self._patch.setattr(torch_worker, "_worker_info", info)

    def as_rank(self) -> None:
        """Lets this process look like one of two ranks."""
        self._patch.setattr(torch.distributed, "is_initialized", lambda: True)
        self._patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        self._patch.setattr(torch.distributed, "get_rank", lambda: 0)

    def run(self, pipe: Any) -> list[Any]:
        """Runs a pipe as torch's DataLoader does in its first of two workers."""
        self.as_worker(pipe)
        apply_sharding(pipe, 2, 0)
        return list(pipe)

    def only_message(self) -> str:
        (message,) = self.messages
        return message


@pytest.fixture
def world(urls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> World:
    return World(urls, monkeypatch, caplog)


# ------------------------------------------------------------------------------------------------- right uses: silent
def fetch(dataset: Any) -> list[Any]:
    """Takes all items as a worker of torch's DataLoader does."""
    fetcher = _IterableDatasetFetcher(dataset, False, list, False)
    found: list[Any] = []
    while not fetcher.ended:
        with suppress(StopIteration):
            found.append(fetcher.fetch([None]))
            continue
        break
    return found


def first_of(pair: Any) -> Any:
    return pair[0]


def zero(_: Any) -> int:
    return 0


def as_they_are(items: Iterator[Any], _: Any) -> Iterator[Any]:
    yield from items


def read_inside(urls: Iterator[str]) -> Iterator[Any]:
    for url in urls:
        yield from unfiltered([url])


def read_inside_of(url: str) -> list[Any]:
    return list(unfiltered([url]))


def inner(urls: list[str]) -> Any:
    return IterableWrapper(urls).sharding_filter().wds_compose(read_inside)


def split(urls: list[str]) -> Any:
    return IterableWrapper(urls).split_shards().load_wds_shards().group_by_key().map(key_of)


def joined_by_key(urls: list[str]) -> Any:
    return samples(urls).zip_with_iter(unfiltered(urls), key_fn=str).map(first_of)


class Numbers(MapDataPipe):
    """Labels that are looked up by number."""

    def __getitem__(self, number: int) -> int:
        return number

    def __len__(self) -> int:
        return 5


def from_a_map(urls: list[str]) -> Any:
    return MapToIterConverter(SequenceWrapper(urls)).sharding_filter().load_wds_shards().group_by_key().map(key_of)


def forked(urls: list[str]) -> Any:
    one, other = samples(urls).fork(2, buffer_size=100)
    return one.zip(other).map(first_of)


RIGHT: list[Graph] = [
    *(samples, split, inner, from_a_map, joined_by_key, forked),
    lambda urls: IterableWrapper(urls).sharding_filter().threadpool_map(read_inside_of).unbatch(),
    lambda urls: IterableWrapper(urls).shuffle().sharding_filter().wds_map(read_inside_of).unbatch(),
    lambda urls: samples(urls).prefetch(3).map(str),
    lambda urls: samples(urls).zip_with_map(Numbers(), zero).map(first_of),
    lambda urls: samples(urls).zip(IterableWrapper(["x"]).cycle()).map(first_of),
    lambda urls: samples(urls).wds_compose(as_they_are, unfiltered(urls)),
    lambda urls: samples(urls[:2]).concat(samples(urls[2:])),
]


@pytest.mark.parametrize("graph", RIGHT)
def test_division_is_silent_when_the_graph_is_right(graph: Graph, world: World) -> None:
    """In a worker that torch told its place."""
    assert 0 < len(world.run(graph(world.urls))) < len(KEYS)
    assert not world.messages


def test_division_is_silent_when_a_source_draws_or_chooses(world: World) -> None:
    """A source with set_seed, or that asks for the worker's number, gives other items in each worker."""
    for other in (Draws(), Chooses(), IterableWrapper(Around([1, 2]))):
        assert world.run(samples(world.urls).wds_mix(other, stop="all"))
    assert not world.messages


@pytest.mark.parametrize("graph", [samples, unfiltered, late])
def test_division_is_silent_when_there_is_one_consumer(graph: Graph, world: World) -> None:
    """Without workers, and in the only one."""
    assert sorted(graph(world.urls)) == KEYS
    world.as_worker(None, workers=1)
    assert sorted(graph(world.urls)) == KEYS
    assert not world.messages


@pytest.mark.parametrize(
    "groups",
    [
        {SHARDING_PRIORITIES.DEFAULT: (4, 0)},
        {SHARDING_PRIORITIES.MULTIPROCESSING: (2, 0), SHARDING_PRIORITIES.DISTRIBUTED: (2, 0)},
        {SHARDING_PRIORITIES.MULTIPROCESSING: (2, 0), SHARDING_PRIORITIES.DISTRIBUTED: (1, 0)},
    ],
)
def test_division_is_silent_when_workers_and_ranks_are_told(groups: Any, world: World) -> None:
    """In one number, or each by itself; ranks told by hand may all read the same."""
    pipe = samples(world.urls)
    world.as_worker(pipe)
    world.as_rank()
    for group, (count, number) in groups.items():
        apply_sharding(pipe, count, number, group)
    assert len(list(pipe)) < len(KEYS)
    assert not world.messages


def run_by_torch(pipe: Any, workers: int = 2, **options: Any) -> list[Any]:
    return list(DataLoader(pipe, batch_size=None, num_workers=workers, **options))


def run_by_stateful(pipe: Any, workers: int = 2, **options: Any) -> list[Any]:
    loader = StatefulDataLoader(pipe, batch_size=None, num_workers=workers, **options)
    found = list(loader)
    if workers:
        loader._iterator._shutdown_workers()
    return found


def run_by_pipeline(pipe: Any, workers: int = 2) -> list[Any]:
    return run_by_stateful(StatefulPipeline(pipe), workers)


def run_by_service(pipe: Any, workers: int = 2, **options: Any) -> list[Any]:
    with DataLoader2(pipe, reading_service=WorkersReadingService(workers, **options)) as loader:
        return list(loader)


def run_by_loader(pipe: Any, workers: int = 2, **options: Any) -> list[Any]:
    with WdsLoader(pipe, workers, **options) as loader:
        return list(loader)


def run_by_stock(pipe: Any, workers: int = 2) -> list[Any]:
    service = MultiProcessingReadingService(workers, main_prefetch_cnt=0)
    with DataLoader2(pipe.join_workers(), reading_service=service) as loader:
        return list(loader)


RUNNERS = [run_by_torch, run_by_stateful, run_by_pipeline, run_by_service, run_by_loader, run_by_stock]


@pytest.mark.parametrize(
    ("run", "graph", "workers"),
    [
        (run_by_torch, samples, 2),
        (run_by_service, samples, 2),
        (run_by_loader, samples, 2),
        *(pytest.param(run, graph, 2, marks=pytest.mark.slow) for run in RUNNERS for graph in RIGHT),
        # fewer workers with every graph, and with every loader
        *(
            pytest.param(RUNNERS[(number + 3 * workers) % len(RUNNERS)], graph, workers, marks=pytest.mark.slow)
            for number, graph in enumerate(RIGHT)
            for workers in (0, 1)
        ),
    ],
)
def test_division_is_silent_when_a_loader_runs_the_graph(
    run: Any, graph: Graph, workers: int, urls: list[str], said: Callable[[], list[str]]
) -> None:
    """Each sample comes once, from real workers."""
    assert sorted(run(graph(urls), workers)) == KEYS or graph is joined_by_key
    assert said() == []


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNNERS)
def test_division_is_silent_when_shards_are_resampled(run: Any, urls: list[str], said: Callable[[], list[str]]) -> None:
    assert run(IterableWrapper(urls).resample_shards(2).load_wds_shards().group_by_key().map(key_of))
    assert said() == []


@pytest.mark.slow
def test_division_is_silent_when_a_branch_follows_the_border(urls: list[str], said: Callable[[], list[str]]) -> None:
    """What meets the workers' items in the main process comes once."""
    pairs = run_by_service(samples(urls).join_workers().zip(IterableWrapper(range(100))))
    assert [number for _, number in pairs] == list(range(len(KEYS)))
    assert said() == []


# ------------------------------------------------------------------------------------------------ inside other datasets
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("graph", [samples, split, inner, late])
def test_division_raises_when_the_filter_was_never_told(graph: Graph, number: int, world: World) -> None:
    """In each worker that the filter does not know, before the first item, in every epoch."""
    pipe = graph(world.urls)
    world.as_worker(Around(pipe), number=number)
    for _ in range(2):
        with pytest.raises(DivisionError) as caught:
            fetch(Around(pipe))
        for part in ("never told of the 2 workers", "each sample comes 2 times", "Pass the pipe itself to DataLoader"):
            assert part in str(caught.value)
    assert not world.messages


def test_division_warns_when_the_epoch_counts_in_each_worker(world: World) -> None:
    """Resampled shards need no division, but a count over all consumers does."""
    resampled = WebDataset(world.urls, resampled=True)
    world.as_worker(Around(resampled))
    next(iter(resampled))
    assert not world.messages
    assert len(list(WebDataset(world.urls, resampled=True).wds_epoch(4))) == 4
    assert [message for message in world.messages if "never told of the 2 workers" in message]


@pytest.mark.parametrize("graph", [unfiltered, late])
def test_division_warns_in_no_worker_but_the_first(graph: Graph, world: World) -> None:
    pipe = graph(world.urls)
    world.as_worker(pipe, workers=2, number=1)
    apply_sharding(pipe, 2, 1)
    assert list(pipe)
    assert not world.messages


@pytest.mark.parametrize(
    ("loader_of", "wrap"),
    [
        (DataLoader, Around),
        *(
            pytest.param(loader_of, wrap, marks=pytest.mark.slow)
            for loader_of in (DataLoader, StatefulDataLoader)
            for wrap in (Around, lambda pipe: Around(Around(pipe)), lambda pipe: ChainDataset([pipe]))
        ),
    ],
)
def test_division_raises_when_a_dataset_stands_around_the_pipe(loader_of: Any, wrap: Any, urls: list[str]) -> None:
    """Under real loaders, which raise a worker's error as an error of the same class."""
    iterator = iter(loader_of(wrap(samples(urls)), batch_size=None, num_workers=2))
    with pytest.raises(DivisionError, match="each sample comes 2 times"):
        next(iterator)
    iterator._shutdown_workers()  # torch waits for the workers of a forgotten iterator


class Hides(IterDataPipe):
    """A pipe in which torch finds no other, although it has one."""

    def __init__(self, inner: Any) -> None:
        self.holder = Around(inner)

    def __iter__(self) -> Iterator[Any]:
        yield from self.holder


def test_division_raises_when_the_graph_hides_the_filter(world: World) -> None:
    """In an object that torch does not look into."""
    pipe = Hides(samples(world.urls))
    world.as_worker(pipe)
    apply_sharding(pipe, 2, 0)
    with pytest.raises(DivisionError, match="never told of the 2 workers"):
        fetch(pipe)


def test_division_warns_once_when_what_hides_the_filter_may_divide(world: World) -> None:
    """A dataset of the user's as a source may divide by the worker's number."""
    for _ in range(2):
        assert sorted(world.run(IterableWrapper(Around(samples(world.urls)), deepcopy=False))) == KEYS
    assert "never told of the 2 workers" in world.only_message()


def take_every(items: Any) -> Iterator[Any]:
    worker = place_here()
    return islice(items, worker.id, None, worker.num_workers)


def place_here() -> Any:
    return get_worker_info()


class Slices(Around):
    """A dataset that keeps every second sample, by way of functions."""

    def __iter__(self) -> Iterator[Any]:
        yield from take_every(self.inner)


class Numbered(Around):
    """A dataset that keeps every second sample; a function of the loader sets which."""

    number = 0

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.inner, self.number, None, 2)


numbered = Numbered(None)


def tell_number(number: int) -> None:
    numbered.number = number


class Tables(Around):
    """A dataset that reads a table in each worker."""

    def __iter__(self) -> Iterator[Any]:
        table = []
        for key in self.inner:
            table.append(key)
        yield from sorted(table)[get_number() :: 2]


class Lists(Around):
    """The same, in one step."""

    def __iter__(self) -> Iterator[Any]:
        table = list(self.inner)
        yield from sorted(table)[get_number() :: 2]


class Looks(Dataset):
    """A dataset that looks samples up in a table, which each worker reads when it is first needed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, number: int) -> Any:
        return sorted(self.inner)[number]

    def __len__(self) -> int:
        return len(KEYS)


def get_number() -> int:
    return int(torch_worker._worker_info.id)


@pytest.mark.parametrize("wrap", [Slices, "numbered", Tables, Lists, Looks])
def test_division_only_warns_when_a_dataset_may_divide(
    wrap: Any, urls: list[str], said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would stop a correct training run."""
    pipe = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key().map(key_of)
    monkeypatch.setattr(numbered, "inner", pipe)
    dataset, function = (numbered, tell_number) if wrap == "numbered" else (wrap(pipe), None)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, worker_init_fn=function, multiprocessing_context="fork"
    )
    assert sorted(loader) == KEYS
    assert ["unless the program divides them itself" in message for message in said()] == [True]


def test_division_is_silent_when_the_dataset_around_divides(world: World) -> None:
    """By hand with apply_sharding, or by choosing the shards by the worker's number."""
    pipe = samples(world.urls)
    world.as_worker(Around(pipe))
    apply_sharding(pipe, 2, 0)
    first = list(Around(pipe))
    assert 0 < len(first) < len(KEYS)
    chosen = unfiltered(world.urls[get_worker_info().id :: 2])
    assert 0 < len(list(Around(chosen))) < len(KEYS)
    assert not world.messages


class Makes(IterableDataset):
    """A dataset that makes a graph in each worker, for shards of that worker's own."""

    def __init__(self, urls: list[str], make: Graph) -> None:
        self.urls = urls
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(self.make(self.urls[worker.id :: worker.num_workers]))


class Takes(Around):
    """A dataset of one graph whose shards ``worker_init_fn`` chooses."""


def choose(number: int) -> None:
    worker = get_worker_info()
    source = worker.dataset.inner
    while not isinstance(source, IterableWrapper):
        source = getattr(source, "source_datapipe", None) or source.datapipe
    source.iterable = source.iterable[number :: worker.num_workers]


@pytest.mark.parametrize("make", [samples, unfiltered])
def test_division_is_silent_when_each_worker_makes_its_graph(
    make: Graph, urls: list[str], said: Callable[[], list[str]]
) -> None:
    """Of shards that it has chosen by its number; ``__iter__`` has returned before the first is read."""
    assert sorted(DataLoader(Makes(urls, make), batch_size=None, num_workers=2)) == KEYS
    assert not said()


def test_division_is_silent_when_a_function_of_the_loader_divides(
    urls: list[str], said: Callable[[], list[str]]
) -> None:
    """In ``worker_init_fn``, as torch's documentation does."""
    loader = DataLoader(Takes(unfiltered(urls)), batch_size=None, num_workers=2, worker_init_fn=choose)
    assert sorted(loader) == KEYS
    assert not said()


def test_division_warns_when_code_asks_for_the_number_and_divides_nothing(
    urls: list[str], said: Callable[[], list[str]]
) -> None:
    """The graph was made before the workers were: each has the same."""
    assert Counter(in_forks(Seeds(samples(urls)))) == dict.fromkeys(KEYS, 2)
    assert ["never told of the 2 workers" in message for message in said()] == [True]


class Seeds(Around):
    """A dataset that asks for the worker's number, to seed a generator of its own."""

    def __iter__(self) -> Iterator[Any]:
        random.Random(get_worker_info().id)
        yield from self.inner


# --------------------------------------------------------------------------------------------------------------- ranks
def test_division_warns_once_when_ranks_iterate_over_the_pipe(world: World) -> None:
    """A plain loop in each of two ranks."""
    world.as_rank()
    pipe = samples(world.urls)
    for _ in range(2):
        assert sorted(pipe) == KEYS
    message = world.only_message()
    assert message.startswith("each of the 2 ranks of torch.distributed reads everything")


def test_division_is_silent_when_torch_tells_the_ranks(world: World) -> None:
    world.as_rank()
    pipe = samples(world.urls)
    apply_sharding(pipe, 2, 0)  # as torch's DataLoader does in the main process
    assert len(list(pipe)) < len(KEYS)
    assert not world.messages


def test_division_warns_once_when_a_service_leaves_the_ranks_undivided(world: World) -> None:
    """The service says so, and the pipes that it runs do not say it again."""
    world.as_rank()
    assert sorted(run_by_service(samples(world.urls), 0)) == KEYS
    assert "distributed=True" in world.only_message()


def test_division_warns_when_only_workers_are_told(world: World) -> None:
    """Two ranks of two workers each, of which the filter knows one number."""
    world.as_rank()
    for group in (SHARDING_PRIORITIES.DEFAULT, SHARDING_PRIORITIES.MULTIPROCESSING):
        handlers.said.clear()
        pipe = samples(world.urls)
        world.as_worker(pipe)
        apply_sharding(pipe, 2, 0, group)
        list(pipe)
    assert [message[:20] for message in world.messages] == ["each of the 2 ranks "] * 2


RANKS = """
import functools, json, os, sys, warnings
from torch.utils.data import DataLoader
from tests.kits.ranks import run_ranks
from tests.pipes import test_division
from tests.pipes.test_division import *

folder, ways, *urls = sys.argv[1:]
warnings.filterwarnings("ignore", "'set_vital' is deprecated")

def run(way, rank):
    pipe = samples(urls)
    match way:
        case "loop":
            return list(pipe)
        case "around":
            return run_by_torch(Around(pipe), 0)
        case "none":
            return run_by_torch(pipe, 0)
        case "torch":
            return run_by_torch(pipe)
        case "twice":
            return [key for _ in range(2) for key in run_by_torch(pipe, 0)]
        case "pipeline":
            return run_by_pipeline(pipe)
        case "service":
            return run_by_service(pipe, distributed=True)
        case "loader":
            return run_by_loader(pipe)
        case "replica":  # two ranks of one model; only one reads
            return run_by_loader(pipe, 0, ranks=(0, 1), seed=1) if rank == 0 else []
        case "by hand":  # two ranks of one model, which both read everything
            apply_sharding(pipe, 1, 0, SHARDING_PRIORITIES.DISTRIBUTED)
            return list(pipe)
        case "alone":
            iterator = iter(DataLoader(pipe, batch_size=None))
            return list(iterator) if rank == 0 else []

if __name__ == "__main__":
    for way in json.loads(ways):
        os.mkdir(f"{folder}/{way}")
        os.dup2(os.open(f"{folder}/{way}/stderr", os.O_WRONLY | os.O_CREAT), 2)
        run_ranks(functools.partial(run, way), f"{folder}/{way}")
"""
#: The ways above, and those that need torchdata.
WAYS = ("loop", "around", "none", "torch", "twice", "loader", "replica", "by hand", "alone")
WAYS_OF_TORCHDATA = ("pipeline", "service")


@pytest.fixture(scope="module")
def in_two_ranks(
    urls: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[list[Any], list[str]]]:
    """What two gloo ranks get in one of the ways above, and what they log; other ranks run for each way."""
    folder = tmp_path_factory.mktemp("ranks")
    ways = WAYS + WAYS_OF_TORCHDATA if is_installed() else WAYS
    done = run_script(RANKS, str(folder), json.dumps(ways), *urls, seconds=240)
    errors = [path.read_text() for path in folder.glob("*/stderr")]
    assert done.returncode == 0, [done.stderr, *errors]

    def of(way: str) -> tuple[list[Any], list[str]]:
        found = [pickle.loads((folder / way / f"{rank}.pickle").read_bytes()) for rank in range(2)]
        return found, [line for line in (folder / way / "stderr").read_text().splitlines() if "Gloo" not in line]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "around"])
def test_division_warns_once_in_each_rank_when_nobody_told_it(way: str, in_two_ranks: Any) -> None:
    """A plain loop, and a dataset around the pipe."""
    found, lines = in_two_ranks(way)
    assert sorted(chain(*found)) == sorted(2 * KEYS)
    assert ["reads everything" in line for line in lines] == [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "times"),
    [
        *(("none", 1), ("torch", 1), ("twice", 2), ("loader", 1), ("replica", 1), ("by hand", 2)),
        *(pytest.param(way, 1, marks=needs_torchdata) for way in WAYS_OF_TORCHDATA),
    ],
)
def test_division_is_silent_when_ranks_are_right(way: str, times: int, in_two_ranks: Any) -> None:
    """Under every loader that divides, and where ranks of one model read the same on purpose."""
    found, lines = in_two_ranks(way)
    assert sorted(chain(*found)) == sorted(times * KEYS)
    assert lines == []


@pytest.mark.slow
def test_division_warns_when_one_rank_reads_alone(in_two_ranks: Any) -> None:
    """At the end of its epoch: the others have made an iterator, and take nothing from it."""
    found, lines = in_two_ranks("alone")
    assert 0 < len(found[0]) < len(KEYS)
    assert ["rank 1 has not begun to read" in line for line in lines] == [True]


# ------------------------------------------------------------------------------------------------------------ branches
def loaders_inside(urls: Iterator[str]) -> Iterator[str]:
    for url in urls:
        yield from WdsLoader(samples([url]))


@pytest.mark.parametrize("run", [run_by_torch, run_by_loader])
def test_division_is_silent_when_loaders_run_inside_a_divided_graph(
    run: Any, urls: list[str], said: Callable[[], list[str]]
) -> None:
    pipe = IterableWrapper(urls).sharding_filter().wds_compose(loaders_inside)
    assert sorted(run(pipe)) == KEYS
    assert said() == []


def test_division_raises_when_loaders_run_inside_a_graph_that_all_workers_read(urls: list[str]) -> None:
    pipe = IterableWrapper(urls).wds_compose(loaders_inside)
    with pytest.raises(DivisionError, match="was never told of the 2 workers") as caught:
        run_by_torch(pipe)
    traceback.clear_frames(caught.tb)  # ends torch's workers now; garbage collection would wait 10 s for them


def mixed(urls: list[str]) -> Any:
    return samples(urls).wds_mix(IterableWrapper(["x", "y"]), stop="all")


@pytest.mark.parametrize(
    ("graph", "branch"),
    [
        (lambda urls: samples(urls).concat(MapToIterConverter(Numbers())), "(MapToIterConverter <- Numbers)"),
        (mixed, "SampleMixer are divided among workers or ranks: source 1, counted from 0, (IterableWrapper)"),
        (
            lambda urls: samples(urls).wds_mix(
                IterableWrapper(["x"]).wds_mix(IterableWrapper(["y"]), stop="all"), stop="all"
            ),
            "source 1, counted from 0, (SampleMixer <- IterableWrapper <- IterableWrapper)",
        ),
        (
            lambda urls: samples(urls).zip(IterableWrapper(range(20)).map(str)),
            "Zipper are divided among workers or ranks: source 1, counted from 0, (Mapper <- IterableWrapper)",
        ),
        (
            lambda urls: IterableWrapper(range(20)).zip_longest(samples(urls)),
            "ZipperLongest are divided among workers or ranks: source 0, counted from 0, (IterableWrapper)",
        ),
        (
            lambda urls: IterableWrapper(["header"]).concat(samples(urls)),
            "Concater are divided among workers or ranks: source 0",
        ),
        (
            lambda urls: samples(urls).mux(unfiltered(urls)),
            "source 1, counted from 0, (Mapper <- KeyGrouper <- ShardLoader <- IterableWrapper)",
        ),
        (lambda urls: samples(urls).mux_longest(unfiltered(urls[:1])), "MultiplexerLongest"),
        (lambda urls: Pairs(samples(urls), unfiltered(urls)), "Pairs"),
    ],
)
def test_division_names_the_branch_when_only_others_are_divided(graph: Graph, branch: str, world: World) -> None:
    """Once, and with where to put the filter."""
    pipe = graph(world.urls)
    for _ in range(2):
        assert world.run(pipe)
    message = world.only_message()
    assert branch in message
    assert ".sharding_filter()" in message
    assert ("wrong items" in message) == ("Zipper" in message)


@pytest.mark.parametrize(
    "run",
    [run_by_service, *(pytest.param(run, marks=pytest.mark.slow) for run in RUNNERS if run is not run_by_service)],
)
def test_division_warns_once_of_a_branch_when_a_loader_runs_it(
    run: Any, urls: list[str], said: Callable[[], list[str]]
) -> None:
    assert len(run(mixed(urls))) == len(KEYS) + 4
    assert ["source 1" in message for message in said()] == [True]


@pytest.mark.slow
def test_division_warns_once_of_a_branch_when_workers_are_spawned(urls: list[str], tmp_path: Path) -> None:
    """Spawned workers know nothing of what others have said."""
    from tests.kits.workers_kit import run_script

    assert run_script(SPAWNED, *urls, seconds=120).stderr.count("only some branches") == 1


SPAWNED = """
import sys
from tests.pipes.test_division import mixed, run_by_service
if __name__ == "__main__":
    print(len(run_by_service(mixed(sys.argv[1:]), multiprocessing_context="spawn")))
"""


def test_division_warns_in_the_main_process_when_the_service_runs_the_graph(world: World) -> None:
    """Where a notebook and a program's own logging see it; the workers keep silent."""
    run_by_service(mixed(world.urls))
    run_by_service(unfiltered(world.urls))
    run_by_service(late(world.urls))
    beginnings = [
        "only some branches",
        "shards are read in several workers or ranks with no",
        "shards are read in several",
    ]
    assert [
        message[: len(beginning)] for message, beginning in zip(world.messages, beginnings, strict=True)
    ] == beginnings


def test_division_warns_of_a_branch_when_no_shards_are_read(said: Callable[[], list[str]]) -> None:
    """WorkersReadingService looks at every graph that it runs."""
    pipe = IterableWrapper(range(4)).sharding_filter().concat(IterableWrapper(range(2)))
    assert len(run_by_service(pipe)) == 8
    assert len(said()) == 1


# ------------------------------------------------------------------------------------------- filters in a bad place
def test_division_says_where_the_filter_belongs_when_it_follows_the_reader(world: World) -> None:
    """Samples come once then; what comes several times is the reading."""

    def inside(found: list[str]) -> Any:
        return IterableWrapper(found).wds_compose(read_inside).sharding_filter()

    for graph in (late, inside):
        handlers.said.clear()
        world.forget()
        pipe = graph(world.urls)
        for _ in range(2):
            assert world.run(pipe) == sorted(KEYS)[::2]
        (message,) = world.messages
        assert "several times" not in message
        assert "each sample comes once, but every worker reads every shard" in message


@pytest.mark.parametrize("prefetched", [False, True])
def test_division_sees_the_filter_when_a_thread_runs_what_is_before_it(prefetched: bool, world: World) -> None:
    pipe = unfiltered(world.urls)
    pipe = (pipe.prefetch(5) if prefetched else pipe).sharding_filter()
    assert world.run(pipe)
    assert "each sample comes once" in world.only_message()


@pytest.mark.parametrize("graph", [unfiltered, lambda urls: IterableWrapper(urls).flatmap(read_inside_of)])
def test_division_warns_once_when_there_is_no_filter(graph: Graph, world: World) -> None:
    """Also where a function of a stage makes the reader."""
    pipe = graph(world.urls)
    for _ in range(2):
        assert sorted(world.run(pipe)) == KEYS
    assert "each sample comes several times" in world.only_message()


def split_by_worker(urls: Iterator[str]) -> Iterator[str]:
    worker = get_worker_info()
    yield from islice(urls, worker.id, None, worker.num_workers) if worker else urls


class Splits(IterDataPipe):
    """A stage of the user's that divides by the worker's number."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from islice(self.source, worker.id, None, worker.num_workers)


@pytest.mark.parametrize(
    "divide",
    [lambda pipe: pipe.wds_compose(split_by_worker), lambda pipe: pipe.wds_compose(partial(split_by_worker)), Splits],
)
def test_division_is_silent_when_a_stage_of_the_user_divides(divide: Any, world: World) -> None:
    """By the worker's number, as WebDataset's split_by_worker does."""
    pipe = divide(IterableWrapper(world.urls)).load_wds_shards().group_by_key()
    assert 0 < len(world.run(pipe)) < len(KEYS)
    assert not world.messages


def test_division_warns_when_only_the_process_that_forks_asks_for_the_number(
    urls: list[str], said: Callable[[], list[str]]
) -> None:
    """The stack of a forked worker begins with that of its parent, which divides nothing by asking."""
    assert get_worker_info() is None
    assert len(list(in_forks(unfiltered(urls)))) == 2 * len(KEYS)
    assert ["each sample comes several times" in message for message in said()] == [True]


PROGRAM = """
import sys
import torchdata_wds
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
pipe = IterableWrapper(sys.argv[1:]).load_wds_shards().group_by_key()
print(len(list(DataLoader(pipe, num_workers=2, batch_size=None))))
"""


@pytest.mark.slow
def test_division_warns_in_one_worker_when_a_program_has_not_configured_logging(urls: list[str]) -> None:
    """The warning comes out of torch's workers too, once, and each worker did read everything."""
    done = run_script(PROGRAM, *urls)
    assert done.stdout == f"{2 * len(KEYS)}\n"
    assert done.stderr.count("each sample comes several times") == 1


def test_division_warns_when_a_module_imports_the_name_of_the_number(world: World) -> None:
    """The code of a script that runs the graph has the name, and divides nothing by that."""
    world.as_worker(None)
    exec("from torch.utils.data import get_worker_info\nitems = list(pipe)", {"pipe": Around(unfiltered(world.urls))})
    assert "each sample comes several times" in world.only_message()


def test_division_looks_at_the_graph_of_the_worker_when_a_pipe_waits_for_the_loader(
    urls: list[str], said: Callable[[], list[str]]
) -> None:
    """A pipe that runs in the process which forks the workers is not part of their graph."""
    loader = in_forks(samples(urls))
    assert sorted(IterableWrapper(loader, deepcopy=False).map(str)) == KEYS
    assert not said()
    loader = in_forks(mixed(urls))
    assert len(list(IterableWrapper(loader, deepcopy=False).map(str))) == len(KEYS) + 4
    assert ["only some branches of SampleMixer" in message for message in said()] == [True]


@pytest.mark.parametrize(
    ("pipe", "warnings"),
    [
        (IterableWrapper(range(4)).map(str), 1),
        (IterableWrapper(range(4)).sharding_filter().map(str), 0),
        (IterableWrapper(["x"]).map(str), 0),
        (Chooses(), 0),
        (Draws(), 0),
        (Around([1, 2]), 0),
    ],
)
def test_division_warns_of_any_graph_without_a_filter_when_the_service_runs_it(
    pipe: Any, warnings: int, said: Callable[[], list[str]]
) -> None:
    """Where it is sure that all workers give the same items."""
    run_by_service(pipe if isinstance(pipe, IterDataPipe) else IterableWrapper(pipe))
    assert len(said()) == warnings


# ------------------------------------------------------------------------------------------------------ idle workers
@pytest.mark.parametrize(("shards", "workers", "idle"), [(1, 4, 3), (3, 4, 1), (4, 4, 0), (0, 2, 0)])
def test_division_warns_in_the_last_consumer_when_shards_are_too_few(
    shards: int, workers: int, idle: int, world: World
) -> None:
    """Once over all of them, with how many have nothing to do."""
    for number in range(workers):
        pipe = samples(world.urls[:shards])
        apply_sharding(pipe, workers, number)
        for _ in range(2):
            list(pipe)
    assert [f"{idle} of them have nothing to do" in message for message in world.messages] == [True] * bool(idle)


def test_division_says_nothing_of_idleness_when_a_stage_drops_the_shards(world: World) -> None:
    pipe = IterableWrapper(world.urls).sharding_filter().filter(is_none).load_wds_shards()
    apply_sharding(pipe, 2, 1)
    assert list(pipe) == []
    assert not world.messages


def is_none(item: Any) -> bool:
    return item is None
