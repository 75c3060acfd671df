"""Epochs of real workers and ranks in every shape: many workers and few shards, none, one to four ranks."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_keys, write_text_shards
from tests.kits.workers_kit import loader_of, run_script, time_limit
from tests.pipes.streams.test_epoch import PassTeller, check_passes
from torchdata_wds import ShardListError, index_shard

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

#: How a graph divides the shards that match a pattern.
FORMS: dict[str, Callable[[IterDataPipe[Any]], IterDataPipe[Any]]] = {
    "sharding_filter": lambda shards: shards.sharding_filter(),
    "split_shards": lambda shards: shards.split_shards(),
    "split_shards by index": lambda shards: shards.split_shards(True),
    "resample_shards": lambda shards: shards.resample_shards(2),
}

#: Workers, and the sizes of the shards.
SETTINGS = [(5, (11, 13, 12)), (4, (20,)), (2, ())]

#: Items of an epoch of wds_epoch, for any of these numbers of workers.
N = 80


def graph_of(pattern: str, form: str, *, is_counted: bool) -> IterDataPipe[Any]:
    """A whole graph, with ``wds_epoch`` at its end or without."""
    shards = FORMS[form](IterableWrapper([pattern]).list_shards().shuffle())
    pipe = shards.load_wds_shards().group_by_key().wds_shuffle(5, initial=2).map(itemgetter("__key__"))
    return pipe.wds_epoch(N) if is_counted else pipe


@contextmanager
def running(pipe: IterDataPipe[Any], kind: str, workers: int) -> Iterator[Any]:
    """A loader of some kind, whose workers are ended behind the block."""
    if kind != "dataloader":
        with loader_of(pipe, workers, front=kind, timeout=60) as loader:
            yield loader
        return
    options: Any = {"persistent_workers": True, "timeout": 60} if workers else {}
    torch_loader = DataLoader(pipe, batch_size=None, num_workers=workers, collate_fn=as_it_is, **options)
    try:
        yield torch_loader
    finally:
        if torch_loader._iterator is not None:
            torch_loader._iterator._shutdown_workers()


def as_it_is(item: Any) -> Any:
    return item


def three_epochs(pipe: IterDataPipe[Any], kind: str, workers: int) -> list[list[Any]]:
    """Three epochs, none of which may hang."""
    torch.manual_seed(0)
    with time_limit(90), running(pipe, kind, workers) as loader:
        return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("is_counted", [False, True], ids=["", "wds_epoch"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("workers", "sizes"), SETTINGS, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("kind", ["loader", "dataloader"])
def test_epochs_are_right_or_say_why_not(
    kind: str, workers: int, sizes: tuple[int, ...], form: str, is_counted: bool, tmp_path: Path
) -> None:
    """More workers than shards, one shard, no shard: no hang, no loss; what cannot be is an error that says so."""
    for url in write_text_shards(tmp_path, sizes):
        index_shard(url)
    pipe = graph_of(f"{tmp_path}/*.tar", form, is_counted=is_counted)
    if not sizes:
        with pytest.raises(ShardListError, match=r"\*\.tar"):
            three_epochs(pipe, kind, workers)
        return
    if form == "sharding_filter" and is_counted:
        with pytest.raises(ValueError, match=rf"no item in \d+ passes.*consumer \d of {workers} .*split_shards"):
            three_epochs(pipe, kind, workers)
        return
    for epoch in three_epochs(pipe, kind, workers):
        found = Counter(epoch)
        assert set(found) <= set(text_keys(sizes))
        if is_counted:
            assert len(epoch) == N
        elif form == "resample_shards":
            # each worker reads two shards, whole
            shards = [
                len({found[key] for key in text_keys(sizes) if key.startswith(f"s{s}-")}) for s in range(len(sizes))
            ]
            assert shards == [1] * len(sizes)
            assert sum(found[f"s{shard}-00000"] for shard in range(len(sizes))) == 2 * workers
        else:
            assert found == Counter(text_keys(sizes))


@pytest.mark.parametrize("kind", ["loader", "dataloader"])
@pytest.mark.parametrize(("workers", "sizes"), SETTINGS[:2], ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("form", ["split_shards", "split_shards by index"])
def test_counted_epochs_are_passes_when_shards_are_split(
    kind: str, workers: int, sizes: tuple[int, ...], form: str, tmp_path: Path
) -> None:
    """However few shards there are for the workers, each pass has every sample once."""
    for url in write_text_shards(tmp_path, sizes):
        index_shard(url)
    shards = FORMS[form](IterableWrapper([f"{tmp_path}/*.tar"]).list_shards().shuffle())
    pipe = PassTeller(shards.load_wds_shards().group_by_key().map(itemgetter("__key__"))).wds_shuffle(5).wds_epoch(N)
    check_passes(chain.from_iterable(three_epochs(pipe, kind, workers)), text_keys(sizes), 5)


#: What runs the graph, in how many ranks, with how many workers each.
RANK_CASES = [
    ("service", 1, 3),
    ("service", 2, 1),
    ("loader", 3, 2),
    ("loader", 4, 0),
    ("loader", 4, 3),
    ("dataloader", 2, 2),
    ("dataloader", 3, 0),
]

RANKS = """
import os, sys
import torch
from tests.kits.ranks import run_ranks
from tests.workers.test_epochs_everywhere import RANK_CASES, split_graph, rank_epochs

folder, urls = sys.argv[1], sys.argv[2:]

def found_by(rank, kind, workers):
    torch.manual_seed(rank)
    return {even: rank_epochs(split_graph(urls, even or None), kind, workers) for even in ("drop", "pad", "")}

if __name__ == "__main__":
    for number, (kind, world, workers) in enumerate(RANK_CASES):
        os.mkdir(f"{folder}/{number}")
        run_ranks(lambda rank: found_by(rank, kind, workers), f"{folder}/{number}", world)
"""


def split_graph(urls: list[str], even: Any) -> IterDataPipe[Any]:
    shards = IterableWrapper(urls).shuffle().split_shards(True, even=even)
    return shards.load_wds_shards().group_by_key().wds_shuffle(5, initial=2).map(with_worker)


def with_worker(sample: dict[str, Any]) -> tuple[str, bool, int]:
    worker = get_worker_info()
    return sample["__key__"], "__pad__" in sample, worker.id if worker else 0


def rank_epochs(pipe: IterDataPipe[Any], kind: str, workers: int) -> list[list[Any]]:
    """Two epochs of a rank."""
    if kind != "dataloader":
        with loader_of(pipe, workers, front=kind, ranks="auto", timeout=60) as loader:
            return [list(loader) for _ in range(2)]
    loader = DataLoader(pipe, batch_size=None, num_workers=workers, collate_fn=as_it_is)
    return [list(iter(loader)) for _ in range(2)]


RANK_SIZES = (9, 0, 4, 17, 1, 8)


@pytest.fixture(scope="module")
def rank_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each rank of each case has found; one process runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    urls = write_text_shards(folder / "shards", RANK_SIZES)
    for url in urls:
        index_shard(url)
    done = run_script(RANKS, str(folder), *urls, seconds=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", range(len(RANK_CASES)), ids=map(str, RANK_CASES))
def test_ranks_have_what_split_shards_promises(case: int, rank_cases: Path) -> None:
    """Each sample once without even=; equal shares, some left out, or some marked as repeats, with it."""
    _, ranks, workers = RANK_CASES[case]
    sizes = RANK_SIZES
    consumers = ranks * max(workers, 1)
    found = [pickle.loads((rank_cases / f"{case}/{rank}.pickle").read_bytes()) for rank in range(ranks)]
    for even in ("drop", "pad", ""):
        for epoch in range(2):
            shares = [one[even][epoch] for one in found]
            own = Counter(key for share in shares for key, is_padding, _ in share if not is_padding)
            padding = [key for share in shares for key, is_padding, _ in share if is_padding]
            by_consumer = Counter((rank, worker) for rank, share in enumerate(shares) for *_, worker in share)
            lengths = set(by_consumer.values())
            assert len(by_consumer) == consumers
            if even == "drop":
                assert set(own.values()) == {1}
                assert len(own) == sum(sizes) - sum(sizes) % consumers
                assert set(own) <= set(text_keys(sizes))
            else:
                assert own == Counter(text_keys(sizes))
            assert len(padding) == (-sum(sizes) % consumers if even == "pad" else 0)
            assert set(padding) <= set(own)
            assert max(lengths) - min(lengths) <= (0 if even else 1)
