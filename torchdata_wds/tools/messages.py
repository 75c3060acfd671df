"""What the program says, on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator

from torchdata_wds.format.printing import printable
from torchdata_wds.tools.progress import paused

__all__ = [
    "PROGRAM",
    "counted",
    "in_our_words",
    "let_go_of_output",
    "logged",
    "message_of",
    "say",
    "tell_left_out",
    "tell_lost",
]

PROGRAM = "wds"

#: Options of the library that its messages advise, and the program's own words for them.
_WORDS = {
    "pass overwrite=True, another pattern, or start_shard='next'": "pass --force, or another name",
    "Pass overwrite=True to replace such files, or give each writer its own pattern": "Pass --force to replace it",
    "Rename it with rename= of load_wds_shards, or leave it out with select=": "Write the shard again without it",
    "overwrite=True": "--force",
    "allow_pipe=True": "--allow-pipe",
    "start_shard='next'": "--start",
    "max_bytes=": "--size ",
    "Raise max_member_bytes if you want it; otherwise leave the member out with select=": "Raise --max-member-bytes",
    "Leave it out with select=, or set max_member_bytes to what one member may take": "Try where there is more memory",
    "max_member_bytes=": "--max-member-bytes=",
    "keys= changes how names are read": "--keys changes how names are read",
    "handler=warn_and_continue": "--errors skip",
    "on_reappearing='allow'": "--on-reappearing allow",
    "on_duplicate='first' or 'last'": "--on-duplicate first or last",
    "lowercase=False": "--keep-case",
    "group_by_key(keys='last_dot')": "--keys last_dot",
    "require_end_marker=False": "--no-end-marker",
    "concatenated=True": "--concatenated",
}


def say(text: str, command: str = "") -> None:
    """Writes a message, whose names may be a stranger's: nothing in it moves the cursor.

    That nobody reads messages any more is no reason to stop.

    Args:
        text: One line, or several.
        command: Which command it is from, for its last words.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    with contextlib.suppress(BrokenPipeError), paused():
        print(f"{PROGRAM}{command and ' '}{command}: {lines}", file=sys.stderr, flush=True)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Writes a number with its noun.

    Example:
        >>> counted(1, "sample"), counted(2_000, "sample"), counted(0, "index", "indexes")
        ('1 sample', '2,000 samples', '0 indexes')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def tell_left_out(skipped: Counter[str]) -> None:
    """Tells how many members belong to no sample, and why; samples that damage has cut are told with the error."""
    for reason, count in sorted((+skipped).items()):
        if reason != "sample cut off by a broken shard":
            say(f"left out {counted(count, 'member that belongs', 'members that belong')} to no sample: {reason}")


def tell_lost(count: int) -> None:
    """Tells how many shards or samples were lost."""
    if count:
        say(f"lost: {counted(count, 'shard or sample was', 'shards or samples were')} skipped (see above)")


def in_our_words(text: str) -> str:
    """Puts the program's options where a message of the library advises those of a function."""
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text


def message_of(error: BaseException) -> str:
    """The error's own text, without the pipe that torch names behind it."""
    text = str(error).partition("\nThis exception is thrown by ")[0].strip()
    return in_our_words(text or type(error).__name__)


def let_go_of_output() -> None:
    """Sends what is left in the buffer of standard output nowhere, so that the interpreter's end does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(in_our_words(record.getMessage()))


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Lets warnings of the library be said, as long as it is entered."""
    logger = logging.getLogger("torchdata_wds")
    handler = _Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
