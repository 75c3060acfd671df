"""The clock of the training loop's waits."""

import time
from collections.abc import Iterator

import pytest

from torchdata_wds.workers.stats.wait_clock import MeasuredItems, WaitClock


def ends_with(error: BaseException | None) -> Iterator[int]:
    """One item, and a wait for the end."""
    yield 0
    time.sleep(0.002)
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [None, ValueError("no such field"), KeyboardInterrupt()])
def test_wait_ends_with_the_epoch_whatever_ends_it(error: BaseException | None) -> None:
    """Time that passes afterwards is neither a wait nor a training step."""
    clock = WaitClock()
    items = MeasuredItems(ends_with(error), clock)
    assert next(items) == 0
    with pytest.raises(StopIteration if error is None else type(error)):
        next(items)
    seconds, waited = clock.seconds(), clock.waited()
    time.sleep(0.01)
    assert (clock.seconds(), clock.waited()) == (seconds, waited)
    assert 0.002 <= waited <= seconds
