"""``index``: indexes of shards, from their headers."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from torchdata_wds.cli.arguments.inputs import add_shards_argument, list_inputs
from torchdata_wds.cli.command import Command, UsageError, counted, message_of, positive_number, say
from torchdata_wds.cli.index.files import (
    IndexJob,
    IndexResult,
    dali_index_url,
    index_in_folder,
    listed_url,
    make_indexes,
    save_text,
)
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import Progress
from torchdata_wds.errors import WdsError
from torchdata_wds.format.index import index_url
from torchdata_wds.format.index.exports import wids_list
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN, scheme_of

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``index``."""
    add_shards_argument(parser, required=True)
    parser.add_argument(
        "--keys", choices=("first_dot", "last_dot"), default="first_dot", help="where names are split (default: first)"
    )
    parser.add_argument(
        "--dali", action="store_true", help="write DALI's index instead: x.idx for x.tar, as its wds2idx does"
    )
    parser.add_argument(
        "--wids", metavar="LIST.json", help="write one list of all shards for wids instead (or besides --dali)"
    )
    parser.add_argument("--name", default="", help="the name of the data set in the list")
    parser.add_argument("--md5", action="store_true", help="note MD5 digests in the list: shards are read whole")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="write indexes there, not beside the shards")
    parser.add_argument("--force", action="store_true", help="replace other indexes that are there")
    parser.add_argument(
        "-p",
        "--parallel",
        type=positive_number,
        default=os.cpu_count() or 1,
        metavar="N",
        help="index N shards at once, in processes (default: as many as there are cores)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the indexes, and returns 1 if one could not be."""
    if arguments.wids is None and (arguments.md5 or arguments.name):
        raise UsageError("--md5 and --name are about the list that --wids writes")
    if arguments.wids is not None and arguments.part is not None:
        raise UsageError("--wids lists all shards, and --part leaves most of them out: run it once without --part")
    jobs = _jobs(arguments, list_inputs(arguments))
    if arguments.output is not None and not scheme_of(arguments.output):
        Path(arguments.output).mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()
    good: list[IndexResult] = []
    with (
        closing(map_in_order(make_indexes, jobs, arguments.parallel)) as results,  # type: ignore[type-var]
        Progress("shards", len(jobs), only_on_terminal=True) as progress,
    ):
        for result in results:
            outcomes.update(result.outcomes)
            if result.failure is None:
                good.append(result)
            else:
                say(f"not indexed: {printable(message_of(result.failure))}")
            progress.advance()
    failed = len(jobs) - len(good)
    is_listed = arguments.wids is None or _write_list(arguments, good, failed)
    if told := _summary(outcomes, len(jobs), failed, is_listed=arguments.wids is not None and is_listed):
        say(told)
    return 0 if is_listed and not failed else 1


COMMAND = Command(
    "write indexes of shards, from their headers: ours, DALI's, or a list for wids",
    add_arguments,
    run,
    """
    wds index 'train-{000000..000003}.tar'
    wds index --dali 'train-*.tar' -o dali-indexes
    wds index --wids train.json 'train-*.tar'
    """,
)


def _summary(outcomes: Counter[str], count: int, failed: int, *, is_listed: bool) -> str:
    told = [
        f"{counted(outcomes[word], 'index', 'indexes')} {word}" for word in ("written", "unchanged") if outcomes[word]
    ]
    told += [f"{counted(count, 'shard')} listed"] if is_listed else []
    told += [f"{failed:,} of {counted(count, 'shard')} failed"] if failed else []
    return ", ".join(told)


def _jobs(arguments: argparse.Namespace, urls: Sequence[str]) -> list[IndexJob]:
    """What to do for each shard.

    Raises:
        UsageError: if there is no place for an index, or one for two.
    """
    writes_own = not arguments.dali and arguments.wids is None
    if arguments.output is not None and not writes_own and not arguments.dali:
        raise UsageError("-o is the folder of indexes, and --wids writes only a list, to the file that it names")
    jobs = []
    for url in urls:
        place = _place(url, arguments)
        own, dali = place if writes_own else None, place if arguments.dali else None
        jobs.append(IndexJob(url, arguments.keys, own, dali, arguments.force, arguments.md5))
    for target, count in Counter(job.own or job.dali for job in jobs).items():
        if count > 1 and target is not None:
            raise UsageError(f"{count:,} of the shards would have one index, {mask_url(target)}: index them apart")
    return jobs


def _place(url: str, arguments: argparse.Namespace) -> str | None:
    """Where the index of a shard goes; None if only a list is written.

    Raises:
        UsageError: if there is no place for it.
    """
    if arguments.wids is not None and scheme_of(url) in (STDIN, "pipe"):
        raise UsageError(f"a list cannot refer to {mask_url(url)}: name the shard itself")
    try:
        if arguments.output is not None:
            return index_in_folder(url, arguments.output, dali=arguments.dali)
        if arguments.dali:
            return dali_index_url(url)
        return index_url(url) if arguments.wids is None else None
    except ValueError as error:
        raise UsageError(str(error)) from error


def _write_list(arguments: argparse.Namespace, results: Sequence[IndexResult], failed: int) -> bool:
    """Writes the list of all shards; tells whether it was written."""
    if failed:
        say(f"{mask_url(arguments.wids)} is not written: {counted(failed, 'shard')} would be missing in it")
        return False
    urls = [listed_url(result.url, arguments.wids) for result in results]
    headers = [(url, result.header) for url, result in zip(urls, results, strict=True) if result.header is not None]
    md5sums = {url: result.md5 for url, result in zip(urls, results, strict=True) if result.md5 is not None}
    try:
        text = wids_list(headers, name=arguments.name, md5sums=md5sums)
        save_text(text, arguments.wids, overwrite=arguments.force)
    except WdsError as error:
        say(f"{mask_url(arguments.wids)} is not written: {printable(message_of(error))}")
        return False
    return True
