"""Pauses between attempts: how long, and when to give up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from torchdata_wds.storage import http_retries
from torchdata_wds.storage.http_retries import HttpFailure, Patience, retry_after, seconds_to_wait


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept, in no time."""
    slept: list[float] = []
    monkeypatch.setattr(http_retries.time, "sleep", slept.append)
    return slept


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


def test_retry_after_reads_seconds_and_dates() -> None:
    """Both forms, within reason; half a second where there is none that can be read."""
    now = datetime.now(UTC)
    assert retry_after({"Retry-After": " 12 "}) == 12
    assert 18 < retry_after({"Retry-After": format_datetime(now + timedelta(seconds=20), usegmt=True)}) <= 20
    assert retry_after({"Retry-After": format_datetime(now - timedelta(days=1), usegmt=True)}) == 0
    assert retry_after({"Retry-After": format_datetime(now + timedelta(days=1), usegmt=True)}) == 300
    assert retry_after({"Retry-After": "999999999999999999999"}) == 300
    for value in ("", "soon", "-5", "1.5", "²", "Sat, 99 Foo 2022 10:00:00 GMT"):
        assert retry_after({"Retry-After": value}) == 0.5


def test_patience_ends_when_as_many_attempts_bring_nothing(sleeps: list[float]) -> None:
    """One failure more than `retries`; something new lets it begin anew."""
    patience = Patience(2, "x.tar")
    failure = HttpFailure("it broke")
    assert [patience.endures(failure) for _ in range(2)] == [True, True]
    patience.renew()
    assert [patience.endures(failure) for _ in range(4)] == [True, True, False, False]
    assert len(sleeps) == 4


def test_patience_ends_at_once_when_there_are_no_retries(sleeps: list[float]) -> None:
    """retries=0 means one attempt."""
    assert not Patience(0, "x.tar").endures(HttpFailure("it broke"))
    assert not sleeps


def test_patience_ends_when_the_server_asks_for_too_long(sleeps: list[float]) -> None:
    """All pauses together have a bound, however many attempts are left."""
    patience = Patience(1000, "x.tar")
    count = 0
    while patience.endures(HttpFailure("overloaded", wait=250)):
        count += 1
    assert count == 2
    assert 500 <= sum(sleeps) <= 600


def test_patience_warns_when_the_pause_is_long(sleeps: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits for the next sample is told why."""
    patience = Patience(8, "x.tar")
    with caplog.at_level("INFO"):
        patience.endures(HttpFailure("it broke"))
        patience.endures(HttpFailure("the server answered 503", wait=100))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "shard x.tar: the server answered 503; attempt 2 of 8 follows in 10" in caplog.text
