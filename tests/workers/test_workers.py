"""Real shards under every way to run a graph: each key exactly once per epoch, in a new order each time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children, open_files, wait_until
from tests.kits.ranks import ranks_of
from tests.kits.servers import serve_folder
from tests.kits.shards import sample_members, text_keys, write_tar, write_text_shards
from tests.kits.torchdata import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    WorkersReadingService,
)
from tests.kits.workers_kit import run_script, time_limit
from torchdata_wds import ShardFormatError, WdsLoader, wds_collate

SIZES = (9, 6, 3, 0, 5, 7, 1)
KEYS = text_keys(SIZES)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Seven shards of uneven length, one of them empty."""
    return write_text_shards(tmp_path_factory.mktemp("shards"), SIZES)


def key_of(sample: dict[str, Any]) -> str:
    """The key alone, cheap to send."""
    return str(sample["__key__"])


def graph(urls: list[str]) -> IterDataPipe[Any]:
    """Shards shuffled before the split, samples after it."""
    loaded = IterableWrapper(urls).list_shards().shuffle().sharding_filter().load_wds_shards()
    return loaded.group_by_key().wds_shuffle(5).wds_decode().wds_map(key_of)


def plain(pipe: IterDataPipe[Any], context: str | None) -> Iterator[list[str]]:
    """Iteration without any loader."""
    for _ in range(3):
        yield list(pipe)


def torch_loader(pipe: IterDataPipe[Any], context: str | None) -> Iterator[list[str]]:
    """Two workers of torch's DataLoader, new ones in each epoch if they are forked."""
    options: Any = {"multiprocessing_context": context, "persistent_workers": context != "fork"}
    loader = DataLoader(pipe, num_workers=2, batch_size=None, shuffle=True, **options)
    for _ in range(3):
        yield list(loader)


def served(service: Callable[[str | None], Any], seeded: bool = False) -> Callable[..., Iterator[list[str]]]:
    """DataLoader2 under a reading service."""

    def epochs(pipe: IterDataPipe[Any], context: str | None) -> Iterator[list[str]]:
        with DataLoader2(pipe, reading_service=service(context)) as loader:
            for number in range(3):
                if seeded:
                    loader.seed(number)
                yield list(loader)

    return epochs


def workers(count: int, **options: Any) -> Callable[..., Iterator[list[str]]]:
    """DataLoader2 under WorkersReadingService."""
    return served(lambda context: WorkersReadingService(count, multiprocessing_context=context, **options))


def own(count: int) -> Callable[..., Iterator[list[str]]]:
    """WdsLoader."""

    def epochs(pipe: IterDataPipe[Any], context: str | None) -> Iterator[list[str]]:
        with WdsLoader(pipe, count, multiprocessing_context=context) as loader:
            for _ in range(3):
                yield list(loader)

    return epochs


def stock(context: str | None) -> Any:
    """Torchdata's own service, as `join_workers` wants it."""
    return MultiProcessingReadingService(2, multiprocessing_context=context, main_prefetch_cnt=0)


RUNNERS: dict[str, tuple[Callable[..., Iterator[list[str]]], str | None]] = {
    "plain iteration": (plain, None),
    "in-process": (served(lambda context: InProcessReadingService(), seeded=True), None),
    "stock service": (served(stock, seeded=True), "fork"),
    "stock service, spawn": (served(stock, seeded=True), "spawn"),
    "torch DataLoader": (torch_loader, "fork"),
    "torch DataLoader, spawn": (torch_loader, "spawn"),
    "0 workers": (workers(0), None),
    "1 worker": (workers(1), "fork"),
    "2 workers": (workers(2), "fork"),
    "2 workers, seeded": (workers(2, seed=3), "fork"),
    "3 workers": (workers(3), "fork"),
    "9 workers": (workers(9), "fork"),
    "WdsLoader, 0 workers": (own(0), None),
    "WdsLoader, 3 workers": (own(3), "fork"),
    "WdsLoader, 9 workers": (own(9), "fork"),
    "WdsLoader, 2 workers, spawn": (own(2), "spawn"),
    "WdsLoader, 2 workers, forkserver": (own(2), "forkserver"),
    "1 worker, spawn": (workers(1), "spawn"),
}
SLOW = {
    "9 workers",
    "WdsLoader, 9 workers",
    "WdsLoader, 2 workers, forkserver",
    *(name for name in RUNNERS if "spawn" in name),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNNERS])
def test_epochs_give_each_key_once_in_a_new_order(name: str, shards: list[str]) -> None:
    """Seven uneven shards, shuffled before the split: three epochs, each key once in each, three orders."""
    run, context = RUNNERS[name]
    pipe = graph(shards).join_workers() if "stock" in name else graph(shards)
    with time_limit(180):
        epochs = list(run(pipe, context))
    for keys in epochs:
        assert sorted(keys) == sorted(KEYS)
    assert len({tuple(keys) for keys in epochs}) == 3


RANKS = """
import json, sys
from tests.kits.ranks import run_ranks
from tests.workers.test_workers import graph
from torchdata_wds import WorkersReadingService
from torchdata.dataloader2 import DataLoader2

folder, urls, context = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]

def run(rank):
    service = WorkersReadingService(2, distributed=True, multiprocessing_context=context)
    with DataLoader2(graph(urls), reading_service=service) as loader:
        found = [list(loader) for _ in range(3)]
    return found

if __name__ == "__main__":
    run_ranks(run, folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_epochs_give_each_key_once_when_two_ranks_have_two_workers(
    context: str, shards: list[str], tmp_path: Path
) -> None:
    """Over two gloo ranks of two workers each key comes once per epoch; nothing is cut off."""
    ranks = ranks_of(RANKS, tmp_path, json.dumps(shards), context)
    epochs = list(zip(*ranks, strict=True))
    for one, two in epochs:
        assert sorted(one + two) == sorted(KEYS)
    assert len({str(epoch) for epoch in epochs}) == 3


def batches(urls: list[str]) -> IterDataPipe[Any]:
    """Batched in the workers, shuffled and batched again in the main process."""
    loaded = IterableWrapper(urls).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()
    tuples = loaded.wds_decode().wds_to_tuple("__key__", "cls", "json")
    joined = tuples.batch(16).collate(wds_collate).join_workers()
    return joined.wds_unbatch().wds_shuffle(500).batch(20).collate(wds_collate)


@pytest.mark.parametrize(
    "make",
    [
        lambda pipe: DataLoader2(pipe, reading_service=stock("fork")),
        lambda pipe: DataLoader2(pipe, reading_service=WorkersReadingService(2)),
        lambda pipe: WdsLoader(pipe, 2),
    ],
    ids=["stock service", "our service", "WdsLoader"],
)
def test_rebatching_loses_nothing_when_workers_are_joined(make: Callable[[Any], Any], shards: list[str]) -> None:
    """Batches of 16 from the workers become shuffled batches of 20, with every sample once and whole."""
    with time_limit(60), make(batches(shards)) as loader:
        for epoch in range(2):
            if not isinstance(loader, WdsLoader):
                loader.seed(epoch)
            found = list(loader)
            assert [len(batch[0]) for batch in found] == [20, 11]
            keys = [key for batch in found for key in batch[0]]
            assert sorted(keys) == sorted(KEYS)
            assert keys != sorted(keys)
            for keys, labels, documents in found:
                assert labels.dtype == torch.int64
                numbers = [int(key[-5:]) for key in keys]
                assert labels.tolist() == [number % 10 for number in numbers]
                assert [document["number"] for document in documents] == numbers


def test_workers_shuffle_samples_apart_when_torch_seeds_them_alike(tmp_path: Path) -> None:
    """Torch's DataLoader gives all workers one seed; equal shards still come in different orders."""
    urls = [
        write_tar(tmp_path / f"{n}.tar", [m for i in range(20) for m in sample_members(f"{i:02}", txt=b"x")])
        for n in (0, 1)
    ]
    pipe = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key().wds_shuffle(20).wds_map(key_of)
    found = list(DataLoader(pipe, num_workers=2, batch_size=None))
    assert sorted(found[::2]) == sorted(found[1::2])
    assert found[::2] != found[1::2]


def test_worker_errors_name_the_shard_when_it_is_cut(shards: list[str], tmp_path: Path) -> None:
    """An exception from a worker has its type, its attributes and the worker's traceback."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(shards[0]).read_bytes()[:2000])
    loader = DataLoader2(graph([*shards, str(cut)]), reading_service=WorkersReadingService(2))
    with time_limit(60), loader, pytest.raises(ShardFormatError, match="cut off in the padding of member") as caught:
        list(loader)
    assert caught.value.shard == str(cut)
    assert "entries.py" in str(caught.value.__cause__)


STOCK = """
import sys
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import WorkersReadingService
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

pipe = IterableWrapper(sys.argv[2:]).sharding_filter().load_wds_shards().group_by_key()
if sys.argv[1] == "joined":
    pipe = pipe.join_workers()
with DataLoader2(pipe, reading_service=MultiProcessingReadingService(2, main_prefetch_cnt=0)) as loader:
    print(len(list(loader)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_loader_warns_when_a_stock_service_is_not_joined(joined: bool, tmp_path: Path) -> None:
    """In a worker of torchdata's own service the loader names .join_workers(), unless it is there."""
    urls = write_text_shards(tmp_path, [2, 2])
    done = run_script(STOCK, "joined" if joined else "alone", *urls)
    assert done.stdout == "4\n", done.stderr
    assert ("join_workers" in done.stderr) is not joined


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("path", 100),
        ("pipe", 30),
        ("http", 30),
        pytest.param("path", 1000, marks=pytest.mark.slow),
        pytest.param("pipe", 1000, marks=pytest.mark.slow),
        pytest.param("http", 1000, marks=pytest.mark.slow),
    ],
)
def test_early_breaks_leave_nothing_behind(source: str, times: int, tmp_path: Path) -> None:
    """A thousand epochs left after the first sample leave no file, socket or child process."""
    path = write_tar(tmp_path / "1.tar", [m for n in range(3) for m in sample_members(str(n), txt=bytes(400_000))])
    with serve_folder(tmp_path) as address:
        url = {"path": path, "pipe": f"pipe:cat '{path}'", "http": f"{address}/1.tar"}[source]
        pipe = IterableWrapper([url, url]).load_wds_shards().group_by_key()
        list(pipe)
        before, processes = open_files(), children(unreaped=True)
        for _ in range(times):
            for _ in pipe:
                break
        assert wait_until(lambda: open_files() <= before)
        assert children(unreaped=True) == processes
