"""The worker processes that run one part of a graph, as the main process sees them."""

from __future__ import annotations

import threading
import time
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch.multiprocessing

from torchdata_wds.pipes.pickling import check_main_functions
from torchdata_wds.pipes.resume_facts import Facts, PassBegun
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.link import WorkerLink, states_of
from torchdata_wds.workers.processes.worker import GRACE, NoticeBoard, WorkerGraph
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.stream import Point
from torchdata_wds.workers.stream_pool import END, PoolOptions, StreamPool


class WorkerPool(StreamPool):
    """A pool of processes of this machine."""

    def __init__(self, graph: WorkerGraph, options: PoolOptions, context: str | None = None) -> None:
        self._context = torch.multiprocessing.get_context(context)
        board = self._context.RawValue(NoticeBoard)
        self._links: list[WorkerLink] = []
        super().__init__(options, board, partial(states_of, self._links))
        self._graph = graph
        self._board: NoticeBoard = board
        # Runs when the pool is garbage collected too, and at exit before Python terminates the processes.
        self._end = Finalize(self, _end, (self._board, self._links, self._lock), exitpriority=1)

    def close(self) -> None:
        """Ends the workers, within seconds even if one is stuck; idempotent."""
        self._end()

    def _order_streams(self, points: list[Any], streams: Streams) -> None:
        if not self._links and self._context.get_start_method() != "fork":
            check_main_functions(self._graph.datapipe, self._graph.functions[:2])
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

    def _make_link(self, number: int) -> WorkerLink:
        return WorkerLink(self._context, self._graph, self._board, number, self._num_workers, self._prefetch_factor)

    def _order(self, number: int, point: Point | None, streams: Streams) -> None:
        link, order = self._links[number], self._order_for(number, point, streams)
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
            lost, self._links[number] = self._links[number], self._make_link(number)
            self._links[number].count_on(lost)
        point = streams.points()[number]
        if streams.continues and point is None:
            # The old worker's position is lost with it: the passes of its stream start over.
            assert self._stream_seeds is not None
            streams.facts[number] = Facts([PassBegun(0, 0)])
            return Point(0, self._stream_seeds, Facts([PassBegun(0, 0)]), False)
        return point

    def _take(self, number: int, turn: int) -> Any:
        link = self._links[number]
        try:
            return link.take(turn, self._watch)
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
