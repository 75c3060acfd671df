"""Pauses between attempts: how long, and when to give up."""

import re
import threading

import pytest

from torchdata_wds.storage.retrying import Patience, seconds_to_wait


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited, in no time."""
    waited: list[float] = []

    def wait(self: threading.Event, seconds: float) -> bool:
        waited.append(seconds)
        return self.is_set()

    monkeypatch.setattr(threading.Event, "wait", wait)
    return waited


def test_seconds_to_wait_grows_when_failures_go_on() -> None:
    """The first attempt follows at once; the others twice as late each time, within a bound, and never in step."""
    assert seconds_to_wait(1) == 0
    for failures, longest in ((2, 0.5), (3, 1), (5, 4), (8, 30), (9, 30), (1000, 30)):
        waits = {seconds_to_wait(failures) for _ in range(50)}
        assert all(longest / 2 <= wait <= longest for wait in waits)
        assert len(waits) > 1


def test_seconds_to_wait_is_what_the_server_asks_for_when_that_is_longer() -> None:
    """A little more than asked for, and never less."""
    assert all(7 <= seconds_to_wait(1, 7) <= 7.7 for _ in range(50))
    assert all(15 <= seconds_to_wait(20, 7) <= 30 for _ in range(50))


def test_patience_ends_when_as_many_attempts_bring_nothing(waits: list[float]) -> None:
    """One failure more than `retries`; something new lets it begin anew."""
    patience = Patience(2, "x.tar")
    assert [patience.endures("it broke") for _ in range(2)] == [True, True]
    patience.renew()
    assert [patience.endures("it broke") for _ in range(4)] == [True, True, False, False]
    assert len(waits) == 4


def test_patience_ends_at_once_when_there_are_no_retries(waits: list[float]) -> None:
    """retries=0 means one attempt."""
    assert not Patience(0, "x.tar").endures("it broke")
    assert not waits


def test_patience_ends_when_the_server_asks_for_too_long(waits: list[float]) -> None:
    """All pauses together have a bound, however many attempts are left."""
    patience = Patience(1000, "x.tar")
    count = 0
    while patience.endures("overloaded", 250):
        count += 1
    assert count == 2
    assert 500 <= sum(waits) <= 600


def test_patience_begins_to_wait_anew_when_something_new_came(waits: list[float]) -> None:
    """The bound is one of pauses without progress, not of all pauses."""
    patience = Patience(1000, "x.tar")
    for _ in range(5):
        assert patience.endures("overloaded", 250)
        patience.renew()
    assert sum(waits) > 1000


def test_patience_ends_when_it_is_interrupted(waits: list[float]) -> None:
    """Before a pause and within one; nothing renews it."""
    patience = Patience(8, "x.tar")
    assert patience.endures("it broke")
    patience.interrupted.set()
    patience.renew()
    assert not patience.endures("it broke")
    assert len(waits) == 1


def test_patience_ends_a_pause_when_another_thread_interrupts_it() -> None:
    """Whoever waits five minutes for a server need not do so for nobody."""
    patience = Patience(8, "x.tar")
    timer = threading.Timer(0.02, patience.interrupted.set)
    timer.start()
    assert not patience.endures("overloaded", 300)
    timer.join()


def test_patience_warns_when_the_pause_is_long(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits for the next sample is told why."""
    patience = Patience(8, "x.tar")
    with caplog.at_level("INFO"):
        patience.endures("it broke")
        patience.endures("the server answered 503", 100)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert re.search(r"shard x\.tar: the server answered 503; attempt 2 of 8 follows in 1[01]\d\.\d s", caplog.text)
