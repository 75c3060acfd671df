"""The reads of remote shards that threads are in, for those that no longer need them to end them."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator

_interrupts: dict[int, Callable[[], object]] = {}
os.register_at_fork(after_in_child=_interrupts.clear)


@contextlib.contextmanager
def interruptible(interrupt: Callable[[], object]) -> Iterator[None]:
    """Notes that this thread is in a read that another thread can end by calling `interrupt`."""
    thread = threading.get_ident()
    before = _interrupts.get(thread)
    _interrupts[thread] = interrupt
    try:
        yield
    finally:
        if before is None:
            _interrupts.pop(thread, None)
        else:
            _interrupts[thread] = before


def interrupt_reads(threads: Iterable[int]) -> None:
    """Makes the reads that these threads are in end soon, with an error, if their sources can."""
    for thread in threads:
        if (interrupt := _interrupts.get(thread)) is not None:
            interrupt()
