"""What the tests of a global order share: indexed shards, grids whose workers run in this process, and a model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_keys, write_text_shards
from torchdata_wds import WdsLoader, index_shard
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.pipes.order.permutation import Order as Positions
from torchdata_wds.workers import engine, graphs
from torchdata_wds.workers.processes.worker import Order, WorkerGraph
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.stream_pool import END, PoolOptions, StreamPool

#: Shards of which tests take some; their samples are told apart by their keys.
SIZES = (9, 0, 1, 14, 3, 0, 25, 6, 2, 17, 1, 40)

SEED = 5

#: What one rank gets: its batches of keys.
Batches = list[list[str]]


class Shards(NamedTuple):
    """Shards, the index of all, and the keys of their samples as numbered."""

    urls: list[str]
    index: DatasetIndex
    keys: list[str]

    def some(self, numbers: Iterable[int]) -> Shards:
        """Returns a few of the shards, in this order."""
        urls = [self.urls[number] for number in numbers]
        index = self.index.select(urls)
        bounds, starts = self.index.bounds.tolist(), dict(zip(self.urls, range(len(self.urls)), strict=True))
        keys = [key for url in urls for key in self.keys[bounds[starts[url]] : bounds[starts[url] + 1]]]
        return Shards(urls, index, keys)

    def pipe(self, **options: Any) -> Any:
        """Returns the samples in order."""
        return IterableWrapper(self.urls).load_in_order(index=self.index, **options)

    def order(self, *, run: int = 16, shuffle: bool = True, seed: int = SEED, epoch: int = 0) -> list[str]:
        """Returns the keys of an epoch by position."""
        numbers = Positions(len(self.keys), run=run, shuffle=shuffle, seed=seed, epoch=epoch)
        return [self.keys[number] for number in numbers.numbers(0, len(self.keys))]


def shards_in(folder: Path, sizes: Sequence[int] = SIZES) -> Shards:
    urls = write_text_shards(folder, sizes)
    index = DatasetIndex.of([(url, index_shard(url, to=False)) for url in urls])
    return Shards(urls, index, text_keys(sizes))


# ---------------------------------------------------------------------------------------------- what graphs are made of
def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def marked_key(sample: dict[str, Any]) -> tuple[str, bool]:
    return sample["__key__"], sample.get("__pad__", False)


def drawn(sample: dict[str, Any]) -> tuple[Any, ...]:
    """A key, and a draw from each of the global generators."""
    return sample["__key__"], random.random(), float(np.random.rand()), float(torch.rand(()))


def sent(state: Any) -> Any:
    """A state as it comes out of a file of JSON."""
    return json.loads(json.dumps(state))


# ------------------------------------------------------------------------------------------- workers in this process
class LocalPool(StreamPool):
    """Takes the place of a `WorkerPool`, and runs the workers' streams in this process."""

    def __init__(self, graph: WorkerGraph, options: PoolOptions, context: str | None = None) -> None:
        super().__init__(options, SimpleNamespace(turn=0), states=list)
        self._graph = graph
        self._graphs = [self.new_worker() for _ in range(options.num_workers)]
        self._made: list[Generator[Any, None, None]] = []

    def new_worker(self) -> WorkerGraph:
        """A worker that has not begun."""
        return WorkerGraph(graphs.copied(self._graph.datapipe), self._graph.functions)

    def _order_streams(self, points: list[Any], streams: Streams) -> None:
        self.close()
        self._made = [self.stream(number, point, streams) for number, point in enumerate(points)]

    def stream(self, number: int, point: Any, streams: Streams) -> Generator[Any, None, None]:
        """What a worker makes from a point on."""
        order = Order(self._board.turn, self._order_seeds, point, streams.epoch)
        return self._graphs[number].items(order, number, len(self._graphs))

    def _take(self, number: int, turn: int) -> Any:
        return next(self._made[number], END)

    def wait_for_facts(self) -> None:
        for graph, facts in zip(self._graphs, self.streams.facts, strict=True):
            facts.add(graph.facts())

    def close(self) -> None:
        for stream in self._made:
            stream.close()


@contextmanager
def local_workers(pool: type[LocalPool] = LocalPool) -> Iterator[None]:
    """Runs the workers of loaders in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "WorkerPool", pool)
        yield


class Grid(NamedTuple):
    """How an epoch is divided."""

    ranks: int = 1
    workers: int = 0
    batch: int = 1


#: Makes a graph whose items hold this many samples each.
Graph = Callable[[int], IterDataPipe[Any]]


class Job:
    """The loaders of all ranks, in one process; `begun` is the state that all of them load."""

    def __init__(self, graph: Graph, grid: Grid, begun: Any = None, *, seed: int | None = SEED, **options: Any) -> None:
        self.loaders = [
            WdsLoader(graph(grid.batch), grid.workers, seed=seed, ranks=(rank, grid.ranks), **options)
            for rank in range(grid.ranks)
        ]
        if begun is not None:
            for loader in self.loaders:
                loader.load_state_dict(sent(begun))

    def epoch(self) -> list[list[Any]]:
        """Returns the items of each rank, up to the end of the epoch."""
        return [list(loader) for loader in self.loaders]

    def steps(self, count: int) -> list[list[Any]]:
        """Returns the first items of each rank, all in step: as many as all ranks have, and at most `count`."""
        iterators = [iter(loader) for loader in self.loaders]
        found: list[list[Any]] = [[] for _ in iterators]
        for _ in range(count):
            step = [list(islice(iterator, 1)) for iterator in iterators]
            for items, more in zip(found, step, strict=True):
                items += more
            if not all(step):
                break
        return found

    def state(self) -> Any:
        """Returns the state, which must be the same in all ranks."""
        first, *others = [loader.state_dict() for loader in self.loaders]
        assert all(state == first for state in others)
        return first

    def shutdown(self) -> None:
        for loader in self.loaders:
            loader.shutdown()


def by_position(ranks: Sequence[Iterable[Any]]) -> list[Any]:
    """Puts the items of all ranks in the order of the job: one of each rank at a time."""
    return [item for step in zip_longest(*ranks, fillvalue=None) for item in step if item is not None]


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for batch in batches for item in batch]


def share_of(keys: Sequence[str], base: int, grid: Grid, rank: int, lost: Iterable[str] = ()) -> Batches:
    """Returns the batches of a rank from a position on, without samples that are lost: the model for even=None."""
    starts = range(base + rank * grid.batch, len(keys), grid.ranks * grid.batch)
    batches = [[key for key in keys[start : start + grid.batch] if key not in lost] for start in starts]
    return [batch for batch in batches if batch]


def steps_left(total: int, base: int, grid: Grid) -> int:
    """Returns how many items all ranks have from a position on: the model for even=None."""
    full, rest = divmod(total - base, grid.ranks * grid.batch)
    return full + (rest > (grid.ranks - 1) * grid.batch)
