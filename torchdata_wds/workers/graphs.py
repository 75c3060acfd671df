"""How a graph is divided: among the ranks of torch.distributed, and into the parts that workers run."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipe, DataPipeGraph, traverse_dps
from torch.utils.data.graph_settings import apply_sharding, get_all_graph_pipes

from torchdata_wds.consumers import Place
from torchdata_wds.handlers import warn_once
from torchdata_wds.workers.resume.planner import is_torchdata


def shard_by_rank(datapipe: DataPipe, distributed: bool) -> Any:
    """Divides the work of a graph among the ranks, if `distributed`.

    Returns:
        A group of the ranks to share seeds in, where the default one cannot; else None.

    Raises:
        ValueError: if the work is already divided.
        RuntimeError: if the process group is not initialized.
    """
    is_divided = ranks_of(datapipe) is not None
    if not distributed:
        world, _ = current_ranks()
        if world > 1 and not is_divided:
            warn_once(
                "ranks",
                f"each of the {world} ranks of torch.distributed reads everything: give WorkersReadingService "
                "distributed=True to divide the work among them",
            )
        return None
    if is_divided:
        raise ValueError(
            "the work is divided among the ranks already, by a DistributedReadingService: drop that one to lose no "
            "items, or drop distributed=True to have all ranks end with the shortest"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "distributed=True needs the ranks to know one another: call torch.distributed.init_process_group() "
            "before the first epoch, or drop distributed=True to run alone"
        )
    apply_sharding(datapipe, *current_ranks(), SHARDING_PRIORITIES.DISTRIBUTED)
    if "gloo" not in dist.get_backend_config():
        return dist.new_group(backend="gloo")  # seeds are shared from the CPU's memory
    return None


def current_ranks() -> tuple[int, int]:
    """Returns the number of ranks, and this process's own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def ranks_of(datapipe: DataPipe) -> Place | None:
    """Returns the place of a graph among the ranks that its work was divided among; None if it was not."""
    for pipe in get_all_graph_pipes(traverse_dps(datapipe)):
        groups = vars(pipe).get("groups")  # any pipe may have such an attribute of its own, without torch's key
        if isinstance(groups, dict) and SHARDING_PRIORITIES.DISTRIBUTED in groups:
            return Place(*groups[SHARDING_PRIORITIES.DISTRIBUTED])
    return None


logger = logging.getLogger(__name__)


def find_branches(datapipe: IterDataPipe[Any]) -> list[DataPipe]:
    """Returns the last pipe of each part of a graph that may run in several copies.

    That is the whole graph or, if some pipes must stay in the main process (``is_replicable()`` returns False:
    ``join_workers``, ``fullsync``, ``pin_memory``), whatever stands directly before those. Pipes that only join such a
    stream later, as labels zipped to it, stay in the main process too.
    """
    graph = traverse_dps(datapipe)
    if _is_replicable(datapipe, graph[id(datapipe)][1]):
        return [datapipe]
    branches: dict[int, DataPipe] = {}
    _collect(datapipe, graph[id(datapipe)][1], branches)
    return list(branches.values())


def _collect(datapipe: DataPipe, sources: DataPipeGraph, branches: dict[int, DataPipe]) -> None:
    for source, further in sources.values():
        if not _is_replicable(source, further):
            _collect(source, further, branches)
        elif not _may_run_in_workers(datapipe):
            branches.setdefault(id(source), source)


def _is_replicable(datapipe: DataPipe, sources: DataPipeGraph) -> bool:
    return _may_run_in_workers(datapipe) and all(_is_replicable(*entry) for entry in sources.values())


def _may_run_in_workers(datapipe: DataPipe) -> bool:
    return not hasattr(datapipe, "is_replicable") or bool(datapipe.is_replicable())


def runs_once(datapipe: IterDataPipe[Any], num_workers: int) -> bool:
    """Returns whether a graph cannot run in several workers; warns if it was to run in some.

    What stands before ``sharding_round_robin_dispatch`` must not be repeated. torchdata's own service runs it in one
    more process, which deals the items out to the workers.
    """
    pipes = get_all_graph_pipes(traverse_dps(datapipe))
    found = any(is_torchdata(pipe, "ShardingRoundRobinDispatcher") for pipe in pipes)
    if found and num_workers:
        logger.warning(
            "what stands before sharding_round_robin_dispatch must run only once, so the whole graph runs in the main "
            "process, without workers. Where each worker can read a part of its own, write .sharding_filter() instead"
        )
    return found
