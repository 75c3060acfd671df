"""Which worker of which rank runs a graph, as its sharding filters were told."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, ShardingFilterIterDataPipe

from torchdata_wds.pipes.place import Place, upstream

__all__ = ["Grid", "grid_of", "ranks_of_filter"]


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
