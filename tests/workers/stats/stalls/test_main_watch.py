"""Stages in the main process that make no item while the training loop waits: another thread says so."""

import logging
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.workers_kit import FRONTS, loader_of, time_limit
from torchdata_wds.process_place import Place
from torchdata_wds.workers.stats.stalls.main_watch import MainWatch

_WARNED = threading.Event()


class Warnings(logging.Handler):
    """Keeps the warnings about stalls."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        _WARNED.set()


@pytest.fixture
def warned() -> Iterator[list[str]]:
    handler, logger = Warnings(), logging.getLogger("torchdata_wds.workers.stats.stalls.alarm")
    _WARNED.clear()
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


def wait_for_warning(item: int) -> int:
    if item == 2:
        _WARNED.wait(50)
    return item


def numbers() -> Any:
    return IterableWrapper(range(4)).sharding_filter()


@pytest.mark.parametrize("front", [FRONTS[1], pytest.param(FRONTS[0], marks=pytest.mark.slow)])
def test_function_is_named_without_workers(front: str, warned: list[str]) -> None:
    """The training loop's own frames are left out."""
    with time_limit(60), loader_of(numbers().map(wait_for_warning), 0, front=front, stall_after=0.1) as loader:
        assert list(loader) == [0, 1, 2, 3]
    assert re.match(r"no item has come for \d+ s: the training loop waits for stages in the main process", warned[0])
    known = r"(\S+, .*for \d+ s; )?"  # the stage before it, if this machine is busy
    assert re.search(rf"main process \(pid \d+\): {known}in wait_for_warning, line ", warned[0])
    assert "_WARNED.wait(50)" in warned[0]
    assert "test_function_is_named" not in warned[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["map", "prefetch"])
def test_function_is_named_when_workers_have_the_other_stages(stage: str, warned: list[str]) -> None:
    """Its thread is named, if the main one only waits for that."""
    pipe = numbers().join_workers().map(wait_for_warning)
    if stage == "prefetch":
        pipe = pytest.importorskip("torchdata.datapipes.iter").Prefetcher(pipe)
    with time_limit(60), loader_of(pipe, 1, front="loader", stall_after=0.1) as loader:
        assert list(loader) == [0, 1, 2, 3]
    assert "in wait_for_warning, line " in next(text for text in warned if "main process" in text)


def test_nothing_is_said_when_the_training_loop_does_not_wait(warned: list[str]) -> None:
    """It may compute for hours between two items."""

    class Graph:
        end = SimpleNamespace(_number_of_samples_yielded=3)
        workers = 0

    graph = Graph()
    watch = MainWatch(Place(), 60, lambda: None)
    watch.begin(graph)
    watch.stop()
    for _ in range(9):
        watch.tick({}, 1000)
    assert warned == []
