"""Runs inside an actor of a Ray cluster: makes the items of one worker's stream, and sends them in messages."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import deque
from collections.abc import Generator
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import ray
import ray.util
import torch

from torchdata_wds.handlers import said
from torchdata_wds.pipes.samples.collate import stack_in
from torchdata_wds.workers.processes.messages import LARGE, PROTOCOL, Envelope, Packer, reduce_tensor
from torchdata_wds.workers.processes.shared_memory import Limits, Segment
from torchdata_wds.workers.processes.worker import Failure, Order, WorkerGraph
from torchdata_wds.workers.ray.item_groups import Group, ItemGroups
from torchdata_wds.workers.ray.node_memory import ActorMemory, Meeting, told
from torchdata_wds.workers.ray.shared_indexes import IndexReceiver
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot
from torchdata_wds.workers.stats.sampling.tally import Tally
from torchdata_wds.workers.stats.stalls.stack_file import StackFile

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


class _Sent(NamedTuple):
    """What may have to be done again, or undone, if a message does not arrive."""

    number: int  # larger than that of any earlier message
    facts: list[Any]
    segments: list[Segment]


class StreamActor:
    """Worker number `number` of `workers`, which runs at most `ahead` messages ahead."""

    def __init__(self, number: int, workers: int, ahead: int) -> None:
        self._number = number
        self._workers = workers
        self._graph: WorkerGraph | None = None
        self._stacks = StackFile()
        self._stacks.register()
        # The last messages, which may not arrive.
        self._sent: deque[_Sent] = deque(maxlen=ahead + 2)
        self._numbers = count()
        self._indexes = IndexReceiver()
        self._groups: ItemGroups | None = None  # those of the last order
        self._news: Snapshot | None = None  # what it has done, to be told with the next message
        self._tally = Tally(self._note_news)
        torch.set_num_threads(1)  # as in processes
        # The thread that makes items lets go of the interpreter for Ray's threads, which ask for it several times a
        # message: after 5 ms each, as by default, text takes a fifth longer.
        sys.setswitchinterval(0.0002)
        # Also if Ray copies batches into its store, their own memory can be used again.
        self._memory = ActorMemory(Limits.of(workers, ahead))
        stack_in(self._memory.lend)
        Failure.dumps = _cloudpickle.dumps

    def place(self) -> tuple[str, str, int, int]:
        """Returns where this actor runs: the parts of an `ActorPlace`."""
        node = ray.get_runtime_context().get_node_id()
        return node, _util.get_node_ip_address(), os.getpid(), self._stacks.descriptor

    def load(self, graph: Any) -> None:
        """Takes the graph: `Sent` by an `IndexSender`, or a list with the reference to that."""
        sent: Any = ray.get(graph[0]) if isinstance(graph, list) else graph
        _, was_said, functions, datapipe = self._indexes.unpack(sent)
        said.update(was_said)
        self._graph = WorkerGraph(datapipe, functions)

    def messages(
        self, order: Any, last: int, repeats: bool, meeting: Meeting | None
    ) -> Generator[tuple[Any, ...], None, None]:
        """Yields the messages that answer an order: the number of each, its segments, and the parts of an `Envelope`.

        The last part of each is a `Snapshot` as plain values, or None.

        The order is `Sent` by an `IndexSender`. `last` is the number of the last message that arrived; with `repeats`,
        what the graph reported in later ones is sent again.
        """
        assert self._graph is not None
        is_shared = meeting is not None and meeting.is_here(ray.get_runtime_context().get_node_id())
        missed = [sent for sent in self._sent if sent.number > last]
        self._sent.clear()
        yield from self._answer(self._graph, self._indexes.unpack(order), missed, repeats=repeats, is_shared=is_shared)

    def _answer(
        self, graph: WorkerGraph, order: Order, missed: list[_Sent], *, repeats: bool, is_shared: bool
    ) -> Generator[tuple[Any, ...], None, None]:
        if self._groups is not None:
            self._groups.join()  # the graph runs one order at a time
        graph.prepare(order, self._number, self._workers)
        self._memory.begin(sent.segments for sent in missed)
        facts = [fact for sent in missed for fact in sent.facts] if repeats else []
        is_canceled = ray.get_runtime_context().is_canceled
        stream = graph.items(order, self._number, self._workers)
        self._groups = groups = ItemGroups(stream, Packer(_item_pickler), self._tally)
        self._tally.trace(order.trace, self._number, self._workers)
        self._tally.begin(graph.end)
        try:
            while (group := groups.take(is_canceled)) is not None:
                pieces, segments = self._placed(group, is_shared=is_shared)
                sent = _Sent(next(self._numbers), [*facts, *graph.facts()], segments)
                facts = []
                self._sent.append(sent)
                if group.is_last:
                    self._tally.end()
                envelope = Envelope(order.turn, group.is_last, group.ends, pieces, [], [], sent.facts)
                yield sent.number, told(segments), tuple(envelope), self._take_news()
                if group.is_last:
                    return
        finally:
            groups.stop()
            self._tally.end()

    def _note_news(self, snapshot: Snapshot) -> None:
        self._news = snapshot

    def _take_news(self) -> tuple[Any, ...] | None:
        news, self._news = self._news, None
        return None if news is None else news.to_plain()

    def _placed(self, group: Group, *, is_shared: bool) -> tuple[list[Any], list[Segment]]:
        """Returns the pieces of an envelope, and the segments that hold some of them."""
        large = [memoryview(group.body)] if len(group.body) >= LARGE else []
        places: list[Any] = [*large, *group.outside]
        segments: list[Segment] = []
        if is_shared:
            places, segments = self._memory.store(places)
        pieces = [pickle.PickleBuffer(place) if isinstance(place, memoryview) else place for place in places]
        return pieces if large else [group.body, *pieces], segments

    def close(self) -> None:
        """Ends the commands from which shards are read."""
        storage = sys.modules.get("torchdata_wds.storage")
        if storage is not None:
            storage.kill_commands()
