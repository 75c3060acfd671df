"""Progress of a command, on stderr."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

__all__ = ["Progress", "paused", "stdout_is_apart"]


_SECONDS = 5.0

#: The bars that stand on the terminal.
_bars: list[Any] = []


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Takes bars off the terminal while it is entered, for lines that are written there."""
    for bar in _bars:
        bar.clear()
    try:
        yield
    finally:
        for bar in _bars:
            bar.refresh()


def stdout_is_apart() -> bool:
    """Whether what is printed cannot come among the lines of a terminal: it goes to a file, or nowhere.

    Of a pipe nobody knows where it ends; ``| cat`` ends on the terminal.
    """
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdout.isatty())


class Progress:
    """Counts things done: in a bar on a terminal, elsewhere in a line now and then.

    The bar is tqdm's. Where that is not installed, a terminal gets lines too.

    Args:
        what: What is counted, in the plural.
        total: How many there will be, if that is known.
        only_on_terminal: Whether to say nothing elsewhere.
        hidden: Whether to say nothing at all, as where a command prints to the same terminal.

    Attributes:
        done: How many are done.
        is_shown: Whether anything is said.
    """

    def __init__(
        self, what: str, total: int | None = None, *, only_on_terminal: bool = False, hidden: bool = False
    ) -> None:
        self.what = what
        self.total = total
        self.done = 0
        on_terminal = sys.stderr.isatty()
        self.is_shown = not hidden and (on_terminal or not only_on_terminal)
        self._bar = _bar(what, total) if on_terminal and self.is_shown else None
        if self._bar is not None:
            _bars.append(self._bar)
        self._shown = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Notes that so many more are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self.is_shown and time.monotonic() - self._shown >= _SECONDS:
            self._shown = time.monotonic()
            self._show()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            _bars.remove(self._bar)
            self._bar.close()
        elif self.is_shown:
            self._show()

    def _show(self) -> None:
        total = "" if self.total is None else f" of {self.total:,}"
        with contextlib.suppress(BrokenPipeError):  # nobody reads messages any more
            print(f"{self.done:,}{total} {self.what}", file=sys.stderr, flush=True)


def _bar(what: str, total: int | None) -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm(desc=what, total=total, file=sys.stderr, dynamic_ncols=True, unit="")
