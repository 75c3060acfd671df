"""Actors that the next loader uses again, for tests of what they do once they run: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from torchdata_wds.workers.ray import actor_pool
from torchdata_wds.workers.ray.actor_link import ActorLink

_PATIENCE = 5  # seconds in which an actor must come to the end of what it does


def _tidied(actor: Any) -> bool:
    """Ends what an actor does; returns whether it does nothing any more. Runs in the actor."""
    groups = actor._groups
    if groups is None:
        return True
    groups.stop()
    groups._thread.join(_PATIENCE)
    return not groups._thread.is_alive()


def _renewed(actor: Any, *arguments: int) -> None:
    """Makes an actor as new. Runs in the actor."""
    actor.__init__(*arguments)


class ActorStock:
    """Actors that are alive and in no loader's use."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self._start: Any = actor_pool._start_actor
        self._kill: Any = ActorLink.kill

    def start(self, kind: Any, options: dict[str, Any], workers: int, number: int, ahead: int, *more: Any) -> Any:
        """Takes the place of the pool's own function."""
        if not self.actors:
            return self._start(kind, options, workers, number, ahead, *more)
        actor = self.actors.pop()
        actor.__ray_call__.remote(_renewed, number, workers, ahead)
        return actor

    def kill(self, link: Any) -> None:
        """Takes the place of the link's own method: keeps an actor that is well."""
        import ray

        actor, is_well = link._actor, False
        with suppress(ray.exceptions.RayError):
            is_well = ray.get(actor.__ray_call__.remote(_tidied), timeout=3 * _PATIENCE)
        if is_well:
            link._drop_message()
            link.stream = None
            self.actors.append(actor)
        else:
            self._kill(link)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lets pools take their actors from here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(actor_pool, "_start_actor", self.start)
            patch.setattr(ActorLink, "kill", lambda link: self.kill(link))
            yield
