"""Ctrl-C while the program ``wds`` starts or ends: the exit status is 130, without a traceback.

Importing torch takes a second, in which there is nothing to tidy up. There, a KeyboardInterrupt would show a traceback,
or be lost, because some compiled modules drop exceptions while they are imported. So the process just ends. This module
is the first that the package imports, and does nothing in other programs.
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
    """Lets Ctrl-C end the process at once, where it would have raised KeyboardInterrupt."""
    with contextlib.suppress(ValueError):  # only the main thread can, and only there it would be raised
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)


def disarm() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """Lets Ctrl-C end the process at once while it is entered: around imports, where nothing is open yet."""
    arm()
    try:
        yield
    finally:
        disarm()


def _is_program() -> bool:
    """Whether this process is the program, and not a worker of it: those have its name, and a command of their own."""
    if sys.argv[:1] == ["-m"]:  # as long as python looks for the module
        return any(word.removeprefix("-m") == _PACKAGE for word in sys.orig_argv[1:])
    words = (sys.argv[0] if sys.argv else "", *sys.orig_argv[1:])
    name, *others = (word.rpartition("/")[2] for word in words)
    return name == _PROGRAM and _PROGRAM in others


if _is_program():
    arm()
