"""Going on in the middle of an epoch: how long `DataLoader2.from_state` takes to its first item.

    python benchmarks/resume.py [--quick] [--json FILE] [--chart FILE]

The epoch is one of 1,200,000 text samples in five shards, decoded into tuples, in order or shuffled, and the state is
that after 1,000,000 of them. "made again" is the same chain with a stage (a filter that keeps all) through which items
cannot be counted, so that all that were delivered are decoded once more and dropped. Shards and indexes are in the page
cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from harness import Contender, Run, compare, finish, parse, run_rounds
from report import Report, Row, Table, note
from shards import Shards, make_shards
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WorkersReadingService, index_shard
from torchdata_wds.format.index.sidecars import local_index
from torchdata_wds.workers.service import DataLoader2

COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "seconds": "{seconds:.3f}",
    "it ÷ first": "{ratio:.1f}",
    "by round": "{lowest:.1f}-{highest:.1f}",
}


def keep(_: Any) -> bool:
    """Keeps an item."""
    return True


def graph(shards: Shards, shuffle: int, skips: bool) -> IterDataPipe[Any]:
    """A chain over text samples."""
    pipe: Any = IterableWrapper([shards.pattern]).list_shards().shuffle().sharding_filter()
    pipe = pipe.load_wds_shards().group_by_key()
    if shuffle:
        pipe = pipe.wds_shuffle(shuffle)
    pipe = pipe.wds_decode().wds_to_tuple("txt", "json", "cls")
    return pipe if skips else pipe.filter(keep)


def service(workers: int) -> WorkersReadingService:
    """The same orders every time."""
    return WorkersReadingService(workers, seed=1)


def state_after(items: int, pipe: IterDataPipe[Any], workers: int) -> dict[str, Any]:
    """Runs an epoch so far and takes its state."""
    with DataLoader2(pipe, reading_service=service(workers)) as loader:
        epoch = iter(loader)
        for _ in islice(epoch, items):
            pass
        return loader.state_dict()


def go_on(state: Callable[[], dict[str, Any]], workers: int) -> Run:
    """Measures the way from a state to the next item."""
    known = state()
    start = perf_counter()
    loader = DataLoader2.from_state(known, service(workers))
    next(iter(loader))
    seconds = perf_counter() - start
    loader.shutdown()
    return Run(seconds, 1)


def with_indexes(shards: Shards) -> Shards:
    """The same shards in another folder, with an index beside each."""
    folder = shards.paths[0].parent / "indexed"
    folder.mkdir(exist_ok=True)
    paths = [folder / path.name for path in shards.paths]
    for path, indexed in zip(shards.paths, paths, strict=True):
        if not indexed.exists():
            os.link(path, indexed)
        if local_index(str(indexed)) is None:
            index_shard(indexed)
    return shards._replace(paths=paths)


def rows_of(kind: str, shards: Shards, shuffle: int, workers: int, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one chain."""
    items = shards.samples * 5 // 6
    states: dict[str, dict[str, Any]] = {}

    def state(name: str, pipe: IterDataPipe[Any]) -> dict[str, Any]:
        if name not in states:
            note(f"{kind}: running to item {items:,}, {name}")
            states[name] = state_after(items, pipe, workers)
        return states[name]

    pipes = {
        "ours, with indexes": graph(with_indexes(shards), shuffle, True),
        "ours, without": graph(shards, shuffle, True),
        "made again": graph(shards, shuffle, False),
    }
    contenders = [Contender(name, partial(go_on, partial(state, name, pipe), workers)) for name, pipe in pipes.items()]
    runs = run_rounds(kind, contenders, arguments.rounds)
    return [row | {"seconds": 1 / row["samples_per_second"]} for row in compare(kind, runs)]


def main() -> None:
    """Measures the chains in one process and in two workers."""
    arguments = parse(__doc__, rounds=3)
    report = Report("resume", quick=arguments.quick)
    shards = make_shards("million texts", arguments.folder, quick=arguments.quick)
    rows = []
    for kind, shuffle, workers in (("in order", 0, 0), ("shuffled", 1000, 0), ("shuffled, 2 workers", 1000, 2)):
        rows += rows_of(kind, shards, shuffle, workers, arguments)
    title = "Seconds from a state to the next item: medians, ratios of medians, and those of single rounds"
    report.tables.append(Table(title, COLUMNS, rows, "seconds", "s"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
