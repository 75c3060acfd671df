"""Divides a graph among ranks, and makes them agree on seeds."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipe
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.consumers import divide, traverse
from torchdata_wds.handlers import warn_once
from torchdata_wds.process_place import Place, distributed_place, rank_place

logger = logging.getLogger(__name__)

_HALF = 2**63
_PATIENCE = 30  # how many seconds a rank waits for the others before it logs that


class RankDivision:
    """The ranks among which a loader divides its work.

    `option` is their place, or ``"auto"`` (torch.distributed, or what a launcher says), ``"distributed"`` (the same,
    but torch.distributed must be initialized) or ``"none"`` (each rank reads everything).
    """

    def __init__(self, option: Place | str) -> None:
        self.option = option
        self.place = Place()
        self._shares = False

    def find(self, datapipe: DataPipe) -> Place:
        """Returns the place that this process has, or will have, among the ranks of a graph."""
        if isinstance(self.option, Place):
            return self.option
        return rank_place() if self.option == "auto" else ranks_of(datapipe) or distributed_place() or Place()

    def divide(self, datapipe: DataPipe, *, is_seeded: bool) -> None:
        """Divides a graph; all ranks call this if they are not seeded."""
        is_divided = ranks_of(datapipe) is not None
        self.place = self.find(datapipe)
        if self.option == "none":
            if self.place.consumers > 1 and not is_divided:
                warn_once(
                    "ranks",
                    f"each of the {self.place.consumers} ranks of torch.distributed reads everything: pass "
                    "distributed=True to WorkersReadingService to divide the work among them",
                )
            return
        if is_divided:
            raise ValueError(
                "the work is already divided among the ranks, and items would be lost. If a DistributedReadingService "
                "or apply_sharding did that, drop it, or leave the ranks to it: drop distributed=True or ranks=. "
                "If an earlier loader did, its graph cannot be copied: build the graph again for each loader"
            )
        if self.option == "distributed" and distributed_place() is None:
            raise RuntimeError(
                "distributed=True needs torch.distributed: call torch.distributed.init_process_group() before the "
                "first epoch, or drop distributed=True to run alone"
            )
        if not is_seeded:
            self._share_seeds()
        divide(datapipe, self.place, SHARDING_PRIORITIES.DISTRIBUTED)

    def _share_seeds(self) -> None:
        """Prepares `share`; raises a RuntimeError if only some of all ranks could take part."""
        world = rank_place()
        if world.consumers == 1 and self.place.consumers == 1:
            return
        # Ranks of one model replica have equal places, but each of their data-parallel groups would agree on a seed of
        # its own. Nor can all ranks agree on one, since some of them may have no loader.
        if self.place != distributed_place():
            raise RuntimeError(
                f"this loader has place {self.place.number} of {self.place.consumers} ranks, but they cannot agree on "
                "a seed among themselves: pass the same seed= in all processes"
                + ("" if distributed_place() else ", or call torch.distributed.init_process_group() before")
            )
        self._shares = True

    def share(self, seed: int) -> int:
        """Returns the seed of rank 0 in every rank."""
        if not self._shares:
            return seed
        shared = torch.tensor(seed - _HALF, dtype=torch.int64)  # a uint64 has no tensor type that all backends take
        work: Any = dist.broadcast(shared, src=0, group=_seed_group(), async_op=True)
        until = time.monotonic() + _PATIENCE
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        if not work.is_completed():
            logger.warning(
                "rank %d has waited %d s for the other ranks to begin this epoch: without a seed, all ranks share one. "
                "Iterate over the loader in every rank, or pass seed= to begin without waiting",
                *(self.place.number, _PATIENCE),
            )
        work.wait()
        return int(shared.item()) + _HALF


_seed_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _seed_group() -> Any:
    """Returns the group of all ranks in which seeds are shared: from CPU memory, which needs gloo; None for theirs."""
    # One for all loaders: each group holds threads and connections until it is destroyed, which all ranks would have to
    # do, and a loader may simply be forgotten.
    if "gloo" in dist.get_backend_config():
        return None
    world = dist.group.WORLD
    if world not in _seed_groups:
        _seed_groups[world] = dist.new_group(backend="gloo")
    return _seed_groups[world]


def ranks_of(datapipe: DataPipe) -> Place | None:
    """Returns the place of a graph among the ranks that share its work; None if they do not."""
    for pipe in get_all_graph_pipes(traverse(datapipe)):
        groups = vars(pipe).get("groups")  # a user's pipe may have an attribute of this name, without torch's key
        if isinstance(groups, dict) and SHARDING_PRIORITIES.DISTRIBUTED in groups:
            return Place(*groups[SHARDING_PRIORITIES.DISTRIBUTED])
    return None
