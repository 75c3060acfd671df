"""The place of this process among all workers and ranks, according to sharding filters and launchers.

Also recognises workers of torchdata's ``MultiProcessingReadingService``, the "stock" service, without importing it. It
loses items, or breaks, if its workers' streams differ in length; a ``.join_workers()`` downstream repairs that.
"""

import io
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, ShardingFilterIterDataPipe
from torch.utils.data.graph import DataPipe, DataPipeGraph, traverse_dps
from torch.utils.data.graph_settings import apply_sharding

from torchdata_wds.process_place import Place, distributed_place, process_place, rank_place

_WORKER_MAIN = ("torchdata.dataloader2.communication.eventloop", "DataPipeToQueuesLoop")
_joined = False

#: What the option ``ranks=`` takes: ``"auto"``, ``(rank, size)``, a ProcessGroup or one dimension of a DeviceMesh.
Ranks = Any


class Grid(NamedTuple):
    """Ranks with the same number of workers each, and the place of one worker."""

    ranks: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0


def in_stock_worker() -> bool:
    """Returns whether this process is a worker of torchdata's ``MultiProcessingReadingService``."""
    # get_worker_info() is None there, but also in a rank that torch.multiprocessing started. The function that the
    # process runs distinguishes them.
    target = getattr(multiprocessing.current_process(), "_target", None)
    return (getattr(target, "__module__", None), getattr(target, "__qualname__", None)) == _WORKER_MAIN


def stock_place() -> Place:
    """Returns this process's place among the workers of the stock service; one of one elsewhere."""
    if in_stock_worker():
        for argument in getattr(multiprocessing.current_process(), "_args", ()):
            if isinstance(workers := getattr(argument, "num_workers", None), int):
                return Place(workers, argument.worker_id)
    return Place()


def note_join() -> None:
    """Notes that a ``.join_workers()`` reads the stream of this process, if it is a stock worker."""
    global _joined
    # Only in workers: forked workers would inherit a note made in the main process.
    _joined = in_stock_worker()


def is_joined() -> bool:
    """Returns whether a ``.join_workers()`` reads the stream of this stock worker."""
    return _joined


_MANY_ITEMS = 100

#: Only one thread at a time may traverse: meanwhile, torch changes how all pipes are pickled and copied.
_traversing = threading.RLock()


def _renew_lock() -> None:
    global _traversing
    _traversing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def graph_of(pipe: IterDataPipe[Any]) -> DataPipeGraph | None:
    """Returns the graph of a pipe and all its sources, or None if it cannot be traversed.

    Traversal pickles the collections stored on pipes; a graph that does not allow this cannot be sharded either.
    """
    try:
        return traverse(pipe)
    except Exception:  # noqa: BLE001 - pickling may raise anything
        return None


def traverse(pipe: DataPipe) -> DataPipeGraph:
    """Returns the graph of a pipe and all its sources, as `traverse_dps`, one thread at a time.

    Unlike that, it does not pickle long lists and tuples of str: 100,000 names of shards would take 60 ms each time.
    """
    with _traversing:
        try:
            if isinstance(pipe, (IterDataPipe, MapDataPipe)):
                return _traversed(pipe, frozenset())
        except Exception:  # noqa: BLE001 - torch's function tries dill too, and says what is wrong
            pass
        return traverse_dps(pipe)


def _traversed(pipe: DataPipe, path: frozenset[int]) -> DataPipeGraph:
    path |= {id(pipe)}
    sources: DataPipeGraph = {}
    for source in _sources_of(pipe, set(path)):
        sources.update(_traversed(source, path))
    return {id(pipe): (pipe, sources)}


def _sources_of(pipe: DataPipe, known: set[int]) -> list[DataPipe]:
    """Returns the pipes that a pipe holds, in attributes or collections, by pickling it with torch's hooks."""
    found: list[DataPipe] = []

    def reduce(other: DataPipe) -> Any:
        if other is pipe or id(other) in known:
            raise NotImplementedError  # it is pickled as usual
        known.add(id(other))
        found.append(other)
        return str, ()

    try:
        for kind in (IterDataPipe, MapDataPipe):
            kind.set_reduce_ex_hook(reduce)
            kind.set_getstate_hook(_collections_in)
        pickle.Pickler(io.BytesIO()).dump(pipe)
    finally:
        for kind in (IterDataPipe, MapDataPipe):
            kind.set_reduce_ex_hook(None)
            kind.set_getstate_hook(None)
    return found


def _collections_in(state: Any) -> Any:
    """Returns the part of a pipe's state that may hold pipes."""
    if isinstance(state, dict):
        return {name: value for name, value in state.items() if _may_hold_pipes(value)}
    if isinstance(state, (list, tuple)):
        return [value for value in state if _may_hold_pipes(value)]
    return state if _may_hold_pipes(state) else None


def _may_hold_pipes(value: Any) -> bool:
    if type(value) in (list, tuple) and len(value) > _MANY_ITEMS and set(map(type, value)) == {str}:
        return False
    return isinstance(value, (IterDataPipe, MapDataPipe, Collection))


def divide(pipe: DataPipe, place: Place, group: SHARDING_PRIORITIES) -> None:
    """Tells the sharding filters of a graph their place, as `apply_sharding`, one thread at a time."""
    with _traversing:
        apply_sharding(pipe, *place, group)


def no_traversal() -> threading.RLock:
    """Returns a context in which no other thread traverses, so that pipes can be pickled and copied."""
    return _traversing


def upstream(pipe: IterDataPipe[Any]) -> Iterator[Any]:
    """Yields a pipe and all its sources, nearest first; yields nothing if the graph cannot be traversed."""
    graphs = [graph_of(pipe) or {}]
    while graphs:
        for found, sources in graphs.pop(0).values():
            yield found
            graphs.append(sources)


def place_of(pipe: IterDataPipe[Any]) -> Place:
    """Returns a pipe's place according to torch's ``sharding_filter`` upstream; without one, it is the only consumer.

    The worker's own number does not count: pipes upstream of the filter must behave the same in all workers. In the
    main process, the pipe that represents the workers has their rank in its attribute ``place``.
    """
    for found in upstream(pipe):
        if isinstance(found, ShardingFilterIterDataPipe):
            return Place(found.num_of_instances, found.instance_id)
        if isinstance(place := vars(found).get("place"), Place):
            return place
    return Place()


def checked_ranks(ranks: Ranks) -> Place | None:
    """Returns the place that the option ``ranks=`` gives; None for ``"auto"``, which is looked up at the first epoch.

    Ranks of one model replica (tensor, pipeline or context parallelism) must read the same data, so they pass their
    place among the data-parallel ranks only.

    Raises:
        TypeError: if it is not ``"auto"``, ``(rank, size)``, a ProcessGroup or a DeviceMesh.
        ValueError: if the rank is not below the size, the process is not in the group or mesh, or a mesh has several
            dimensions.
    """
    if isinstance(ranks, str) and ranks == "auto":
        return None
    if isinstance(ranks, (tuple, list)) and len(ranks) == 2 and all(type(number) is int for number in ranks):
        rank, size = ranks
        if not 0 <= rank < size:
            raise ValueError(f"ranks={ranks!r} must be (rank, size), with 0 <= rank < size")
        return Place(size, rank)
    if (mesh := _mesh_type()) is not None and isinstance(ranks, mesh):
        if ranks.ndim != 1:
            raise ValueError(
                f"ranks= takes one dimension of a DeviceMesh, not all of {tuple(ranks.mesh_dim_names or ())}: pass the "
                "data-parallel one, such as mesh['dp']; flatten several first, by mesh._flatten()"
            )
        if not ranks.get_coordinate():
            raise ValueError("ranks= is a DeviceMesh that this process does not belong to: pass its own mesh")
        return Place(ranks.size(), ranks.get_local_rank())
    distributed = torch.distributed
    if distributed.is_available() and isinstance(ranks, distributed.ProcessGroup):
        return Place(distributed.get_world_size(ranks), distributed.get_rank(ranks))
    if type(ranks) is int and distributed.is_available() and ranks == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("ranks= is a process group that this process does not belong to: pass its own group")
    raise TypeError(f"ranks must be 'auto', (rank, size), a ProcessGroup or a dimension of a DeviceMesh, not {ranks!r}")


def _mesh_type() -> type[Any] | None:
    """Returns the class DeviceMesh if it has been imported: only then can a program have one."""
    return getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)


def place_among_ranks(place: Place) -> Place:
    """Returns the place among all consumers, for a graph that may be divided only among the workers of one rank."""
    # 2 ranks of 4 workers: a filter may tell worker 2 of rank 1 that it is 2 of 4, as a DataLoader's does before
    # torch.distributed is initialized. Among all, it is 1 * 4 + 2 = 6 of 8. If it is told 8, all ranks are counted.
    ranks, rank = rank_place()
    if ranks == 1 or (place.consumers == process_place().consumers and not in_stock_worker()):
        return place
    return Place(ranks * place.consumers, rank * place.consumers + place.number)


def divided_place(pipe: IterDataPipe[Any]) -> Place | None:
    """Returns a pipe's place among all consumers that share its work; None if no filter divides the work."""
    # None, and not one of one: without a filter every process has the whole stream, and its files need a number of the
    # process instead. With one, equal shares have equal numbers: worker 2 of rank 1 is 6 of 8, in whichever process.
    is_divided = any(isinstance(found, ShardingFilterIterDataPipe) for found in upstream(pipe))
    return place_among_ranks(place_of(pipe)) if is_divided else None


def find_sharder(pipe: IterDataPipe[Any]) -> str | None:
    """Returns the class name of the nearest pipe, from this one upstream, that divides the work among consumers."""
    return next((type(found).__name__ for found in upstream(pipe) if hasattr(type(found), "apply_sharding")), None)


def grid_of(pipe: IterDataPipe[Any]) -> Grid:
    """Returns a pipe's grid according to torch's sharding filters upstream; without one, one worker of one rank."""
    groups: dict[Any, tuple[int, int]] = {}
    for found in upstream(pipe):
        if isinstance(found, ShardingFilterIterDataPipe):
            only = found.sharding_group_filter
            groups = {**{key: group for key, group in found.groups.items() if only in (None, key)}, **groups}
        elif not groups and isinstance(place := vars(found).get("place"), Place):
            return Grid(*place)
    return _grid_of_groups(groups)


def ranks_of_filter(sharding_filter: Any) -> list[range]:
    """Returns, for each rank, the numbers of its consumers, as the services number them."""
    # 6 consumers of 2 ranks: torch's DataLoader counts worker * ranks + rank, so rank 1 has 1, 3 and 5. Reading
    # services count rank * workers + worker, so it has 3, 4 and 5.
    consumers = sharding_filter.num_of_instances
    ranks, _, workers, _ = _grid_of_groups(sharding_filter.groups)
    if SHARDING_PRIORITIES.DEFAULT in sharding_filter.groups:
        return [range(rank, consumers, ranks) for rank in range(ranks)]
    return [range(rank * workers, (rank + 1) * workers) for rank in range(ranks)]


def _grid_of_groups(groups: dict[Any, tuple[int, int]]) -> Grid:
    if SHARDING_PRIORITIES.DEFAULT not in groups:
        known = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
        return Grid(*known, *groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0)))
    # torch's DataLoader has one number for both: worker * ranks + rank. A spawned worker does not know the number of
    # ranks, but it follows from that of workers: with 6 consumers and 3 workers, there are 2 ranks.
    consumers, number = groups[SHARDING_PRIORITIES.DEFAULT]
    worker = get_worker_info()
    ranks = 1
    if worker is None and consumers % (distributed_place() or Place()).consumers == 0:
        ranks = (distributed_place() or Place()).consumers
    elif worker is not None and consumers % worker.num_workers == 0:
        ranks = consumers // worker.num_workers
    return Grid(ranks, number % ranks, consumers // ranks, number // ranks)
