"""Where a pipe stands among the consumers of its graph, and the seeds that follow from it.

What a pipe can learn about torchdata's own worker processes, without importing torchdata.

``MultiProcessingReadingService`` loses items, or breaks, when its workers' streams differ in length. A
``.join_workers()`` downstream repairs that; these functions let the shard loader see whether there is one.

Which worker of which rank runs a graph, as its sharding filters were told.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, ShardingFilterIterDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from torchdata_wds.environment import launched_place

__all__ = [
    "in_stock_worker",
    "is_joined",
    "note_join",
    "stock_place",
    "Place",
    "find_sharder",
    "graph_of",
    "place_among_ranks",
    "place_of",
    "process_place",
    "rank_place",
    "upstream",
    "Grid",
    "grid_of",
    "ranks_of_filter",
]


_WORKER_MAIN = ("torchdata.dataloader2.communication.eventloop", "DataPipeToQueuesLoop")

_joined = False


def in_stock_worker() -> bool:
    """Tells whether this process is a worker of torchdata's ``MultiProcessingReadingService``.

    ``torch.utils.data.get_worker_info()`` is None there, as it is in a rank started by ``torch.multiprocessing``; what
    tells them apart, however the process was started, is the function that it was started to run.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    return (getattr(target, "__module__", None), getattr(target, "__qualname__", None)) == _WORKER_MAIN


def stock_place() -> tuple[int, int]:
    """Returns the number of workers of the stock service that this process is one of, and its own; else (1, 0)."""
    if in_stock_worker():
        for argument in getattr(multiprocessing.current_process(), "_args", ()):
            if isinstance(workers := getattr(argument, "num_workers", None), int):
                return workers, argument.worker_id
    return 1, 0


def note_join() -> None:
    """Notes that a ``.join_workers()`` takes the stream of this process, if it is a stock worker."""
    global _joined
    # Only there: a note made in a main process would be inherited by every worker that it forks.
    _joined = in_stock_worker()


def is_joined() -> bool:
    """Tells whether a ``.join_workers()`` takes the stream of this stock worker."""
    return _joined


#: torch's traversal changes how all pipes are pickled while it lasts: one thread at a time may be at it.
_traversing = threading.RLock()


def _renew_lock() -> None:
    global _traversing
    _traversing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Place(NamedTuple):
    """Which of how many consumers this process is."""

    consumers: int = 1
    number: int = 0


def graph_of(pipe: IterDataPipe[Any]) -> DataPipeGraph | None:
    """Returns a pipe and all above it, or None where the graph cannot be traversed.

    Traversal pickles the collections that pipes hold; a graph that does not allow it cannot be sharded either.
    """
    with _traversing:
        try:
            return traverse_dps(pipe)
        except Exception:  # noqa: BLE001  (whatever pickling what pipes hold may raise)
            return None


def upstream(pipe: IterDataPipe[Any]) -> Iterator[Any]:
    """Gives the pipe and all above it, nearest first; nothing where the graph cannot be traversed."""
    graphs = [graph_of(pipe) or {}]
    while graphs:
        for found, sources in graphs.pop(0).values():
            yield found
            graphs.append(sources)


def place_of(pipe: IterDataPipe[Any]) -> Place:
    """Reads a pipe's place off the native ``sharding_filter`` above it; without one there is one consumer.

    A pipe above the filter must behave alike in all workers, which is why the worker's own number does not count here.
    What stands in the main process for workers knows the rank that they work for: its attribute ``place``.
    """
    for found in upstream(pipe):
        if isinstance(found, ShardingFilterIterDataPipe):
            return Place(found.num_of_instances, found.instance_id)
        if isinstance(place := vars(found).get("place"), Place):
            return place
    return Place()


def process_place() -> Place:
    """Tells which of how many consumers this process is, over all ranks and workers, whatever graph it runs."""
    ranks, rank = rank_place()
    worker = get_worker_info()
    if worker is None:
        return Place(ranks, rank)
    return Place(ranks * worker.num_workers, rank * worker.num_workers + worker.id)


def rank_place() -> Place:
    """Tells how many ranks there are, and to which of them this process belongs."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_world_size(), distributed.get_rank())
    return Place(*launched_place())


def place_among_ranks(place: Place) -> Place:
    """Completes the place that a graph was divided by: where that was among the workers of each rank, by the rank."""
    ranks, rank = rank_place()
    if ranks == 1 or (place.consumers == process_place().consumers and not in_stock_worker()):
        return place
    return Place(ranks * place.consumers, rank * place.consumers + place.number)


def find_sharder(pipe: IterDataPipe[Any]) -> str | None:
    """Names a pipe, from this one up, that divides the work among consumers."""
    return next((type(found).__name__ for found in upstream(pipe) if hasattr(type(found), "apply_sharding")), None)


class Grid(NamedTuple):
    """Ranks that have the same number of workers each, and one of the workers."""

    ranks: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0


def grid_of(pipe: IterDataPipe[Any]) -> Grid:
    """Reads the grid off the native sharding filters above a pipe; without one there is one worker of one rank.

    What stands in the main process for workers knows the rank that they work for: its attribute ``place``.
    """
    groups: dict[Any, tuple[int, int]] = {}
    for found in upstream(pipe):
        if isinstance(found, ShardingFilterIterDataPipe):
            only = found.sharding_group_filter
            groups = {**{key: group for key, group in found.groups.items() if only in (None, key)}, **groups}
        elif not groups and isinstance(place := vars(found).get("place"), Place):
            return Grid(*place)
    return _grid_of_groups(groups)


def ranks_of_filter(sharding_filter: Any) -> list[range]:
    """Returns the numbers of the consumers of each rank, as the services number them."""
    consumers = sharding_filter.num_of_instances
    ranks, _, workers, _ = _grid_of_groups(sharding_filter.groups)
    if SHARDING_PRIORITIES.DEFAULT in sharding_filter.groups:
        return [range(rank, consumers, ranks) for rank in range(ranks)]
    return [range(rank * workers, (rank + 1) * workers) for rank in range(ranks)]


def _grid_of_groups(groups: dict[Any, tuple[int, int]]) -> Grid:
    if SHARDING_PRIORITIES.DEFAULT not in groups:
        ranks = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
        return Grid(*ranks, *groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0)))
    # torch's DataLoader has one number for both: worker * ranks + rank. A spawned worker does not know of the ranks,
    # so they are reckoned from the number of workers: of 6 consumers, in a worker that is one of 3, there are 2 ranks.
    consumers, number = groups[SHARDING_PRIORITIES.DEFAULT]
    worker, distributed = get_worker_info(), torch.distributed
    ranks_known = 1
    if worker is not None and consumers % worker.num_workers == 0:
        ranks_known = consumers // worker.num_workers
    elif worker is None and distributed.is_available() and distributed.is_initialized():
        ranks_known = distributed.get_world_size() if consumers % distributed.get_world_size() == 0 else 1
    return Grid(ranks_known, number % ranks_known, consumers // ranks_known, number // ranks_known)
