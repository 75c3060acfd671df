"""An exception's way from a worker to the main process: its type, its attributes and where it came from."""

import threading
from multiprocessing.pool import RemoteTraceback
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children
from tests.kits.workers_kit import FRONTS, FRONTS_QUICK, loader_of
from torchdata_wds.errors import DecodingError, ShardFormatError, ShardOpenError
from torchdata_wds.workers.processes.worker import Failure


def one_of_each(kind: str) -> str:
    if kind == "format":
        raise ShardFormatError("cut off", shard="a.tar", member="b.jpg")
    if kind == "open":
        raise ShardOpenError("no such shard", shard="a.tar")
    if kind == "decode":
        raise DecodingError("bad jpeg", shard="a.tar", key="b", field="jpg") from ValueError("the cause")
    if kind == "key":
        return {}[kind]
    if kind == "picky":
        raise PickyError(1, 2)
    if kind == "unpicklable":
        raise LockedError("has a lock")
    return kind


class PickyError(Exception):
    """Pickles, but cannot be rebuilt from its args."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize(
    ("kind", "error", "attributes"),
    [
        ("format", ShardFormatError, {"shard": "a.tar", "member": "b.jpg", "key": None}),
        ("open", ShardOpenError, {"shard": "a.tar"}),
        ("picky", PickyError, {}),
        ("decode", DecodingError, {"shard": "a.tar", "key": "b", "field": "jpg"}),
        ("key", KeyError, {}),
    ],
)
def test_loader_keeps_type_and_attributes_when_a_worker_raises(
    kind: str, error: Any, attributes: Any, front: str
) -> None:
    """The exception comes as it was raised, with the worker's traceback as its cause; DataLoader2 is shut down."""
    loader = loader_of(IterableWrapper(["fine", kind]).sharding_filter().map(one_of_each), front=front)
    stream = iter(loader)
    assert next(stream) == "fine"
    with pytest.raises(error) as caught:
        next(stream)
    assert type(caught.value) is error
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = str(caught.value.__cause__)
    assert "In worker 1 (pid" in text
    assert "in one_of_each" in text
    assert ("ValueError: the cause" in text) == (kind == "decode")
    if front == "loader":
        assert next(iter(loader)) == "fine"
        loader.shutdown()
    assert not children()
    with pytest.raises(RuntimeError, match="shut down"):
        iter(loader)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(("kind", "name"), [("unpicklable", "LockedError")])
def test_loader_quotes_the_exception_when_it_cannot_travel(kind: str, name: str, front: str) -> None:
    """An exception that does not survive pickling becomes a RuntimeError with its name, text and traceback."""
    with (
        loader_of(IterableWrapper([kind]).sharding_filter().map(one_of_each), 1, front=front) as loader,
        pytest.raises(RuntimeError, match=rf"{name} in worker 0 \(pid \d+\)") as caught,
    ):
        list(loader)
    assert "in one_of_each" in str(caught.value.__cause__)


def test_failure_is_complete_when_it_is_rebuilt_twice() -> None:
    """Each reraise builds a new exception, so that tracebacks do not pile up."""
    failure = Failure(ShardFormatError("cut off", shard="a.tar"), "worker 0 (pid 1)")
    errors = []
    for _ in range(2):
        with pytest.raises(ShardFormatError) as caught:
            failure.reraise()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_failure_keeps_type_and_attributes_when_the_constructor_wants_more() -> None:
    """What pickle alone cannot rebuild comes back from its parts."""
    error = PickyError(1, 2)
    error.number = 3  # type: ignore[attr-defined]
    with pytest.raises(PickyError, match="1 and 2") as caught:
        Failure(error, "worker 0").reraise()
    assert vars(caught.value)["number"] == 3
