"""Which parts of a graph the workers run."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe, DataPipeGraph, traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.workers.known_stages import is_torchdata

__all__ = ["find_branches", "runs_once"]

logger = logging.getLogger(__name__)


def find_branches(datapipe: IterDataPipe[Any]) -> list[DataPipe]:
    """Returns the last pipe of each part of a graph that may run in several copies.

    That is the whole graph or, if there are pipes that must stay in the main process (they have a method
    ``is_replicable`` that returns False: ``join_workers``, ``fullsync``, ``pin_memory``), what stands directly before
    them. What merely meets such a stream further down, as labels zipped to it, stays in the main process too.

    Args:
        datapipe: The last pipe of the graph.
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
    """Whether a graph cannot run in several workers, and a warning where there were to be some.

    What stands before ``sharding_round_robin_dispatch`` must not be repeated. torchdata's own service runs it in one
    more process, from which it deals the items out to the workers.

    Args:
        datapipe: The last pipe of the graph.
        num_workers: How many workers it was to run in.
    """
    pipes = get_all_graph_pipes(traverse_dps(datapipe))
    found = any(is_torchdata(pipe, "ShardingRoundRobinDispatcher") for pipe in pipes)
    if found and num_workers:
        logger.warning(
            "what stands before sharding_round_robin_dispatch must run only once, so the whole graph runs in the main "
            "process, without workers. Where each worker can read a part of its own, write .sharding_filter() instead"
        )
    return found
