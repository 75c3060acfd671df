"""The reading service that runs a graph in actors of a Ray cluster, for DataLoader2."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchdata_wds.consumers import Ranks
from torchdata_wds.workers.ray.actor_pool import RayPool
from torchdata_wds.workers.service import WorkerFn, WorkersReadingService


class RayReadingService(WorkersReadingService):
    """Runs a graph in actors of a Ray cluster, for DataLoader2: as `WorkersReadingService` does in processes.

    Order, seeds, epochs and states are the same. `RayPool` says how actors run, and what happens when one is lost.

    Args:
        num_workers, prefetch_factor, timeout, distributed, seed, worker_init_fn, worker_reset_fn, ranks,
            stall_after, trace: As in `WorkersReadingService`; ``num_workers`` must be at least 1.
        address, actor_options, max_restarts: As in `RayPool`.

    Raises:
        ImportError: if Ray is not installed (``pip install 'torchdata-wds[ray]'``).
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> from torchdata_wds import RayReadingService
        >>> service = RayReadingService(4, address="auto", actor_options={"resources": {"data": 1}})
        >>> service.restarts
        0
    """

    def __init__(
        self,
        num_workers: int,
        *,
        address: str | None = None,
        actor_options: Mapping[str, Any] | None = None,
        max_restarts: int = 3,
        prefetch_factor: int = 2,
        timeout: float = 0,
        distributed: bool = False,
        seed: int | None = None,
        worker_init_fn: WorkerFn | None = None,
        worker_reset_fn: WorkerFn | None = None,
        ranks: Ranks | None = None,
        stall_after: float = 60.0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._pool: RayPool = RayPool(address, actor_options=actor_options, max_restarts=max_restarts)
        super().__init__(
            num_workers,
            prefetch_factor=prefetch_factor,
            timeout=timeout,
            distributed=distributed,
            seed=seed,
            worker_init_fn=worker_init_fn,
            worker_reset_fn=worker_reset_fn,
            ranks=ranks,
            stall_after=stall_after,
            trace=trace,
        )

    @property
    def restarts(self) -> int:
        """How many actors were replaced since the service was made."""
        return self._pool.restarts
