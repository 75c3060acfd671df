"""An exception's way from a worker to the main process: its type, its attributes and where it came from."""

import pytest

from tests.kits.pool_suite.failures import PickyError
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.workers.processes.worker import Failure


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
