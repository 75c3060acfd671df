"""A set of worker processes that run one part of a graph, seen from the main process.

This is the one place that looks into private attributes of torch's DataLoader: a worker's number, pid and exit code,
and the shutdown of workers that persist, are to be had in no other way.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.workers.failures import Failure
from torchdata_wds.workers.seeds import NoticeBoard, mix
from torchdata_wds.workers.worker import SeedGraph, WorkerGraph, close_after_fork, start_worker

__all__ = ["PooledIterDataPipe", "WorkerPool"]


class PooledIterDataPipe(WdsPipe[Any]):
    """Stands in the main process for the part of the graph that a pool's workers run."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the pool's turn is taken now, not at the first item.
        return self._pool.items()


class WorkerPool:
    """A set of worker processes: torch's DataLoader, started again for each epoch.

    Args:
        datapipe: The last pipe of the part of the graph that the workers run.
        seed_graph: Seeds that part in a worker.
        num_workers: The number of processes.
        prefetch_factor: How many items each worker makes ahead.
        multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for Python's default.
        timeout: How many seconds to wait for an item; 0 waits for ever.
    """

    def __init__(
        self,
        datapipe: DataPipe,
        seed_graph: SeedGraph,
        *,
        num_workers: int,
        prefetch_factor: int,
        multiprocessing_context: str | None,
        timeout: float,
    ) -> None:
        context = torch.multiprocessing.get_context(multiprocessing_context)
        self._board = NoticeBoard(context)
        self._loader: DataLoader[Any] = _Loader(
            WorkerGraph(seed_graph, self._board, datapipe),
            batch_size=None,
            collate_fn=_identity,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=context,
            timeout=timeout,
            worker_init_fn=start_worker,
            persistent_workers=True,
            # Its own, so that the number of workers makes no difference to the state of torch's global generator.
            generator=torch.Generator(),
        )
        # Stages of the main process may read from a thread (prefetch, fullsync) that outlives an epoch broken off.
        self._lock = threading.Lock()
        self._stream: Any = None
        self._results: Any = None
        self._seeds = (0, 0)
        self._turn = 0
        self._pass = 0
        self._is_fresh = False
        self._watcher: threading.Thread | None = None
        self._first_dead: list[int] = []

    def begin(self, seeds: tuple[int, int]) -> None:
        """Starts an epoch: the workers begin to make its items at once.

        Args:
            seeds: The seed shared by all workers and ranks, and this rank's own.
        """
        self._seeds = seeds
        self._pass = 0
        self._start(seeds)
        self._is_fresh = True

    def items(self) -> Iterator[Any]:
        """Returns the epoch's items; asked again in the same epoch (by ``cycle``), another pass in another order."""
        if not self._is_fresh:
            self._pass += 1
            shared, local = self._seeds
            self._start((mix(shared, "pass", self._pass), mix(local, "pass", self._pass)))
        self._is_fresh = False
        return self._run(self._turn)

    def watch(self) -> None:
        """Starts the thread that watches over the workers; apart from ``begin``, as none should run during a fork."""
        if self._watcher is None:
            stream = self._stream
            _ignore_deaths(stream)
            arguments = (stream._workers, self._results, self._board, self._first_dead)
            self._watcher = threading.Thread(target=_watch, args=arguments, name="wds-watch", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """Ends the workers; one that is stuck is made to end within seconds. May be called again."""
        self._board.close()
        self._turn += 1
        stream, self._stream = self._stream, None
        if stream is None or sys.is_finalizing():
            return
        stream._shutdown_workers()
        for worker in stream._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        # A thread of the main process that still waits for an item now sees the pipe's end.
        _close(self._results)

    def _start(self, seeds: tuple[int, int]) -> None:
        self._turn += 1
        with self._lock:
            self._board.seeds = seeds
            try:
                self._stream = iter(self._loader)
            except RuntimeError as error:
                raise self._explained(error) from error
            if self._results is None:
                self._results = self._stream._worker_result_queue._writer
                close_after_fork.add(self._results)

    def _run(self, turn: int) -> Iterator[Any]:
        while True:
            with self._lock:
                if turn != self._turn:
                    return
                try:
                    item = next(self._stream)
                except StopIteration:
                    return
                except Exception as error:
                    if turn != self._turn:
                        return
                    raise self._explained(error) from error
            if type(item) is Failure:
                item.reraise()
            yield item

    def _explained(self, error: Exception) -> Exception:
        """Returns what lies behind an error of the DataLoader, or a plain copy of it if it stands for itself."""
        workers: list[BaseProcess] = getattr(self._loader._iterator, "_workers", [])
        dead = self._first_dead or [number for number, worker in enumerate(workers) if not worker.is_alive()]
        if dead:
            return RuntimeError(_death_notice(dead[0], workers))
        if "timed out" in str(error):
            return RuntimeError(
                f"none of the {len(workers)} workers sent the next item within timeout={self._loader.timeout} s: "
                "its source is slow or stuck. A larger timeout waits longer, timeout=0 for ever"
            )
        return error


class _Loader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """Says nothing: workers that wait for a disk or a network may well outnumber the cores."""


def _identity(item: Any) -> Any:
    return item


def _watch(workers: list[BaseProcess], results: Any, board: NoticeBoard, first_dead: list[int]) -> None:
    """Waits for a worker to die before its time, and sees to it that nobody waits for what it owes.

    A process that dies while it writes to the shared pipe leaves half an item and a lock behind, on which the reader
    and its siblings would wait for ever. So they go too, and with the last writer gone the reader sees the pipe's end.
    """
    sentinels = [worker.sentinel for worker in workers]
    ready = wait(sentinels)
    if board.closing:
        return
    first_dead.append(sentinels.index(ready[0]))  # type: ignore[arg-type]  # they are ints here, not connections
    for worker in workers:
        worker.kill()
    _close(results)


def _close(results: Any) -> None:
    with suppress(OSError):  # it is closed already
        results.close()


def _ignore_deaths(stream: Any) -> None:
    """Keeps torch from raising its own error about a dead worker in whatever the main thread does at that moment."""
    if stream._worker_pids_set:
        stream._worker_pids_set = False
        signal_handling._remove_worker_pids(id(stream))  # type: ignore[attr-defined]  # made in C


def _death_notice(number: int, workers: list[BaseProcess]) -> str:
    worker = workers[number]
    worker.join(timeout=1)  # its exit code may take a moment
    code = worker.exitcode
    if code is None or code >= 0:
        how = f"ended by itself with exit code {code}"
    else:
        how = f"was killed by {signal.Signals(-code).name}"
        how += " (the system does so when memory runs out)" if -code == signal.SIGKILL else ""
    return (
        f"worker {number} of {len(workers)} (pid {worker.pid}) {how}; the epoch cannot be completed. "
        "num_workers=0 runs the same stages in the main process, where a crash shows its place"
    )
