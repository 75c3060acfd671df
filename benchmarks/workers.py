"""Samples per second out of worker processes: `WorkersReadingService` and torch's own DataLoader, 1 and 2 workers.

    python benchmarks/workers.py [--quick] [--json FILE] [--chart FILE]

Both run the same graph, per item and with `.batch(n).collate(wds_collate)` in the workers. Workers are started and run
one epoch before anything is timed. Each timed epoch is measured from its fifth item to its last, so that what was
prefetched, and starting the epoch, is left out for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import Contender, compare, finish, parse, run_rounds, timed_from
from report import Report, Row, Table
from shards import make_shards
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WorkersReadingService, wds_collate
from torchdata_wds.workers.service import DataLoader2

WORKERS = (1, 2)
AHEAD = 4  # items that two workers make ahead
OURS, TORCH = "ours", "DataLoader"
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "samples/s": "{samples_per_second:,.0f}",
    "µs/sample": "{microseconds:,.1f}",
    "ours ÷ it": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
    "÷ 1 worker": "{scaling:.2f}",
}
TITLE = "Workers: medians, ratios of medians to ours with as many workers, and to the same with one"


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
    text = _read("text", 2, arguments)
    decoded = _read("images", 4, arguments).wds_decode("rgb8").wds_to_tuple("jpg", "cls")
    return {
        "small tensors, per item": Case(_pairs(few), None),
        f"small tensors, batches of {batch}": Case(_batched(_pairs(many), batch), count_rows),
        "text, per item": Case(text, None),
        f"text, batches of {batch}": Case(_batched(text, batch), count_rows),
        f"images to rgb8, batches of {images}": Case(_batched(decoded, images), count_rows),
    }


def _pairs(number: int) -> IterDataPipe[Any]:
    return IterableWrapper(range(number), deepcopy=False).sharding_filter().map(make_pair)


def _read(kind: str, shards: int, arguments: argparse.Namespace) -> IterDataPipe[Any]:
    paths = make_shards(kind, arguments.folder, quick=arguments.quick).paths[:shards]
    return IterableWrapper([*map(str, paths)]).list_shards().sharding_filter().load_wds_shards().group_by_key()


def _batched(graph: IterDataPipe[Any], size: int) -> IterDataPipe[Any]:
    return graph.batch(size).collate(wds_collate)


def measure(kind: str, case: Case, rounds: int) -> list[Row]:
    """The rows of one kind."""
    with ExitStack() as stack:
        loaders: dict[str, Iterable[Any]] = {}
        for workers in WORKERS:
            service = WorkersReadingService(workers)
            loaders[_name(OURS, workers)] = stack.enter_context(DataLoader2(case.graph, reading_service=service))
            loaders[_name(TORCH, workers)] = DataLoader(
                case.graph, batch_size=None, num_workers=workers, persistent_workers=True
            )
        contenders = [
            Contender(name, partial(timed_from, AHEAD, loader, case.size)) for name, loader in loaders.items()
        ]
        for contender in contenders:
            contender.run()
        runs = run_rounds(kind, contenders, rounds)
    rows = []
    for workers in WORKERS:
        rows += compare(kind, {name: runs[name] for name in (_name(OURS, workers), _name(TORCH, workers))})
    alone = {row["contender"].partition(",")[0]: row["samples_per_second"] for row in rows[:2]}
    for row in rows:
        row["scaling"] = row["samples_per_second"] / alone[row["contender"].partition(",")[0]]
    return rows


def _name(loader: str, workers: int) -> str:
    return f"{loader}, {workers} worker{'s' * (workers > 1)}"


def main() -> None:
    """Measures every graph."""
    arguments = parse(__doc__, rounds=5)
    report = Report("workers", quick=arguments.quick)
    rows = [row for kind, case in cases(arguments).items() for row in measure(kind, case, arguments.rounds)]
    report.tables.append(Table(TITLE, COLUMNS, rows, "samples_per_second", "samples/s"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
