"""Runs inside an actor of a Ray cluster: makes the items of one worker's stream, and sends them in messages."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import deque
from collections.abc import Generator
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
from torchdata_wds.workers.processes.worker import Failure, Order, WorkerGraph
from torchdata_wds.workers.ray.item_groups import ItemGroups
from torchdata_wds.workers.ray.shared_indexes import IndexReceiver

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
        self._groups: ItemGroups | None = None  # those of the last order
        torch.set_num_threads(1)  # as in processes
        # Ray copies batches into its store, so that their own memory can be used again.
        stack_in(SegmentPool(Limits(_SEGMENTS, _SEGMENTS)).lend)
        Failure.dumps = _cloudpickle.dumps

    def place(self) -> tuple[str, str, int]:
        """Returns where this actor runs: the node's id and address, and the process."""
        node = ray.get_runtime_context().get_node_id()
        return node, _util.get_node_ip_address(), os.getpid()

    def messages(self, graph: Any, order: Any, received: int | None) -> Generator[tuple[Any, ...], None, None]:
        """Yields the messages that answer an order.

        Both come as `Sent` by an `IndexSender`, or in a list as the reference to that. `received` is how many of those
        that answered the last order have arrived; None if that does not matter.
        """
        if self._graph is None:
            sent: Any = ray.get(graph[0]) if isinstance(graph, list) else graph
            _, told, functions, datapipe = self._indexes.unpack(sent)
            said.update(told)
            self._graph = WorkerGraph(datapipe, functions)
        yield from self._answer(self._graph, self._indexes.unpack(order), received)

    def _answer(self, graph: WorkerGraph, order: Order, received: int | None) -> Generator[tuple[Any, ...], None, None]:
        if self._groups is not None:
            self._groups.join()  # the graph runs one order at a time
        graph.prepare(order, self._number, self._workers)
        first = inf if received is None else received
        missed = [fact for number, facts in self._reported if number >= first for fact in facts]
        self._reported.clear()
        is_canceled = ray.get_runtime_context().is_canceled
        stream = graph.items(order, self._number, self._workers)
        self._groups = groups = ItemGroups(stream, Packer(_item_pickler))
        try:
            for number in count():
                group = groups.take(is_canceled)
                if group is None:
                    return
                body = pickle.PickleBuffer(group.body) if len(group.body) >= LARGE else group.body
                facts = [*missed, *graph.facts()]
                missed.clear()
                self._reported.append((number, facts))
                pieces = [body, *map(pickle.PickleBuffer, group.outside)]
                yield tuple(Envelope(order.turn, group.is_last, group.ends, pieces, [], [], facts))
                if group.is_last:
                    return
        finally:
            groups.stop()

    def close(self) -> None:
        """Ends the commands from which shards are read."""
        storage = sys.modules.get("torchdata_wds.storage")
        if storage is not None:
            storage.kill_commands()
