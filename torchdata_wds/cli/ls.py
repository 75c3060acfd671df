"""``ls``: which samples shards have, with the fields of each and their sizes."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any

from torchdata_wds import storage
from torchdata_wds.cli.arguments.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.arguments.shown_samples import write_line
from torchdata_wds.cli.command import Command, counted, say, tell_left_out
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import Progress
from torchdata_wds.errors import WdsError
from torchdata_wds.format.index.scan import read_for_sizes
from torchdata_wds.format.index.slices import OpenSlice, slice_members
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import is_metadata, key_splitter
from torchdata_wds.format.tar.members import Mark, Unit

__all__ = ["COMMAND"]


_WIDEST_KEY = 60  # longer ones push their own line aside, not all that follow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_input_arguments(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object a line: key, shard, fields, bytes")
    parser.add_argument("-q", "--totals", action="store_true", help="only the counts, on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Lists the samples."""
    counts = Counts()
    reader = SizeReader(arguments, counts)
    with closing(reader.samples()) as samples:
        if arguments.totals:
            with Progress("samples", only_on_terminal=True) as progress:
                for sample in samples:
                    counts.add(sample)
                    progress.advance()
        else:
            line = _json_line if arguments.json else Columns().line
            for sample in samples:
                counts.add(sample)
                write_line(line(sample))
    tell: Callable[[str], None] = write_line if arguments.totals else say
    for text in counts.json_lines() if arguments.totals and arguments.json else counts.lines():
        tell(text)
    return reader.finish()


class SizeReader:
    """Reads samples for their sizes, from headers alone where that is faster.

    Args:
        arguments: With those of `add_input_arguments`.
        counts: Is told of each shard that could be opened.
    """

    def __init__(self, arguments: argparse.Namespace, counts: Counts) -> None:
        self._arguments = arguments
        self._counts = counts
        self._reader = SampleReader(arguments)
        self._skipped: Counter[str] = Counter()

    def samples(self) -> Generator[dict[str, Any], None, None]:
        """Reads the samples: ``__key__``, ``__url__``, and sizes or bytes by field.

        Raises:
            WdsError: at damage, unless it is to be skipped.
        """
        part: slice = self._arguments.slice or slice(None)
        with closing(self._all()) as samples:
            yield from islice(samples, part.start, part.stop, part.step)

    def finish(self) -> int:
        """Tells what was left out, and gives the exit status."""
        tell_left_out(self._skipped)
        return self._reader.finish()

    def _all(self) -> Generator[dict[str, Any], None, None]:
        arguments = self._arguments
        for visit, url in enumerate(self._reader.urls, 1):
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
        try:
            members = read_for_sizes(
                url,
                visit=visit,
                require_end_marker=not self._arguments.no_end_marker,
                concatenated=self._arguments.concatenated,
                skipped=self._skipped,
            )
            with closing(members):
                first = next(members, Mark.END)
                self._counts.begin(url)
                yield from self._sliced(chain((first,), members), url)
        except (WdsError, OSError) as error:
            yield Mark.BROKEN  # what is whole goes out before the error is raised
            self._lose(error)

    def _sliced(self, units: Iterable[Unit], url: str) -> Iterable[Unit]:
        part: slice | None = self._arguments.shard_slice
        if part is None:
            return units
        wanted = OpenSlice(url, part.start or 0, part.stop, part.step or 1)
        return slice_members(units, key_splitter(self._arguments.keys), wanted)

    def _lose(self, error: Exception) -> bool:
        self._reader.refuse(error)
        return True


def _sizes(sample: dict[str, Any]) -> dict[str, int]:
    fields = ((name, value) for name, value in sample.items() if not is_metadata(name))
    return {name: value if isinstance(value, int) else len(value) for name, value in fields}


def _json_line(sample: dict[str, Any]) -> str:
    sizes = _sizes(sample)
    shard = storage.mask_url(sample["__url__"])
    return json.dumps({"key": sample["__key__"], "shard": shard, "fields": sizes, "bytes": sum(sizes.values())})


class Columns:
    """Lines whose columns are as wide as the widest so far."""

    def __init__(self) -> None:
        self._key = 0
        self._fields: dict[str, int] = {}

    def line(self, sample: dict[str, Any]) -> str:
        """Makes the line of a sample: its key, then name and size of each field."""
        key = printable(sample["__key__"])
        self._key = max(self._key, min(len(key), _WIDEST_KEY))
        parts = [f"{key:<{self._key}}"]
        for field, size in _sizes(sample).items():
            text = f"{size:,} B"  # a bare number would read as the label
            width = self._fields[field] = max(self._fields.get(field, 0), len(text))
            parts.append(f"{printable(field)} {text:>{width}}")
        return "  ".join(parts)


class Counts:
    """Counts samples, members and bytes of each shard, empty or not, in the order they are read."""

    def __init__(self) -> None:
        self._shards: list[tuple[str, list[int]]] = []

    def begin(self, url: str) -> None:
        """Takes note of a shard, which the next samples belong to."""
        self._shards.append((url, [0, 0, 0]))

    def add(self, sample: dict[str, Any]) -> None:
        """Counts a sample."""
        sizes = _sizes(sample)
        counts = self._shards[-1][1]
        for place, number in enumerate((1, len(sizes), sum(sizes.values()))):
            counts[place] += number

    def lines(self) -> Iterator[str]:
        """Gives a line for each shard, and one for all."""
        for url, counts in self._shards:
            yield f"{printable(storage.mask_url(url))}: {_told(counts)}"
        yield f"{counted(len(self._shards), 'shard')}: {_told(self._total())}"

    def json_lines(self) -> Iterator[str]:
        """Gives the same in JSON; the last object, of all, has the number of shards instead of a name."""
        for url, counts in self._shards:
            yield json.dumps({"shard": storage.mask_url(url), **_named(counts)})
        yield json.dumps({"shards": len(self._shards), **_named(self._total())})

    def _total(self) -> list[int]:
        return [sum(column) for column in zip(*(counts for _, counts in self._shards), strict=True)] or [0, 0, 0]


def _told(counts: list[int]) -> str:
    return ", ".join(counted(count, words.removesuffix("s")) for words, count in _named(counts).items())


def _named(counts: list[int]) -> dict[str, int]:
    return dict(zip(("samples", "members", "bytes"), counts, strict=True))


COMMAND = Command(
    "list the samples: key, fields and sizes of each; counts of the shards",
    add_arguments,
    run,
    """
    wds ls 'train-{000000..000003}.tar'
    wds ls --totals train-*.tar
    wds ls --json --slice 0:5 train-000000.tar
    """,
)
