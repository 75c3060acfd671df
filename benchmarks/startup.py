"""What the package takes to import after torch, alone and with a first chain, and to the first sample of 1 GB.

    python benchmarks/startup.py [--quick] [--json FILE] [--chart FILE]

Imports are timed inside new processes, after `import torch, torch.utils.data`, with bytecode that is cached: a first
run of each is not counted. The package imports most of its modules when a first chain uses them. The time to the first
sample is that from making the chain, in a process in which everything is imported; the shard is in the page cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from time import perf_counter

from harness import Contender, Run, compare, finish, parse, run_rounds
from peers import Epoch, find_peers, read_ours
from report import Report, Row, Table
from shards import make_shards

IMPORT = """
import sys
import torch, torch.utils.data
from time import perf_counter
start = perf_counter()
exec(sys.argv[1])
print(perf_counter() - start)
"""
CHAIN = """
from torchdata_wds import WdsLoader, WebDataset, wds_collate
pipe = WebDataset("x.tar").wds_shuffle(1000).wds_decode("rgb").wds_to_tuple("jpg", "cls").batch(64).collate(wds_collate)
"""
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "ms": "{milliseconds:,.1f}",
    "it ÷ ours": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
}


def import_once(statements: str, environment: dict[str, str]) -> Run:
    """Imports in a new process."""
    command = [sys.executable, "-c", IMPORT, statements]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Run(float(run.stdout), 1)


def first_sample(epoch: Epoch) -> Run:
    """Makes a chain and takes one sample."""
    start = perf_counter()
    samples = iter(epoch())
    next(samples)
    return Run(perf_counter() - start, 1)


def import_rows(report: Report, arguments: argparse.Namespace) -> list[Row]:
    """The rows of the imports."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(arguments.folder / "bytecode")
    statements = {"ours": "import torchdata_wds", "ours, with a chain": CHAIN}
    if "webdataset" not in report.left_out:
        statements["webdataset"] = "import webdataset"
    contenders = [Contender(name, partial(import_once, code, environment)) for name, code in statements.items()]
    for contender in contenders:
        contender.run()
    return compare("import after torch", run_rounds("imports", contenders, arguments.rounds))


def first_sample_rows(report: Report, arguments: argparse.Namespace) -> list[Row]:
    """The rows of the first samples."""
    shards = make_shards("1 GB", arguments.folder, quick=arguments.quick)
    peers, missing = find_peers("webdataset", "torchdata")
    report.left_out |= missing
    epochs = {"ours": read_ours(shards)} | {name: read(shards) for name, read in peers.items()}
    contenders = [Contender(name, partial(first_sample, epoch)) for name, epoch in epochs.items()]
    for contender in contenders:
        contender.run()
    kind = f"first sample of {shards.size / 1e6:,.0f} MB"
    return compare(kind, run_rounds(kind, contenders, 3 * arguments.rounds))


def main() -> None:
    """Measures imports and first samples."""
    arguments = parse(__doc__)
    report = Report("startup", quick=arguments.quick)
    first = first_sample_rows(report, arguments)
    rows = import_rows(report, arguments) + first
    for row in rows:
        row["milliseconds"] = row["microseconds"] / 1e3
    report.tables.append(Table("Starting: medians and ratios of medians", COLUMNS, rows, "milliseconds", "ms"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
