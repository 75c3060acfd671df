"""Exception handlers, for the ``handler=`` argument of pipes.

A handler is any ``callable(exception) -> bool``: True skips the item and continues, False ends the pipe's stream for
this epoch, and raising passes the exception on. The names are WebDataset's; unlike there, warnings use ``logging``, are
rate-limited and never sleep, and skipped items are counted.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdata_wds.errors import Advice, cli_message

Handler = Callable[[Exception], bool]
logger = logging.getLogger(__name__)

#: The number of exceptions in this process by "handler/exception type", for the five handlers below.
handled: Counter[str] = Counter()
_NEVER_SKIPPED = (ImportError, MemoryError)
_WARNED_IN_FULL = 10
_warned: Counter[tuple[str, str]] = Counter()

#: The kinds of `warn_once` that this process has logged, or leaves to the process that started it.
said: set[str] = set()


def reraise_exception(exception: Exception) -> bool:
    """Raises the exception; the default of all pipes."""
    _count("reraise_exception", exception)
    raise exception


def ignore_and_continue(exception: Exception) -> bool:
    """Skips the item silently."""
    _count("ignore_and_continue", exception)
    return True


def ignore_and_stop(exception: Exception) -> bool:
    """Ends the stream silently."""
    _count("ignore_and_stop", exception)
    return False


def warn_and_continue(exception: Exception) -> bool:
    """Skips the item and logs a warning: for the first ten exceptions of a type, the hundredth, the thousandth, ..."""
    _count("warn_and_continue", exception)
    warn_rarely("skipped", exception)
    return True


def warn_and_stop(exception: Exception) -> bool:
    """Logs a warning and ends the stream."""
    _count("warn_and_stop", exception)
    warn_rarely("stopped", exception)
    return False


def check_handler(handler: Handler) -> Handler:
    """Returns a ``handler=`` argument; raises TypeError if it is not callable."""
    if not callable(handler):
        raise TypeError(f"handler must be a function of an exception, such as warn_and_continue, not {handler!r}")
    return handler


class SkipCounts(Counter[str]):
    """Counts the items that a pipe skipped, by exception type, or by the rule that excludes them."""

    def __init__(self, *counts: Any) -> None:
        super().__init__(*counts)
        self.losses: set[str] = set()  # the reasons that are losses, and not rules such as ignoring hidden files
        self.examples: dict[str, str] = {}  # an example message for some of the reasons

    def __reduce__(self) -> tuple[Any, ...]:
        return SkipCounts, (dict(self),), {"losses": self.losses, "examples": self.examples}


def keep_going(handler: Handler, exception: Exception, skipped: Counter[str]) -> bool:
    """Calls a handler with an exception and counts what it skips: True skips the item, False ends the stream.

    Errors because of a missing package or a lack of memory are raised: every item would fail, and skipping them would
    lose data silently. A result that is not a bool raises TypeError: a handler that forgets its ``return`` would
    otherwise end the stream silently.
    """
    if isinstance(exception, _NEVER_SKIPPED) or isinstance(exception.__cause__, _NEVER_SKIPPED):
        raise exception
    answer = handler(exception)
    if not isinstance(answer, bool):
        raise TypeError(
            f"the handler {getattr(handler, '__qualname__', handler)!r} returned {answer!r} for "
            f"{type(exception).__name__}; it must return True (skip this item) or False (end the stream), or raise"
        ) from exception
    count_loss(skipped, type(exception).__name__, exception)
    return answer


def count_loss(skipped: Counter[str], reason: str, exception: Exception | None = None) -> None:
    """Counts an item that was lost, rather than excluded by a rule."""
    skipped[reason] += 1
    if isinstance(skipped, SkipCounts):
        skipped.losses.add(reason)
        if exception is not None and reason not in skipped.examples:
            skipped.examples[reason] = with_notes(exception)


@dataclass
class Asked:
    """The handler of one iteration of a pipe."""

    handler: Handler
    skipped: Counter[str]  # the pipe's own count
    note: Callable[[Exception], object] = lambda _: None  # called first, to note where the exception was raised
    is_over: bool = False  # whether the handler has ended the stream

    def __call__(self, exception: Exception) -> bool:
        """Calls the handler as `keep_going` does."""
        self.note(exception)
        self.is_over |= not keep_going(self.handler, exception, self.skipped)
        return not self.is_over


def warn_rarely(outcome: str, exception: Exception) -> None:
    """Logs a warning for the first ten of an outcome and exception type, then the hundredth, the thousandth, ..."""
    kind = type(exception).__name__
    if count := _warn_count(outcome, kind):
        message = f"{outcome} ({kind}, number {count} of its kind): "
        cli = message + with_notes(exception, cli_message)
        logger.warning("%s%s", message, with_notes(exception), extra={"cli_message": cli})


def warn_seldom(kind: str, message: str, advice: Advice | None = None) -> None:
    """Logs a warning about data for which no handler is called: the first ten of a kind, then the hundredth, ..."""
    if count := _warn_count(kind, ""):
        number = f" (number {count:,} of its kind; not all are shown)" if count >= _WARNED_IN_FULL else ""
        library, cli = ("", "") if advice is None else (f" {words}" for words in advice)
        logger.warning("%s%s%s", message, library, number, extra={"cli_message": message + cli + number})


def warn_once(kind: str, message: str) -> None:
    """Logs a warning, but only the first of its kind in this process."""
    if kind not in said:
        said.add(kind)
        logger.warning("%s", message)


def _warn_count(outcome: str, kind: str) -> int:
    """Counts a warning; returns the count if the warning is to be shown, else 0."""
    _warned[outcome, kind] += 1
    count = _warned[outcome, kind]
    return count if count <= _WARNED_IN_FULL or count == 10 ** (len(str(count)) - 1) else 0


def with_notes(exception: BaseException, message: Callable[[BaseException], str] = str) -> str:
    """Returns an exception's notes, in which stages say where it was raised, followed by its message."""
    return ": ".join([*reversed(getattr(exception, "__notes__", [])), message(exception)])


def _count(handler: str, exception: Exception) -> None:
    handled[f"{handler}/{type(exception).__name__}"] += 1
