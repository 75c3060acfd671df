"""What a pipe can learn about torchdata's own worker processes, without importing torchdata.

``MultiProcessingReadingService`` loses items, or breaks, when its workers' streams differ in length. A
``.join_workers()`` downstream repairs that; these functions let the shard loader see whether there is one.
"""

from __future__ import annotations

import multiprocessing

__all__ = ["in_stock_worker", "is_joined", "note_join", "stock_place"]

_WORKER_MAIN = ("torchdata.dataloader2.communication.eventloop", "DataPipeToQueuesLoop")

_joined = False


def in_stock_worker() -> bool:
    """Tells whether this process is a worker of torchdata's ``MultiProcessingReadingService``.

    ``torch.utils.data.get_worker_info()`` is None there, as it is in a rank started by ``torch.multiprocessing``; what
    tells them apart, however the process was started, is the function that it was started to run.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    return (getattr(target, "__module__", None), getattr(target, "__qualname__", None)) == _WORKER_MAIN


def stock_place() -> tuple[int, int]:
    """Returns the number of workers of the stock service that this process is one of, and its own; else (1, 0)."""
    if in_stock_worker():
        for argument in getattr(multiprocessing.current_process(), "_args", ()):
            if isinstance(workers := getattr(argument, "num_workers", None), int):
                return workers, argument.worker_id
    return 1, 0


def note_join() -> None:
    """Notes that a ``.join_workers()`` takes the stream of this process, if it is a stock worker."""
    global _joined
    # Only there: a note made in a main process would be inherited by every worker that it forks.
    _joined = in_stock_worker()


def is_joined() -> bool:
    """Tells whether a ``.join_workers()`` takes the stream of this stock worker."""
    return _joined
