"""Runs inside an actor of a Ray cluster: makes the items of one worker's stream, and sends them in messages."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from itertools import count
from math import inf
from types import FunctionType
from typing import Any

import ray
import ray.util
import torch

from torchdata_wds.handlers import said
from torchdata_wds.pipes.samples.collate import stack_in
from torchdata_wds.workers.processes.messages import LARGE, PROTOCOL, Envelope, Packer, reduce_tensor
from torchdata_wds.workers.processes.shared_memory import Limits, SegmentPool
from torchdata_wds.workers.processes.worker import Failure, Order, WorkerGraph, unsent
from torchdata_wds.workers.ray.shared_indexes import IndexReceiver

#: A message is sent once it has this many items or bytes, or this many seconds after its first item was started. It
#: takes 1.2 ms of CPU time if Ray sends it without the object store, up to 100 KB, and 3.8 ms with it, up to 1 MB and
#: more: ten messages of 100 KB cost three times as much as one of 1 MB.
MOST_ITEMS = 4096
MOST_BYTES = 1 << 20
LINGER = 0.025
_SEGMENTS = 8  # how many batches' memory is kept to be used again


_cloudpickle: Any = ray.cloudpickle  # without types
_util: Any = ray.util


class _ItemPickler(_cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles what the graph yields by value, also objects whose class is defined in ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        found = reduce_tensor(value)
        # Ray's own answer takes longer than all the rest; only what cannot be imported needs it.
        if found is NotImplemented and isinstance(value, (type, FunctionType)) and not _is_importable(value):
            return super().reducer_override(value)
        return found


def _is_importable(value: Any) -> bool:
    return value.__module__ != "__main__" and "<" not in value.__qualname__


def _item_pickler(file: io.BytesIO, keep_inside: Any) -> Any:
    return _ItemPickler(file, protocol=PROTOCOL, buffer_callback=keep_inside)


class StreamActor:
    """Worker number `number` of `workers`, which runs at most `ahead` messages ahead."""

    def __init__(self, number: int, workers: int, ahead: int) -> None:
        self._number = number
        self._workers = workers
        self._graph: WorkerGraph | None = None
        # What the graph reported in the last messages, which may not arrive: with the number of each in its order.
        self._reported: deque[tuple[int, list[Any]]] = deque(maxlen=ahead + 2)
        self._indexes = IndexReceiver()
        torch.set_num_threads(1)  # as in processes
        # Ray copies batches into its store, so that their own memory can be used again.
        stack_in(SegmentPool(Limits(_SEGMENTS, _SEGMENTS)).lend)
        Failure.dumps = _cloudpickle.dumps

    def place(self) -> tuple[str, str, int]:
        """Returns where this actor runs: the node's id and address, and the process."""
        node = ray.get_runtime_context().get_node_id()
        return node, _util.get_node_ip_address(), os.getpid()

    def messages(self, graph: Any, order: Any, received: int | None) -> Generator[tuple[Any, ...], None, None]:
        """Yields the messages that answer an order; both come as `Sent` by an `IndexSender`.

        `received` is how many of those that answered the last order have arrived; None if that does not matter.
        """
        if self._graph is None:
            _, told, functions, datapipe = self._indexes.unpack(graph)
            said.update(told)
            self._graph = WorkerGraph(datapipe, functions)
        yield from self._answer(self._graph, self._indexes.unpack(order), received)

    def _answer(self, graph: WorkerGraph, order: Order, received: int | None) -> Generator[tuple[Any, ...], None, None]:
        graph.prepare(order, self._number, self._workers)
        first = inf if received is None else received
        missed = [fact for number, facts in self._reported if number >= first for fact in facts]
        self._reported.clear()
        packer = Packer(_item_pickler)
        ends: list[int] = []
        numbers = count()

        def message(*, is_last: bool = False) -> tuple[Any, ...]:
            body, outside = packer.take()
            large = len(body) >= LARGE
            pieces = [pickle.PickleBuffer(body) if large else body, *map(pickle.PickleBuffer, outside)]
            facts = [*missed, *graph.facts()]
            missed.clear()
            self._reported.append((next(numbers), facts))
            sent = Envelope(order.turn, is_last, ends.copy(), pieces, [], [], facts)
            ends.clear()
            return tuple(sent)

        with closing(graph.items(order, self._number, self._workers)) as items:
            begun = -inf  # the first item is sent at once
            for item in items:
                is_unsent = False
                try:
                    end, size = packer.pack(item)
                except Exception as error:  # noqa: BLE001  # pickling may raise anything
                    end, size = packer.pack(unsent(item, error))
                    is_unsent = True
                ends.append(end)
                if is_unsent:
                    break
                if size >= MOST_BYTES or len(ends) >= MOST_ITEMS or time.perf_counter() - begun >= LINGER:
                    yield message()
                    begun = time.perf_counter()
        yield message(is_last=True)

    def close(self) -> None:
        """Ends the commands from which shards are read."""
        storage = sys.modules.get("torchdata_wds.storage")
        if storage is not None:
            storage.kill_commands()
