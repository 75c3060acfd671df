"""The place of this process among all workers and ranks, which only torch and the launcher know.

A process that has not imported torch is not one of its workers, and has no process group.
"""

import sys
from typing import Any, NamedTuple

from torchdata_wds.environment import launched_place


class Place(NamedTuple):
    """The number of consumers, and the number of this one."""

    consumers: int = 1
    number: int = 0


def process_place() -> Place:
    """Returns this process's place among the workers of all ranks, regardless of any graph."""
    ranks, rank = rank_place()
    workers, number = (1, 0) if (worker := _worker_info()) is None else (worker.num_workers, worker.id)
    return Place(ranks * workers, rank * workers + number)


def distributed_place() -> Place | None:
    """Returns this process's place among the ranks of ``torch.distributed``; None before that is initialized."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_world_size(), distributed.get_rank())
    return None


def rank_place() -> Place:
    """Returns the place of this process's rank among all ranks."""
    return distributed_place() or Place(*launched_place())


def _worker_info() -> Any:
    torchs = sys.modules.get("torch.utils.data")
    return None if torchs is None else torchs.get_worker_info()
