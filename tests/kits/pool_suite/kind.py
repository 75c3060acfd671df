"""Where the streams of a loader run, for tests that hold wherever that is."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe

from tests.kits.processes import children
from tests.kits.torchdata import DataLoader2
from tests.kits.workers_kit import loader_of, resumed_loader

#: Options of a loader whose workers are forked.
FORKED: Mapping[str, Any] = {"multiprocessing_context": "fork"}


class PoolKind(NamedTuple):
    """Makes loaders with a front, "loader" or "service", whose streams run in one kind of place."""

    front: str
    workers: int  # 0 for the main process
    options: Mapping[str, Any] = {}
    left: Callable[[], Any] = children  # what loaders have left running: falsy for nothing
    patience: float = 0.5  # seconds, for ``timeout=``
    group: int = 256  # how many small items a worker makes at most for one message
    spare: int = 0  # how many messages a worker makes ahead at most, beside ``prefetch_factor``
    is_slow: bool = False  # whether workers take seconds to start
    service: Callable[..., Any] | None = None  # makes a reading service of the pool's own

    @property
    def streams(self) -> int:
        """How many streams the graph is divided among."""
        return max(self.workers, 1)

    @property
    def elsewhere(self) -> PoolKind:
        """Where states of this pool are resumed: states are the same in all pools, and forked workers start at once."""
        return PoolKind(self.front, self.workers, FORKED) if self.is_slow else self

    def of(self, workers: int) -> PoolKind:
        """The same with another number of workers; the main process stays."""
        return self._replace(workers=workers) if self.workers else self

    def loader(self, pipe: IterDataPipe, **options: Any) -> Any:
        if self.service is not None and self.front == "service":
            return DataLoader2(pipe, reading_service=self.service(self.workers, **options))
        return loader_of(pipe, self.workers, front=self.front, **{**self.options, **options})

    def resumed(self, state: Any, pipe: IterDataPipe, **options: Any) -> Any:
        """Another loader, which resumes from a state."""
        if self.service is not None and self.front == "service":
            return DataLoader2.from_state(state, self.service(self.workers, **options))
        return resumed_loader(state, pipe, self.workers, front=self.front, **{**self.options, **options})

    def sent(self, state: Any) -> Any:
        """A state as another program finds it: through JSON, which DataLoader2's, with a graph in it, cannot take."""
        return json.loads(json.dumps(state)) if self.front == "loader" else state

    def came_from(self, error: BaseException) -> str:
        """The traceback of the place where an exception was raised."""
        return str(error.__cause__) if self.workers else "".join(traceback.format_exception(error))
