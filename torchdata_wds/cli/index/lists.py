"""Files about all shards: the list for wids, and the packed index."""

import argparse
import os
import posixpath
from collections.abc import Sequence
from contextlib import suppress

from torchdata_wds.cli.index.shard_indexes import IndexResult, save_index
from torchdata_wds.cli.terminal import counted, message_of, printable, say
from torchdata_wds.errors import ShardFormatError, ShardOpenError, WdsError
from torchdata_wds.format.index import wids_list
from torchdata_wds.format.index.columns import Columns
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import is_local, local_path, scheme_of


def write_lists(arguments: argparse.Namespace, urls: Sequence[str], results: Sequence[IndexResult]) -> list[str]:
    """Writes the files that ``--wids`` and ``--pack`` name; returns what was done, one text for each that is whole."""
    told = []
    for name, write, word in (
        (arguments.wids, _write_wids, "listed"),
        (arguments.pack, _write_packed, "packed"),
    ):
        if name is None:
            continue
        try:
            if missing := sum(result.failure is not None for result in results):
                raise WdsError(f"{counted(missing, 'shard')} would be missing from it")
            write(arguments, urls, results)
            told.append(f"{counted(len(results), 'shard')} {word}")
        except WdsError as error:
            say(f"{mask_url(name)} is not written: {printable(message_of(error))}")
    return told


def _write_wids(arguments: argparse.Namespace, urls: Sequence[str], results: Sequence[IndexResult]) -> None:
    listed = [(listed_url(url, arguments.wids), result) for url, result in zip(urls, results, strict=True)]
    headers = [(url, result.header) for url, result in listed if result.header is not None]
    md5sums = {url: result.md5 for url, result in listed if result.md5 is not None}
    text = wids_list(headers, name=arguments.name, md5sums=md5sums)
    save_index(text.encode(), arguments.wids, overwrite=arguments.force)


def _write_packed(arguments: argparse.Namespace, _: Sequence[str], results: Sequence[IndexResult]) -> None:
    columns = [result.columns for result in results if result.columns is not None]
    save_packed(DatasetIndex.of_columns(Columns.of(arguments.keys, columns)), arguments.pack, overwrite=arguments.force)


def save_packed(index: DatasetIndex, url: str, *, overwrite: bool = False) -> None:
    """Writes a packed index unless the same exists; raises ShardOpenError if another file does."""
    if not overwrite and (not is_local(url) or os.path.lexists(local_path(url))):
        with suppress(ShardOpenError):  # writing the file gives a better error
            try:
                there: DatasetIndex | None = DatasetIndex.load(url)
            except ShardFormatError:
                there = None
            if there == index:
                return
            shown = mask_url(url)
            what = f"cannot write the packed index {shown}: a different file exists. Pass --force to replace it"
            raise WdsError(what, shard=shown)
    index.save(url)


def listed_url(shard: str, list_file: str) -> str:
    """Returns the URL of a shard for a list: relative local paths start at the list's folder."""
    if scheme_of(shard) or posixpath.isabs(shard):
        return shard
    if not is_local(list_file):
        return os.path.abspath(shard)  # noqa: PTH100 - a str
    return os.path.relpath(shard, os.path.dirname(local_path(list_file)) or ".")  # noqa: PTH120
