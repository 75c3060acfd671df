"""Write indexes of shards from their headers: our own, one packed for all, DALI's, or a list for wids.

wds index 'train-{000000..000003}.tar'
wds index --dali 'train-*.tar' -o dali-indexes
wds index --wids train.json 'train-*.tar'
wds index --pack train.pack 'train-*.tar'
wds index --check 'train-*.tar'
"""

import argparse
import functools
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from torchdata_wds.cli.command import Command, UsageError, add_parallel, choice, flag, option, usage_checked
from torchdata_wds.cli.index.index_check import FAULTS, compare_indexes, compare_packed
from torchdata_wds.cli.index.lists import write_lists
from torchdata_wds.cli.index.shard_indexes import UNCHANGED, WRITTEN, make_index
from torchdata_wds.cli.inputs import add_shards_argument, list_inputs
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.outputs import write_line
from torchdata_wds.cli.terminal import Progress, counted, message_of, paused, printable, say
from torchdata_wds.format.index.foreign import dali_name
from torchdata_wds.format.index.sidecars import beside, index_in_folder, index_url, local_index
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN, is_local, scheme_of

_RIGHT = "right"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shards_argument(parser, required=True)
    choice(parser, "--keys", ("first_dot", "last_dot"), "where names are split (default: first_dot)", "first_dot")
    flag(parser, "--dali", "write DALI's index instead: x.idx for x.tar, as its wds2idx does")
    option(parser, "--wids", "LIST.json", "write one list of all shards for wids instead (or in addition to --dali)")
    option(parser, "--pack", "FILE", "write one binary index of all shards instead, which opens in milliseconds")
    parser.add_argument("--name", default="", help="the name of the data set in the list")
    flag(parser, "--md5", "add MD5 digests to the list; this reads all of each shard")
    option(parser, "-o --output", "FOLDER", "write indexes there instead of next to the shards")
    flag(parser, "--force", "replace existing indexes that differ")
    text = "write nothing: read the headers again and report each index that is missing, stale or wrong"
    flag(parser, "--check", text)
    cores = os.cpu_count() or 1
    add_parallel(parser, "index N shards at once, in processes (default: one per core)", cores)


def _run(arguments: argparse.Namespace) -> int:
    lists = [f"--{name}" for name in ("wids", "pack") if getattr(arguments, name) is not None]
    if arguments.wids is None and (arguments.md5 or arguments.name):
        raise UsageError("--md5 and --name need --wids, for whose list they are")
    if lists and arguments.part is not None:
        raise UsageError(f"{lists[0]} is about all shards, and --part leaves most of them out: run it without --part")
    if arguments.check and (arguments.wids is not None or arguments.force):
        raise UsageError("--check compares the indexes of shards and writes nothing: use it without --wids and --force")
    if lists and arguments.output is not None and not arguments.dali:
        raise UsageError(f"-o is the folder of indexes, and {lists[0]} writes only one file, which it names")
    if arguments.check and arguments.pack is not None and arguments.dali:
        raise UsageError("--check compares one kind of index: use it with --pack or with --dali")
    jobs = [(url, _target(url, arguments)) for url in list_inputs(arguments)]
    # With -o, a/x.tar and b/x.tar have the same index, and with --dali x.1.tar and x.2.tar: refuse that before the
    # first is written. After that, a shard that fails does not stop the others; only the list needs all of them.
    for target, count in Counter(target for _, target in jobs).items():
        if count > 1 and target is not None:
            raise UsageError(f"{count:,} of the shards would share the index {mask_url(target)}: index them separately")
    return _check(arguments, jobs) if arguments.check else _write(arguments, jobs)


def _write(arguments: argparse.Namespace, jobs: list[tuple[str, str | None]]) -> int:
    """Writes the indexes or lists, and returns the exit status."""
    if arguments.output is not None and not scheme_of(arguments.output):
        Path(arguments.output).mkdir(parents=True, exist_ok=True)
    options = {"keys": arguments.keys, "dali": arguments.dali, "md5": arguments.md5, "overwrite": arguments.force}
    options["pack"] = arguments.pack is not None
    options["reuse"] = options["pack"] and not arguments.dali and arguments.wids is None
    results = []
    figures = Figures([url for url, _ in jobs])
    made = map_in_order(functools.partial(make_index, **options), jobs, arguments.parallel)
    with closing(made), figures.progress:
        for (url, _), result in zip(jobs, made, strict=True):
            results.append(result)
            if result.failure is not None:
                say(f"not indexed: {printable(message_of(result.failure))}")
            figures.add(url, result.samples)
    failed = sum(result.failure is not None for result in results)
    listed = write_lists(arguments, [url for url, _ in jobs], results)
    outcomes = Counter(result.outcome for result in results)
    told = [f"{counted(outcomes[word], 'index', 'indexes')} {word}" for word in (WRITTEN, UNCHANGED) if outcomes[word]]
    told += listed
    told += [f"{failed:,} of {counted(len(jobs), 'shard')} failed"] if failed else []
    figures.tell(told)
    wanted = sum(name is not None for name in (arguments.wids, arguments.pack))
    return 1 if failed or len(listed) != wanted else 0


def _check(arguments: argparse.Namespace, jobs: list[tuple[str, str | None]]) -> int:
    """Compares existing indexes with their shards, prints a line for each that differs, returns the exit status."""
    counts: Counter[str] = Counter()
    figures = Figures([url for url, _ in jobs])
    compare = compare_indexes if arguments.pack is None else compare_packed
    compared = compare(arguments, jobs)
    with closing(compared), figures.progress:
        for (url, _), result in zip(jobs, compared, strict=True):
            if result.failure is not None:
                say(f"not checked: {printable(message_of(result.failure))}")
            elif result.fault is not None:
                with paused():
                    write_line(printable(f"{mask_url(url)}: {result.fault}: {result.what}"))
            counts["failed" if result.failure is not None else result.fault or _RIGHT] += 1
            figures.add(url, result.samples)
    told = [f"{counted(counts[word], 'index', 'indexes')} {word}" for word in (_RIGHT, *FAULTS) if counts[word]]
    told += [f"{counts['failed']:,} of {counted(len(jobs), 'shard')} failed"] if counts["failed"] else []
    figures.tell(told)
    return 0 if counts[_RIGHT] == len(jobs) else 1


class Figures:
    """Counts what is done, shows it as progress, and tells at the end how long it took."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.shards = self.samples = 0
        self.progress = Progress("shards", urls=urls, summarizes=True)
        self._start = time.monotonic()

    def add(self, url: str, samples: int) -> None:
        """Counts a shard with its samples."""
        self.shards += 1
        self.samples += samples
        self.progress.advance(shard=url, samples=samples)

    def tell(self, outcomes: Sequence[str]) -> None:
        """Says the outcomes and the figures in one line; nothing if there were no shards."""
        if outcomes:
            seconds = max(time.monotonic() - self._start, 1e-6)
            size = f"{counted(self.samples, 'sample')} of {counted(self.shards, 'shard')}"
            say(f"{', '.join(outcomes)} ({size} in {seconds:,.1f} s, {self.samples / seconds:,.0f} samples/s)")


def _target(url: str, arguments: argparse.Namespace) -> str | None:
    """Returns where the index of a shard goes; None if only a list is written."""
    is_list = arguments.wids is not None or arguments.pack is not None
    if is_list and scheme_of(url) in (STDIN, "pipe"):
        raise UsageError(f"a list cannot refer to {mask_url(url)}: name the shard itself")
    with usage_checked():
        if arguments.output is not None:
            return index_in_folder(url, arguments.output, dali_name if arguments.dali else None)
        if arguments.dali:
            return beside(url, dali_name)
        if is_list:
            return None
        old = local_index(url) if is_local(url) else None  # stays where it lies
        return index_url(url) if old is None else old


COMMAND = Command(__doc__, _add_arguments, _run)
