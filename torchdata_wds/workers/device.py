"""Iterators that bring items closer to a device: a thread pins their memory, or a stream copies them there."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torchdata_wds.workers.transfers import Device, copied, streams_of, usable_device

T = TypeVar("T")

#: Seconds that `close` waits for a thread whose source does not respond; the thread then ends after that item.
_PATIENCE = 5.0


class PinnedItems(Iterator[T]):
    """Pins the memory of items in a thread, which is at most one item ahead.

    The thread starts with the first item, and is the only one that calls the source from then on. An error ends the
    iterator, as it ends a generator. The thread ends at `close`, or when this object is forgotten; the source is
    released, but not closed.

    Args:
        source: Yields the items: tensors, or collections of tensors and other values, whose type is kept.
        device: The device that the items will be copied to; by default the current CUDA device.

    Raises:
        RuntimeError: if the device cannot be used in this process.
    """

    def __init__(self, source: Iterator[T], device: Device | None = None) -> None:
        self._handover = _Handover()
        arguments = (self._handover, source, usable_device("cuda" if device is None else device))
        self._thread = threading.Thread(target=_pin_items, args=arguments, name="wds-pin", daemon=True)
        weakref.finalize(self, _end, self._handover, self._thread)

    def __next__(self) -> T:
        if self._handover.is_closed:
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        item, error = self._handover.take()
        if error is not None:
            self._handover.close()
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the thread; waits at most 5 seconds for a source that does not respond. Idempotent."""
        _end(self._handover, self._thread, waits=True)


class _Handover:
    """Hands answers from a thread to an iterator, one ahead."""

    # The thread answers a call only if no answer is left, so surplus calls do nothing: `take` can be interrupted
    # anywhere and called again. Of all queues only this kind may be used by finalizers, which run at any point.
    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.is_closed = False

    def take(self) -> tuple[Any, BaseException | None]:
        """Waits for an item or an error, and calls for the next."""
        self._calls.put(None)
        answer = self.answers.get()
        self._calls.put(None)
        return answer

    def close(self) -> None:
        """Ends the thread at its next `is_wanted`."""
        self.is_closed = True
        self._calls.put(None)

    def is_wanted(self) -> bool:
        """Waits until an answer is wanted; returns whether one ever will be."""
        while not self.is_closed:
            self._calls.get()
            if self.answers.empty():
                break
        return not self.is_closed


def _end(handover: _Handover, thread: threading.Thread, *, waits: bool = False) -> None:
    """Tells a thread to end, and waits until it has if `waits`, or if the program is ending."""
    # At exit Python stops daemon threads that still run, which aborts the process if one is inside torch.
    handover.close()
    is_exit = not threading.main_thread().is_alive()
    if (waits or is_exit) and thread.is_alive() and thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _pin_items(handover: _Handover, source: Iterator[Any], device: torch.device) -> None:
    """Pins the items of a source as they are wanted, up to its end or an error."""
    try:
        torch.set_num_threads(1)  # as torch's own loader does: this thread's copies would use all cores
        if (module := streams_of(device)) is not None:
            module.set_device(device)
        while handover.is_wanted():
            handover.answers.put((pin_memory(next(source)), None))  # type: ignore[no-untyped-call]
        handover.answers.put((None, StopIteration()))  # closed while another thread waits
    except BaseException as error:  # noqa: BLE001 - raised again where the item would have been
        handover.answers.put((None, error))


class DeviceItems(Iterator[T]):
    """Copies items to a device, on a stream of its own: the next one while the current one is used.

    Copies overlap with the work on the device if the items are in pinned memory. On the CPU the items pass unchanged,
    and on devices without streams each is copied when it is requested: in both cases nothing is taken ahead. An error
    ends the iterator at the item that failed.

    Args:
        source: Yields the items: objects with a method ``to``, as tensors have, and mappings, lists and tuples of them,
            whose type is kept. Other values pass unchanged.
        device: Where the items go, as for ``torch.device``.

    Raises:
        RuntimeError: if the device does not exist or cannot be used in this process.

    Example:
        >>> list(DeviceItems(iter([{"image": torch.zeros(2), "text": "a"}]), "cpu"))
        [{'image': tensor([0., 0.]), 'text': 'a'}]
    """

    def __init__(self, source: Iterator[T], device: Device) -> None:
        self._device = usable_device(device)
        self._source = source
        self._streams = streams_of(self._device)
        self._side: Any = self._streams and self._streams.Stream(device=self._device)
        self._copies: deque[tuple[Any, list[Any], Any]] = deque()  # items, what was copied in each, and their events
        self._end: Exception | None = None

    def __next__(self) -> T:
        if self._side is None:
            item = next(self._source)
            return item if self._device.type == "cpu" else copied(item, self._device, [])
        while self._end is None and len(self._copies) < 2:
            self._start_next()
        if not self._copies:
            raise self._reason_to_end()
        return self._finish(*self._copies.popleft())  # type: ignore[no-any-return]

    def _start_next(self) -> None:
        """Starts to copy the next item; keeps an error until the items before it are delivered."""
        # Ctrl-C is raised at once instead, and the item that is ahead can still be taken.
        try:
            item, parts = next(self._source), list[Any]()
            # A copy may get the memory of an item that was dropped, while submitted work still reads it. So it waits
            # for that work, but not for the work on the item that is delivered next, which is submitted later.
            self._side.wait_stream(self._streams.current_stream(self._device))
            with self._streams.stream(self._side):
                item = copied(item, self._device, parts)
            self._copies.append((item, parts, self._side.record_event()))
        except StopIteration:
            self._end = StopIteration()  # unlike the one caught, it has no traceback, which would refer to this object
        except Exception as error:  # noqa: BLE001 - raised again at its place
            self._end = error

    def _finish(self, item: Any, parts: list[Any], event: Any) -> Any:
        """Lets the current stream use an item: it waits for the copy, and the memory is kept until it is done."""
        current = self._streams.current_stream(self._device)
        current.wait_event(event)
        for part in parts:
            with suppress(NotImplementedError):  # sparse ones: only the wait before the next copy protects them
                part.record_stream(current)
        return item

    def _reason_to_end(self) -> Exception:
        error, self._end = self._end, StopIteration()
        return error or StopIteration()
