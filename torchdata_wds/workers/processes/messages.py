"""Sends items from a worker to the main process: small ones in groups, large ones in shared memory.

A message is one pickled `Envelope`. Two items, one of 300 bytes and one with an image of 1 MB, are sent as

    ends=[300, 500]                     where the pickle of each item ends in the first piece
    pieces=[<500 bytes>, (3, ...)]      all pickles (in shared memory too, if large); then each large buffer
    segments=[3], new=[3]               the segments in use; the descriptor of each new one follows the message

Each message costs the worker a credit. It takes one before it makes the message's first item, and the main process
returns it on receiving the message, so the number of credits limits how many messages a worker is ahead.
"""

from __future__ import annotations

import ctypes
import errno
import io
import math
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # registers the tensors that are not packed here with ForkingPickler

from torchdata_wds.workers.processes.shared_memory import Limits, SegmentPool, SegmentTable, Span
from torchdata_wds.workers.stats.sampling.tally import Tally

#: Buffers of this many bytes or more stay outside the pickle; for smaller ones, copying costs less than bookkeeping.
LARGE = 1 << 16
PROTOCOL = 5
Buffer = bytes | bytearray | memoryview


class Packer:
    """Pickles items one after another, each separately; buffers of 64 KB or more stay outside the pickle.

    `make_pickler` is called with a file, and with what decides which buffers stay inside.
    """

    def __init__(self, make_pickler: Callable[[io.BytesIO, Any], Any] | None = None) -> None:
        self._file = io.BytesIO()
        self._outside: list[pickle.PickleBuffer] = []
        self._pickler = (make_pickler or _process_pickler)(self._file, self._keep_inside)

    def pack(self, item: Any) -> tuple[int, int]:
        """Adds an item, unless pickling it raises; returns the end of its pickle and the bytes of all items."""
        size, outside = self._file.tell(), len(self._outside)
        try:
            self._pickler.dump(item)
        except BaseException:
            self._file.seek(size)
            self._file.truncate()
            del self._outside[outside:]
            raise
        finally:
            # A memo would refer back to an item that was changed and sent again, and keep all items alive.
            self._pickler.clear_memo()
        end = self._file.tell()
        return end, end + sum(buffer.raw().nbytes for buffer in self._outside)

    def take(self) -> tuple[bytes, list[memoryview]]:
        """Returns the pickles of all items and the buffers outside them, and empties the packer."""
        body, outside = self._file.getvalue(), [buffer.raw() for buffer in self._outside]
        self._file.seek(0)
        self._file.truncate()
        self._outside.clear()
        return body, outside

    def _keep_inside(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE:
            return True
        self._outside.append(buffer)
        return False


class _TensorPickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_tensor(value)


def _process_pickler(file: io.BytesIO, keep_inside: Any) -> _TensorPickler:
    return _TensorPickler(file, PROTOCOL, True, keep_inside)


def reduce_tensor(value: Any) -> Any:
    """Returns how a plain tensor is pickled, as a buffer; NotImplemented for anything else."""
    if type(value) is not torch.Tensor or not _is_plain(value):
        return NotImplemented
    # Not through numpy, which lacks some of torch's types.
    memory: Any = (ctypes.c_ubyte * (value.numel() * value.element_size())).from_address(value.data_ptr())
    memory.tensor = value  # keeps the tensor alive while its memory is referenced
    dtype = str(value.dtype).removeprefix("torch.")
    return _tensor_of, (pickle.PickleBuffer(memory), dtype, tuple(value.shape), value.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is packed by value; others, and those shared on purpose, are pickled by torch."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel() or tensor.requires_grad:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.untyped_storage().is_shared():
        return False
    # It must fill its memory without gaps or overlaps, in any order of dimensions: strides (1, 3) for shape (3, 2) do.
    expected = 1
    for stride, size in () if tensor.is_contiguous() else sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _tensor_of(buffer: Buffer, dtype: str, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    # Shaped in place, which is faster than making a tensor of the storage, and does not make a view.
    tensor = torch.frombuffer(buffer, dtype=getattr(torch, dtype))
    return tensor if len(size) == 1 else tensor.as_strided_(size, stride)


# A message is sent once it has this many items or bytes, or this many seconds after its first item was started.
MOST_ITEMS = 256
MOST_BYTES = 1 << 15
LINGER = 0.001
PATIENCE = 0.005  # after this many seconds, items are sent even if the next one is not ready


class Envelope(NamedTuple):
    """A message as it is sent."""

    turn: int  # the order that it answers
    is_last: bool  # whether it ends the stream
    ends: list[int]  # where the pickle of each item ends
    pieces: list[Any]  # all pickles, then the large buffers of the items: bytes, or the parts of a `Span`
    segments: list[int]  # the segments that hold pieces
    new: list[int]  # those whose descriptors follow
    facts: list[Any]  # what the graph reported while it made the items


def open_channel(connection: Connection) -> socket.socket:
    """Returns a socket of its own for a connection."""
    channel = socket.socket(fileno=os.dup(connection.fileno()))
    # ``socket.setdefaulttimeout`` would make both non-blocking.
    channel.settimeout(None)
    return channel


class Sender:
    """The worker's end; `credits` counts the messages it may send, `facts` returns what the graph has reported."""

    def __init__(
        self,
        connection: Connection,
        credits: Any,
        segments: SegmentPool,
        facts: Callable[[], list[Any]] = list,
        tally: Tally | None = None,
    ) -> None:
        self._connection = connection
        self._credits = credits
        self._segments = segments
        self._facts = facts
        self._tally = tally or Tally()  # notes the waits for room
        self._packer = Packer()
        self._turn = 0
        self._ends: list[int] = []
        self._begun = 0.0
        self._has_credit = False  # always true while items are waiting
        # Messages are sent by the thread that makes the items, or by a second one while the next item takes long.
        self._lock = threading.Lock()
        self._has_items = threading.Event()
        threading.Thread(target=self._send_late, name="wds-send", daemon=True).start()

    def begin(self, turn: int) -> None:
        """Begins the stream that answers an order, and drops the rest of the previous one."""
        with self._lock:
            self._turn = turn
            self._packer.take()
            self._ends.clear()
            self._has_items.clear()
            self._segments.trim()

    def wait_for_room(self) -> None:
        """Waits until the next item may be made."""
        if not self._ends:
            self._get_credit()
            self._begun = time.perf_counter()

    def add(self, item: Any) -> None:
        """Sends an item, now or soon with later ones; raises an OSError if the main process has hung up."""
        with self._lock:
            self._get_credit()
            end, size = self._packer.pack(item)
            self._ends.append(end)
            late = time.perf_counter() - self._begun >= LINGER
            if late or size >= MOST_BYTES or len(self._ends) >= MOST_ITEMS:
                self._send()
            elif len(self._ends) == 1:
                self._has_items.set()

    def finish(self) -> None:
        """Sends the remaining items and the end of the stream."""
        with self._lock:
            self._get_credit()
            self._send(is_last=True)

    def _get_credit(self) -> None:
        if not self._has_credit:
            if not self._credits.acquire(False):
                with self._tally.blocking():
                    self._credits.acquire()
            self._has_credit = True

    def _send(self, *, is_last: bool = False) -> None:
        ends, self._ends = self._ends, []
        self._has_items.clear()
        body, outside = self._packer.take()
        large = [memoryview(body)] if len(body) >= LARGE else []
        places, segments = self._segments.store([*large, *outside])
        # Plain tuples, since the first name of a class in a pickle is as slow to load as the rest of an envelope.
        pieces: list[Any] = [] if large else [body]
        pieces += [tuple(place) if isinstance(place, Span) else pickle.PickleBuffer(place) for place in places]
        new = [segment for segment in segments if segment.descriptor >= 0]
        used, untold = [segment.number for segment in segments], [segment.number for segment in new]
        envelope = Envelope(self._turn, is_last, ends, pieces, used, untold, self._facts())
        self._connection.send_bytes(pickle.dumps(tuple(envelope), pickle.HIGHEST_PROTOCOL))
        if new:
            with open_channel(self._connection) as channel:
                socket.send_fds(channel, [b"d"], [segment.descriptor for segment in new])
            for segment in new:
                segment.close_descriptor()
        self._has_credit = False

    def _send_late(self) -> None:
        while True:
            self._has_items.wait()
            time.sleep(PATIENCE)
            with self._lock:
                if self._ends and time.perf_counter() - self._begun >= PATIENCE:
                    try:
                        self._send()
                    except OSError:  # the main process has hung up; the other thread will notice too
                        return


class Message:
    """The items of one message, each unpacked when it is taken; see `Envelope`."""

    def __init__(self, envelope: Envelope, segments: Mapping[int, memoryview]) -> None:
        self.turn, self.is_last, self.facts = envelope.turn, envelope.is_last, envelope.facts
        self._ends = envelope.ends
        self._taken = 0
        body, *outside = [
            segments[piece[0]][piece[1] : piece[2]] if type(piece) is tuple else piece for piece in envelope.pieces
        ]
        self._body, self._outside = memoryview(body), iter(outside)

    @property
    def is_empty(self) -> bool:
        """Whether all items have been taken."""
        return self._taken == len(self._ends)

    def take(self) -> Any:
        """Returns the next item; it counts as taken even if unpickling raises."""
        start = self._ends[self._taken - 1] if self._taken else 0
        data = self._body[start : self._ends[self._taken]]
        self._taken += 1
        # One iterator serves all items: each pickle takes as many large buffers from it as it had when it was packed.
        outside = self._outside
        if self.is_empty:  # from now on only the items hold the shared memory
            self._body, self._outside = memoryview(b""), iter(())
        return pickle.loads(data, buffers=outside)  # writable, as parts of the item

    def discard(self) -> None:
        """Drops the remaining items, by taking them: tensors that torch pickled hold files open until then."""
        while not self.is_empty:
            with suppress(Exception):
                self.take()


class Receiver:
    """The main process's end of the connection to a worker; `sentinel` is the process's."""

    def __init__(self, connection: Connection, sentinel: int, credits: Any, limits: Limits) -> None:
        self._connection = connection
        self._either = select.poll()  # kept, since multiprocessing's wait() makes a new one each time
        for descriptor in (connection.fileno(), sentinel):
            self._either.register(descriptor, select.POLLIN)
        self._credits = credits
        self._segments = SegmentTable(limits)
        self._turn = 0
        # Whether every message that started to arrive was read and noted completely. It stays False after an exception
        # in between, such as Ctrl-C: the rest of the connection's data cannot be decoded then.
        self.is_settled = True

    def receive(self, timeout: float) -> Message | None:
        """Returns the next message, or None after `timeout` seconds; the caller then sets `is_settled`."""
        ready = dict(self._either.poll(math.ceil(timeout * 1000)))
        if not ready:
            return None
        if not ready.get(self._connection.fileno(), 0) & select.POLLIN and not self._connection.poll():
            raise EOFError
        self.is_settled = False
        envelope = Envelope(*pickle.loads(self._connection.recv_bytes()))
        self._credits.release()
        if envelope.turn != self._turn:
            self._turn = envelope.turn
            self._segments.trim()
        self._receive_segments(envelope.new)
        return Message(envelope, {number: self._segments.lease(number) for number in envelope.segments})

    def _receive_segments(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        with open_channel(self._connection) as channel:
            _, descriptors, flags, _ = socket.recv_fds(channel, 1, len(numbers))
        if len(descriptors) == len(numbers):
            for number, descriptor in zip(numbers, descriptors, strict=True):
                self._segments.add(number, descriptor)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "too many files are open to receive shared memory: raise the limit (ulimit -n)")
        raise EOFError
