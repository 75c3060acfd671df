"""JPEG shards to batches for training: this package, webdataset, HF datasets, litdata, energon, torchdata and DALI.

    python benchmarks/train.py [--quick] [--size SIZE ...] [--workers N ...] [--only NAME ...] [--json FILE]

All make uint8 batches (64, 3, 224, 224), with classes, of random resized crops (bilinear, antialiased, as torchvision
draws them), half of them mirrored, from the same shards in order. `train_peers.py` has each loop as users of that
library write it. "ours" decodes with `crop_decoder`, "ours, pilrgb" decodes whole images as most loops do; "PIL" and
"torchvision" say who decodes. What is not installed, or does not run, is left out.

Each loop runs in a process of its own in each round, with one thread in each worker (DALI: one thread for a worker).
The clock runs for some seconds, after three batches of each worker and while the shards go on: neither the start nor
what was made ahead counts. "CPU" is that of all processes, "main" that of the process that trains, in which DALI does
everything; "first batch" counts from making the loader, with its library imported; "MB" is the memory of all processes,
a page that several share divided among them. litdata reads its own format, and energon needs indexes: both are made
before, untimed. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import Contender, Run, compare, finish, parse, run_rounds
from report import Report, Row, Table, note
from shards import make_shards
from train_peers import CONTENDERS

SIZES = ("400x400", "500x375", "1000x750", "1024x768")
WORKERS = (1, 2)
SECONDS = 4.0  # that the clock runs
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "images/s": "{samples_per_second:,.0f}",
    "ours ÷ it": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
    "CPU µs/image": "{cpu:,.0f}",
    "CPU ÷ ours": "{cpu_ratio:.2f}",
    "main µs/image": "{main:,.0f}",
    "first batch s": "{first:.2f}",
    "MB": "{megabytes:,.0f}",
}
TITLE = "Random crops of JPEGs in batches: medians, and ratios of medians"


def run_child(name: str, size: str, workers: int, seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a loop in a process of its own, and ends all that it started; returns its figures."""
    batch = 4 if arguments.quick else 64
    folder = arguments.folder
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hugging_face")}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile("w+") as errors:
        result = Path(place) / "result.json"
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("train_child.py")), name, _kind(size)]
        command += [str(workers), str(batch), str(seconds), str(folder), str(result)]
        command += ["--quick"] * arguments.quick
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if not result.exists():
            errors.seek(0)
            raise RuntimeError(f"{name}, {size}, {workers} workers ended with {code}:\n{errors.read()[-4000:]}")
        return json.loads(result.read_text())


def _kind(size: str) -> str:
    return f"JPEG {size}"


def find_contenders(size: str, report: Report, arguments: argparse.Namespace) -> list[str]:
    """Those that run here; a first run also makes what they need."""
    found = []
    for name in arguments.only or CONTENDERS:
        if name in report.left_out:
            continue
        note(f"{size}: trying {name}")
        missing = run_child(name, size, 1, 0, arguments).get("missing")
        if missing:
            report.leave_out(name, missing)
        else:
            found.append(name)
    return found


def measure(size: str, workers: int, names: list[str], arguments: argparse.Namespace) -> list[Row]:
    """The rows of a size of images and a number of workers."""
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def timed(name: str) -> Run:
        seconds = 0.0 if arguments.quick else SECONDS
        figures[name].append(run_child(name, size, workers, seconds, arguments))
        return Run(figures[name][-1]["seconds"], figures[name][-1]["samples"])

    kind = f"{size}, {workers} worker{'s' * (workers > 1)}"
    runs = run_rounds(kind, [Contender(name, partial(timed, name)) for name in names], arguments.rounds)
    rows = compare(kind, runs)
    for row in rows:
        own = figures[row["contender"]]
        for figure in ("cpu", "main"):
            row[figure] = median(1e6 * run[figure] / run["samples"] for run in own)
        for figure in ("first", "megabytes"):
            row[figure] = median(run[figure] for run in own)
        row["cpu_ratio"] = row["cpu"] / rows[0]["cpu"] if rows[0]["cpu"] else math.nan  # by ticks of 10 ms
    return rows


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="of the JPEGs (default: all)")
    parser.add_argument("--workers", action="append", type=int, metavar="N", help="how many (default: 1, and 2)")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="measure only these; the first is the base")


def main() -> None:
    """Measures each size with each number of workers."""
    arguments = parse(__doc__, rounds=3, add=_add_arguments)
    report = Report("train", quick=arguments.quick)
    rows: list[Row] = []
    for size in arguments.size or SIZES:
        make_shards(_kind(size), arguments.folder, quick=arguments.quick)
        names = find_contenders(size, report, arguments)
        for workers in arguments.workers or WORKERS:
            rows += measure(size, workers, names, arguments)
    report.tables.append(Table(TITLE, COLUMNS, rows, "samples_per_second", "images/s"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
