"""Samples per second out of worker processes, and what a step costs the main process: ours, and torch's DataLoader.

    python benchmarks/workers.py [--quick] [--table speed|steps] [--json FILE] [--chart FILE]

Ours are `WdsLoader` and `WorkersReadingService`. All run the same graphs.

The first table has 1 and 2 workers, per item and with `.batch(n).collate(wds_collate)` in the workers. Each round has
new workers, which run one epoch before the timed one; nothing else runs meanwhile. The timed epoch is measured from its
fifth item to its last, so that what was prefetched, and starting the epoch, is left out for all.

The second has the time of `next()` for batches of 10 MB that two workers have made ahead: the CPU time of the main
thread, on which other programs have less influence, and the whole time. Either several batches are taken one after the
other, or the main thread computes for 20 ms before each one, after which the processor's caches hold nothing of the
loader.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import Contender, Run, compare, finish, parse, run_rounds, timed_from
from report import Report, Row, Table
from shards import make_shards
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WdsLoader, WorkersReadingService, wds_collate
from torchdata_wds.workers.service import DataLoader2

WORKERS = (1, 2)
AHEAD = 4  # items that two workers make ahead
LOADER, SERVICE, TORCH = "ours: WdsLoader", "ours: service", "DataLoader"
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "samples/s": "{samples_per_second:,.0f}",
    "µs/sample": "{microseconds:,.1f}",
    "WdsLoader ÷ it": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
    "÷ 1 worker": "{scaling:.2f}",
}
TITLE = "Workers: medians, ratios of medians to WdsLoader with as many workers, and to the same with one"
BATCH = 10 << 20  # bytes
READY = 8  # batches that each worker makes ahead
IN_A_ROW = 12  # fewer than both have made
WARM = 2 * READY  # steps in which memory is taken for the first time
STEP_COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "CPU µs/step": "{microseconds:,.0f}",
    "µs/step": "{wall:,.0f}",
    "it ÷ WdsLoader": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
}
STEP_TITLE = "A step in the main process: medians of steps and rounds, and ratios of the CPU time"


class Case(NamedTuple):
    """A graph that is run in workers.

    Attributes:
        graph: Its last pipe.
        size: How many samples an item holds; None for one.
    """

    graph: IterDataPipe[Any]
    size: Callable[[Any], int] | None


def make_pair(number: int) -> tuple[torch.Tensor, int]:
    """A small tensor and a number."""
    return torch.full((16,), float(number)), number


def count_rows(batch: Any) -> int:
    """How many samples were collated."""
    return len(batch["__key__"] if isinstance(batch, dict) else batch[-1])


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    """The graphs by the name of their kind."""
    quick = arguments.quick
    batch, images = (8, 4) if quick else (64, 32)
    few, many = (100, 200) if quick else (3_000, 60_000)
    text = read_shards("text", 2, arguments)
    decoded = read_shards("images", 4, arguments).wds_decode("rgb8").wds_to_tuple("jpg", "cls")
    return {
        "small tensors, per item": Case(_pairs(few), None),
        f"small tensors, batches of {batch}": Case(batched(_pairs(many), batch), count_rows),
        "text, per item": Case(text, None),
        f"text, batches of {batch}": Case(batched(text, batch), count_rows),
        f"images to rgb8, batches of {images}": Case(batched(decoded, images), count_rows),
    }


def _pairs(number: int) -> IterDataPipe[Any]:
    return IterableWrapper(range(number), deepcopy=False).sharding_filter().map(make_pair)


def read_shards(kind: str, shards: int, arguments: argparse.Namespace) -> IterDataPipe[Any]:
    paths = make_shards(kind, arguments.folder, quick=arguments.quick).paths[:shards]
    return IterableWrapper([*map(str, paths)]).list_shards().sharding_filter().load_wds_shards().group_by_key()


def batched(graph: IterDataPipe[Any], size: int) -> IterDataPipe[Any]:
    return graph.batch(size).collate(wds_collate)


def measure(kind: str, case: Case, rounds: int) -> list[Row]:
    """The rows of one kind."""
    contenders = [
        Contender(_name(loader, workers), partial(timed_epoch, loader, case, workers))
        for workers in WORKERS
        for loader in (LOADER, SERVICE, TORCH)
    ]
    runs = run_rounds(kind, contenders, rounds)
    rows = []
    for workers in WORKERS:
        rows += compare(kind, {_name(name, workers): runs[_name(name, workers)] for name in (LOADER, SERVICE, TORCH)})
    alone = {row["contender"].partition(",")[0]: row["samples_per_second"] for row in rows[: len(rows) // len(WORKERS)]}
    for row in rows:
        row["scaling"] = row["samples_per_second"] / alone[row["contender"].partition(",")[0]]
    return rows


def timed_epoch(name: str, case: Case, workers: int) -> Run:
    """Measures the second epoch of a new loader."""
    with running(name, case.graph, workers) as loader:
        timed_from(AHEAD, loader, case.size)
        return timed_from(AHEAD, loader, case.size)


@contextmanager
def running(name: str, graph: IterDataPipe[Any], workers: int, ahead: int = 2) -> Iterator[Iterable[Any]]:
    """A loader of a graph, whose workers end with the block."""
    if name == LOADER:
        with WdsLoader(graph, workers, prefetch_factor=ahead) as ours:
            yield ours
    elif name == SERVICE:
        with DataLoader2(graph, reading_service=WorkersReadingService(workers, prefetch_factor=ahead)) as ours:
            yield ours
    else:  # its workers end when it is forgotten
        yield DataLoader(graph, batch_size=None, num_workers=workers, persistent_workers=True, prefetch_factor=ahead)


def _name(loader: str, workers: int) -> str:
    return f"{loader}, {workers} worker{'s' * (workers > 1)}"


def make_batch(number: int) -> torch.Tensor:
    """A batch of images."""
    return torch.full((BATCH // (3 << 16), 3, 256, 256), number % 256, dtype=torch.uint8)


def rest(step: int) -> None:
    """Waits now and then until the workers have made batches."""
    if step % IN_A_ROW == 0:
        time.sleep(0.5)


def compute(step: int) -> None:  # noqa: ARG001  (as `rest`)
    """Computes for 20 ms."""
    weights = torch.ones(256, 256) / 256
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        weights = torch.tanh(weights @ weights)


PAUSES = {"10 MB, in a row": rest, "10 MB, computing before each": compute}


def measure_steps(kind: str, steps: int, rounds: int) -> list[Row]:
    """The rows of one way to spend the time between steps."""
    graph = IterableWrapper(range(WARM + steps)).sharding_filter().map(make_batch)
    walls: dict[str, list[float]] = {name: [] for name in (LOADER, SERVICE, TORCH)}
    contenders = [
        Contender(name, partial(timed_steps, name, graph, steps, PAUSES[kind], of_name))
        for name, of_name in walls.items()
    ]
    rows = compare(kind, run_rounds(kind, contenders, rounds))
    return [{**row, "wall": 1e6 * median(walls[row["contender"]])} for row in rows]


def timed_steps(
    name: str, graph: IterDataPipe[Any], steps: int, pause: Callable[[int], None], walls: list[float]
) -> Run:
    """Measures the steps of an epoch: a run of one step that took the median CPU time; adds the median whole time."""
    with running(name, graph, 2, READY) as loader:
        cpu, wall = time_steps(loader, steps, pause)
    walls.append(wall)
    return Run(cpu, 1)


def time_steps(loader: Iterable[Any], steps: int, pause: Callable[[int], None]) -> tuple[float, float]:
    """Medians of the CPU time and of the whole time of an epoch's steps, after those that warm it up."""
    times = []
    items = iter(loader)
    for step in range(WARM + steps):
        pause(step)
        cpu, wall = time.thread_time(), time.perf_counter()
        batch = next(items)  # frees the one before
        times.append((time.thread_time() - cpu, time.perf_counter() - wall))
        assert batch.nbytes > BATCH // 2
    assert next(items, None) is None
    cpus, whole = zip(*times[WARM:], strict=True)
    return median(cpus), median(whole)


def main() -> None:
    """Measures every graph, and steps."""
    arguments = parse(__doc__, rounds=5, add=lambda parser: parser.add_argument("--table", choices=("speed", "steps")))
    report = Report("workers", quick=arguments.quick)
    if arguments.table != "steps":
        rows = [row for kind, case in cases(arguments).items() for row in measure(kind, case, arguments.rounds)]
        report.tables.append(Table(TITLE, COLUMNS, rows, "samples_per_second", "samples/s"))
    if arguments.table != "speed":
        steps = IN_A_ROW if arguments.quick else 10 * IN_A_ROW
        rows = [row for kind in PAUSES for row in measure_steps(kind, steps, arguments.rounds)]
        report.tables.append(Table(STEP_TITLE, STEP_COLUMNS, rows, "microseconds", "CPU µs/step"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
