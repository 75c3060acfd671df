"""Progress of a command, on standard error."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

_SECONDS = 5.0

#: The bars that are on the terminal now.
_bars: list[Any] = []


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Removes bars from the terminal while lines are written there."""
    for bar in _bars:
        bar.clear()
    try:
        yield
    finally:
        for bar in _bars:
            bar.refresh()


def stdout_is_apart() -> bool:
    """Returns whether standard output goes to a file or nowhere, and so cannot mix with the lines of a terminal.

    Where a pipe ends is not known: ``| cat`` ends on the terminal.
    """
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdout.isatty())


class Progress:
    """Counts things done: in a bar on a terminal, elsewhere in a line every few seconds.

    The bar is tqdm's. Where that is not installed, a terminal gets lines too. `what` is a plural; `hidden` shows
    nothing at all, as where a command prints to the same terminal.
    """

    def __init__(
        self, what: str, total: int | None = None, *, only_on_terminal: bool = False, hidden: bool = False
    ) -> None:
        self.done = 0
        self._what = what
        self._total = total
        on_terminal = sys.stderr.isatty()
        self.is_shown = not hidden and (on_terminal or not only_on_terminal)
        self._bar: Any = None
        if on_terminal and self.is_shown:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm  # type: ignore[import-untyped]

                self._bar = tqdm(desc=what, total=total, file=sys.stderr, dynamic_ncols=True, unit="")
                _bars.append(self._bar)
        self._shown = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Reports `count` more as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self.is_shown and time.monotonic() - self._shown >= _SECONDS:
            self._shown = time.monotonic()
            self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            _bars.remove(self._bar)
            self._bar.close()
        elif self.is_shown:
            self._show()

    def _show(self) -> None:
        total = "" if self._total is None else f" of {self._total:,}"
        with contextlib.suppress(BrokenPipeError):  # a closed standard error does not stop the work
            print(f"{self.done:,}{total} {self._what}", file=sys.stderr, flush=True)
