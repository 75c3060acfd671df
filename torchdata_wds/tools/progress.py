"""Progress of a command, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

__all__ = ["Progress"]

_SECONDS_ON_TERMINAL = 0.1
_SECONDS_IN_FILE = 5.0


class Progress:
    """Counts things done: on a terminal in one line that changes, elsewhere in a line now and then.

    Args:
        what: What is counted, in the plural.
        total: How many there will be.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._on_terminal = sys.stderr.isatty()
        self._pause = _SECONDS_ON_TERMINAL if self._on_terminal else _SECONDS_IN_FILE
        self._shown = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Notes that so many more are done."""
        self.done += count
        now = time.monotonic()
        if now - self._shown >= self._pause:
            self._shown = now
            self._show(end="" if self._on_terminal else "\n")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show(end="\n")

    def _show(self, end: str) -> None:
        start = "\r" if self._on_terminal else ""
        print(f"{start}{self.done:,} of {self.total:,} {self.what}", end=end, file=sys.stderr, flush=True)
