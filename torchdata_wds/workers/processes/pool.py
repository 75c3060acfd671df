"""The worker processes that run one part of a graph, as the main process sees them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch.multiprocessing

from torchdata_wds.consumers import Place
from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.pipes.pickling import check_main_functions
from torchdata_wds.pipes.resume_facts import Facts, PassBegun
from torchdata_wds.pipes.seeds import Seeds, mix
from torchdata_wds.pipes.starvation import most_empty_passes
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.link import END, WorkerLink
from torchdata_wds.workers.processes.worker import GRACE, Failure, NoticeBoard, Order, WorkerGraph
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.ordered import Gap
from torchdata_wds.workers.resume.stream import Point


class WorkerPool(WdsPipe[Any]):
    """Replaces, in the main process, the stages that its workers run; yields their items, epoch after epoch."""

    def __init__(
        self,
        graph: WorkerGraph,
        place: Place,
        num_workers: int,
        prefetch_factor: int,
        context: str | None,
        timeout: float,
    ) -> None:
        self.place = place  # of the rank
        self.streams = Streams(num_workers)  # the positions of the workers' streams
        self.was_interrupted = False  # whether Ctrl-C ended this epoch during a wait for an item
        self.has_cycled = False  # whether streams that run across epochs were asked for several passes in one of them
        self._graph = graph
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._context = torch.multiprocessing.get_context(context)
        self._timeout = timeout or None
        self._board = self._context.RawValue(NoticeBoard)
        self._owner = os.getpid()
        self._links: list[WorkerLink] = []
        # Stages of the main process may read from a thread (prefetch, fullsync) that outlives an interrupted epoch.
        self._lock = threading.RLock()
        # Runs when the pool is garbage collected too, and at exit before Python terminates the processes.
        self._end = Finalize(self, _end, (self._board, self._links, self._lock), exitpriority=1)
        self._seeds = self._order_seeds = (0, 0)
        self._stream_seeds: Seeds | None = None
        self._pass = self._empty = 0
        self._is_fresh = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # for graph traversal: no pipe is above, and a pool is never sent to another process

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

    def close(self) -> None:
        """Ends the workers, within seconds even if one is stuck; idempotent."""
        self._end()

    def wait_for_facts(self) -> None:
        """Waits until every worker has reported where its epoch began."""
        self._check_owner()
        with self._lock:
            for link in self._links:
                link.wait_for_facts(self._timeout)

    def _check_owner(self) -> None:
        """Raises in a forked process, which would take items away from the pool's owner."""
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this loader belongs to process {self._owner}, from which this process was forked: iterating it here "
                "would take items away there. Make a separate loader in each process"
            )

    def _start(self, seeds: Seeds, streams: Streams) -> None:
        self._check_owner()
        if not self._links and self._context.get_start_method() != "fork":
            check_main_functions(self._graph.datapipe, self._graph.functions[:2])
        # A turn is the number of one order. Raising it first makes workers drop the old order, and a thread that holds
        # the lock while it waits for an old item give up. Messages carry their turn, so late ones are recognized: if an
        # epoch left early was turn 5, items of turn 5 that arrive during turn 6 are dropped.
        self._board.turn += 1
        with self._lock:
            self._order_seeds = seeds
            points = streams.points()
            self._stream_seeds = self._stream_seeds or (points[0].stream_seeds if points[0] else seeds)
            for number in range(self._num_workers):
                if number < len(self._links) and self._links[number].is_lost:
                    points[number] = self._replace(number, streams)
                elif number == len(self._links):
                    with interrupts_held():
                        self._links.append(self._make_link(number))
            for number in range(self._num_workers):
                self._order(number, points[number], streams)
            if self.was_interrupted:
                # Ctrl-C may have come while a worker was stuck: one that does not take up the order soon is replaced.
                end = time.monotonic() + GRACE
                while (stuck := [link.is_stuck for link in self._links]) and any(stuck) and time.monotonic() <= end:
                    time.sleep(0.005)
                for number in range(self._num_workers):
                    if stuck[number]:
                        self._order(number, self._replace(number, streams), streams)
            self.streams = streams
            self.was_interrupted = False

    def _make_link(self, number: int) -> WorkerLink:
        return WorkerLink(self._context, self._graph, self._board, number, self._num_workers, self._prefetch_factor)

    def _order(self, number: int, point: Point | None, streams: Streams) -> None:
        link, order = self._links[number], Order(self._board.turn, self._order_seeds, point, streams.epoch)
        try:
            link.order(order, streams.facts[number], keeps_facts=streams.continues)
        except RuntimeError:
            if not link.never_began:
                raise
            self._order(number, self._replace(number, streams), streams)

    def _replace(self, number: int, streams: Streams) -> Point | None:
        """Replaces a worker that is unusable after Ctrl-C; returns where the new worker's stream resumes."""
        with interrupts_held():
            self._links[number].kill()
            self._links[number] = self._make_link(number)
        point = streams.points()[number]
        if streams.continues and point is None:
            # The old worker's position is lost with it: the passes of its stream start over.
            assert self._stream_seeds is not None
            streams.facts[number] = Facts([PassBegun(0, 0)])
            return Point(0, self._stream_seeds, Facts([PassBegun(0, 0)]), False)
        return point

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

    def _take(self, number: int, turn: int) -> Any:
        link = self._links[number]
        try:
            return link.take(turn, self._timeout)
        except RuntimeError:
            if turn != self._board.turn:  # closed, or another epoch began, in the meantime
                return END
            if not link.never_began:
                raise
        self._order(number, self._replace(number, self.streams), self.streams)
        return self._take(number, turn)


def _end(board: NoticeBoard, links: list[WorkerLink], lock: threading.RLock) -> None:
    board.turn += 1
    board.closing = True
    with interrupts_held():  # for a few seconds at most
        for link in links:
            link.hang_up()
        for link in links:
            link.join()
        with lock:  # released, since a thread waiting for an item has seen the connection end
            while links:
                links.pop().close()
