"""Notes every wait of the training loop on its track."""

from __future__ import annotations

from torchdata_wds.workers.stats.tracing.track import Track
from torchdata_wds.workers.stats.wait_clock import WaitClock

#: Seconds; waits and steps that are both shorter become one span.
_SHORT = 0.0001


class TracedClock(WaitClock):
    """Measures each item, not only some of them, as long as its track goes on."""

    def __init__(self, track: Track) -> None:
        super().__init__()
        self._track = track

    def note(self, taken: int) -> None:
        """Notes a wait, and the training step before it."""
        before = self._ended
        super().note(taken)
        if self._track.is_running:
            self.due = 0
            self._add(before or self.began, self._ended)

    def stop(self) -> None:
        """Notes the wait for the end of the epoch."""
        before = self._ended
        super().stop()
        if before and self._ended > before:
            self._add(before, self._ended)

    def _add(self, before: float, now: float) -> None:
        log = self._track.log
        if max(self.began - before, now - self.began) < _SHORT:
            log.add("short steps and waits", "step", before, now)
        else:
            log.add("training step", "step", before, self.began)
            log.add("next(loader)", "wait", self.began, now)
