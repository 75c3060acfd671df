"""Terminal output: untrusted text made safe and short, messages, and progress."""

import contextlib
import logging
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torchdata_wds.errors import cli_message
from torchdata_wds.storage import meters
from torchdata_wds.storage.urls import is_local, local_path
from torchdata_wds.workers.stats.reports.amounts import size_text

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


Sample = TypeVar("Sample", bound=Mapping[str, Any])
_SECONDS, _BAR_SECONDS = 5.0, 0.1
_MOST_SIZES = 2000  # how many shards are looked up
_BAR, _LEFT, _ELAPSED = "{percentage:3.0f}%|{bar}| {desc}", ", {remaining} left", ", {elapsed}"
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
    """Shows on a terminal how far a command is: shards, samples, bytes a second, and the time left.

    It is a bar of tqdm, or without tqdm a line every few seconds; nothing is shown if standard error is not a terminal.
    The last line says that all is done, unless the command `summarizes` in its own words.

    Args:
        noun: What `advance` counts, in the plural.
        total: How many there are; by default, that of `urls` for shards, and unknown otherwise.
        urls: The shards that are read, in their order.
        size: How many bytes are read in all; None takes those of `urls`, if they are local.
        skips: Whether only parts of the shards are read, so that bytes do not say how much is left.
        hidden: Whether nothing is shown on a terminal either.
        summarizes: Whether the command itself says at the end what was done.
    """

    def __init__(
        self,
        noun: str,
        total: int | None = None,
        *,
        urls: Sequence[str] = (),
        size: int | None = None,
        skips: bool = False,
        hidden: bool = False,
        summarizes: bool = False,
    ) -> None:
        self.done = self.samples = self.bytes = 0
        self.is_shown = not hidden and sys.stderr.isatty()
        self._noun, self._summarizes = noun, summarizes
        self._total = len(urls) if total is None and noun == "shards" else total
        self._urls = urls if self.is_shown else ()
        self._sizes = _local_sizes(self._urls)
        self._size = size or sum(self._sizes.values())
        self._place = 0  # the number of the shard that is being read
        self._by_bytes = self._size > 0 and not skips
        self._read_before = _bytes_read()
        self._start = self._shown = time.monotonic()
        self._bar = self._new_bar() if self.is_shown else None

    def _new_bar(self) -> Any:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            return None
        # tqdm's monitor is a thread, and processes are not forked beside threads
        tqdm.monitor_interval = 0
        total = self._size if self._by_bytes else len(self._urls) or self._total
        form = f"{{desc}}{_ELAPSED}" if total is None else _BAR + _LEFT
        bar = tqdm(desc=self._text(0.0), total=total, file=sys.stderr, dynamic_ncols=True, bar_format=form)
        _bars.append(bar)
        return bar

    def advance(self, count: int = 1, *, shard: str | None = None, samples: int = 0, size: int = 0) -> None:
        """Reports `count` more as done, such as `shard`, with this many samples and bytes."""
        self.done += count
        self.samples += samples
        self.bytes += size or self._sizes.get(shard or "", 0)
        if self.is_shown:
            now = time.monotonic()
            if now - self._shown >= (_SECONDS if self._bar is None else _BAR_SECONDS):
                self._shown = now
                self._show()

    def over(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yields samples, and reports each when the next one is requested."""
        if not self.is_shown:
            yield from samples
            return
        places = {url: place for place, url in reversed(list(enumerate(self._urls)))}
        shard: Any = None
        count = due = 0.0
        for sample in samples:
            if sample["__url__"] != shard:
                shard = sample["__url__"]
                self._place = max(self._place, places.get(shard, 0))  # shards may be read in turns
            yield sample
            count += 1
            if (now := time.monotonic()) >= due:  # not for each sample: they may take microseconds
                self.advance(int(count))
                count, due = 0, now + _BAR_SECONDS
        self.advance(int(count))

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._noun == "samples":
            self._place = len(self._urls)
        if self._bar is not None:
            self._bar.bar_format = self._bar.bar_format.replace(_LEFT, _ELAPSED)
            self._show()
            _bars.remove(self._bar)
            self._bar.close()
        elif self.is_shown and not self._summarizes:
            self._show()

    def _show(self) -> None:
        text = self._text(time.monotonic() - self._start)
        if self._bar is None:
            with contextlib.suppress(BrokenPipeError):  # a closed standard error does not stop the work
                print(text, file=sys.stderr, flush=True)
            return
        shards = self._place if self._noun == "samples" else self.done
        done = self._bytes_done() if self._by_bytes else shards if self._urls else self.done
        self._bar.n = done if self._bar.total is None else min(done, self._bar.total)
        self._bar.set_description_str(text)

    def _text(self, seconds: float) -> str:
        samples = self.samples
        if self._urls and self._noun == "samples":
            parts, samples = [f"{self._place:,} of {len(self._urls):,} shards"], self.done
        else:
            parts = [f"{self.done:,}{'' if self._total is None else f' of {self._total:,}'} {self._noun}"]
        parts += [counted(samples, "sample")] if samples else []
        if seconds >= _BAR_SECONDS and (done := self._bytes_done()):
            parts.append(f"{size_text(done / seconds)}/s")
        return ", ".join(parts)

    def _bytes_done(self) -> int:
        # What worker processes read is not counted here; then only the sizes of finished shards are known.
        return max(self.bytes, _bytes_read() - self._read_before)


def _bytes_read() -> int:
    return sum(tally.bytes for tally in meters.snapshot().values())


def _local_sizes(urls: Sequence[str]) -> dict[str, int]:
    """Returns the sizes of local shards; nothing if one is not a local file, or there are very many."""
    sizes: dict[str, int] = {}
    for url in urls if len(urls) <= _MOST_SIZES else ():
        try:
            found = os.stat(local_path(url)) if is_local(url) else None  # noqa: PTH116 - a str
        except (OSError, ValueError):
            return {}
        if found is None or not stat.S_ISREG(found.st_mode):
            return {}
        sizes[url] = found.st_size
    return sizes
