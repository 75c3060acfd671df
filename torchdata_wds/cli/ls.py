"""List samples with their key, fields and sizes, and count those of each shard.

wds ls 'train-{000000..000003}.tar'
wds ls --totals train-*.tar
wds ls --json --slice 0:5 train-000000.tar
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from typing import Any, cast

import numpy as np

from torchdata_wds.cli.command import Command, UsageError, flag, option, usage_checked
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments, list_inputs
from torchdata_wds.cli.outputs import write_line
from torchdata_wds.cli.sample_order import ChosenNumbers
from torchdata_wds.cli.terminal import Progress, counted, printable, say
from torchdata_wds.errors import ShardFormatError, WdsError
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.scan import read_sizes
from torchdata_wds.format.index.slices import check_size, slice_members
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import is_metadata, key_splitter
from torchdata_wds.format.tar.members import Mark, ShardMember, Unit
from torchdata_wds.storage import mask_url
from torchdata_wds.workers.stats.reports.amounts import size_text

_BLOCK = 1024  # samples of a packed index that are looked up at once
_WIDEST_KEY = 60  # a longer key shifts only its own line
_COUNTED = ("samples", "members", "bytes")
Sized = tuple[dict[str, Any], dict[str, int]]  # a sample, and the sizes of its fields


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    flag(parser, "--json", "one JSON object per line, with exact sizes: key, shard, fields, bytes")
    flag(parser, "--index", "list the samples that the indexes of the shards name, without reading the shards")
    text = "list what the file of 'wds index --pack' has: number, place and hash of the key of each sample"
    option(parser, "--pack", "FILE", text)
    flag(parser, "-q --totals", "print only the counts, to standard output")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.pack is not None:
        return _list_packed(arguments)
    reader = SizeReader(arguments)
    lines = _json_lines if arguments.json else _columns
    with closing(reader.sizes()) as samples:
        if arguments.totals:
            for _ in samples:
                pass
        else:
            for line in lines(samples):
                write_line(line)
    tell: Callable[[str], None] = write_line if arguments.totals else say
    for text in _totals(reader.counts, as_json=arguments.totals and arguments.json):
        tell(text)
    return reader.finish()


class SizeReader(SampleReader):
    """Reads samples for their sizes, from headers alone where that is faster."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.counts: list[tuple[str, dict[str, int]]] = []  # of each shard that could be opened, empty or not
        self._by_index: bool = arguments.index
        self.hidden = not arguments.totals

    def sizes(self) -> Generator[Sized, None, None]:
        """Yields each sample (rely only on its ``__key__`` and ``__url__``) and the sizes of its fields."""
        for sample in self:
            fields = ((name, value) for name, value in sample.items() if not is_metadata(name))
            sizes = {name: value if isinstance(value, int) else len(value) for name, value in fields}
            counts = self.counts[-1][1]
            counts["samples"] += 1
            counts["members"] += len(sizes)
            counts["bytes"] += sum(sizes.values())
            yield sample, sizes

    def left_out(self) -> Counter[str]:
        """Counts the members that belong to no sample, by reason."""
        return self._skipped

    def _progress(self) -> Progress:
        return Progress("samples", urls=self.urls, skips=True, hidden=self.hidden)

    def _samples(self) -> Generator[dict[str, Any], None, None]:
        return group_members(
            self._units(), on_error=self._lose, skipped=self._skipped, shown=mask_url, **self._grouping
        )

    def _units(self) -> Iterator[Unit]:
        """Yields the members of all shards, most of them with only their sizes; each shard ends with a mark."""
        split = key_splitter(self._grouping["keys"])
        for visit, url in enumerate(self.urls, 1):
            try:
                with closing(self._read(url, visit)) as members:
                    first = next(members, Mark.END)
                    self.counts.append((url, dict.fromkeys(_COUNTED, 0)))  # once it is open, even without samples
                    part, units = self._slice_of(url), chain((first,), members)
                    yield from units if part is None else slice_members(units, split, part)
                yield Mark.END
            except (WdsError, OSError) as error:
                yield Mark.BROKEN  # complete samples go out before the error is raised
                self._lose(error)

    def _read(self, url: str, visit: int) -> Generator[Unit, None, None]:
        if self._by_index:
            return _indexed_sizes(url, visit, self._grouping["keys"])
        return read_sizes(url, visit=visit, skipped=self._skipped, **self._reading)


def _indexed_sizes(url: str, visit: int, keys: object) -> Generator[Unit, None, None]:
    """Yields the members that the index of a shard names, with their sizes for content, as `read_sizes` does."""
    with usage_checked():
        index = ShardIndex.beside(url)
    check_size(index.header, url)
    shard, rule = mask_url(url), index.header.keys
    if rule != keys:
        what = f"the index of shard {shard} was made with --keys {rule}: pass the same, or make it again"
        raise ShardFormatError(what, shard=shard, kind="index")
    for sample in index:
        for member in sample.members:
            if member.size is None:
                what = f"the index of shard {shard} has no size of {member.name}, which is sparse: leave out --index"
                raise ShardFormatError(what, shard=shard, member=member.name, kind="index")
            yield ShardMember(url, member.name, cast("bytes", member.size), visit)


def _json_lines(samples: Iterable[Sized]) -> Iterator[str]:
    for sample, sizes in samples:
        shard = mask_url(sample["__url__"])
        yield json.dumps({"key": sample["__key__"], "shard": shard, "fields": sizes, "bytes": sum(sizes.values())})


def _columns(samples: Iterable[Sized]) -> Iterator[str]:
    """Yields key, then name and size of each field, in columns that are as wide as the widest so far."""
    key_width = 0
    widths: dict[str, int] = {}
    for sample, sizes in samples:
        key = printable(sample["__key__"])
        key_width = max(key_width, min(len(key), _WIDEST_KEY))
        parts = [f"{key:<{key_width}}"]
        for field, size in sizes.items():
            text = size_text(size)
            width = widths[field] = max(widths.get(field, 0), len(text))
            parts.append(f"{printable(field)} {text:>{width}}")
        yield "  ".join(parts)


def _totals(shards: list[tuple[str, dict[str, int]]], *, as_json: bool) -> Iterator[str]:
    """Yields a line per shard and one for all; as JSON, the last has the number of shards instead of a name."""
    names = shards[0][1] if shards else _COUNTED
    total = {name: sum(counts[name] for _, counts in shards) for name in names}
    rows: list[tuple[dict[str, Any], str, dict[str, int]]]
    rows = [({"shard": mask_url(url)}, printable(mask_url(url)), counts) for url, counts in shards]
    for record, name, counts in [*rows, ({"shards": len(shards)}, counted(len(shards), "shard"), total)]:
        told = ", ".join(counted(count, words.removesuffix("s")) for words, count in counts.items())
        yield json.dumps(record | counts) if as_json else f"{name}: {told}"


def _list_packed(arguments: argparse.Namespace) -> int:
    """Lists the samples and shards of a packed index, all of them or those of the named shards."""
    if arguments.index:
        raise UsageError("--index reads the index of each shard, and --pack one of all: choose one")
    index = DatasetIndex.load(arguments.pack)
    if arguments.shards:
        index = index.select(list_inputs(arguments))
    if not arguments.totals:
        chosen = ChosenNumbers(index.bounds, arguments.shard_slice or slice(None), arguments.slice or slice(None))
        for record in _packed_samples(index, chosen):
            write_line(json.dumps(record) if arguments.json else _packed_line(**record))
    tell: Callable[[str], None] = write_line if arguments.totals else say
    counts = [(entry.url, {"samples": entry.samples, "bytes": entry.tar_bytes}) for entry in index.shards]
    for text in _totals(counts, as_json=arguments.totals and arguments.json):
        tell(text)
    say(f"digest {index.digest}, --keys {index.keys}")
    return 0


def _packed_samples(index: DatasetIndex, chosen: ChosenNumbers) -> Iterator[dict[str, Any]]:
    """Yields the number and the place of each sample, and the low 32 bits of its key's hash."""
    for first in range(0, len(chosen), _BLOCK):
        numbers = chosen.at(np.arange(first, min(first + _BLOCK, len(chosen))))
        shards = np.searchsorted(index.bounds, numbers, side="right") - 1
        for number, shard in zip(numbers.tolist(), shards.tolist(), strict=True):
            place = number - int(index.bounds[shard])
            (start, stop), checks = index.rows(shard, place, place + 1)
            key_hash = None if checks is None else f"{checks[0]:08x}"
            place_in_shard = {
                "shard": mask_url(index.shards[shard].url),
                "start": int(start),
                "size": int(stop - start),
            }
            yield {"number": number, "key_hash": key_hash, **place_in_shard}


def _packed_line(*, number: int, key_hash: str | None, shard: str, start: int, size: int) -> str:
    return f"{number}  {key_hash or '-'}  {printable(shard)}  {size:,} B at {start:,}"


COMMAND = Command(__doc__, _add_arguments, _run)
