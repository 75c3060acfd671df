"""The items of a loader's running epoch, from the graph to the training loop."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torchdata_wds.checks import checked_int
from torchdata_wds.workers.device import DeviceItems, PinnedItems
from torchdata_wds.workers.lengths import items_before
from torchdata_wds.workers.stats.wait_clock import WaitClock

T = TypeVar("T")
_process = os.getpid()  # which would be a call for each item


def _note_process() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_note_process)


class Epoch(Generic[T]):
    """The running epoch of a loader; its items may pass through pinned memory, and be copied to a device."""

    def __init__(
        self, source: Iterator[T], pinned_workers: int | None, device: torch.device | None, clock: WaitClock
    ) -> None:
        self.source = source  # the graph's
        self.clock = clock
        # Without workers the graph would run in that thread, in which torch computes on one core only.
        self._thread = PinnedItems(source) if pinned_workers else None
        items = map(pin_memory, source) if pinned_workers == 0 else self._thread or source
        self._items: Iterator[T] = items if device is None else DeviceItems(items, device)
        self.delivered = 0
        self.is_over = False  # whether all items were delivered
        self.is_left = False
        self._error: BaseException | None = None
        self._owner = _process

    @property
    def is_fresh(self) -> bool:
        """Whether it has not been used yet."""
        return not (self.delivered or self.is_over or self._error or self.is_left)

    def take(self) -> T:
        """Returns the next item; raises StopIteration if all were delivered."""
        if self.is_left:
            raise RuntimeError(
                "this iterator has ended, because the loader began another epoch, loaded a state or was shut down: a "
                "WdsLoader has one iterator at a time"
            )
        if _process != self._owner:
            raise RuntimeError(
                f"this iterator belongs to process {self._owner}, from which this process was forked: iterating "
                "over it here would take items from that process, and move the positions in its open files. Make a "
                "separate loader in each process"
            )
        if self._error is not None:
            raise RuntimeError(
                f"this epoch was ended by {type(self._error).__name__}: begin another, or load a state"
            ) from self._error
        try:
            item = next(self._items)
        except StopIteration:
            self.is_over = True
            raise
        except BaseException as error:
            self._error = error
            self.clock.stop()  # what follows is no wait
            raise
        self.delivered += 1
        return item

    def has_more(self) -> bool:
        """Returns whether there may be another item, which then stays the next one."""
        if self.is_over:
            return False
        if self.is_left or self._error is not None:
            return True
        try:
            item = next(self._items)
        except StopIteration:
            self.is_over = True
            return False
        self._items = itertools.chain([item], self._items)
        return True

    def leave(self) -> Iterator[T]:
        """Ends the epoch and its thread; returns the graph's iterator, from which items may be left to take."""
        self.is_left = True
        if self._thread is not None:
            self._thread.close()
        source, self.source = self.source, iter(())
        self._items = iter(())  # without references, a generator in this process closes its files
        return source


class LoaderIterator(Iterator[T]):
    """Yields the items of one epoch of a `WdsLoader`; can pause after a number of them."""

    def __init__(self, loader: Any, epoch: Epoch[T]) -> None:
        self._loader = loader
        self._epoch = epoch
        self._limit: int | None = None
        self._since = 0  # items since the limit was set, or reached

    def __next__(self) -> T:
        loader, epoch = self._loader, self._epoch
        if epoch.is_over or (loader._is_paused and not epoch.is_left):
            raise StopIteration
        clock = epoch.clock
        is_measured = epoch.delivered >= clock.due
        if is_measured:
            clock.began = perf_counter()
        try:
            item = epoch.take()
        except StopIteration:
            loader._engine.end()
            raise
        if is_measured:
            clock.note(epoch.delivered)
        self._since += 1
        if self._since == self._limit:
            self._since = 0
            loader._is_paused = True
            loader._engine.pause()
        return item

    def __len__(self) -> int:
        """Returns how many items are left in this epoch, in a resumed one too; a TypeError if that is not known."""
        loader, epoch = self._loader, self._epoch
        if epoch.is_over or epoch.is_left:
            return 0
        total = len(loader)
        before = items_before(loader.pipe, loader._engine.ranks.find(loader.pipe), loader._engine.resumed)
        if before is None:
            raise TypeError(
                "how many items are left in this resumed epoch is not known: its state counts the items that workers "
                "have made, of which the stages after .join_workers() make others"
            )
        return max(0, total - before - epoch.delivered)

    def __bool__(self) -> bool:
        return True  # also if nothing is left, or the number is not known

    def limit(self, n: int | None) -> None:
        """Pauses after the next n items, and again n items after each `resume`; None removes the limit.

        While paused, iteration stops at once, no thread of the main process runs, and the state stays the same.
        """
        self._limit = None if n is None else checked_int("n", n, 1)
        self._since = 0

    def resume(self) -> None:
        """Lets the iterator continue after the limit was reached."""
        if self._loader._is_paused and not self._epoch.is_left:
            self._loader._is_paused = False
            self._loader._engine.resume()
