"""Controls one actor from the main process: starts it, orders streams, takes items and ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from torchdata_wds.pipes.resume_facts import Facts
from torchdata_wds.workers.processes.messages import Envelope, Message
from torchdata_wds.workers.processes.shared_memory import Limits
from torchdata_wds.workers.ray.actor_stacks import stacks_of
from torchdata_wds.workers.ray.losses import ActorPlace, LostActorError, lost, shortened
from torchdata_wds.workers.ray.node_memory import MappedMemory, Meeting
from torchdata_wds.workers.stats.figures import At
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot
from torchdata_wds.workers.stats.stalls.watch import StallWatch
from torchdata_wds.workers.stats.stalls.worker_states import WorkerState
from torchdata_wds.workers.stream_pool import StreamLink

logger = logging.getLogger(__name__)
_SLOW_START = 30.0  # after how many seconds a warning says that an actor has not started; again after twice as long
_INLINED = 100_000  # messages of fewer bytes do not use the object store
_MOST_UNPLACED = 20
# Seconds before a second actor in a row that never ran is replaced, and the most; doubled each time.
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
# How many seconds longer than `timeout` an actor may take to start, and then to import what the graph needs.
_MOST_START = _MOST_IMPORT = 120.0


class ActorLink(StreamLink):
    """Actor number `number` of `workers`, which may run `ahead` messages ahead of the main process.

    `start` starts an actor, not on a certain node if it can, and returns its handle; `needs` says what it asks of the
    cluster. At `meeting` it finds out whether it shares memory with this process.
    """

    def __init__(
        self,
        ray: Any,
        number: int,
        workers: int,
        ahead: int,
        start: Callable[[int, int, str | None], Any],
        needs: str,
        meeting: Meeting | None,
    ) -> None:
        super().__init__(number, workers)
        self._ray = ray
        self._ahead = ahead
        self._limits = Limits.of(workers, ahead)
        self._meeting = meeting
        self._start_actor = start
        self._needs = needs
        self.stream: Any = None  # references to the messages of the current order
        self.is_large = False  # whether the last message was in the object store
        self.replaced = 0  # how often in a row the actor was replaced, without an item in between
        self._snapshot: Snapshot | None = None
        self.causes: list[str] = []  # why actors were replaced since the last item
        self._unplaced = 0  # how many of its actors were placed on a node that had gone
        self._avoided: str | None = None  # the node on which the last actor was lost
        self._start()

    def _start(self) -> None:
        self._actor = self._start_actor(self._number, self._ahead, self._avoided)
        self._place_found = self._actor.place.remote()
        self.place: ActorPlace | None = None  # known once it has started
        self._graph_loaded: Any = None  # the answer to the graph
        self._graph_sent, self._has_loaded = 0.0, False
        self._memory = MappedMemory(self._limits)
        self._last = self._newest = -1  # the number of the last message, noted and not

    def order(self, turn: int, sent: tuple[Any, Any], facts: Facts, *, keeps_facts: bool) -> None:
        """Requests a stream in place of any earlier one; `sent` are the graph and the order.

        With `keeps_facts`, `facts` still collects those of the earlier one.
        """
        self._cancel()
        self._note_order(turn, facts, keeps_facts=keeps_facts)
        graph, order = sent
        if self._graph_loaded is None:
            self._graph_loaded = self._actor.load.remote(graph)
            self._graph_sent = time.monotonic()
        # The actor itself holds one message more.
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": max(self._ahead - 1, 1)}
        # A stream that runs on reports again what was in messages that never arrived.
        self.stream = self._actor.messages.options(**options).remote(order, self._last, keeps_facts, self._meeting)
        self._memory.trim()

    def is_hopeless(self, loss: LostActorError, most: int) -> bool:
        """Returns whether the actor was replaced `most` times in a row, and this loss counts too."""
        return self.replaced >= most and self._counts(loss)

    def _counts(self, loss: LostActorError) -> bool:
        return not loss.never_ran or self._unplaced >= _MOST_UNPLACED

    def replace(self, loss: LostActorError) -> None:
        """Starts another actor in place of this one, which counts unless that was placed on a node that had gone."""
        self.causes.append(shortened(str(loss)))
        self.replaced += self._counts(loss)
        if loss.never_ran and self._unplaced:  # the cluster takes up to 20 s to notice what has gone
            time.sleep(min(_PAUSE * 2.0 ** (self._unplaced - 1), _LONGEST_PAUSE))
        self._unplaced += loss.never_ran
        self._avoided = self.place.node if self.place else self._avoided
        self.has_reported, self.first_order = False, None
        self._drop_message()
        self.kill()
        self._start()

    def _receive(self, watch: StallWatch) -> Message:
        if not self._has_loaded and self.stream is not None:
            self._await_start(watch)
        return super()._receive(watch)

    def _note(self, message: Message) -> Message:
        super()._note(message)
        self._last = self._newest  # now that what it reports is noted
        return message

    def _next_message(self, timeout: float) -> Message | None:
        ray, stream = self._ray, self.stream
        if stream is None:  # another thread has ended this link
            raise LostActorError("it was ended", self.place)
        try:
            if not ray.wait([stream], timeout=timeout, fetch_local=False)[0]:
                return None
            self._newest, segments, values, news = ray.get(next(stream))
        except StopIteration:
            raise LostActorError("its stream ended without a last message", self.place) from None
        except ray.exceptions.RayError as error:
            raise self.lost(error) from error
        if news is not None:
            self._snapshot = Snapshot.from_plain(news)
        envelope = Envelope(*values)
        # Copied from Ray's store: an item may be written to, and outlive the connection to the cluster.
        pieces = [piece if isinstance(piece, (bytes, tuple)) else bytearray(piece) for piece in envelope.pieces]
        self.is_large = sum(len(piece) for piece in pieces if not isinstance(piece, tuple)) >= _INLINED
        message = Message(envelope._replace(pieces=pieces), self._lease(segments))
        if envelope.ends:
            self.replaced = self._unplaced = 0
            self.causes.clear()
        return message

    def snapshot(self) -> Snapshot | None:
        """Returns what the actor has told with its last messages."""
        return self._snapshot

    def _lease(self, segments: list[tuple[int, int, int]]) -> dict[int, memoryview]:
        place = self.place
        assert place is not None
        try:
            return self._memory.lease(place.process, segments)
        except OSError as error:  # too many files are open, or it has just ended
            self._meeting = None  # the actor that takes its place uses Ray's store
            raise LostActorError(f"its memory cannot be mapped: {error}", place) from error

    def _await_start(self, watch: StallWatch) -> None:
        """Waits until the actor has started and imported what the graph needs, which may take longer than an item."""
        most = watch.timeout or inf
        try:
            if self.place is None and self._is_there(self._place_found, most + _MOST_START, self._why_not_started):
                self.place = ActorPlace(*self._ray.get(self._place_found))
            if self.place is not None and self._is_there(self._graph_loaded, most + _MOST_IMPORT, self._why_not_loaded):
                self._ray.get(self._graph_loaded)
                self._has_loaded = True
        except self._ray.exceptions.RayError as error:
            raise self.lost(error) from error
        if not self._has_loaded:
            raise RuntimeError(watch.late(self._number))

    def _is_there(self, answer: Any, most: float, why: Callable[[float], str]) -> bool:
        """Returns whether an answer comes within `most` seconds; logs what `why` returns while it is late."""
        begun, pause = time.monotonic(), _SLOW_START
        while (waited := time.monotonic() - begun) < most:
            if self._ray.wait([answer], timeout=min(pause, most - waited))[0]:
                return True
            logger.warning("worker %d of %d %s", self._number, self._workers, why(time.monotonic() - begun))
            pause *= 2
        return False

    def _why_not_started(self, seconds: float) -> str:
        return (
            f"has waited {seconds:.0f} s for its actor to start: the cluster is still preparing it, or has no room for "
            f"what it asks for ({self._needs}); `ray status` shows what is free. It starts as soon as it can"
        )

    def _why_not_loaded(self, seconds: float) -> str:
        return f"has waited {seconds:.0f} s for its actor on {self.place} to import what the graph needs"

    @property
    def note(self) -> str:
        """Why the actor's stack is not wanted, or not to be had; "" if it is."""
        self._look_for_place()
        if self.place is None or self._graph_loaded is None:
            return "has not started"
        if self._is_loading():
            return ""
        if self._has_ended:
            return "has made all its items of this epoch"
        return "has items ready" if self.stream is not None and self.stream.next_ready() else ""

    @property
    def at(self) -> At | None:
        """What the actor is at, as far as it has told."""
        if self._is_loading():
            return At("imports what the graph needs", "", 0, time.monotonic() - self._graph_sent)
        return super().at

    def _is_loading(self) -> bool:
        return not (self._has_loaded or self._ray.wait([self._graph_loaded], timeout=0)[0])

    def _look_for_place(self) -> None:
        if self.place is None:
            with suppress(self._ray.exceptions.RayError):
                self.place = ActorPlace(*self._ray.get(self._place_found, timeout=0))

    def ask(self) -> Any:
        """Asks the actor where it runs; the answer is there at once if that is not reachable."""
        return self._actor.place.remote()

    def lost(self, error: Exception) -> LostActorError:
        """Returns the error for the lost actor; raises a RuntimeError if another one would fail too."""
        self._look_for_place()  # it may have begun, and been lost before its first message
        return lost(self._ray, error, self.place, f"worker {self._number} of {self._workers}")

    def is_on(self, place: ActorPlace | None) -> bool:
        """Returns whether this actor runs on the node of another one."""
        return self.place is not None and place is not None and self.place.node == place.node

    def _cancel(self) -> None:
        """Ends the stream after the item that the actor is making; nothing of it arrives any more."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(stream)

    def hang_up(self) -> Any:
        """Ends the stream, and asks the actor to end its commands; returns the reference of its answer."""
        self._cancel()
        return self._actor.close.remote()

    def kill(self) -> None:
        """Ends the actor at once; a thread that waits for its next message wakes up."""
        self.stream = None
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)


def states_of(ray: Any, links: Sequence[ActorLink], options: Mapping[str, Any]) -> list[WorkerState]:
    """Returns what each of some actors is at; `options` are theirs."""
    notes = [link.note for link in links]
    asked = [link.place for link, note in zip(links, notes, strict=True) if link.place is not None and not note]
    answers = iter(stacks_of(ray, asked, options))
    found = []
    for link, note in zip(links, notes, strict=True):
        dump, why = ("", note) if note else next(answers)
        process, where = (None, "") if link.place is None else (link.place.process, f" on node {link.place.address}")
        found.append(WorkerState(process, why, dump, None if note else link.at, where))
    return found
