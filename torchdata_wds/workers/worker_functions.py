"""The user's functions that set up the graph of each worker, called as torchdata calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.seeds import mix
from torchdata_wds.workers.resume.stream import Seeds


class WorkerFunctions(NamedTuple):
    """What is called in each worker, when it starts and before each epoch."""

    init: Callable[..., Any] | None  # (datapipe, info) -> datapipe
    reset: Callable[..., Any] | None  # (datapipe, info, seed_generator) -> datapipe
    info: Callable[[int, int], Any]  # torchdata's ``WorkerInfo`` of the number of workers and the worker's own
    generator: Callable[[int, int, int], Any]  # of two seeds, one of them shared by all workers, and a worker's number

    def initialized(self, datapipe: DataPipe, workers: int, worker: int) -> DataPipe:
        """Returns the graph that a worker runs."""
        if self.init is None:
            return datapipe
        return _checked_graph("worker_init_fn", self.init(datapipe, self.info(workers, worker)))

    def reset_for(self, datapipe: DataPipe, workers: int, worker: int, seeds: Seeds) -> DataPipe:
        """Returns the graph that a worker runs in an epoch; its pipes already have their seeds."""
        if self.reset is None:
            return datapipe
        shared, local = seeds
        generator = self.generator(mix(shared, "reset"), mix(local, "reset"), worker)
        return _checked_graph("worker_reset_fn", self.reset(datapipe, self.info(workers, worker), generator))


def checked_function(name: str, function: Any) -> Any:
    """Returns an argument that is a function or None; else a TypeError."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function or None, not {function!r}")
    return function


def _checked_graph(name: str, found: Any) -> DataPipe:
    if not isinstance(found, IterDataPipe):
        raise TypeError(f"{name} returned {found!r}; it must return a DataPipe, the one it was given or another")
    return found
