"""Waiting for another process, which may be suspended or stuck."""

from __future__ import annotations

import time

__all__ = ["StalledError", "Waiting"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
#: A process that gives nothing for so many seconds may be suspended: others go to the source by themselves.
_LONGEST_WAIT = 300.0


class StalledError(OSError):
    """Another process has a shard's lock, and nothing comes."""

    def __init__(self) -> None:
        super().__init__(f"the process that downloads it has not gone on for {_LONGEST_WAIT:.0f} seconds")


class Waiting:
    """Waiting for what another process does, as long as it goes on."""

    def __init__(self) -> None:
        self._pause = _SHORTEST_PAUSE
        self._seen: object = None
        self._since = time.monotonic()

    def go_on(self, seen: object = None) -> None:
        """Sleeps for a little, and each time longer.

        Args:
            seen: How far the other process has come.

        Raises:
            StalledError: if that has been the same for long.
        """
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > _LONGEST_WAIT:
            raise StalledError
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
