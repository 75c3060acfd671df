"""The actors of a Ray cluster that run one part of a graph, as the main process sees them."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torchdata_wds.checks import checked_int
from torchdata_wds.handlers import said
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.messages import LARGE
from torchdata_wds.workers.processes.worker import GRACE, Imports, WorkerGraph
from torchdata_wds.workers.ray.actor_link import ActorLink, states_of
from torchdata_wds.workers.ray.cluster import Cluster, checked_address, import_ray
from torchdata_wds.workers.ray.losses import LostActorError, earlier, shortened
from torchdata_wds.workers.ray.node_memory import MeetingPoint
from torchdata_wds.workers.ray.placement import away_from
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.lost_streams import point_of
from torchdata_wds.workers.shared_copies import SharedByCopies
from torchdata_wds.workers.stream_pool import END, PoolOptions, StreamPool

logger = logging.getLogger(__name__)
_ANSWER = 0.3  # how many seconds an actor has to answer whether it is lost

#: The options of an actor that say what it needs.
_NEEDS = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector", "scheduling_strategy")

#: Options of an actor that the pool decides: with them, Ray would restart it by itself, or let it outlive its program.
_OWN_OPTIONS = {
    *("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups"),
    *("lifetime", "name", "namespace", "get_if_exists"),
}


class RayPool:
    """Runs a loader's workers as actors of a Ray cluster, in place of processes of this machine.

    Order, seeds, epochs and states are those of the same number of local workers: a state taken with one pool resumes
    with the other. An actor that is lost, with its node or alone, is replaced wherever there is room, and its stream
    continues at the first item that was not delivered: nothing is lost or repeated. A warning says so, and `restarts`
    counts it.

    The graph is sent by cloudpickle, with lambdas and functions of ``__main__``. Arrays and tensors of 64 KB or more
    share memory with an actor on the same node; those from other nodes come through Ray's object store. Each loader has
    its own actors, and each of its branches. They end with the loader, and with the program.

    Args:
        address: The cluster's address; ``"auto"`` for the one that runs on this machine (``ray start --head``); None
            for the one that the program is connected to, or else one that is started here and ended with the loader.
        actor_options: What Ray's ``.options()`` takes for an actor, such as ``num_cpus``, ``resources``,
            ``scheduling_strategy`` and ``runtime_env``. By default ``num_cpus`` is 1, and 0 in a cluster started here;
            the strategy is ``"SPREAD"``.
        max_restarts: How often in a row a worker's actor is replaced before it has delivered an item; after that, a
            RuntimeError names the node, the actor and the cause.

    Raises:
        ImportError: if Ray is not installed (``pip install 'torchdata-wds[ray]'``).
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or an option is one that the pool decides.

    Example:
        >>> from torchdata_wds import RayPool
        >>> pool = RayPool("auto", actor_options={"resources": {"data": 1}})
        >>> pool.restarts
        0
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        actor_options: Mapping[str, Any] | None = None,
        max_restarts: int = 3,
    ) -> None:
        import_ray()
        checked_address(address)
        if actor_options is not None and not isinstance(actor_options, Mapping):
            raise TypeError(f"actor_options must be a dict of Ray's options, not {type(actor_options).__name__}")
        if own := sorted(_OWN_OPTIONS.intersection(actor_options or ())):
            raise ValueError(f"actor_options must not have {own[0]!r}: the pool names and replaces its actors itself")
        self.address = address
        self.actor_options = dict(actor_options or {})
        self.max_restarts = checked_int("max_restarts", max_restarts, 0)
        self._counter = _Counter()

    @property
    def restarts(self) -> int:
        """How many actors were replaced since the pool was made."""
        return self._counter.count

    def __call__(self, graph: WorkerGraph, options: PoolOptions) -> ActorPool:
        """Makes the pool that runs a part of a graph."""
        return ActorPool(graph, options, self)

    def note_restarts(self, count: int) -> None:
        """Counts replaced actors."""
        self._counter.count += count


class _Counter(SharedByCopies):
    """Counts for the original of a `RayPool` what its copies do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0


class _Board:
    """The number of the current order; see `StreamPool`."""

    def __init__(self) -> None:
        self.turn = 0


class ActorPool(StreamPool):
    """A pool of actors."""

    def __init__(self, graph: WorkerGraph, options: PoolOptions, settings: RayPool) -> None:
        from torchdata_wds.workers.ray import actor, shared_indexes  # they import Ray

        self._links: list[ActorLink] = []
        super().__init__(options, _Board(), partial(states_of, import_ray(), self._links, settings.actor_options))
        self._ray = import_ray()
        self._part = graph.datapipe
        self._settings = settings
        self._class = actor.StreamActor
        self._contents = Imports(), frozenset(said), graph.functions, graph.datapipe
        self._sender = shared_indexes.IndexSender(self._ray.put)
        self._graph: Any = None  # as it is sent
        self._options: dict[str, Any] = {}  # of the actors
        self._cluster: Cluster | None = None
        self._held: dict[str, Any] = {}
        self._end = Finalize(self, _end, (self._board, self._links, self._held, self._lock), exitpriority=1)

    def close(self) -> None:
        """Ends the actors, and the cluster if it was started here; idempotent."""
        self._end()
        self._sender.clear()
        self._graph = None

    def _order_streams(self, points: list[Any], streams: Streams) -> None:
        if self._cluster is None:
            self._cluster = self._held["cluster"] = Cluster.join(self._settings.address)
            defaults = {"num_cpus": 0 if self._cluster.is_own else 1, "scheduling_strategy": "SPREAD"}
            self._options = {**defaults, **self._settings.actor_options, "max_restarts": 0, "max_task_retries": 0}
            self._held["meeting"] = MeetingPoint(self._ray.get_runtime_context().get_node_id())
        self._check_connected()
        if self._graph is None:
            self._graph = self._packed_graph()
        while len(self._links) < self._num_workers:
            with interrupts_held():
                self._links.append(self._make_link(len(self._links)))
        self._sender.drop_unused()
        for number, point in enumerate(points):
            self._order(number, point, streams)

    def _make_link(self, number: int) -> ActorLink:
        needs = ", ".join(f"{name}={self._options[name]!r}" for name in _NEEDS if name in self._options)
        # Not a method of the pool: the links are kept until it is garbage collected.
        start = partial(_start_actor, self._ray.remote(self._class), self._options, self._num_workers)
        arguments = (self._num_workers, self._prefetch_factor, start, needs, self._held["meeting"].meeting)
        return ActorLink(self._ray, number, *arguments)

    def _order(self, number: int, point: Any, streams: Streams) -> None:
        order = self._order_for(number, point, streams)
        sent = self._graph, self._sender.pack(order)
        self._links[number].order(order.turn, sent, streams.facts[number], keeps_facts=streams.continues)

    def _packed_graph(self) -> Any:
        """Returns the graph as it is sent with each order; one with a long list of shards, as a reference to it."""
        try:
            sent = self._sender.pack(self._contents)
            return [self._ray.put(sent)] if len(sent.data) > LARGE else sent
        except Exception as error:
            raise RuntimeError(
                f"the graph cannot be sent to the cluster: {type(error).__name__}: {error}. Stages may hold functions, "
                "lambdas and plain objects, but not open files, locks or connections: open those where they are used"
            ) from error

    def _check_connected(self) -> None:
        """Raises a RuntimeError after ``ray.shutdown()``: what belongs to an earlier connection would crash Ray."""
        if self._cluster is not None and not self._cluster.is_current():
            raise RuntimeError(
                "this loader's workers ended when the program ended its connection to the Ray cluster, by "
                "ray.shutdown(): make another loader"
            )

    def _take(self, number: int, turn: int) -> Any:
        link = self._links[number]
        if link.is_empty and turn == self._board.turn:
            self._check_connected()
        if link.is_empty:
            # The store of this node fetches what comes next from workers of other nodes, while this item is used.
            streams = [other.stream for other in self._links if other.is_large and other.stream is not None]
            if streams:
                self._ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=True)
        while True:
            try:
                return link.take(turn, self._watch)
            except LostActorError as loss:
                if turn != self._board.turn:  # closed, or another epoch began, in the meantime
                    return END
                self._replace(number, self.streams, loss)

    def _wait_for_facts(self, number: int) -> None:
        if not self._links[number].facts.passes:
            self._check_connected()
        try:
            super()._wait_for_facts(number)
        except LostActorError as loss:
            self._replace(number, self.streams, loss)
            self._wait_for_facts(number)

    def _replace(self, number: int, streams: Streams, loss: LostActorError) -> None:
        """Replaces a lost actor, and others on its node that are lost too."""
        lost = {number: loss, **self._lost_beside(number, loss)}
        names = ", ".join(map(str, lost))
        place = loss.place or "a node that it had not reached"
        most = self._settings.max_restarts
        if any(self._links[other].is_hopeless(reason, most) for other, reason in lost.items()):
            before = earlier(cause for other in lost for cause in self._links[other].causes)
            raise RuntimeError(
                f"worker {names} of {self._num_workers} was lost {most + 1} times in a row without an item in between, "
                f"the last time on {place}. Ray says: {str(loss).rstrip('.')}{before}"
            ) from loss
        logger.warning(
            "lost the %s on %s: %s. Others take their place, and their streams go on at the first item that was not "
            "delivered",
            f"actors of workers {names}" if len(lost) > 1 else f"actor of worker {names}",
            *(place, shortened(str(loss))),
        )
        for other, reason in lost.items():
            self._links[other].replace(reason)
        self._settings.note_restarts(len(lost))
        # Ray's own frames hold the error and what the lost stream had made ahead, in a cycle.
        for reason in lost.values():
            reason.__traceback__ = reason.__cause__ = reason.__context__ = None
        gc.collect()
        for other in lost:
            self._resume(other, streams)

    def _lost_beside(self, number: int, loss: LostActorError) -> dict[int, LostActorError]:
        """Finds the actors of the same node that are lost too: one by one, each would take the time of a start."""
        asked = {link.ask(): n for n, link in enumerate(self._links) if n != number and link.is_on(loss.place)}
        if not asked:
            return {}
        # One that lives is busy, and does not answer.
        answered, _ = self._ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER)
        found = {}
        for answer in answered:
            link = self._links[asked[answer]]
            try:
                self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                found[asked[answer]] = link.lost(error)
        return found

    def _resume(self, number: int, streams: Streams) -> None:
        """Orders what is left of a stream from a new actor."""
        assert self._stream_seeds is not None
        self._order(number, point_of(self._part, streams, number, self._stream_seeds), streams)


def _start_actor(
    actor: Any, options: dict[str, Any], workers: int, number: int, ahead: int, avoided: str | None
) -> Any:
    return actor.options(**away_from(options, avoided)).remote(number, workers, ahead)


def _end(board: _Board, links: list[ActorLink], held: dict[str, Any], lock: threading.RLock) -> None:
    board.turn += 1
    cluster, meeting = held.pop("cluster", None), held.pop("meeting", None)
    if cluster is None:
        return
    ray = import_ray()
    with interrupts_held():
        if cluster.is_current():
            answers = [link.hang_up() for link in links]
            ray.wait(answers, num_returns=len(answers), timeout=GRACE)
            for link in links:
                link.kill()
        with lock:  # released, since a thread waiting for an item has seen its actor end
            links.clear()
            cluster.close()
            if meeting is not None:
                meeting.close()
