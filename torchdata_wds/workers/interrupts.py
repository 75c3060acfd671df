"""Delays Ctrl-C while worker processes start and end, until those steps are complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delays Ctrl-C until the end of a block that must not be interrupted."""
    # Terminals and notebooks send SIGINT to every process of a group. A process started in the block begins with the
    # signal blocked, until it calls `ignore_interrupts`.
    # Python runs handlers in the main thread only, whichever thread received the signal.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    caught: list[Any] = []
    if callable(handler):
        signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        if caught:
            signal.raise_signal(signal.SIGINT)


def ignore_interrupts() -> None:
    """Ignores Ctrl-C from now on: the main process handles it, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
