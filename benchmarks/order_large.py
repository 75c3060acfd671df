"""The global order of ten million samples: how soon a loader starts and resumes, and the memory of its workers.

    python benchmarks/order.py --table large [--quick] [--json FILE] [--chart FILE]

The samples are those of one shard of 1,000 with 10,000 names: hard links, so that nothing is large but the index and
the list of shards. Everything runs in new processes, which have imported the package before the clock starts; the index
is a packed file in the page cache. Text samples come in batches of 64, by runs of 16.

"start" is from making a loader to its first batch; "resume" is the same with a state, at a position drawn at random.
Memory is that of one of two workers after 1,000 batches. All is compared with 10 of the shards. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from harness import parse
from report import Report, Row, Table, note
from shards import make_shards
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import DatasetIndex, WdsLoader, index_shard
from torchdata_wds.format.index.columns import Columns, ShardColumns

__all__ = ["measure", "memory_of"]

MANY, FEW = 10_000, 10  # shards
BATCH, RUN = 64, 16
BATCHES = 1_000  # until memory is measured
STATES = 5  # that are resumed
SECONDS = ("start", "start, 2 workers", "resume", "resume, 2 workers")
MEGABYTES = ("a worker's private memory", "a worker's resident memory")
COLUMNS = {"kind": "{kind}", "contender": "{contender}"}
TIMES = COLUMNS | {"seconds": "{figure:.3f}", "by round": "{lowest:.3f}-{highest:.3f}"}
MEMORY = COLUMNS | {
    "MB": "{figure:.1f}",
    "above the first": "{above_first:.1f}",
    "by round": "{lowest:.1f}-{highest:.1f}",
}


def make_links(folder: Path, count: int, *, quick: bool) -> tuple[list[str], str]:
    """Makes or finds `count` names of one shard, and the index of all of them."""
    shard = make_shards("one of many", folder, quick=quick).paths[0]
    place = shard.parent / f"{count}"
    urls = [str(place / f"shard-{number:06d}.tar") for number in range(count)]
    path = place / "all.packed"
    if not path.exists():
        note(f"making {count:,} names of one shard, and their index")
        place.mkdir(exist_ok=True)
        for url in urls:
            if not Path(url).exists():
                os.link(shard, url)
        columns = ShardColumns.of(urls[0], index_shard(urls[0], to=False))
        DatasetIndex.of_columns(Columns.of("first_dot", [columns._replace(url=url) for url in urls])).save(path)
    return urls, str(path)


def make_loader(urls: list[str], index: str, workers: int) -> WdsLoader[Any]:
    """A loader of batches in the global order."""
    pipe: Any = IterableWrapper(urls, deepcopy=False).load_in_order(index=index, run=RUN)
    return WdsLoader(pipe.batch(BATCH), workers, seed=1)


def first_batch(loader: WdsLoader[Any]) -> tuple[float, Iterator[Any]]:
    """When the first batch is there, and the rest."""
    batches = iter(loader)
    next(batches)
    return time.perf_counter(), batches


def memory_of(process: int) -> tuple[float, float]:
    """Private and resident memory of a process, in MB."""
    sizes = {"Private": 0, "Rss": 0}
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        name = line.partition("_")[0].partition(":")[0]
        if name in sizes and "_Hugetlb" not in line:
            sizes[name] += int(line.split()[1])
    return sizes["Private"] / 1024, sizes["Rss"] / 1024


def measure_here(urls: list[str], index: str, batches: int) -> dict[str, float]:
    """All figures of one process."""
    figures: dict[str, float] = {}
    total = len(DatasetIndex.load(index))
    for workers, suffix in ((0, ""), (2, ", 2 workers")):
        begun = time.perf_counter()
        with make_loader(urls, index, workers) as loader:
            there, rest = first_batch(loader)
            figures[f"start{suffix}"] = there - begun
            state = loader.state_dict()
            if workers:
                for _ in islice(rest, batches):
                    pass
                memory = [memory_of(child.pid) for child in multiprocessing.active_children() if child.pid]
                figures |= zip(MEGABYTES, map(median, zip(*memory, strict=True)), strict=True)
        figures[f"resume{suffix}"] = median(
            time_resuming(make_loader(urls, index, workers), state, random.randrange(total - BATCH))
            for _ in range(STATES)
        )
    return figures


def time_resuming(loader: WdsLoader[Any], state: dict[str, Any], position: int) -> float:
    """Seconds from a state to the next batch."""
    state = {**state, "position": position}
    begun = time.perf_counter()
    with loader:
        loader.load_state_dict(state)
        return first_batch(loader)[0] - begun


def run_process(count: int, arguments: argparse.Namespace) -> dict[str, float]:
    """All figures of a new process."""
    command = [sys.executable, __file__, "--shards", str(count), "--folder", str(arguments.folder)]
    command += ["--quick"] if arguments.quick else []
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def measure(report: Report, arguments: argparse.Namespace) -> list[Table]:  # noqa: ARG001 - as all
    """Runs processes on few shards and on many."""
    counts = (FEW, MANY // 100 if arguments.quick else MANY)
    per_shard = make_shards("one of many", arguments.folder, quick=arguments.quick).samples
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for count in counts:
        make_links(arguments.folder, count, quick=arguments.quick)
    for number in range(arguments.rounds):
        note(f"large: round {number + 1} of {arguments.rounds}")
        for count in counts[:: -1 if number % 2 else 1]:
            found[count].append(run_process(count, arguments))

    def rows_of(kinds: tuple[str, ...]) -> list[Row]:
        rows: list[Row] = []
        for kind in kinds:
            for count in counts:
                figures = [figures[kind] for figures in found[count]]
                row: Row = {"kind": kind, "contender": f"{count * per_shard:,} samples", "figure": median(figures)}
                row |= {"lowest": min(figures), "highest": max(figures), "rounds": figures}
                rows.append(row | {"above_first": row["figure"] - rows[-1]["figure"] if count != FEW else 0.0})
        return rows

    return [
        Table("Until the first batch: medians, the lowest and the highest", TIMES, rows_of(SECONDS), "figure", "s"),
        Table("Memory: medians, the lowest and the highest", MEMORY, rows_of(MEGABYTES), "figure", "MB"),
    ]


def main() -> None:
    """Measures in this process, for `run_process`."""
    arguments = parse(__doc__, add=lambda parser: parser.add_argument("--shards", type=int, default=FEW))
    urls, index = make_links(arguments.folder, arguments.shards, quick=arguments.quick)
    print(json.dumps(measure_here(urls, index, 20 if arguments.quick else BATCHES)))


if __name__ == "__main__":
    main()
