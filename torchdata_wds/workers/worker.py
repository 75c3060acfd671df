"""What runs inside a worker process of ``WorkersReadingService``."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipe
from torch.utils.data.graph_settings import apply_sharding

from torchdata_wds.workers.failures import Failure
from torchdata_wds.workers.seeds import NoticeBoard, mix

__all__ = ["WorkerGraph", "close_after_fork", "start_worker"]

#: How often, in seconds, a worker looks whether it should be gone; the death of its parent it learns at once.
CHECK_INTERVAL = 0.5

#: How long, in seconds, a worker that is to close may still finish the item it is at.
GRACE = 1.5

#: The writing ends of other pools' pipes. A forked worker inherits them and must let go of them: a pipe ends for its
#: reader, which is how a dead pool is noticed, only when nobody holds its writing end any more.
close_after_fork: WeakSet[Any] = WeakSet()

SeedGraph = Callable[[DataPipe, tuple[int, int], int], object]


class WorkerGraph(IterableDataset[Any]):
    """The part of a graph that one set of workers runs, as a dataset of torch's DataLoader.

    It is no DataPipe, so that the DataLoader neither shards nor seeds it in its own way.

    Args:
        seed_graph: Seeds a graph for a worker's number. It comes first, because unpickling it in a spawned worker
            silences torchdata before the pipes import it.
        board: Where the seeds of the epoch are read.
        datapipe: The last pipe of the part.
    """

    def __init__(self, seed_graph: SeedGraph, board: NoticeBoard, datapipe: DataPipe) -> None:
        self.seed_graph = seed_graph
        self.board = board
        self.datapipe: Any = datapipe
        self._is_sharded = False

    def __getstate__(self) -> dict[str, Any]:
        # torch's wrapper pickles with dill what pickle cannot (lambdas), where dill is installed.
        packed = _IterDataPipeSerializationWrapper(self.datapipe)  # type: ignore[no-untyped-call]
        return {**vars(self), "datapipe": packed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, datapipe=state["datapipe"]._datapipe)

    def __iter__(self) -> Iterator[Any]:
        try:
            self._prepare()
            yield from self.datapipe
        except Exception as error:  # noqa: BLE001  # all of them are raised again in the main process
            yield Failure(error, _where())

    def _prepare(self) -> None:
        worker = get_worker_info()
        assert worker is not None
        if not self._is_sharded:
            apply_sharding(self.datapipe, worker.num_workers, worker.id, SHARDING_PRIORITIES.MULTIPROCESSING)
            self._is_sharded = True
        seeds = self.board.seeds
        _seed_globals(seeds[1], worker.id)
        self.seed_graph(self.datapipe, seeds, worker.id)


def start_worker(worker_id: int) -> None:
    """Sets up a worker process; the DataLoader calls it there before anything else."""
    del worker_id
    worker = get_worker_info()
    assert worker is not None
    for pipe in close_after_fork:
        with suppress(OSError):  # it is closed already
            pipe.close()
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]
    threading.Thread(target=_guard, args=(worker.dataset.board,), name="wds-guard", daemon=True).start()  # type: ignore[attr-defined]


def _seed_globals(seed: int, worker_id: int) -> None:
    """Seeds the generators that augmentations draw from."""
    random.seed(mix(seed, worker_id, "random"))
    np.random.seed(mix(seed, worker_id, "numpy") >> 32)
    torch.manual_seed(mix(seed, worker_id, "torch"))


def _where() -> str:
    worker = get_worker_info()
    return f"worker {worker.id if worker else 0} (pid {os.getpid()})"


def _send_failure(queue: Any, error: Exception, unsent: Any) -> None:
    """Sends word of an item that could not be pickled, from the thread that would otherwise just print a traceback.

    The main process would wait for that item for ever. This hook of multiprocessing's queues exists for such a use
    (concurrent.futures overrides it); pickling each item beforehand would cost as much again.
    """
    index, item = unsent if isinstance(unsent, tuple) and len(unsent) == 2 else (None, unsent)
    explained = RuntimeError(
        f"{_where()} could not send an item of type {type(item).__qualname__} to the main process: "
        f"{type(error).__name__}: {error}. Yield bytes, arrays, tensors or plain Python objects, or move the stage "
        "that makes it behind .join_workers()"
    )
    explained.__cause__ = error
    queue.put((index, Failure(explained, _where())))


def _guard(board: NoticeBoard) -> None:
    """Ends this process when its parent has died, or when it is to close and does not.

    The worker's main thread can do neither while it waits for a source or for room in a pipe that nobody reads.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    starter = os.getppid()
    while not wait([parent.sentinel], CHECK_INTERVAL):
        if os.getppid() != starter:  # a process forked later may hold the sentinel's other end open
            break
        if board.closing:
            _kill_commands()  # which may be what the main thread waits for
            time.sleep(GRACE)
            os._exit(0)
    _kill_commands()
    os._exit(1)


def _kill_commands() -> None:
    # Not imported: a process that never loaded it runs no commands.
    storage = sys.modules.get("torchdata_wds.storage")
    if storage is not None:
        storage.kill_commands()
