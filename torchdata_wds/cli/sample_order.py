"""Reading samples in a random order of the whole data set (``--order``), by an index of where each one lies."""

import argparse
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import numpy as np

from torchdata_wds.cli.command import Parser, UsageError, option, positive_number, whole_number
from torchdata_wds.cli.inputs import SampleReader, list_all_inputs, part_of
from torchdata_wds.cli.terminal import Progress
from torchdata_wds.errors import ShardFormatError, WdsError
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.lookup import find_index
from torchdata_wds.format.index.samples import SampleReader as IndexedReader
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.pipes.order.permutation import Order
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.ranges import ShardRanges
from torchdata_wds.storage.urls import STDIN, scheme_of

T = TypeVar("T")
R = TypeVar("R")
Numbers = np.ndarray[Any, Any]
_BLOCK = 1024  # how many positions of the order are computed at once
_REQUESTS = 8  # how many pieces of remote shards are read at once, or more with --parallel
_KEYS = ("first_dot", "last_dot")

# Options that change what a sample is: indexes are made without them.
_REFUSED = {
    "no_end_marker": False,
    "concatenated": False,
    "on_reappearing": "error",
    "max_member_bytes": DEFAULT_MAX_MEMBER_BYTES,
}


def add_order_arguments(parser: Parser) -> None:
    """Adds ``--order`` and the options that need it."""
    text = "shuffle all samples perfectly, by an index; keys that come in several shards need --rekey"
    option(parser, "--order", "SEED", text, whole_number)
    text = "with --order: keep runs of N neighbours together, which makes fewer and longer reads (default: 1)"
    option(parser, "--run", "N", text, positive_number)
    text = "with --order: the file of 'wds index --pack' (default: the shards' own indexes, or a scan of headers)"
    option(parser, "--pack", "FILE", text)
    text = "with --order: keep copies of remote shards there, each copied once (default: read parts of them)"
    option(parser, "--cache", "FOLDER", text)


def check_order_arguments(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go with ``--order``, or that need it."""
    if arguments.order is None:
        for name in ("run", "pack", "cache"):
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name} needs --order, which reads samples by an index")
        return
    given = [name for name, default in _REFUSED.items() if getattr(arguments, name) != default]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"--order reads samples by an index, which is made without {options}: leave it out")
    if arguments.keys not in _KEYS:
        raise UsageError(f"--order reads samples by an index: --keys must be {' or '.join(_KEYS)}")


class OrderedReader(SampleReader):
    """Reads each sample once, in the order of ``--order`` and ``--run``, in bounded memory.

    ``--slice`` and ``--shard-slice`` choose samples as they lie in the shards, before they are ordered; ``--part``
    takes a part of the order. `parallel` pieces of shards are read at once, and more if shards are remote.
    """

    def __init__(self, arguments: argparse.Namespace, *, parallel: int = 1, hidden: bool = False) -> None:
        super().__init__(arguments, urls=[], hidden=hidden)
        self._index = self._readable(_find_index(arguments, self._lose))
        self.urls = [entry.url for entry in self._index.shards]
        self._chosen = ChosenNumbers(self._index.bounds, self._shard_slice or slice(None), self._slice)
        self._slice = slice(None)
        total = len(self._chosen)
        self._order = Order(total, run=arguments.run or 1, seed=arguments.order)
        part = part_of(range(total), arguments.part, "sample")
        self._positions = range(part[0], part[-1] + 1) if part else range(0)
        self._parallel = parallel
        self._cache: str | None = arguments.cache

    def _readable(self, index: DatasetIndex) -> DatasetIndex:
        """Returns the index without compressed shards, which are refused."""
        kept = []
        for entry in index.shards:
            if entry.compressed:
                shown = mask_url(entry.url)
                what = f"shard {shown} is compressed, so that --order cannot read its samples one by one"
                cure = "Decompress it first, or shuffle it with wds sort --type shuffle"
                self._lose(ShardFormatError(f"{what}. {cure}", shard=shown, kind="unsupported"))
            else:
                kept.append(entry.url)
        return index if len(kept) == len(index.shards) else index.select(kept)

    def _progress(self) -> Progress:
        return Progress("samples", len(self._positions), hidden=self.hidden)

    def _samples(self) -> Generator[dict[str, Any], None, None]:
        rules: Any = {name: self._grouping[name] for name in ("lowercase", "on_duplicate")}
        with ShardRanges(cache=self._cache) as ranges:
            is_local = all(ranges.is_local(url) for url in self.urls)
            parallel = self._parallel if is_local else max(self._parallel, _REQUESTS)
            reader = IndexedReader(self._index, ranges, **rules)
            blocks = (self._positions[place : place + _BLOCK] for place in range(0, len(self._positions), _BLOCK))
            ordered = (self._chosen.at(self._order.numbers(block.start, block.stop)) for block in blocks)
            pieces = (piece for numbers in ordered for piece in reader.pieces(numbers))
            with closing(fetched(reader.fetch, pieces, parallel)) as results:
                for piece, data in results:
                    for sample in reader.take(piece, data):
                        if isinstance(sample, Exception):
                            self._lose(sample)
                        else:
                            yield sample


def _find_index(arguments: argparse.Namespace, lose: Callable[[Exception], bool]) -> DatasetIndex:
    """Finds the index of the shards that can be opened; `lose` raises the errors of the others, or counts them."""
    if arguments.pack is not None and not arguments.shards:
        index = DatasetIndex.load(arguments.pack)
        if index.keys != arguments.keys:
            raise UsageError(f"the index was made with --keys {index.keys}: pass the same")
        return index
    urls = list_all_inputs(arguments)
    for url in urls:
        if scheme_of(url) in (STDIN, "pipe"):
            raise UsageError(f"--order reads samples at any place of a shard: {mask_url(url)} has no such access")
    find = functools.partial(find_index, index=arguments.pack or "auto", keys=arguments.keys)
    try:
        return find(urls)
    except WdsError as error:
        if arguments.errors == "stop":
            raise
        first = error
    good = []
    for url in urls:
        try:
            find([url])
            good.append(url)
        except WdsError as error:
            lose(error)
    if len(good) == len(urls):
        raise first
    return find(good)


class ChosenNumbers:
    """The numbers of the samples that ``--shard-slice`` and ``--slice`` choose, in no more memory than the shards take.

    Example:
        >>> chosen = ChosenNumbers(np.array([0, 5, 8]), slice(1, None, 2), slice(1, None))  # 1 3 of 5, 1 of 3
        >>> len(chosen), chosen.at(np.array([0, 1])).tolist()
        (2, [3, 6])
    """

    def __init__(self, bounds: Numbers, shard_slice: slice, whole: slice) -> None:
        self._first, self._step = shard_slice.start or 0, shard_slice.step or 1
        counts = [len(range(int(count))[shard_slice]) for count in np.diff(bounds)]
        self._starts = bounds[:-1]
        self._bounds = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._whole = range(int(self._bounds[-1]))[whole]

    def __len__(self) -> int:
        return len(self._whole)

    def at(self, places: Numbers) -> Numbers:
        """Returns the numbers at places among the chosen ones."""
        rows = self._whole.start + self._whole.step * places
        shards = np.searchsorted(self._bounds, rows, side="right") - 1
        numbers: np.ndarray[Any, Any] = self._starts[shards] + self._first + self._step * (rows - self._bounds[shards])
        return numbers


def fetched(fetch: Callable[[T], R], items: Iterable[T], parallel: int) -> Generator[tuple[T, R], None, None]:
    """Yields each item with what was fetched for it, in order; `parallel` of them are fetched at once, in threads."""
    if parallel == 1:
        yield from ((item, fetch(item)) for item in items)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    with ThreadPoolExecutor(parallel) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(fetch, item)))
                if len(waiting) > parallel:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for item, future in waiting:
                yield item, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
