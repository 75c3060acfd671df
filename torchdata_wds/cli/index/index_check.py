"""Comparing existing indexes with their shards, of which only the headers are read (``wds index --check``)."""

import argparse
import functools
import os
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Literal, NamedTuple

from torchdata_wds.cli.index.comparison import (
    MISSING,
    STALE,
    WRONG,
    Fault,
    difference,
    packed_difference,
    text_difference,
)
from torchdata_wds.cli.index.shard_indexes import make_index
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.terminal import message_of
from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError, WdsError
from torchdata_wds.format.index import ShardIndex, dali_index
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.format.index.shard_lookup import has_digest
from torchdata_wds.format.index.sidecars import index_url
from torchdata_wds.storage import StorageOptions, mask_url, open_shard
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

FAULTS = MISSING, STALE, WRONG
Jobs = Sequence[tuple[str, str | None]]


class Comparison(NamedTuple):
    """What is wrong with an index, and how; or why its shard could not be read."""

    fault: str | None = None  # one of `FAULTS`, None if the index is right
    what: str = ""
    failure: WdsError | None = None
    samples: int = 0  # of the shard


def compare_index(
    job: tuple[str, str], *, keys: Literal["first_dot", "last_dot"] = "first_dot", dali: bool = False
) -> Comparison:
    """Compares the index at a URL, ours or DALI's, with the shard; returns failures, does not raise them."""
    url, target = job
    try:
        index = index_shard(url, keys=keys, to=False)
        expected = dali_index(index) if dali else ""
    except WdsError as error:
        return Comparison(failure=error)
    shown = mask_url(target)
    fault: Fault | None
    try:
        if is_local(target) and not os.path.lexists(local_path(target)):
            fault = MISSING, f"it has no index {shown}"
        elif dali:
            fault = text_difference(_read(target), expected, shown)
        else:
            is_beside = scheme_of(url) not in (STDIN, "pipe") and target == index_url(url)  # or at its old place
            found = ShardIndex.beside(url) if is_beside else ShardIndex.load(target)
            fault = difference(_retagged(found, index, url), index, shown)
    except ShardFormatError as error:
        fault = WRONG, message_of(error)
    except ShardOpenError as error:
        fault = MISSING, message_of(error)
    kind, what = fault or (None, "")
    return Comparison(kind, what, samples=len(index))


def _retagged(found: ShardIndex, index: ShardIndex, url: str) -> ShardIndex:
    """Gives an index the present tag of its shard if that was copied or touched, but has the content of before."""
    was, now = found.header, index.header
    if was.tag != now.tag and was.bytes is not None:
        is_same = has_digest(url, StoredVersion(was.bytes), was.sha256, StorageOptions())
        found.header = was._replace(tag=now.tag) if is_same else was
    return found


def compare_indexes(arguments: argparse.Namespace, jobs: Jobs) -> Generator[Comparison, None, None]:
    """Compares the index of each shard, in processes."""
    compare = functools.partial(compare_index, keys=arguments.keys, dali=arguments.dali)
    return map_in_order(compare, jobs, arguments.parallel)


def compare_packed(arguments: argparse.Namespace, jobs: Jobs) -> Generator[Comparison, None, None]:
    """Compares what the packed index says of each shard; the headers are read in processes."""
    packed = DatasetIndex.load(arguments.pack)
    shown = mask_url(arguments.pack)
    scan = functools.partial(make_index, keys=arguments.keys, pack=True)
    with closing(map_in_order(scan, jobs, arguments.parallel)) as results:
        for (url, _), result in zip(jobs, results, strict=True):
            if result.columns is None:
                yield Comparison(failure=result.failure)
                continue
            fault: Fault | None
            try:
                fault = packed_difference(packed.select([url]), result.columns, arguments.keys, shown)
            except ShardListError:
                fault = MISSING, f"{shown} does not have it"
            kind, what = fault or (None, "")
            yield Comparison(kind, what, samples=len(result.columns.offsets) - 1)


def _read(url: str) -> bytes:
    with open_shard(url) as stream:
        return stream.read()
