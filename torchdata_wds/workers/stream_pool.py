"""What all pools of workers share: the items of their streams in turn, and what is known about each stream."""

from __future__ import annotations

import copy
import os
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.resume_facts import Facts
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.pipes.starvation import most_empty_passes
from torchdata_wds.process_place import Place
from torchdata_wds.workers.processes.messages import Message
from torchdata_wds.workers.processes.worker import Failure, Order
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.ordered import Gap
from torchdata_wds.workers.stats.figures import At
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot
from torchdata_wds.workers.stats.stalls.watch import StallWatch
from torchdata_wds.workers.stats.stalls.worker_states import States
from torchdata_wds.workers.stats.tracing.epoch_trace import EpochTrace

_READY = 0.001  # a message that takes fewer seconds was there
END: Final = object()  # marks the end of a worker's stream


class Board(Protocol):
    """Holds the number of the current order, by which late messages and waiting threads are recognized."""

    turn: int


class StreamLink:
    """The connection to worker number `number` of `workers`, which sends messages of its items."""

    def __init__(self, number: int, workers: int) -> None:
        self._number = number
        self._workers = workers
        self._message: Message | None = None
        self._turn = 0
        self._keeps_facts = False
        self.facts = Facts()
        self.has_reported = False  # whether the worker has reported anything, so that it has begun its stream
        self.first_order: Order | None = None
        # How often a message was asked for, how often one was there, and the seconds of all waits.
        self.asked, self.found_ready, self.awaited = 0, 0, 0.0

    def count_on(self, earlier: StreamLink) -> None:
        """Continues the counts of a link whose worker was lost."""
        self.asked, self.found_ready, self.awaited = earlier.asked, earlier.found_ready, earlier.awaited

    def snapshot(self) -> Snapshot | None:
        """Returns what the worker has done, as far as it has told."""
        return None

    @property
    def at(self) -> At | None:
        """What the worker is at, as far as it has told."""
        snapshot = self.snapshot()
        return None if snapshot is None or snapshot.at is None else At(*snapshot.at)

    @abstractmethod
    def _next_message(self, timeout: float) -> Message | None:
        """Returns the worker's next message, or None after `timeout` seconds."""

    def _note_order(self, turn: int, facts: Facts, *, keeps_facts: bool) -> None:
        """Notes which order the next messages answer; with `keeps_facts`, `facts` still collects the last one's."""
        self._drop_message()
        self._turn = turn
        self.facts = facts
        self._keeps_facts = keeps_facts

    def wait_for_facts(self, watch: StallWatch) -> None:
        """Waits until the graph has reported where the epoch began, or has ended without beginning one."""
        while not self.facts.passes and not self._has_ended:
            if self._receive(watch).turn != self._turn:
                self.facts.passes.clear()  # those of the previous epoch

    @property
    def is_empty(self) -> bool:
        """Whether the next item comes with another message."""
        return self._message is None or self._message.is_empty

    @property
    def _has_ended(self) -> bool:
        """Whether all messages of the current order have come."""
        message = self._message
        return message is not None and message.turn == self._turn and message.is_last

    def take(self, turn: int, watch: StallWatch) -> Any:
        """Returns the next item of an order, or `END`; raises a RuntimeError if the worker died or is too slow."""
        while self._message is None or self._message.turn != turn or self._message.is_empty:
            if self._message is not None and self._message.turn == turn and self._message.is_last:
                return END
            self._receive(watch)
        return self._message.take()

    def _receive(self, watch: StallWatch) -> Message:
        """Replaces the current message by the next one, and notes what the graph reported in it."""
        self._drop_message()
        began = perf_counter()
        message = watch.wait(self._number, self._next_message)
        waited = perf_counter() - began
        self.asked += 1
        self.found_ready += waited < _READY
        self.awaited += waited
        return self._note(message)

    def _note(self, message: Message) -> Message:
        if message.facts and (self._keeps_facts or message.turn == self._turn):
            self.facts.add(message.facts)
        self.has_reported = self.has_reported or bool(message.facts)
        self._message = message
        return message

    def _drop_message(self) -> None:
        message, self._message = self._message, None
        if message is not None:
            message.discard()


class PoolOptions(NamedTuple):
    """What every pool is told: this rank's place, the number of its workers, and how they run ahead."""

    place: Place
    num_workers: int
    prefetch_factor: int
    timeout: float
    stall_after: float
    trace: EpochTrace | None = None


class StreamPool(WdsPipe[Any]):
    """Replaces, in the main process, the stages that its workers run; yields their items, epoch after epoch.

    A pool orders the streams of its workers (`_order_streams`), and has a link to each of them. `states` returns what
    its workers are at.
    """

    _links: Sequence[StreamLink] = ()

    def __init__(self, options: PoolOptions, board: Board, states: States = list) -> None:
        self.place = options.place  # of the rank
        self.streams = Streams(options.num_workers)  # the positions of the workers' streams
        self.was_interrupted = False  # whether Ctrl-C ended this epoch during a wait for an item
        self.has_cycled = False  # whether streams that run across epochs were asked for several passes in one of them
        self._num_workers = options.num_workers
        self._prefetch_factor = options.prefetch_factor
        self._trace = options.trace
        times = {"timeout": options.timeout, "stall_after": options.stall_after}
        self._watch = StallWatch(options.place, options.num_workers, states=states, **times)
        self._board = board
        self._owner = os.getpid()
        # Stages of the main process may read from a thread (prefetch, fullsync) that outlives an interrupted epoch.
        self._lock = threading.RLock()
        self._seeds = self._order_seeds = (0, 0)
        self._stream_seeds: Seeds | None = None
        self._pass = self._empty = 0
        self._is_fresh = False

    @property
    def links(self) -> Sequence[StreamLink]:
        """The connections to the workers."""
        return self._links

    @property
    def waited(self) -> float:
        """The seconds of a wait for a message that goes on, once it is long."""
        return self._watch.waited

    def __getstate__(self) -> dict[str, Any]:
        return {}  # for graph traversal: no pipe is above, and a pool is never sent to another process

    @abstractmethod
    def _order_streams(self, points: list[Any], streams: Streams) -> None:
        """Orders a stream of each worker, from its point on, in place of any earlier one."""

    @abstractmethod
    def _take(self, number: int, turn: int) -> Any:
        """Returns the next item of a worker, or `END`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers, within seconds even if one is stuck; idempotent."""

    def begin(self, seeds: Seeds, streams: Streams) -> None:
        """Starts an epoch with the seed of all ranks and this rank's own; workers start making items at once."""
        self._seeds = seeds
        self._pass = self._empty = 0
        self._start(seeds, streams)
        self._is_fresh = True

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, so that the turn is taken now, not at the first item. Another call in the same epoch (by
        # ``cycle``) starts a new pass in a new order.
        if not self._is_fresh:
            self._pass += 1
            self._empty = 0 if self.streams.taken else self._empty + 1
            if self._empty >= most_empty_passes(1):
                raise ShardListError(
                    f"the workers yielded nothing in {self._empty} passes in a row, and the main process keeps "
                    "starting new ones. Check that the shards have samples, what filters leave, and what handlers skip"
                )
            shared, local = self._seeds
            self.has_cycled = self.has_cycled or self.streams.continues
            streams = Streams(self._num_workers)
            streams.epoch = self.streams.epoch
            for before, facts in zip(self.streams.facts, streams.facts, strict=True):
                facts.skips = before.skips  # they count for the whole epoch
            self._start((mix(shared, "pass", self._pass), mix(local, "pass", self._pass)), streams)
        self._is_fresh = False
        return self._items(self._board.turn, self.streams)

    def _order_for(self, number: int, point: Any, streams: Streams) -> Order:
        """Returns the order of a worker's stream, from its point on."""
        link = self._links[number]
        folder = None if self._trace is None else self._trace.folder
        order = Order(self._board.turn, self._order_seeds, point, streams.epoch, trace=folder)
        if not streams.continues or link.has_reported:
            return order
        if point is not None or link.first_order is None:
            link.first_order = copy.deepcopy(order)  # what is known about a stream changes
            return order
        return order._replace(first=link.first_order)

    def wait_for_facts(self) -> None:
        """Waits until every worker has reported where its epoch began."""
        self._check_owner()
        with self._lock:
            for number in range(len(self._links)):
                self._wait_for_facts(number)

    def _wait_for_facts(self, number: int) -> None:
        self._links[number].wait_for_facts(self._watch)

    def _check_owner(self) -> None:
        """Raises in a forked process, which would take items away from the pool's owner."""
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this loader belongs to process {self._owner}, from which this process was forked: iterating it here "
                "would take items away there. Make a separate loader in each process"
            )

    def _start(self, seeds: Seeds, streams: Streams) -> None:
        self._check_owner()
        # A turn is the number of one order. Raising it first makes workers drop the old order, and a thread that holds
        # the lock while it waits for an old item give up. Messages carry their turn, so late ones are recognized: if an
        # epoch left early was turn 5, items of turn 5 that arrive during turn 6 are dropped.
        self._board.turn += 1
        with self._lock:
            self._order_seeds = seeds
            points = streams.points()
            self._stream_seeds = self._stream_seeds or (points[0].stream_seeds if points[0] else seeds)
            self._order_streams(points, streams)
            self.streams = streams
            self.was_interrupted = False

    def _items(self, turn: int, streams: Streams) -> Iterator[Any]:
        # One item each in rotation, waiting for a slow worker rather than taking what is ready: so the order of items
        # depends only on seeds and the number of workers. A worker that has ended leaves the rotation.
        turns = deque(streams.turns.order)
        try:
            while turns:
                self._check_owner()
                with self._lock:
                    if turn != self._board.turn:
                        return
                    item = self._take(turns[0], turn)
                    if item is END:
                        streams.turns.note_end(streams.taken, turns.popleft())
                    elif type(item) is not Failure:
                        streams.taken += 1
                        if type(item) is Gap:
                            streams.note_gap()
                if type(item) is Failure:
                    item.reraise()
                if item is not END:
                    if type(item) is not Gap:
                        yield item
                    turns.rotate(-1)
        except KeyboardInterrupt:
            self.was_interrupted = True
            raise
