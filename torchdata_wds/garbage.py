"""Pauses garbage collection, which several threads may need at once."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a signal handler may come in between
_pauses: Counter[int] = Counter()  # how many blocks each thread is in, by its identifier
_was_on = False  # whether garbage was being collected before


@contextmanager
def collection_held() -> Iterator[None]:
    """Switches garbage collection off in a block; a process forked in it begins without, until `leave_garbage`."""
    global _was_on
    thread, is_inside = threading.get_ident(), False
    try:
        with _lock:
            if not _pauses:
                _was_on = gc.isenabled()
            _pauses[thread] += 1
            is_inside = True
            gc.disable()
        yield
    finally:
        if is_inside:
            with _lock:
                _pauses[thread] -= 1
                _go_on()
                if not _pauses[thread]:  # only now: a child that is forked in between must find it
                    del _pauses[thread]


def _go_on() -> None:
    if not _pauses.total() and _was_on:
        gc.enable()


def leave_garbage() -> None:
    """Leaves the program's garbage alone from now on, in a process that it has forked."""
    # Finalizers may wait for ever for threads that only the program has, as that of a video frame does once PyAV has
    # converted it.
    _pauses.clear()
    gc.freeze()
    gc.enable()


def _forget_other_threads() -> None:
    """Runs in a forked child."""
    global _lock
    _lock = threading.RLock()
    others = _pauses.keys() - {threading.get_ident()}
    for thread in others:
        del _pauses[thread]
    if others:
        _go_on()


os.register_at_fork(after_in_child=_forget_other_threads)
