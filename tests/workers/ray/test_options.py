"""The options of a pool of actors, which are checked when it is made; none of these tests starts Ray."""

import copy
import pickle
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import RayPool, WdsLoader

PIPE = IterableWrapper(range(3)).sharding_filter()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"address": 5}, TypeError, "address must be a str"),
        ({"address": "ray://head:10001"}, ValueError, "Ray Client, which cannot stream"),
        ({"address": "head"}, ValueError, "expected 'host:port' or 'auto'"),
        ({"actor_options": ["num_cpus"]}, TypeError, "actor_options must be a dict of Ray's options, not list"),
        (
            {"actor_options": {"max_restarts": 1}},
            ValueError,
            "must not have 'max_restarts': the pool",
        ),
        ({"actor_options": {"lifetime": "detached"}}, ValueError, "must not have 'lifetime'"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts must be a whole number"),
    ],
)
def test_pool_is_refused_when_an_option_is_wrong(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """With what is expected."""
    with pytest.raises(error, match=message):
        RayPool(**options)


def test_loader_is_refused_when_its_workers_cannot_be_actors() -> None:
    """There must be at least one, which no start method applies to; and a pool makes them."""
    pool = RayPool("auto")
    with pytest.raises(ValueError, match="num_workers must be at least 1 with pool="):
        WdsLoader(PIPE, pool=pool)
    with pytest.raises(ValueError, match="multiprocessing_context must be None with pool="):
        WdsLoader(PIPE, 2, multiprocessing_context="fork", pool=pool)
    with pytest.raises(TypeError, match="pool must be a RayPool or None, not 'ray'"):
        WdsLoader(PIPE, 2, pool="ray")  # type: ignore[arg-type]


def test_copies_of_a_pool_share_its_count() -> None:
    """DataLoader2 runs a copy of its service."""
    pool = RayPool("auto", max_restarts=0)
    pickle.loads(pickle.dumps(pool)).note_restarts(2)
    copy.deepcopy(pool).note_restarts(1)
    assert pool.restarts == 3
    assert RayPool("auto").restarts == 0
