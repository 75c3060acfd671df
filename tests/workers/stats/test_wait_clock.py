"""The clock of the training loop's waits."""

import time
from collections.abc import Iterator

import pytest

from torchdata_wds.workers.stats import wait_clock
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


class CountingClock(WaitClock):
    measured = 0

    def note(self, taken: int) -> None:
        self.measured += 1
        super().note(taken)


@pytest.mark.parametrize(("each", "least", "most"), [(0.0011, 1.0, 1.0), (0.0003, 0.15, 0.5), (0.00001, 0.001, 0.01)])
def test_all_waits_are_measured_when_an_item_takes_a_millisecond(
    each: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none is missed where items come in bursts; of quicker items, those measured stand for all."""
    now, count = 100.0, 5000
    monkeypatch.setattr(wait_clock, "perf_counter", lambda: now)
    clock = CountingClock()

    def items() -> Iterator[int]:
        nonlocal now
        for number in range(count):
            now += each / 2
            yield number

    for _ in MeasuredItems(items(), clock):
        now += each / 2  # the training step
    assert least <= clock.measured / count <= most
    assert clock.waited() == pytest.approx(count * each / 2, rel=0.2)
