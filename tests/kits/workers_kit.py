"""What the tests of the workers share: uneven streams, pipes that tell what they know, and guards against hanging."""

from __future__ import annotations

import ast
import copy
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

import torchdata_wds  # registers join_workers
from tests.kits.torchdata import DataLoader2, WorkersReadingService, is_installed, skip_test, uses_torchdata
from torchdata_wds import WdsLoader

assert torchdata_wds.JoinWorkers

#: Seven sources of uneven length, one of them empty.
SIZES = (9, 6, 3, 0, 5, 7, 1)

ROOT = Path(__file__).parents[2]


def expand(source: tuple[int, int]) -> list[tuple[int, int]]:
    number, size = source
    return [(number, item) for item in range(size)]


def items_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    return [item for source in enumerate(sizes) for item in expand(source)]


def uneven_pipe(sizes: Iterable[int] = SIZES) -> IterDataPipe:
    """Sources shuffled before they are divided, each expanded to its items after."""
    return IterableWrapper(list(enumerate(sizes))).shuffle().sharding_filter().map(expand).unbatch()


class _State(dict[str, Any]):
    """A state of a loader, and its graph."""

    def __missing__(self, name: str) -> NoReturn:
        skip_test()  # what only DataLoader2's states hold


class _Loader(WdsLoader[Any]):
    """A WdsLoader in the place of a DataLoader2 with our service, whose states hold the graph too."""

    def __init__(self, pipe: IterDataPipe, workers: int, **options: Any) -> None:
        if {"distributed", "worker_init_fn", "worker_reset_fn"} & set(options):
            skip_test()
        super().__init__(pipe, workers, **options)
        self.reading_service = self

    def seed(self, _: int) -> None:
        skip_test()

    def state_dict(self) -> _State:
        return _State(super().state_dict(), graph=self.pipe)


#: What runs graphs for a training loop: DataLoader2 with WorkersReadingService, and WdsLoader.
FRONTS = ("service", "loader")
#: The same for expensive tests of what both share; only the loader is in the short run.
FRONTS_QUICK = (pytest.param("service", marks=pytest.mark.slow), "loader")


def loader_of(pipe: IterDataPipe, workers: int = 2, *, front: str | None = None, **options: Any) -> Any:
    """A WdsLoader, or a DataLoader2 with our service; by default that or, without torchdata, the other."""
    if front == "loader":
        return WdsLoader(pipe, workers, **options)
    if front is None and not is_installed():
        return _Loader(pipe, workers, **options)
    return DataLoader2(pipe, reading_service=WorkersReadingService(workers, **options))


def loader_from(state: dict[str, Any], workers: int, **options: Any) -> Any:
    """A loader that resumes from a state of such a loader."""
    if not is_installed():
        loader = _Loader(state["graph"], workers, **options)
        loader.load_state_dict({name: value for name, value in state.items() if name != "graph"})
        return loader
    return DataLoader2.from_state(state, WorkersReadingService(workers, **options))


def resumed_loader(state: Any, pipe: IterDataPipe, workers: int = 2, *, front: str = "service", **options: Any) -> Any:
    """Another loader of the front that resumes from a state."""
    if front == "service":
        return loader_from(state, workers, **options)
    loader = loader_of(pipe, workers, front=front, **options)
    loader.load_state_dict(state)
    return loader


def engine_of(loader: Any) -> Any:
    """The engine that a loader runs its graph with."""
    return loader._engine if isinstance(loader, WdsLoader) else loader.reading_service._engine


def skipped_by(loader: Any, **options: Any) -> dict[str, dict[str, int]]:
    """What a loader says that stages skipped."""
    return (loader if isinstance(loader, WdsLoader) else loader.reading_service).skipped(**options)


def consumers_of(pipe: IterDataPipe, number: int, seed: int | None = 0) -> list[IterDataPipe]:
    """Copies of a graph, each with its place, seeded as torch's DataLoader seeds its workers; with None, not at all."""
    copies = [copy.deepcopy(pipe) for _ in range(number)]
    for instance, one in enumerate(copies):
        apply_sharding(one, number, instance)
    return copies if seed is None else seeded(copies, seed)


def seeded(pipes: list[IterDataPipe], seed: int) -> list[IterDataPipe]:
    """Seeds consumers as services do at the beginning of each epoch: all alike."""
    for pipe in pipes:
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    return pipes


class SeedTeller(IterDataPipe):
    """Yields each item with the seed that this pipe was given and the worker it is in."""

    def __init__(self, source_datapipe: IterDataPipe) -> None:
        self.source_datapipe = source_datapipe
        self.seed: int | None = None

    def set_seed(self, seed: int) -> SeedTeller:
        self.seed = seed
        return self

    def __iter__(self) -> Iterator[tuple[Any, int | None, int | None]]:
        for item in self.source_datapipe:
            worker = get_worker_info()
            yield item, self.seed, worker.id if worker else None


def with_pid(item: Any) -> tuple[Any, int]:
    return item, os.getpid()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Turns a hang into an error, and ends every worker that was started within it."""
    others = set(multiprocessing.active_children())  # torch raises anywhere when one of its workers is killed

    def stop(*_: Any) -> None:
        raise TimeoutError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for process in set(multiprocessing.active_children()) - others:
            process.kill()


@contextmanager
def logged_in(file: Path) -> Iterator[None]:
    """Writes what the package logs to a file, in processes forked within it too."""
    handler = logging.FileHandler(file)
    logger = logging.getLogger("torchdata_wds")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def run_script(text: str, *arguments: str, seconds: int = 60) -> subprocess.CompletedProcess[str]:
    """Runs a Python script in a process of its own, warnings being errors."""
    if not is_installed() and uses_torchdata(ast.parse(text)):
        skip_test()
    command = [sys.executable, "-W", "error", "-c", text, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False)
