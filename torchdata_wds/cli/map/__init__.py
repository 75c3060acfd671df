"""``map``: runs a Python function over shards, shard by shard."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
from pathlib import Path

from torchdata_wds.cli.command import Command, UsageError, whole_number
from torchdata_wds.cli.inputs import add_shards_argument, list_all_inputs
from torchdata_wds.cli.jobs import run_in_processes
from torchdata_wds.cli.map.dask_tasks import run_on_dask
from torchdata_wds.cli.map.functions import load_function, load_sample_function
from torchdata_wds.cli.map.shard_tasks import Results, ShardTask, run_task, work_on_shards
from torchdata_wds.storage.urls import STDIN

_EXAMPLE = """
wds map augment:augment 'train-{000000..000003}.tar' -o augmented/
wds map augment:augment 'train-*.tar' -o 'augmented/{name}.tar.gz' --workers 2
"""

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "function",
        type=function_name,
        metavar="MODULE:FUNCTION",
        help="a function of two names: of the shard to read, and of the file to write; its module is looked for in the "
        "current folder first",
    )
    add_shards_argument(parser, required=True)
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="a folder, for outputs of the same names, or a name with {name} (the input's, without .tar and the like) "
        "or {shard:06d} (its number); outputs that exist are skipped",
    )
    parser.add_argument("--force", action="store_true", help="replace outputs that exist")
    parser.add_argument(
        "--per-sample",
        action="store_true",
        help="the function is given one sample, a dict of bytes by field with __key__; it returns a sample, None, or "
        "several",
    )
    parser.add_argument(
        "--workers",
        type=whole_number,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        metavar="N",
        help="worker processes; 0 works in this one (default: one for each core, %(default)s)",
    )
    parser.add_argument(
        "--dask", metavar="ADDRESS", help="a Dask scheduler that does the work, or 'local' for a cluster made for it"
    )


def function_name(text: str) -> str:
    """Checks the name of a function."""
    if _NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"expected module:function, such as augment:main for the function main of augment.py, not {text!r}"
        )
    return text


def run(arguments: argparse.Namespace) -> int:
    """Runs the function over the shards, and returns 1 if it failed for one."""
    load = functools.partial(load_sample_function if arguments.per_sample else load_function, arguments.function)
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # also for processes that are started
    try:
        load()  # fails now, and not once for every shard
        urls = list_all_inputs(arguments)
        if STDIN in urls:
            raise UsageError("a function is given the names of shards, and standard input ('-') has none")

        def work(tasks: list[ShardTask]) -> Results:
            workers = min(arguments.workers, len(tasks))
            if arguments.dask is not None and tasks:
                yield from run_on_dask(load(), tasks, arguments.dask, num_workers=max(workers, 1), folder=folder)
            elif workers:
                yield from run_in_processes(functools.partial(run_task, load), tasks, workers)
            else:
                yield from ((task, run_task(load, task)) for task in tasks)

        return work_on_shards(urls, arguments, work)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


COMMAND = Command("run a Python function over shards, shard by shard", add_arguments, run, _EXAMPLE)
