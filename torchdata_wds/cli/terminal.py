"""Terminal output: untrusted text made safe and short, messages, and progress."""

import contextlib
import logging
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torchdata_wds.errors import cli_message

PROGRAM = "wds"
_GAP = "..."
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")  # tabs, line ends and form feeds are text


def printable(text: str) -> str:
    r"""Escapes characters that would move the cursor, be invisible or reverse the text, as ``\x1b`` and the like."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shorten(text: str, width: int, *, middle: bool = False) -> str:
    """Cuts a text at its end, as ``abcde...``, or in its middle, as ``tra...123``: keys differ at their ends."""
    if len(text) <= width:
        return text
    room = max(0, width - len(_GAP))
    tail = room // 2 if middle else 0
    return text[: room - tail] + _GAP[: max(0, width)] + text[len(text) - tail :]


def guess_text(data: bytes, length: int) -> str | None:
    r"""Decodes the first `length` bytes if they look like text: UTF-8 without control characters."""
    try:
        text = data[:length].decode()
    except UnicodeDecodeError as error:
        if len(data) <= length or error.start < length - 3:
            return None
        text = data[: error.start].decode()  # the last character was cut
    return None if _NO_TEXT.search(text) else text


def say(text: str, command: str = "") -> None:
    """Writes a message to standard error, escaped: names in it may come from untrusted shards."""
    lines = "\n".join(map(printable, text.split("\n")))
    with contextlib.suppress(BrokenPipeError), paused():
        print(f"{PROGRAM}{command and ' '}{command}: {lines}", file=sys.stderr, flush=True)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Writes a number with its noun: ``1 sample``, ``2,000 samples``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def tell_losses(left_out: Counter[str], lost: int) -> int:
    """Says how many members belong to no sample, and why, and how much was lost; returns the exit status."""
    for reason, count in sorted((+left_out).items()):
        if reason != "sample cut off by a broken shard":  # the error has said so
            say(f"left out {counted(count, 'member that belongs', 'members that belong')} to no sample: {reason}")
    if lost:
        say(f"lost: {counted(lost, 'shard or sample was', 'shards or samples were')} skipped (see above)")
    return 1 if lost else 0


def message_of(error: BaseException) -> str:
    """Returns an error's message for the command line, without the name of the pipe that torch appends."""
    return cli_message(error).partition("\nThis exception is thrown by ")[0].strip() or type(error).__name__


def discard_output() -> None:
    """Discards what standard output still buffers, so that the interpreter does not complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        open_nowhere(sys.stdout.fileno())


def open_nowhere(number: int) -> None:
    """Makes a file's number refer to ``/dev/null``."""
    if (nowhere := os.open(os.devnull, os.O_RDWR)) != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Shows the library's warnings inside the context."""
    logger = logging.getLogger("torchdata_wds")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(getattr(record, "cli_message", "") or record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


_SECONDS = 5.0
_bars: list[Any] = []  # those on the terminal now


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Hides progress bars while lines are written to the terminal."""
    for bar in _bars:
        bar.clear()
    try:
        yield
    finally:
        for bar in _bars:
            bar.refresh()


def stdout_is_apart() -> bool:
    """Returns whether standard output goes to a file or a device, and so cannot mix with lines on the terminal."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    # a pipe may still lead to the terminal, as `| cat` does
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdout.isatty())


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows progress: as tqdm's bar on a terminal; elsewhere, or without tqdm, as a line every few seconds.

    The last line says that all is done, unless the command `summarizes` in its own words.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        only_on_terminal: bool = False,
        hidden: bool = False,
        summarizes: bool = False,
    ) -> None:
        self.done = 0
        self._what, self._total, self._summarizes = what, total, summarizes
        self._note = ""
        on_terminal = sys.stderr.isatty()
        self.is_shown = not hidden and (on_terminal or not only_on_terminal)
        self._bar: Any = None
        if on_terminal and self.is_shown:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm  # type: ignore[import-untyped]

                # tqdm's monitor is a thread, and processes are not forked beside threads; miniters=1 does without it
                tqdm.monitor_interval = 0
                self._bar = tqdm(desc=what, total=total, file=sys.stderr, dynamic_ncols=True, unit="", miniters=1)
                _bars.append(self._bar)
        self._shown = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Reports `count` more as done; the note, such as another figure, is shown after them."""
        self.done += count
        self._note = note
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self.is_shown and time.monotonic() - self._shown >= _SECONDS:
            self._shown = time.monotonic()
            self._show()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            _bars.remove(self._bar)
            self._bar.close()
        elif self.is_shown and not self._summarizes:
            self._show()

    def _show(self) -> None:
        total = "" if self._total is None else f" of {self._total:,}"
        with contextlib.suppress(BrokenPipeError):  # a closed standard error does not stop the work
            print(f"{self.done:,}{total} {self._what}{self._note and ', '}{self._note}", file=sys.stderr, flush=True)
