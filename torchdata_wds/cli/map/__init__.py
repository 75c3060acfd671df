"""Run a Python function on shards, one by one.

wds map augment:augment 'train-{000000..000003}.tar' -o augmented/
wds map augment:augment 'train-*.tar' -o 'augmented/{name}.tar.gz' --workers 2
wds map augment:augment 'train-*.tar' -o augmented/ --ray head:6379
"""

import argparse
import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from torchdata_wds.cli.command import Command, UsageError, flag, option, whole_number
from torchdata_wds.cli.inputs import add_shards_argument, list_all_inputs
from torchdata_wds.cli.jobs import run_in_processes
from torchdata_wds.cli.map.clusters import add_cluster_options, chosen_cluster, run_on_cluster
from torchdata_wds.cli.map.shard_tasks import (
    Results,
    ShardFunction,
    ShardTask,
    error_text,
    run_task,
    work_on_shards,
)
from torchdata_wds.environment import usable_cpus
from torchdata_wds.errors import SampleError
from torchdata_wds.handlers import Asked, reraise_exception
from torchdata_wds.pipes.shards.shard_reading import Item, ShardReading
from torchdata_wds.storage import StorageOptions, mask_url
from torchdata_wds.storage.urls import STDIN
from torchdata_wds.writers.tar_writer import TarWriter

#: ``module:function``.
FUNCTION_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "a function that takes the name of the shard to read and of the file to write; its module is searched for in "
        "the current folder first"
    )
    option(parser, "function", "MODULE:FUNCTION", text, function_name)
    add_shards_argument(parser, required=True)
    text = (
        "a folder, for outputs with the same names, or a name with {name} (the input's, without .tar and the like) "
        "or {shard:06d} (its number); existing outputs are skipped"
    )
    option(parser, "-o --output", "OUT", text, required=True)
    flag(parser, "--force", "replace existing outputs")
    text = (
        "the function takes one sample, a dict of bytes by field with __key__, and returns a sample, None, or several"
    )
    flag(parser, "--per-sample", text)
    cores = usable_cpus()
    text = "worker processes; 0 works in this one (default: one per core, %(default)s)"
    option(parser, "--workers", "N", text, whole_number, default=cores)
    add_cluster_options(parser)


def function_name(text: str) -> str:
    """Parses ``module:function``."""
    if FUNCTION_NAME.fullmatch(text) is None:
        expected = "expected module:function, such as augment:main for the function main of augment.py"
        raise argparse.ArgumentTypeError(f"{expected}, not {text!r}")
    return text


def _run(arguments: argparse.Namespace) -> int:
    load = functools.partial(load_function, arguments.function, per_sample=arguments.per_sample)
    cluster = chosen_cluster(arguments)
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # also for processes that are started
    try:
        load()  # fails now instead of once per shard
        urls = list_all_inputs(arguments)
        if STDIN in urls:
            raise UsageError("the function takes the names of shards, and standard input ('-') has none")

        def work(tasks: list[ShardTask]) -> Results:
            workers = min(arguments.workers, len(tasks))
            if cluster and tasks:
                yield from run_on_cluster(cluster, load(), tasks, num_workers=max(workers, 1), folder=folder)
            elif workers:
                yield from run_in_processes(functools.partial(run_task, load), tasks, workers)
            else:
                yield from ((task, run_task(load, task)) for task in tasks)

        return work_on_shards(urls, arguments, work)
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


COMMAND = Command(__doc__, _add_arguments, _run)


# ------------------------------------------------------------------------------------------------- the user's function


def load_function(name: str, *, per_sample: bool = False) -> ShardFunction:
    """Imports ``module:function`` as a function of a shard, wrapping one of a sample; raises ImportError."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            message = f"there is no module {error.name!r} in the current folder or where Python looks for modules"
        else:
            message = f"the module {module_name!r} fails when it is imported:\n{error_text(error)}"
        raise ImportError(message, name=module_name) from error
    try:
        found = functools.reduce(getattr, path.split("."), found)
    except AttributeError as error:
        raise ImportError(f"the module {module_name!r} has no function {path!r}", name=module_name) from error
    if not callable(found):
        raise ImportError(f"{name} cannot be called: it is {found!r:.60}", name=module_name)  # noqa: TRY004
    return functools.partial(over_samples, found) if per_sample else found


def over_samples(function: Callable[[dict[str, Any]], Any], source: str, target: str) -> None:
    """Applies a function to each sample of a shard and writes the results to another, in order.

    The function returns a sample, None to leave it out, or any number of samples; values that are not bytes are encoded
    by their field.
    """
    skipped: Counter[str] = Counter()
    samples = ShardReading(skipped, StorageOptions()).samples([Item(source)], Asked(reraise_exception, skipped))
    with TarWriter(target) as writer, closing(samples) as given:
        for sample in given:
            key = sample["__key__"]  # the function may change its sample
            if (made := function(sample)) is None:
                continue
            if isinstance(made, Mapping):
                made = (made,)
            elif not isinstance(made, Iterable) or isinstance(made, (str, bytes)):
                shard = mask_url(source)
                what = f"the function has returned {made!r:.60} for sample {key!r} of shard {shard}"
                expected = "it must return a sample (a dict), None to leave it out, or a list of samples"
                raise SampleError(f"{what}: {expected}", shard=shard, key=key)
            for one in made:
                writer.write(one)
