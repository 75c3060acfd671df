"""The pauses of DataLoader2: ``limit(n)`` and ``resume()`` of its iterator."""

from __future__ import annotations

from typing import Any

from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes


class Pausable:
    """What a reading service does at ``limit(n)`` and ``resume()``; DataLoader2 looks for its private methods.

    DataLoader2 counts the items itself, and workers are never far ahead; only threads of the main process, such as
    those of ``prefetch``, are stopped.
    """

    _end: Any  # the last pipe of the main process
    _is_paused = False

    def check_not_paused(self) -> None:
        """Refuses to begin an epoch during a pause, where DataLoader2 would end it at once, silently."""
        if self._is_paused:
            raise RuntimeError(
                "the loader is paused, because the limit(n) of its last iterator was reached: call resume() of that "
                "iterator before another epoch begins"
            )

    def _pause(self, pause_fn: Any = None) -> None:  # noqa: ARG002  (as torchdata calls it)
        self._is_paused = True
        for pipe in self._pipes_with("pause"):
            pipe.pause()

    def _resume(self, resume_fn: Any = None) -> None:  # noqa: ARG002
        self._is_paused = False
        for pipe in reversed(self._pipes_with("resume")):
            pipe.resume()

    def _limit(self, num_batches: int | None, limit_fn: Any = None) -> None:
        pass

    def _pipes_with(self, method: str) -> list[Any]:
        pipes = get_all_graph_pipes(traverse_dps(self._end))
        return [pipe for pipe in pipes if callable(getattr(type(pipe), method, None))]
