"""Figures are sent to functions while an epoch runs and at its end, and never stop it."""

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from torchdata_wds.workers.stats.figures import Figures
from torchdata_wds.workers.stats.loader_stats import LoaderStats
from torchdata_wds.workers.stats.sinks import StatsSinks

SOON = 0.02


class Clock:
    """A source whose moments are numbers: 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.now = -1

    def moment(self) -> int:
        self.now += 1
        return self.now

    def between(self, since: int, now: int) -> LoaderStats:
        return LoaderStats(0, 0, Figures(items=now), Figures(items=now - since))


def wait_until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stats of a loader"]


def test_function_is_called_while_an_epoch_runs_and_at_its_end() -> None:
    """Each call has the figures since the one before it."""
    sinks, source = StatsSinks(), Clock()
    told: list[LoaderStats] = []
    sinks.add(told.append, SOON)
    sinks.begin(source)
    wait_until(lambda: len(told) > 2)
    sinks.end()
    count = len(told)
    assert told[-1].total.items == source.now
    assert sum(stats.recent.items for stats in told) == source.now
    sinks.end()
    assert len(told) == count
    assert not threads()


def test_function_is_called_once_an_epoch_when_every_is_0() -> None:
    """Also if it is added while an epoch runs."""
    sinks = StatsSinks()
    told: list[LoaderStats] = []
    for _ in range(2):
        source = Clock()
        sinks.begin(source)
        sinks.add(told.append, 0)
        sinks.end()
    assert len(told) == 2


def test_failure_of_a_function_is_logged_once_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on."""

    def fail(stats: LoaderStats) -> None:
        raise ConnectionError("the gateway is down")

    sinks, source = StatsSinks(), Clock()
    told: list[LoaderStats] = []
    sinks.add(fail, SOON)
    sinks.add(told.append, SOON)
    with caplog.at_level(logging.WARNING, "torchdata_wds"):
        sinks.begin(source)
        wait_until(lambda: len(told) > 3)
        sinks.end()
    (record,) = caplog.records
    assert "fail, to which send_stats passes figures, failed" in record.getMessage()
    assert "the gateway is down" in caplog.text


def test_thread_ends_when_the_loader_is_gone() -> None:
    """It does not keep it alive."""
    sinks, source = StatsSinks(), Clock()
    sinks.add(print, 3600)
    sinks.begin(source)
    assert threads()
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None
    wait_until(lambda: not threads())
    sinks.end()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_process_sends_nothing() -> None:
    """It has no thread, and does not wait for one."""
    sinks, source = StatsSinks(), Clock()
    told: list[LoaderStats] = []
    sinks.add(told.append, 3600)
    sinks.begin(source)
    if (child := os.fork()) == 0:
        sinks.end()
        os._exit(len(told))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sinks.end()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("function", "every", "error"), [(None, 1, TypeError), (print, "1", TypeError), (print, -1, ValueError)]
)
def test_wrong_arguments_are_refused(function: Any, every: Any, error: type[Exception]) -> None:
    """When they are passed."""
    with pytest.raises(error):
        StatsSinks().add(function, every)
