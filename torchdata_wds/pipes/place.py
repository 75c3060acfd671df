"""Where a pipe stands among the consumers of its graph, and the seeds that follow from it."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import ShardingFilterIterDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from torchdata_wds.environment import launched_place
from torchdata_wds.pipes import stock_workers

__all__ = [
    "Place",
    "Seed",
    "find_sharder",
    "graph_of",
    "leave_unsaid",
    "mix",
    "place_among_ranks",
    "place_of",
    "process_place",
    "rank_place",
    "said",
    "upstream",
    "warn_once",
]

logger = logging.getLogger(__name__)

_warned: set[str] = set()

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


def mix(*parts: int | str) -> int:
    """Returns a uint64 that depends on every part, the same on all machines and Python versions."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def place_among_ranks(place: Place) -> Place:
    """Completes the place that a graph was divided by: where that was among the workers of each rank, by the rank."""
    ranks, rank = rank_place()
    if ranks == 1 or (place.consumers == process_place().consumers and not stock_workers.in_stock_worker()):
        return place
    return Place(ranks * place.consumers, rank * place.consumers + place.number)


def find_sharder(pipe: IterDataPipe[Any]) -> str | None:
    """Names a pipe, from this one up, that divides the work among consumers."""
    return next((type(found).__name__ for found in upstream(pipe) if hasattr(type(found), "apply_sharding")), None)


class Seed:
    """The random source of one pipe: what ``set_seed`` gave it, and how many epochs it has begun since.

    Never seeded, it draws from torch's global generator each epoch, as the native Shuffler does.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.epoch = 0

    def set(self, seed: int) -> None:
        """Sets the seed and counts epochs from here."""
        self.seed = seed
        self.epoch = 0

    def begin_epoch(self, name: str, place: Place) -> random.Random:
        """Gives the generator of the next epoch: the same on every machine for the same seed, epoch, name and place.

        Use only its ``random()`` and ``getrandbits()``, whose values Python guarantees to stay.
        """
        seed = self.seed
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        rng = random.Random(f"{seed}/{self.epoch}/{name}/{place.consumers}/{place.number}")
        self.epoch += 1
        return rng


def said() -> frozenset[str]:
    """Returns the kinds of warnings that this process has logged, for one that is spawned to keep silent about them."""
    return frozenset(_warned)


def leave_unsaid(kinds: Iterable[str]) -> None:
    """Keeps this process from logging kinds of warnings that the process which spawned it has logged."""
    _warned.update(kinds)


def warn_once(kind: str, message: str) -> None:
    """Logs a warning, the first time in this process."""
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("%s", message)
