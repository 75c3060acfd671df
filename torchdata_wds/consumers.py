"""Which of how many consumers this process is: workers and ranks, as sharding filters and launchers were told.

It also recognises the workers of torchdata's ``MultiProcessingReadingService`` without importing torchdata. That
service loses items, or breaks, when its workers' streams differ in length; a ``.join_workers()`` downstream repairs it.
"""

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

_WORKER_MAIN = ("torchdata.dataloader2.communication.eventloop", "DataPipeToQueuesLoop")
_joined = False


class Place(NamedTuple):
    """Which of how many consumers this process is."""

    consumers: int = 1
    number: int = 0


class Grid(NamedTuple):
    """Ranks that have the same number of workers each, and one of the workers."""

    ranks: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0


def in_stock_worker() -> bool:
    """Returns whether this process is a worker of torchdata's ``MultiProcessingReadingService``."""
    # get_worker_info() is None there, as in a rank started by torch.multiprocessing: the function that the process was
    # started to run tells them apart.
    target = getattr(multiprocessing.current_process(), "_target", None)
    return (getattr(target, "__module__", None), getattr(target, "__qualname__", None)) == _WORKER_MAIN


def stock_place() -> Place:
    """Returns which of how many workers of the stock service this process is; one of one elsewhere."""
    if in_stock_worker():
        for argument in getattr(multiprocessing.current_process(), "_args", ()):
            if isinstance(workers := getattr(argument, "num_workers", None), int):
                return Place(workers, argument.worker_id)
    return Place()


def note_join() -> None:
    """Notes that a ``.join_workers()`` takes the stream of this process, if it is a stock worker."""
    global _joined
    # Only there: a note made in a main process would be inherited by every worker that it forks.
    _joined = in_stock_worker()


def is_joined() -> bool:
    """Returns whether a ``.join_workers()`` takes the stream of this stock worker."""
    return _joined


#: torch's traversal changes how all pipes are pickled while it lasts, so that only one thread at a time may traverse.
_traversing = threading.RLock()


def _renew_lock() -> None:
    global _traversing
    _traversing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


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
    """Yields a pipe and all above it, nearest first; nothing where the graph cannot be traversed."""
    graphs = [graph_of(pipe) or {}]
    while graphs:
        for found, sources in graphs.pop(0).values():
            yield found
            graphs.append(sources)


def place_of(pipe: IterDataPipe[Any]) -> Place:
    """Returns a pipe's place, as the native ``sharding_filter`` above it was told; without one it is the only consumer.

    The worker's own number does not count: a pipe above the filter must behave alike in all workers. What stands for
    the workers in the main process has the rank that they work for in its attribute ``place``.
    """
    for found in upstream(pipe):
        if isinstance(found, ShardingFilterIterDataPipe):
            return Place(found.num_of_instances, found.instance_id)
        if isinstance(place := vars(found).get("place"), Place):
            return place
    return Place()


def process_place() -> Place:
    """Returns which of how many consumers this process is, over all ranks and workers, whatever graph it runs."""
    ranks, rank = rank_place()
    workers, number = (1, 0) if (worker := get_worker_info()) is None else (worker.num_workers, worker.id)
    return Place(ranks * workers, rank * workers + number)


def distributed_place() -> Place | None:
    """Returns which of how many ranks of ``torch.distributed`` this process is; None before that is initialized."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_world_size(), distributed.get_rank())
    return None


def rank_place() -> Place:
    """Returns which of how many ranks this process belongs to."""
    return distributed_place() or Place(*launched_place())


def place_among_ranks(place: Place) -> Place:
    """Returns the place among all consumers, for a graph that may have been divided among one rank's workers only."""
    ranks, rank = rank_place()
    if ranks == 1 or (place.consumers == process_place().consumers and not in_stock_worker()):
        return place
    return Place(ranks * place.consumers, rank * place.consumers + place.number)


def divided_place(pipe: IterDataPipe[Any]) -> Place | None:
    """Returns the place among all consumers that a pipe's work is divided among; None if no filter divides it."""
    is_divided = any(isinstance(found, ShardingFilterIterDataPipe) for found in upstream(pipe))
    return place_among_ranks(place_of(pipe)) if is_divided else None


def find_sharder(pipe: IterDataPipe[Any]) -> str | None:
    """Returns the class name of the nearest pipe, from this one up, that divides the work among consumers."""
    return next((type(found).__name__ for found in upstream(pipe) if hasattr(type(found), "apply_sharding")), None)


def grid_of(pipe: IterDataPipe[Any]) -> Grid:
    """Returns the grid that the native sharding filters above a pipe were told; without one, one worker of one rank."""
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
        known = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
        return Grid(*known, *groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0)))
    # torch's DataLoader has one number for both: worker * ranks + rank. A spawned worker does not know the ranks, so
    # they follow from the number of workers: 6 consumers in a worker that is one of 3 are 2 ranks.
    consumers, number = groups[SHARDING_PRIORITIES.DEFAULT]
    worker = get_worker_info()
    ranks = 1
    if worker is None and consumers % (distributed_place() or Place()).consumers == 0:
        ranks = (distributed_place() or Place()).consumers
    elif worker is not None and consumers % worker.num_workers == 0:
        ranks = consumers // worker.num_workers
    return Grid(ranks, number % ranks, consumers // ranks, number // ranks)
