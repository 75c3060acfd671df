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
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.workers_kit import FRONTS, loader_of
from torchdata_wds import WdsLoader
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


@pytest.mark.parametrize("front", FRONTS)
def test_loader_sends_its_figures_at_the_end_of_each_epoch(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that is left early; workers are forked before the thread starts."""
    running: list[list[threading.Thread]] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: (running.append(threads()), fork())[1])
    told: list[LoaderStats] = []
    pipe = IterableWrapper(range(12)).sharding_filter()
    with loader_of(pipe, 2, front=front, multiprocessing_context="fork") as loader:
        (loader if front == "loader" else loader.reading_service).send_stats(told.append, every=3600)
        assert len(list(loader)) == 12
        assert [stats.total.items for stats in told] == [12]
        next(iter(loader))
    assert [(stats.epoch, stats.total.items) for stats in told] == [(0, 12), (1, 1)]
    assert running == [[], []]
    assert not threads()


def test_loader_logs_each_epoch_when_info_is_enabled(caplog: pytest.LogCaptureFixture) -> None:
    """One line, with the verdict."""
    loader = WdsLoader(IterableWrapper(range(5)))
    list(loader)
    with caplog.at_level(logging.INFO, "torchdata_wds.workers.stats"):
        list(loader)
    (record,) = caplog.records
    assert record.getMessage().startswith("epoch 1: 5 items in ")
    assert "Too little has happened to say what holds the training back" in record.getMessage()


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
