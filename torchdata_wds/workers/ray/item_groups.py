"""Makes the items of a stream in a thread, and groups small ones, while Ray sends those that are made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from torchdata_wds.workers.processes.messages import Packer
from torchdata_wds.workers.processes.worker import unsent
from torchdata_wds.workers.stats.sampling.tally import Tally

#: A group is complete once it has this many items or bytes. A message takes 1.2 ms of CPU time if Ray sends it
#: without the object store, up to 100 KB, and 3.8 ms with it, up to 1 MB and more: ten messages of 100 KB cost three
#: times as much as one of 1 MB.
MOST_ITEMS = 4096
MOST_BYTES = 1 << 20
PATIENCE = 0.025  # after this many seconds, a group is sent even if it is not complete
_CHECK = 0.1  # how often, in seconds, a wait for an item ends to see whether the order still holds


class Group(NamedTuple):
    """Some items of a stream, one after another."""

    ends: list[int]  # where the pickle of each item ends
    body: bytes  # all pickles
    outside: list[memoryview]  # their large buffers
    is_last: bool


class ItemGroups:
    """The items of `stream` in groups; at most one group is ready before it is taken."""

    def __init__(self, stream: Generator[Any, None, None], packer: Packer, tally: Tally) -> None:
        self._stream = stream
        self._tally = tally  # notes the waits until a group is taken
        self._packer = packer
        self._ends: list[int] = []
        self._begun = 0.0  # when the first item of the group was there
        self._is_full = self._is_over = self._is_stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="wds-items", daemon=True)
        self._thread.start()

    def take(self, is_canceled: Callable[[], bool]) -> Group | None:
        """Waits for the next group; returns None if the order no longer holds."""
        with self._changed:
            while not (self._is_full or self._is_over):
                wait = self._begun + PATIENCE - time.perf_counter() if self._ends else _CHECK
                if self._ends and wait <= 0:
                    break
                if not self._changed.wait(wait) and is_canceled():
                    return None
            if self._error is not None:
                raise self._error
            group = Group(self._ends, *self._packer.take(), self._is_over)
            self._ends, self._is_full = [], False
            self._changed.notify()
        return group

    def stop(self) -> None:
        """Ends the stream after the item that is being made."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Waits until the stream has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._stream:
                if not self._add(item):
                    break
            self._stream.close()
        except BaseException as error:  # noqa: BLE001  # raised where the groups are taken
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _add(self, item: Any) -> bool:
        """Adds an item, and waits while the group is complete; returns whether the stream goes on."""
        with self._changed:
            is_sent = True
            try:
                end, size = self._packer.pack(item)
            except Exception as error:  # noqa: BLE001  # pickling may raise anything
                end, size = self._packer.pack(unsent(item, error))
                is_sent = False
            self._ends.append(end)
            self._is_full = size >= MOST_BYTES or len(self._ends) >= MOST_ITEMS
            if len(self._ends) == 1:
                self._begun = time.perf_counter()
            if self._is_full or len(self._ends) == 1:
                self._changed.notify()
            if self._is_full and not self._is_stopped:
                with self._tally.blocking():
                    self._changed.wait_for(lambda: not self._is_full or self._is_stopped)
            return is_sent and not self._is_stopped
