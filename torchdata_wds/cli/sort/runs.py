"""Sorting more samples than fit into memory: sorted runs in files without a name, and a merge of them."""

from __future__ import annotations

import contextlib
import heapq
import os
import pickle
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from operator import itemgetter
from sys import getsizeof
from typing import Any

Sample = Mapping[str, Any]

#: The value that a sample is sorted by, and the sample, or its place in the file of large ones.
Entry = tuple[Any, Any]
_Run = tuple[int, int]  # where the blocks of a run start and stop in their file
_value_of = itemgetter(0)
_BUFFER = 16 << 10  # samples are read from random places, so that most of what is read ahead is wasted
_MOST_RUNS = 1000
_SMALLEST_BLOCK, _LARGEST_BLOCK = 4 << 10, 1 << 20
_PER_SAMPLE, _PER_FIELD = 320, 48  # what a sample, and each of its fields, takes in memory besides its bytes


def sort_samples(
    entries: Iterable[tuple[Any, Sample]],
    *,
    reverse: bool = False,
    memory: float = 1 << 30,
    folder: str | os.PathLike[str] | None = None,
) -> Generator[Sample, None, None]:
    """Sorts samples by their values, in a given amount of memory. Samples with the same value keep their order.

    All are read before the first is yielded. What does not fit into memory goes to temporary files, three at most. They
    have no name, so that nothing is left of them however the process ends, and take the space of the samples once;
    small samples in very many runs take it twice.

    Entries are values with their samples; `memory` is in bytes, and a larger sample is sorted too. Temporary files go
    to `folder`, by default where the system has them (``TMPDIR``).
    """
    with contextlib.closing(_Runs(folder, memory, reverse)) as runs:
        held: list[Entry] = []
        size = 0
        for value, sample in entries:
            size += _size_of(value, sample)
            held.append((value, sample))
            if size > memory:
                runs.add(held)
                size = 0
        if runs.runs:
            runs.add(held)
            yield from runs.merged()
            return
        held.sort(key=_value_of, reverse=reverse)
        held.reverse()
        while held:  # each is released once it is yielded
            yield held.pop()[1]


def _size_of(value: Any, sample: Sample) -> int:
    """Estimates what a sample takes in memory, with its value."""
    parts = value if isinstance(value, tuple) else (value,)
    return _PER_SAMPLE + _PER_FIELD * len(sample) + sum(map(getsizeof, parts)) + sum(map(len, sample.values()))


class _Runs:
    """Sorted runs of samples.

    A run consists of blocks, lists of entries, and a merge holds one block of each run in memory. A sample that is
    large for a block goes to another file, and its entry has its place there: it is read when it is yielded, and the
    passes of a merge do not move it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, memory: float, reverse: bool) -> None:
        self.runs: list[_Run] = []
        self._folder = folder
        self._memory = memory
        self._reverse = reverse
        self._block = int(max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, memory / 64)))
        self._widest = self._block
        self._files: list[_TemporaryFile] = []  # of large samples, then of blocks; made when they are needed

    def add(self, entries: list[Entry]) -> None:
        """Makes a run of entries, and empties their list."""
        entries.sort(key=_value_of, reverse=self._reverse)
        while len(self._files) < 2:
            self._files.append(_TemporaryFile(self._folder))
        large, blocks = self._files
        limit = self._block // 4
        stored = ((value, large.put(sample) if _size_of(b"", sample) >= limit else sample) for value, sample in entries)
        self.runs.append(self._write(stored, blocks))
        entries.clear()

    def merged(self) -> Iterator[Sample]:
        """Yields the samples of all runs, in their order."""
        while len(self.runs) > self._most_runs():
            self._merge_groups()
        large, blocks = self._files
        for _, stored in self._merge(self.runs, blocks):
            yield large.get(stored)[0] if isinstance(stored, int) else stored

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _most_runs(self) -> int:
        # with 1 GiB and blocks of 1 MiB, 1000 runs; a run with a block of 2 MiB halves that
        return max(2, min(_MOST_RUNS, int(self._memory // self._widest)))

    def _merge_groups(self) -> None:
        """Merges neighbouring runs into fewer ones, in a new file."""
        before, self._files[1] = self._files[1], _TemporaryFile(self._folder)
        most = self._most_runs()
        groups = [self.runs[start : start + most] for start in range(0, len(self.runs), most)]
        with contextlib.closing(before):
            self.runs = [self._write(self._merge(group, before), self._files[1]) for group in groups]

    def _merge(self, runs: Iterable[_Run], file: _TemporaryFile) -> Iterator[Entry]:
        # of entries with the same value, the merge takes those of an earlier run first
        return heapq.merge(*(_read(run, file) for run in runs), key=_value_of, reverse=self._reverse)

    def _write(self, entries: Iterable[Entry], file: _TemporaryFile) -> _Run:
        """Appends a run to a file."""
        start = file.end
        block: list[Entry] = []
        size = 0
        for entry in entries:
            value, stored = entry
            block.append(entry)
            # the bytes of a large sample are in the other file: only its value counts here
            size += _size_of(value, {} if isinstance(stored, int) else stored)
            if size >= self._block:
                self._widest = max(self._widest, size)
                file.put(block)
                block, size = [], 0
        if block:
            file.put(block)
        return start, file.end


def _read(run: _Run, file: _TemporaryFile) -> Iterator[Entry]:
    position, stop = run
    while position < stop:
        block, position = file.get(position)
        yield from block


class _TemporaryFile:
    """Objects in a file without a name, which no other process can change: first all are put in, then taken out."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = folder
        self.end = 0  # the place of the next object
        with self._explained():
            self._file = tempfile.TemporaryFile(dir=folder, buffering=_BUFFER)  # noqa: SIM115 - closed by `close`

    def put(self, value: object) -> int:
        """Writes an object and returns its place."""
        place = self.end
        with self._explained():
            pickle.dump(value, self._file, pickle.HIGHEST_PROTOCOL)
            self.end = self._file.tell()
        return place

    def get(self, place: int) -> tuple[Any, int]:
        """Reads an object and returns the place after it too."""
        with self._explained():
            self._file.seek(place)
            return pickle.load(self._file), self._file.tell()

    def close(self) -> None:
        # what did not fit on a full disk is still in the buffer, and useless
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
