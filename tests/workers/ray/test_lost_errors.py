"""What Ray says when an actor does not answer: lost, and another one takes its place; or another one would fail too."""

import re
import time
from typing import Any
from unittest.mock import Mock

import pytest

from torchdata_wds.workers.ray.actor_link import ActorLink
from torchdata_wds.workers.ray.losses import ActorPlace, LostActorError, earlier, lost

ray: Any = pytest.importorskip("ray")
errors = ray.exceptions

PLACE = ActorPlace("0123456789abcdef", "192.0.2.2", 77)


@pytest.mark.parametrize(
    "error",
    [
        errors.ActorDiedError(),
        errors.ActorUnavailableError("RPC error: Socket closed", None),
        errors.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.\nMemory on the node"),
        errors.NodeDiedError("gone"),
        errors.WorkerCrashedError(),
        errors.LocalRayletDiedError(),
        errors.ObjectLostError("ff", None, ""),
        errors.OwnerDiedError("ff", None, ""),
        errors.ObjectReconstructionFailedError("ff"),
        errors.TaskCancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_actor_is_lost_when_its_process_node_or_objects_are_gone(error: Exception) -> None:
    """It says so in one line, with Ray's words."""
    found = lost(ray, error, PLACE, "worker 1 of 2")
    assert isinstance(found, LostActorError)
    assert found.place == PLACE
    assert str(found) == re.sub(r"\s+", " ", str(error)).strip()
    assert not found.never_ran


@pytest.mark.parametrize(
    "error",
    [
        errors.RayActorError("0f", "cannot import the graph", actor_init_failed=True),
        errors.RuntimeEnvSetupError("no such package"),
        errors.ActorUnschedulableError("the node does not exist any more"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_is_raised_when_another_actor_would_meet_it_too(error: Exception) -> None:
    """It names the worker and the cause."""
    with pytest.raises(RuntimeError, match=rf"worker 1 of 2 cannot run on the cluster: .*{error}") as raised:
        lost(ray, error, None, "worker 1 of 2")
    assert raised.value.__cause__ is error


def test_actor_that_never_ran_is_told_apart() -> None:
    """It was placed on a node of which the cluster did not know yet that it had gone."""
    error = errors.RayActorError("0f", "its node has died.\nThe actor never ran - it was cancelled")
    assert lost(ray, error, None, "worker 1 of 2").never_ran
    assert not lost(ray, error, PLACE, "worker 1 of 2").never_ran


def test_actors_that_never_run_are_replaced_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first at once; a cluster takes some seconds to notice that a node has gone."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    loss = LostActorError("The actor never ran", None)
    link = ActorLink(Mock(exceptions=Mock(RayError=errors.RayError)), 0, 1, 2, Mock(), "num_cpus=1", None)
    link.replace(LostActorError("its node has died", PLACE))
    for _ in range(20):
        assert not link.is_hopeless(loss, 1)
        link.replace(loss)
    assert link.replaced == 1
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert sum(pauses) > 40
    assert link.is_hopeless(loss, 1)
    link.replace(loss)
    assert link.replaced == 2


def test_earlier_causes_are_told_once_each() -> None:
    """Ray's ids differ from one to the next."""
    causes = [
        "actor 0ff27fcac7654c13e8f40bbe01000000 was killed",
        "no room",
        "actor 9c0bbe01000000ff27fcac76 was killed",
    ]
    assert earlier(causes) == "; before that: actor 9c0bbe01000000ff27fcac76 was killed; before that: no room"
    assert earlier([]) == ""
