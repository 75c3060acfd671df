"""Makes Ctrl-C end the program ``wds`` with status 130 and without a traceback while it starts or exits.

Imports take a while, when there is nothing to clean up. A KeyboardInterrupt would show a traceback then, or be lost,
because some compiled modules drop exceptions while they are imported. So the process just ends. The package imports
this module first; it does nothing in other programs.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

#: The exit status after Ctrl-C, as a shell reports it.
INTERRUPTED = 128 + signal.SIGINT
_PACKAGE, _PROGRAM = "torchdata_wds", "wds"


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


def arm() -> None:
    """Makes Ctrl-C end the process at once, if it would raise KeyboardInterrupt now."""
    with contextlib.suppress(ValueError):  # in other threads, where signals cannot be set and do not raise
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)


def disarm() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once: for imports, when nothing is open yet."""
    arm()
    try:
        yield
    finally:
        disarm()


def _is_program() -> bool:
    """Returns whether this process is the program itself; its workers share the name, but have another command line."""
    if sys.argv[:1] == ["-m"]:  # while python is still looking for the module
        return any(word.removeprefix("-m") == _PACKAGE for word in sys.orig_argv[1:])
    words = (sys.argv[0] if sys.argv else "", *sys.orig_argv[1:])
    name, *others = (word.rpartition("/")[2] for word in words)
    return name == _PROGRAM and _PROGRAM in others


if _is_program():
    arm()
