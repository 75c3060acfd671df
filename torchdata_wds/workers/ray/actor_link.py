"""Controls one actor from the main process: starts it, orders streams, takes items and ends it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from torchdata_wds.pipes.resume_facts import Facts
from torchdata_wds.workers.processes.messages import Envelope, Message
from torchdata_wds.workers.processes.worker import Order
from torchdata_wds.workers.ray.losses import ActorPlace, LostActorError, lost
from torchdata_wds.workers.stream_pool import StreamLink

logger = logging.getLogger(__name__)
_SLOW_START = 30.0  # after how many seconds a warning says that the cluster has no room for an actor


class ActorLink(StreamLink):
    """Actor number `number` of `workers`, which may run `ahead` messages ahead of the main process.

    `start` starts an actor and returns its handle; `pack` returns an order as bytes.
    """

    def __init__(
        self,
        ray: Any,
        number: int,
        workers: int,
        ahead: int,
        start: Callable[[int], Any],
        pack: Callable[[Order], bytes],
    ) -> None:
        super().__init__(number, workers)
        self._ray = ray
        self._ahead = ahead
        self._start_actor = start
        self._pack = pack
        self._stream: Any = None  # references to the messages of the current order
        self._received = 0  # how many of them have arrived
        self.replaced = 0  # how often in a row, without an item in between
        self._start()

    def _start(self) -> None:
        self._actor = self._start_actor(self._number)
        self._place_found = self._actor.place.remote()
        self.place: ActorPlace | None = None  # known from its first message on

    def order(self, graph: Any, order: Order, facts: Facts, *, keeps_facts: bool) -> None:
        """Requests a stream in place of any earlier one; with `keeps_facts`, `facts` still collects that one's."""
        self._cancel()
        self._note_order(order.turn, facts, keeps_facts=keeps_facts)
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": self._ahead}
        # A stream that runs on reports again what was in messages that never arrived.
        received = self._received if keeps_facts else None
        self._stream = self._actor.messages.options(**options).remote(graph, self._pack(order), received)
        self._received = 0

    def replace(self) -> None:
        """Starts another actor in place of this one."""
        self.replaced += 1
        self.kill()
        self._start()

    def _next_message(self, timeout: float | None) -> Message | None:
        ray = self._ray
        try:
            if not self._wait(timeout):
                return None
            values = ray.get(next(self._stream))
            if self.place is None:
                self.place = ActorPlace(*ray.get(self._place_found))
        except StopIteration:
            raise LostActorError("its stream ended without a last message", self.place) from None
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error
        envelope = Envelope(*values)
        self._received += 1
        if envelope.ends:
            self.replaced = 0
        pieces = [_writable(piece) for piece in envelope.pieces]
        return Message(envelope._replace(pieces=pieces), {})

    def _wait(self, timeout: float | None) -> bool:
        """Waits for a message; returns whether it is there. Says so if the actor does not start."""
        if timeout is not None:
            return bool(self._ray.wait([self._stream], timeout=timeout, fetch_local=False)[0])
        if self.place is None and not self._ray.wait([self._place_found], timeout=_SLOW_START)[0]:
            logger.warning(
                "worker %d has waited %d s for its actor to start: the cluster may lack the resources that its "
                "actor_options ask for (`ray status` shows what is free). It goes on waiting",
                *(self._number, _SLOW_START),
            )
        return True

    def _lost(self, error: Exception) -> LostActorError:
        return lost(self._ray, error, self.place, f"worker {self._number} of {self._workers}")

    def is_on(self, place: ActorPlace | None) -> bool:
        """Returns whether this actor runs on the node of another one."""
        return self.place is not None and place is not None and self.place.node == place.node

    def _cancel(self) -> None:
        """Ends the stream after the item that the actor is making; nothing of it arrives any more."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(stream)

    def hang_up(self) -> Any:
        """Ends the stream, and asks the actor to end its commands; returns the reference of its answer."""
        self._drop_message()
        self._cancel()
        return self._actor.close.remote()

    def kill(self) -> None:
        """Ends the actor at once."""
        self._drop_message()
        self._stream = None
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)


def _writable(piece: Any) -> Any:
    """Returns a buffer of the object store as writable memory: nothing else refers to a message of a stream."""
    if isinstance(piece, bytes):
        return piece
    view = np.frombuffer(piece, np.uint8)
    if not view.size:
        return piece
    memory: Any = (ctypes.c_ubyte * view.size).from_address(view.ctypes.data)
    memory.owner = view
    return memory
