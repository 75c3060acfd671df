"""Measures one loop of `train_peers.py` in this process and its workers, and writes the figures as JSON.

    python benchmarks/train_child.py NAME KIND WORKERS BATCH SECONDS FOLDER RESULT [--quick]

`train.py` runs it. The clock starts after three batches of each worker, so that nothing that was made ahead is counted
for free, and stops before the shards end, while the workers go on as before. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from harness import ROOT  # noqa: F401  first: the checkout is measured
from shards import Shards, make_shards
from train_peers import CONTENDERS, SIDE

WARM = 3  # batches of each worker
TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from family(int(child))


def cpu_seconds() -> float:
    """The CPU time of this process and of its children, running and ended."""
    ticks = 0
    for pid in family(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # of itself and of children that ended
    return ticks / TICKS


def megabytes() -> float:
    """The memory of this process and of its children: each page divided by the number of processes that share it."""
    lines = [line for pid in family(os.getpid()) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def measure(name: str, shards: Shards, workers: int, batch: int, seconds: float) -> dict[str, Any]:
    """The figures of a loop."""
    begun = perf_counter()
    batches = iter(CONTENDERS[name](shards, workers, batch))
    check(next(batches), batch)
    first = perf_counter() - begun
    for _ in range(WARM * workers - 1):
        next(batches)
    left = shards.samples // batch - 2 * WARM * workers
    taken, start = 0, (perf_counter(), cpu_seconds(), process_time())
    while taken == 0 or (taken < left and perf_counter() - start[0] < seconds):
        for _ in range(workers):
            next(batches)
            taken += 1
    stop = perf_counter(), cpu_seconds(), process_time()
    wall, cpu, main = (end - begin for end, begin in zip(stop, start, strict=True))
    figures = {"seconds": wall, "samples": taken * batch, "cpu": cpu, "main": main}
    return figures | {"first": first, "megabytes": megabytes()}


def check(item: Any, batch: int) -> None:
    """Raises unless it is a batch of crops with their classes."""
    images, classes = item
    if images.shape != (batch, 3, SIDE, SIDE) or images.dtype != torch.uint8 or len(classes) != batch:
        raise RuntimeError(f"got images {images.dtype} {tuple(images.shape)} and {len(classes)} classes")


def main() -> None:
    """Measures, or says why the loop cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("kind")
    parser.add_argument("workers", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shards = make_shards(arguments.kind, arguments.folder, quick=arguments.quick)
    try:
        result = measure(arguments.name, shards, arguments.workers, arguments.batch, arguments.seconds)
    except Exception as error:
        if arguments.name.startswith("ours"):
            raise
        result = {"missing": f"{type(error).__name__}: {error}"}
    arguments.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
