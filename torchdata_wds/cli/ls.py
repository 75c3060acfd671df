"""``ls``: which samples shards have, with the fields of each and their sizes."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any

from torchdata_wds import storage
from torchdata_wds.cli.command import Command, flag
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.outputs import write_line
from torchdata_wds.cli.terminal import Progress, counted, printable, say
from torchdata_wds.errors import WdsError
from torchdata_wds.format.index.scan import read_sizes
from torchdata_wds.format.index.slices import OpenSlice, slice_members
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import is_metadata, key_splitter
from torchdata_wds.format.tar.members import Mark, Unit

_WIDEST_KEY = 60  # a longer one moves only the rest of its own line
_COUNTED = ("samples", "members", "bytes")
Sizes = dict[str, int]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    flag(parser, "--json", "a JSON object a line: key, shard, fields, bytes")
    flag(parser, "-q --totals", "only the counts, on standard output")


def _run(arguments: argparse.Namespace) -> int:
    reader = SizeReader(arguments)
    line = _json_line if arguments.json else Columns().line
    with (
        closing(reader.sizes()) as samples,
        Progress("samples", only_on_terminal=True, hidden=not arguments.totals) as progress,
    ):
        for sample, sizes in samples:
            if arguments.totals:
                progress.advance()
            else:
                write_line(line(sample, sizes))
    tell: Callable[[str], None] = write_line if arguments.totals else say
    for text in _totals(reader.counts, as_json=arguments.totals and arguments.json):
        tell(text)
    return reader.finish()


class SizeReader(SampleReader):
    """Reads samples for their sizes, from headers alone where that is faster.

    Attributes:
        counts: Samples, members and bytes of each shard that could be opened, empty or not, in order.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.counts: list[tuple[str, list[int]]] = []
        self._arguments = arguments
        self._skipped: Counter[str] = Counter()

    def sizes(self) -> Generator[tuple[dict[str, Any], Sizes], None, None]:
        """Yields each sample (of which only ``__key__`` and ``__url__`` are certain) and the sizes of its fields."""
        part = self._slice
        with closing(self._samples()) as samples:
            for sample in islice(samples, part.start, part.stop, part.step):
                fields = ((name, value) for name, value in sample.items() if not is_metadata(name))
                sizes = {name: value if isinstance(value, int) else len(value) for name, value in fields}
                counts = self.counts[-1][1]
                for place, number in enumerate((1, len(sizes), sum(sizes.values()))):
                    counts[place] += number
                yield sample, sizes

    def left_out(self) -> Counter[str]:
        """Counts the members that belong to no sample, by reason."""
        return self._skipped

    def _samples(self) -> Generator[dict[str, Any], None, None]:
        arguments = self._arguments
        for visit, url in enumerate(self.urls, 1):
            with closing(self._units(url, visit)) as units:
                yield from group_members(
                    units,
                    keys=arguments.keys,
                    lowercase=not arguments.keep_case,
                    on_duplicate=arguments.on_duplicate,
                    on_reappearing=arguments.on_reappearing,
                    on_error=self._lose,
                    skipped=self._skipped,
                    shown=storage.mask_url,
                )

    def _units(self, url: str, visit: int) -> Generator[Unit, None, None]:
        arguments = self._arguments
        part: slice | None = arguments.shard_slice
        try:
            members = read_sizes(
                url,
                visit=visit,
                require_end_marker=not arguments.no_end_marker,
                concatenated=arguments.concatenated,
                skipped=self._skipped,
            )
            with closing(members):
                # the shard counts once it is open, even if it has no samples
                first = next(members, Mark.END)
                self.counts.append((url, [0, 0, 0]))
                units = chain((first,), members)
                if part is None:
                    yield from units
                else:
                    wanted = OpenSlice(url, part.start or 0, part.stop, part.step or 1)
                    yield from slice_members(units, key_splitter(arguments.keys), wanted)
        except (WdsError, OSError) as error:
            yield Mark.BROKEN  # complete samples go out before the error is raised
            self._lose(error)


def _json_line(sample: dict[str, Any], sizes: Sizes) -> str:
    shard = storage.mask_url(sample["__url__"])
    return json.dumps({"key": sample["__key__"], "shard": shard, "fields": sizes, "bytes": sum(sizes.values())})


class Columns:
    """Lines whose columns are as wide as the widest so far."""

    def __init__(self) -> None:
        self._key = 0
        self._fields: dict[str, int] = {}

    def line(self, sample: dict[str, Any], sizes: Sizes) -> str:
        """Returns the line of a sample: its key, then name and size of each field."""
        key = printable(sample["__key__"])
        self._key = max(self._key, min(len(key), _WIDEST_KEY))
        parts = [f"{key:<{self._key}}"]
        for field, size in sizes.items():
            text = f"{size:,} B"  # a bare number would look like the label
            width = self._fields[field] = max(self._fields.get(field, 0), len(text))
            parts.append(f"{printable(field)} {text:>{width}}")
        return "  ".join(parts)


def _totals(shards: list[tuple[str, list[int]]], *, as_json: bool) -> Iterator[str]:
    """Yields a line for each shard, and one for all; the last JSON object has the number of shards for a name."""
    for url, counts in shards:
        shard = storage.mask_url(url)
        yield json.dumps({"shard": shard, **_named(counts)}) if as_json else f"{printable(shard)}: {_told(counts)}"
    total = [sum(column) for column in zip(*(counts for _, counts in shards), strict=True)] or [0, 0, 0]
    if as_json:
        yield json.dumps({"shards": len(shards), **_named(total)})
    else:
        yield f"{counted(len(shards), 'shard')}: {_told(total)}"


def _told(counts: list[int]) -> str:
    return ", ".join(counted(count, words.removesuffix("s")) for words, count in _named(counts).items())


def _named(counts: list[int]) -> dict[str, int]:
    return dict(zip(_COUNTED, counts, strict=True))


COMMAND = Command(
    "list the samples: key, fields and sizes of each; counts of the shards",
    _add_arguments,
    _run,
    """
    wds ls 'train-{000000..000003}.tar'
    wds ls --totals train-*.tar
    wds ls --json --slice 0:5 train-000000.tar
    """,
)
