"""Which errors of Ray mean that an actor was lost, and which ones another actor would meet too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_ID = re.compile(r"\b[0-9a-f-]{12,}\b")
_LONGEST = 400
_NEVER_RAN = "never ran"  # in Ray's words


class ActorPlace(NamedTuple):
    """Where an actor runs."""

    node: str  # its id
    address: str
    process: int
    stacks: int = -1  # its descriptor of the file for its stacks

    def __str__(self) -> str:
        return f"node {self.address} ({self.node[:12]}), pid {self.process}"


class LostActorError(RuntimeError):
    """An actor has ended or cannot be reached; `place` is where it ran, None if it had not begun."""

    def __init__(self, cause: str, place: ActorPlace | None) -> None:
        super().__init__(cause)
        self.place = place

    @property
    def never_ran(self) -> bool:
        """Whether it was placed on a node that had gone: for some seconds, the cluster does not know that."""
        return self.place is None and _NEVER_RAN in str(self)


def lost(ray: Any, error: Exception, place: ActorPlace | None, worker: str) -> LostActorError:
    """Makes the error for a lost actor; raises a RuntimeError if another actor would fail too."""
    if is_lasting(ray, error):
        raise RuntimeError(
            f"{worker} cannot run on the cluster: {error}\nEach node needs the same versions of Python and of the "
            "packages that the graph uses, torchdata_wds among them; runtime_env in actor_options can bring them"
        ) from error
    return LostActorError(" ".join(str(error).split()), place)


def shortened(text: str) -> str:
    """Returns the beginning of what Ray says, which may be pages, without a period."""
    text = text.rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def earlier(causes: Iterable[str]) -> str:
    """Returns the end of a message that says why actors were lost before; of causes that differ in ids only, one."""
    kinds = {_ID.sub("", cause): cause for cause in causes}
    return "".join(f"; before that: {cause}" for cause in kinds.values())


def is_lasting(ray: Any, error: Exception) -> bool:
    """Returns whether an actor or a task would meet an error of Ray again, wherever it runs."""
    errors = ray.exceptions
    # Everything else is a process or a node that has ended, an object that was on it, or a broken connection.
    lasting = (
        errors.RayTaskError,
        errors.RuntimeEnvSetupError,
        errors.ActorUnschedulableError,
        errors.TaskUnschedulableError,
    )
    return isinstance(error, lasting) or bool(getattr(error, "actor_init_failed", False))
