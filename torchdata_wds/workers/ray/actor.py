"""Runs inside an actor of a Ray cluster: makes the items of one worker's stream, and sends them in messages."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

import ray
import ray.util
import torch

from torchdata_wds.consumers import no_traversal
from torchdata_wds.handlers import said
from torchdata_wds.workers.processes.messages import LARGE, PROTOCOL, Envelope, Packer, reduce_tensor
from torchdata_wds.workers.processes.worker import Imports, Order, WorkerGraph, unsent

#: A message is sent once it has this many items or bytes, or this many seconds after its first item was started. It
#: costs more than one between processes; up to 100 KB, Ray sends it without the object store.
MOST_ITEMS = 1024
MOST_BYTES = 90_000
LINGER = 0.01


_cloudpickle: Any = ray.cloudpickle  # without types
_util: Any = ray.util


class _ItemPickler(_cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles what the graph yields by value, also objects whose class is defined in ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        found = reduce_tensor(value)
        return super().reducer_override(value) if found is NotImplemented else found


def _item_pickler(file: io.BytesIO, keep_inside: Any) -> Any:
    return _ItemPickler(file, protocol=PROTOCOL, buffer_callback=keep_inside)


def pack_graph(graph: WorkerGraph) -> bytes:
    """Pickles a graph with its lambdas and functions of ``__main__``; raises a RuntimeError if that fails."""
    try:
        with no_traversal():
            data: bytes = _cloudpickle.dumps((Imports(), frozenset(said), graph.functions, graph.datapipe))
    except Exception as error:
        raise RuntimeError(
            f"the graph cannot be sent to the cluster: {type(error).__name__}: {error}. Stages may hold functions, "
            "lambdas and plain objects, but not open files, locks or connections: open those where they are used"
        ) from error
    return data


def _unpack_graph(data: bytes) -> WorkerGraph:
    _, told, functions, datapipe = pickle.loads(data)
    said.update(told)
    return WorkerGraph(datapipe, functions)


class StreamActor:
    """Worker number `number` of `workers`."""

    def __init__(self, number: int, workers: int) -> None:
        self._number = number
        self._workers = workers
        self._graph: WorkerGraph | None = None
        # What the graph reported in messages that may not have arrived, if their order was replaced.
        self._reported: list[list[Any]] = []
        torch.set_num_threads(1)  # as in processes

    def place(self) -> tuple[str, str, int]:
        """Returns where this actor runs: the node's id and address, and the process."""
        node = ray.get_runtime_context().get_node_id()
        return node, _util.get_node_ip_address(), os.getpid()

    def messages(self, graph: bytes, order: bytes, received: int | None) -> Generator[tuple[Any, ...], None, None]:
        """Yields the messages that answer an order.

        `received` is how many of those that answered the last order have arrived; None if that does not matter.
        """
        if self._graph is None:
            self._graph = _unpack_graph(graph)
        yield from self._answer(self._graph, pickle.loads(order), received)

    def _answer(self, graph: WorkerGraph, order: Order, received: int | None) -> Generator[tuple[Any, ...], None, None]:
        graph.prepare(order, self._number, self._workers)
        lost = [] if received is None else [fact for facts in self._reported[received:] for fact in facts]
        self._reported.clear()
        packer = Packer(_item_pickler)
        ends: list[int] = []
        begun = 0.0

        def message(*, is_last: bool = False) -> tuple[Any, ...]:
            body, outside = packer.take()
            large = len(body) >= LARGE
            pieces = [pickle.PickleBuffer(body) if large else body, *map(pickle.PickleBuffer, outside)]
            facts = [*lost, *graph.facts()]
            lost.clear()
            self._reported.append(facts)
            sent = Envelope(order.turn, is_last, ends.copy(), pieces, [], [], facts)
            ends.clear()
            return tuple(sent)

        with closing(graph.items(order, self._number, self._workers)) as items:
            begun = time.perf_counter()
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
