"""Sorting more samples than fit into memory: sorted runs in files without a name, and a merge of them."""

from __future__ import annotations

import contextlib
import heapq
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from sys import getsizeof
from typing import Any, NamedTuple

from torchdata_wds.errors import SampleError

__all__ = ["sort_samples"]


Sample = Mapping[str, Any]

#: The value that a sample is sorted by, and the sample, or the place where it lies.
_Entry = tuple[Any, Any]

_value_of = itemgetter(0)

# Samples that are sought lie anywhere: what is read ahead of them is mostly read in vain.
_BUFFER = 16 << 10

_MOST_RUNS = 1000

_SMALLEST_BLOCK, _LARGEST_BLOCK = 4 << 10, 1 << 20

#: What a sample takes in memory besides the bytes of its values, and each of its fields.
_PER_SAMPLE, _PER_FIELD = 320, 48


def sort_samples(
    samples: Iterable[Sample],
    key: Callable[[Sample], Any],
    *,
    reverse: bool = False,
    memory: float = 1 << 30,
    folder: str | os.PathLike[str] | None = None,
    on_error: Callable[[SampleError], object] | None = None,
) -> Iterator[Sample]:
    """Sorts samples, in as much memory as is given. Samples with the same value keep their order.

    All are read before the first is given. What does not fit into memory goes to temporary files, of which there are
    three at most. They have no name, so that nothing of them is left however the process ends, and take the space of
    the samples once; small samples in very many runs take it twice.

    Args:
        samples: ``__key__`` and bytes by field.
        key: Gives what a sample is sorted by, as `torchdata_wds.cli.sort.keys.SortKey` does; None leaves it out.
        reverse: Whether the largest comes first.
        memory: How many bytes of samples to keep in memory. A sample that is larger is sorted too.
        folder: Where temporary files lie; by default where the system has them (``TMPDIR``).
        on_error: Is told of each sample whose value cannot be found out, which is left out; None raises.

    Yields:
        The samples.

    Raises:
        SampleError: as `key` does.
        OSError: if there is no room for the temporary files, or no such folder.

    Example:
        >>> samples = [{"__key__": "a", "cls": b"2"}, {"__key__": "b", "cls": b"10"}, {"__key__": "c", "cls": b"2"}]
        >>> [sample["__key__"] for sample in sort_samples(samples, lambda sample: int(sample["cls"]))]
        ['a', 'c', 'b']
    """
    with contextlib.closing(_Runs(folder, memory, reverse)) as runs:
        held: list[_Entry] = []
        size = 0
        for value, sample in _with_values(samples, key, on_error):
            size += _size_of(value, sample)
            held.append((value, sample))
            if size > memory:
                runs.add(held)
                size = 0
        if runs.count:
            runs.add(held)
            yield from runs.merged()
            return
        held.sort(key=_value_of, reverse=reverse)
        held.reverse()
        while held:
            yield held.pop()[1]


def _with_values(
    samples: Iterable[Sample], key: Callable[[Sample], Any], on_error: Callable[[SampleError], object] | None
) -> Iterator[tuple[Any, Sample]]:
    for sample in samples:
        try:
            value = key(sample)
        except SampleError as error:
            if on_error is None:
                raise
            on_error(error)
            continue
        if value is not None:
            yield value, sample


def _size_of(value: Any, sample: Sample) -> int:
    """Estimates what a sample takes in memory, with its value."""
    parts = value if isinstance(value, tuple) else (value,)
    return _PER_SAMPLE + _PER_FIELD * len(sample) + sum(map(getsizeof, parts)) + sum(map(len, sample.values()))


class _Run(NamedTuple):
    """Where the blocks of a run lie in their file."""

    start: int
    stop: int


class _Runs:
    """Sorted runs of samples.

    A run is made of blocks, lists of entries, of which one of each run is in memory while runs are merged. A sample
    that is large for a block lies by itself in another file, and its entry says where: it is read when it is given
    out, and the passes of a merge do not move it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, memory: float, reverse: bool) -> None:
        self._folder = folder
        self._memory = memory
        self._reverse = reverse
        self._block = int(max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, memory / 64)))
        self._widest = self._block
        self._runs: list[_Run] = []
        self._blocks: _TemporaryFile | None = None
        self._large: _TemporaryFile | None = None

    @property
    def count(self) -> int:
        return len(self._runs)

    def add(self, entries: list[_Entry]) -> None:
        """Makes a run of entries, which are taken out of the list."""
        entries.sort(key=_value_of, reverse=self._reverse)
        if self._blocks is None:
            self._blocks = _TemporaryFile(self._folder)
            self._large = _TemporaryFile(self._folder)
        self._runs.append(self._write(map(self._outside_if_large, entries), self._blocks))
        entries.clear()

    def merged(self) -> Iterator[Sample]:
        """Gives the samples of all runs."""
        while len(self._runs) > self._most_runs():
            self._merge_groups()
        large = self._large
        assert large is not None
        for _, stored in self._merge(self._runs):
            yield large.get(stored)[0] if isinstance(stored, int) else stored

    def close(self) -> None:
        for file in (self._blocks, self._large):
            if file is not None:
                file.close()

    def _most_runs(self) -> int:
        return max(2, min(_MOST_RUNS, int(self._memory // self._widest)))

    def _merge_groups(self) -> None:
        """Merges runs that stand next to each other into fewer ones, in a new file."""
        before, self._blocks = self._blocks, _TemporaryFile(self._folder)
        assert before is not None
        most = self._most_runs()
        groups = [self._runs[start : start + most] for start in range(0, len(self._runs), most)]
        with contextlib.closing(before):
            self._runs = [self._write(self._merge(group, before), self._blocks) for group in groups]

    def _merge(self, runs: Iterable[_Run], file: _TemporaryFile | None = None) -> Iterator[_Entry]:
        file = file or self._blocks
        assert file is not None
        # of entries with the same value, the merge takes those of an earlier run first
        return heapq.merge(*(_read(run, file) for run in runs), key=_value_of, reverse=self._reverse)

    def _outside_if_large(self, entry: _Entry) -> _Entry:
        value, sample = entry
        if _size_of(b"", sample) < self._block // 4:
            return entry
        assert self._large is not None
        return value, self._large.put(sample)

    def _write(self, entries: Iterable[_Entry], file: _TemporaryFile) -> _Run:
        """Writes a run behind what is in a file."""
        start = file.end
        block: list[_Entry] = []
        size = 0
        for entry in entries:
            value, stored = entry
            block.append(entry)
            size += _size_of(value, {} if isinstance(stored, int) else stored)
            if size >= self._block:
                self._widest = max(self._widest, size)
                file.put(block)
                block, size = [], 0
        if block:
            file.put(block)
        return _Run(start, file.end)


def _read(run: _Run, file: _TemporaryFile) -> Iterator[_Entry]:
    position = run.start
    while position < run.stop:
        block, position = file.get(position)
        yield from block


class _TemporaryFile:
    """Objects in a file without a name, which no other process can have changed: first all are put in, then taken out.

    Attributes:
        end: Where the next object will lie.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = folder
        self.end = 0
        with self._explained():
            self._file = tempfile.TemporaryFile(dir=folder, buffering=_BUFFER)  # noqa: SIM115 - closed by `close`

    def put(self, value: object) -> int:
        """Writes an object and gives its place."""
        place = self.end
        with self._explained():
            pickle.dump(value, self._file, pickle.HIGHEST_PROTOCOL)
            self.end = self._file.tell()
        return place

    def get(self, place: int) -> tuple[Any, int]:
        """Reads an object and gives the place behind it."""
        with self._explained():
            self._file.seek(place)
            return pickle.load(self._file), self._file.tell()

    def close(self) -> None:
        # what did not fit on a full disk is still in the buffer, and of no use
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = os.fspath(self._folder) if self._folder is not None else tempfile.gettempdir()
            raise OSError(
                error.errno,
                f"samples that are being sorted cannot be kept in a temporary file in {place}: "
                f"{error.strerror or error}. Give it a folder with room for them, or more memory",
            ) from error
