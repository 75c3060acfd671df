"""Write indexes of shards from their headers: our own, DALI's, or a list for wids.

wds index 'train-{000000..000003}.tar'
wds index --dali 'train-*.tar' -o dali-indexes
wds index --wids train.json 'train-*.tar'
wds index --check 'train-*.tar'
"""

import argparse
import functools
import hashlib
import os
import posixpath
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from torchdata_wds import dali_index
from torchdata_wds.cli.command import Command, UsageError, add_parallel, choice, flag, option, usage_checked
from torchdata_wds.cli.index.comparison import FAULTS, compare_index
from torchdata_wds.cli.inputs import add_shards_argument, list_inputs
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.outputs import write_line, write_whole
from torchdata_wds.cli.terminal import Progress, counted, message_of, paused, printable, say
from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index import IndexHeader, ShardIndex, shard_name, wids_list
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.format.index.sidecars import INDEX_SUFFIX, beside, index_url, local_index, make_index_folder
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.byte_streams import stored_bytes
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

_OUTCOMES = _WRITTEN, _UNCHANGED = "written", "unchanged"
_RIGHT = "right"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shards_argument(parser, required=True)
    choice(parser, "--keys", ("first_dot", "last_dot"), "where names are split (default: first_dot)", "first_dot")
    flag(parser, "--dali", "write DALI's index instead: x.idx for x.tar, as its wds2idx does")
    option(parser, "--wids", "LIST.json", "write one list of all shards for wids instead (or in addition to --dali)")
    parser.add_argument("--name", default="", help="the name of the data set in the list")
    flag(parser, "--md5", "add MD5 digests to the list; this reads all of each shard")
    option(parser, "-o --output", "FOLDER", "write indexes there instead of next to the shards")
    flag(parser, "--force", "replace existing indexes that differ")
    text = "write nothing: read the headers again and report each index that is missing, stale or wrong"
    flag(parser, "--check", text)
    cores = os.cpu_count() or 1
    add_parallel(parser, "index N shards at once, in processes (default: one per core)", cores)


def _run(arguments: argparse.Namespace) -> int:
    is_list = arguments.wids is not None
    if not is_list and (arguments.md5 or arguments.name):
        raise UsageError("--md5 and --name need --wids, for whose list they are")
    if is_list and arguments.part is not None:
        raise UsageError("--wids lists all shards, and --part leaves most of them out: run it once without --part")
    if arguments.check and (is_list or arguments.force):
        raise UsageError("--check compares the indexes of shards and writes nothing: use it without --wids and --force")
    if is_list and arguments.output is not None and not arguments.dali:
        raise UsageError("-o is the folder of indexes, and --wids writes only a list, to the file that it names")
    jobs = [(url, _target(url, arguments)) for url in list_inputs(arguments)]
    # With -o, a/x.tar and b/x.tar have the same index, and with --dali x.1.tar and x.2.tar: refuse that before the
    # first is written. After that, a shard that fails does not stop the others; only the list needs all of them.
    for target, count in Counter(target for _, target in jobs).items():
        if count > 1 and target is not None:
            raise UsageError(f"{count:,} of the shards would share the index {mask_url(target)}: index them separately")
    return _check(arguments, jobs) if arguments.check else _write(arguments, jobs)


def _write(arguments: argparse.Namespace, jobs: list[tuple[str, str | None]]) -> int:
    """Writes the indexes or the list, and returns the exit status."""
    if arguments.output is not None and not scheme_of(arguments.output):
        Path(arguments.output).mkdir(parents=True, exist_ok=True)
    options = {"keys": arguments.keys, "dali": arguments.dali, "md5": arguments.md5, "overwrite": arguments.force}
    results = []
    figures = Figures(len(jobs))
    made = map_in_order(functools.partial(make_index, **options), jobs, arguments.parallel)
    with closing(made), figures.progress:
        for result in made:
            results.append(result)
            if result.failure is not None:
                say(f"not indexed: {printable(message_of(result.failure))}")
            figures.add(0 if result.header is None else result.header.samples)
    failed = sum(result.failure is not None for result in results)
    is_list = arguments.wids is not None
    is_listed = is_list and _write_list(arguments, (url for url, _ in jobs), results)
    outcomes = Counter(result.outcome for result in results)
    told = [f"{counted(outcomes[word], 'index', 'indexes')} {word}" for word in _OUTCOMES if outcomes[word]]
    told += [f"{counted(len(jobs), 'shard')} listed"] if is_listed else []
    told += [f"{failed:,} of {counted(len(jobs), 'shard')} failed"] if failed else []
    figures.tell(told)
    return 1 if failed or is_list != is_listed else 0


def _check(arguments: argparse.Namespace, jobs: list[tuple[str, str | None]]) -> int:
    """Compares existing indexes with their shards, prints a line for each that differs, returns the exit status."""
    options = {"keys": arguments.keys, "dali": arguments.dali}
    counts: Counter[str] = Counter()
    figures = Figures(len(jobs))
    compared = map_in_order(functools.partial(compare_index, **options), jobs, arguments.parallel)
    with closing(compared), figures.progress:
        for (url, _), result in zip(jobs, compared, strict=True):
            if result.failure is not None:
                say(f"not checked: {printable(message_of(result.failure))}")
            elif result.fault is not None:
                with paused():
                    write_line(printable(f"{mask_url(url)}: {result.fault}: {result.what}"))
            counts["failed" if result.failure is not None else result.fault or _RIGHT] += 1
            figures.add(result.samples)
    told = [f"{counted(counts[word], 'index', 'indexes')} {word}" for word in (_RIGHT, *FAULTS) if counts[word]]
    told += [f"{counts['failed']:,} of {counted(len(jobs), 'shard')} failed"] if counts["failed"] else []
    figures.tell(told)
    return 0 if counts[_RIGHT] == len(jobs) else 1


class Figures:
    """Counts what is done, shows it as progress, and tells at the end how long it took."""

    def __init__(self, shards: int) -> None:
        self.shards = self.samples = 0
        self.progress = Progress("shards", shards, summarizes=True)
        self._start = time.monotonic()

    def add(self, samples: int) -> None:
        """Counts a shard with its samples."""
        self.shards += 1
        self.samples += samples
        self.progress.advance(note=f"{counted(self.samples, 'sample')}, {self._rate(self._seconds())}")

    def tell(self, outcomes: Sequence[str]) -> None:
        """Says the outcomes and the figures in one line; nothing if there were no shards."""
        if outcomes:
            seconds = self._seconds()
            size = f"{counted(self.samples, 'sample')} of {counted(self.shards, 'shard')}"
            say(f"{', '.join(outcomes)} ({size} in {seconds:,.1f} s, {self._rate(seconds)})")

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-6)

    def _rate(self, seconds: float) -> str:
        return f"{self.samples / seconds:,.0f} samples/s"


def _target(url: str, arguments: argparse.Namespace) -> str | None:
    """Returns where the index of a shard goes; None if only a list is written."""
    if arguments.wids is not None and scheme_of(url) in (STDIN, "pipe"):
        raise UsageError(f"a list cannot refer to {mask_url(url)}: name the shard itself")
    with usage_checked():
        if arguments.output is not None:
            return index_in_folder(url, arguments.output, dali=arguments.dali)
        if arguments.dali:
            return dali_index_url(url)
        if arguments.wids is not None:
            return None
        old = local_index(url) if is_local(url) else None  # stays where it lies
        return index_url(url) if old is None else old


def dali_index_url(shard: str) -> str:
    """Returns where DALI's own ``wds2idx`` puts the index of a shard: the name up to its first dot counts."""
    return beside(shard, _dali_name)


def index_in_folder(shard: str, folder: str, *, dali: bool = False) -> str:
    """Returns where the index of a shard goes in a folder of indexes."""
    name = shard_name(shard)
    if scheme_of(shard) in (STDIN, "pipe") or name in ("", ".", ".."):
        raise ValueError(f"{mask_url(shard)} has no name that an index could have")
    base = _dali_name(name) if dali else name + INDEX_SUFFIX
    return f"{folder.rstrip('/')}/{base}" if folder.strip("/") else folder + base


def _dali_name(base: str) -> str:
    return base[:1] + base[1:].partition(".")[0] + ".idx"


class IndexResult(NamedTuple):
    """What happened to the file, or why it failed; and the shard's header and MD5 digest."""

    outcome: str | None = None
    failure: WdsError | None = None
    header: IndexHeader | None = None
    md5: str | None = None


def make_index(
    job: tuple[str, str | None],
    *,
    keys: Literal["first_dot", "last_dot"] = "first_dot",
    dali: bool = False,
    md5: bool = False,
    overwrite: bool = False,
) -> IndexResult:
    """Makes the index of one shard and saves it unless its target is None; returns failures, does not raise them."""
    url, target = job
    outcome = digest = None
    try:
        index = index_shard(url, keys=keys, to=False)
        if target is not None:
            outcome = save_index(dali_index(index).encode() if dali else index, target, overwrite=overwrite)
        if md5:
            with stored_bytes(open_shard(url)) as stream:
                digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except WdsError as error:
        return IndexResult(outcome, error)
    return IndexResult(outcome, None, index.header, digest)


def save_index(index: ShardIndex | bytes, url: str, *, overwrite: bool = False) -> str:
    """Writes an index, ours or another program's, unless the same exists; returns ``"written"`` or ``"unchanged"``."""
    there = None
    if scheme_of(url) not in (STDIN, "pipe") and (not is_local(url) or os.path.lexists(local_path(url))):
        with suppress(ShardOpenError), stored_bytes(open_shard(url)) as stream:  # writing the file gives a better error
            there = stream.read()
    if isinstance(index, ShardIndex):
        if there is not None:
            # An existing index may know more than this one, made from headers: the shard's digest, or its size. It is
            # as good if the rest is equal, and must not be replaced by one that knows less.
            with suppress(ShardFormatError):
                old = ShardIndex.load(url)
                size = None if index.header.bytes is None else old.header.bytes
                old.header = old.header._replace(sha256=index.header.sha256, bytes=size)
                if old == index:
                    return _UNCHANGED
        index = index.dump()
    if there == index:
        return _UNCHANGED
    if there is not None and not overwrite:
        shown = mask_url(url)
        why = "a different one exists, of other options or another version of the shard. Pass --force to replace it"
        raise ShardOpenError(f"cannot write the index {shown}: {why}", shard=shown)
    make_index_folder(url)
    write_whole([index], url, overwrite=overwrite)
    return _WRITTEN


def _write_list(arguments: argparse.Namespace, urls: Iterable[str], results: Iterable[IndexResult]) -> bool:
    """Writes the list of all shards; returns whether it was written."""
    try:
        listed = [(listed_url(url, arguments.wids), result) for url, result in zip(urls, results, strict=True)]
        headers = [(url, result.header) for url, result in listed if result.header is not None]
        if missing := len(listed) - len(headers):
            raise WdsError(f"{counted(missing, 'shard')} would be missing from it")
        md5sums = {url: result.md5 for url, result in listed if result.md5 is not None}
        text = wids_list(headers, name=arguments.name, md5sums=md5sums)
        save_index(text.encode(), arguments.wids, overwrite=arguments.force)
    except WdsError as error:
        say(f"{mask_url(arguments.wids)} is not written: {printable(message_of(error))}")
        return False
    return True


def listed_url(shard: str, list_file: str) -> str:
    """Returns the URL of a shard for a list: relative local paths start at the list's folder."""
    if scheme_of(shard) or posixpath.isabs(shard):
        return shard
    if not is_local(list_file):
        return os.path.abspath(shard)  # noqa: PTH100 - a str
    return os.path.relpath(shard, os.path.dirname(local_path(list_file)) or ".")  # noqa: PTH120


COMMAND = Command(__doc__, _add_arguments, _run)
