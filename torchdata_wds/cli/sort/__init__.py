"""Sort samples by their key or a field, in bounded memory.

wds sort train-000000.tar -k cls --type int -o by-class.tar
wds sort 'train-*.tar' --type shuffle --seed 1 --memory 100MB -o shuffled.tar

What does not fit in memory goes to unnamed temporary files as sorted runs, which are then merged.
"""

import argparse
import heapq
import math
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from decimal import Decimal
from hashlib import blake2b
from itertools import chain, islice
from operator import itemgetter
from sys import getsizeof
from typing import Any, Literal, get_args

from torchdata_wds.cli import outputs
from torchdata_wds.cli.command import Command, UsageError, add_seed, byte_size, choice, flag, option, usage_checked
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.terminal import Progress, counted, say
from torchdata_wds.codecs.values.text import without_bom
from torchdata_wds.errors import DecodingError
from torchdata_wds.pipes.samples.field_specs import alternatives, find_field, missing_field, name_sample

SortType = Literal["text", "int", "float", "shuffle"]
MissingValue = Literal["error", "skip", "last"]  # what to do with a sample that lacks the field to sort by
Sample = Mapping[str, Any]

#: The value that a sample is sorted by, and the sample, or its place in the file of large ones.
Entry = tuple[Any, Any]
_Run = tuple[int, int]  # where the blocks of a run start and stop in their file
_value_of = itemgetter(0)
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_SHOWN = 40
_BUFFER = 16 << 10  # small: samples are read from random places, so that most of a larger buffer would be wasted
_MOST_RUNS = 1000
_SMALLEST_BLOCK, _LARGEST_BLOCK = 4 << 10, 1 << 20
_PER_SAMPLE, _PER_FIELD = 320, 48  # what a sample, and each of its fields, takes in memory besides its bytes


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    option(parser, "-k --key", "FIELD", "the field to sort by (default: __key__)", default="__key__")
    text = "compare bytes, integers or numbers, or shuffle (default: text)"
    choice(parser, "--type", get_args(SortType), text, "text")
    add_seed(parser, "--type shuffle")
    flag(parser, "--reverse", "largest first; equal samples keep their order")
    text = "if the field is missing: stop, leave the sample out, or put it last (default: error)"
    choice(parser, "--missing", get_args(MissingValue), text, "error")
    text = "memory to use; what does not fit goes to temporary files (default: 1GiB)"
    option(parser, "--memory", "SIZE", text, byte_size, default=float(1 << 30))
    option(parser, "--tmpdir", "FOLDER", "folder for the temporary files (default: the system's)")
    outputs.add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    is_shuffle = arguments.type == "shuffle"
    if arguments.seed is not None and not is_shuffle:
        raise UsageError("--seed needs --type shuffle, whose order it chooses")
    key = SortKey(arguments, outputs.chosen_seed(arguments.seed) if is_shuffle else 0)
    reader = SampleReader(arguments)

    count = 0

    def entry_of(sample: dict[str, Any]) -> Entry | None:
        nonlocal count
        if (value := key(sample)) is None:
            return None
        count += 1
        return value, sample

    with outputs.SampleOutput(arguments) as output, closing(reader.taken(entry_of)) as entries:
        ordered = sort_samples(entries, reverse=arguments.reverse, memory=arguments.memory, folder=arguments.tmpdir)
        with closing(ordered):
            first = list(islice(ordered, 1))  # by now all samples were read, and the progress of reading has ended
            with Progress("samples written", count, hidden=reader.hidden) as progress:
                outputs.copy_samples(progress.over(chain(first, ordered)), output, reader)
    if key.left_out:
        say(f"left out {counted(key.left_out, 'sample')} without {' or '.join(key.fields)} (--missing skip)")
    return reader.finish()


class SortKey:
    """Computes the value that a sample is sorted by; each sort needs its own object, which counts its samples.

    Of several fields separated by ``;``, the first that exists is used. ``"text"`` compares bytes, which for UTF-8 is
    the order of code points. ``"shuffle"`` orders by a hash of the seed and of each sample's value and ``__key__``;
    samples that share both are distinguished by their number in the stream.
    """

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        with usage_checked():
            self.fields = [name.removeprefix(".") for name in alternatives(arguments.key)]
        self.left_out = 0
        self._missing: MissingValue = arguments.missing
        self._read = _READERS[arguments.type]
        self._seeded = blake2b(b"%d\0" % seed, digest_size=16) if arguments.type == "shuffle" else None
        self._number = 0
        self._ranks = (1, 0) if arguments.reverse else (0, 1)  # of samples with a value, and of those without

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """Returns a sample's value, which can be compared with all others; None if the sample is left out."""
        if (field := find_field(sample, self.fields)) is None:
            if self._missing == "error":
                raise missing_field(sample, self.fields)
            if self._missing == "last":
                return (self._ranks[1],)
            self.left_out += 1
            return None
        data = _as_bytes(sample[field])
        try:
            value = self._read(data)
        except ValueError as error:
            found = sample[field]
            rest = "" if len(found) <= _SHOWN else f" and {len(found) - _SHOWN:,} more bytes"
            which, place = name_sample(sample)
            what = f"{which} cannot be sorted by field {field!r}, which is {error}: found {found[:_SHOWN]!r}{rest}"
            raise DecodingError(f"{what}. Sort it as text, or leave such samples out", **place, field=field) from error
        if self._seeded is not None:  # order by the digest of value and key, then by that of the sample's number
            own, numbered = self._seeded.copy(), self._seeded.copy()
            # the length keeps value "ab" with key "c" apart from "a" with "bc"
            own.update(b"%d:%b%b" % (len(data), data, _as_bytes(sample.get("__key__", ""))))
            numbered.update(b"#%d" % self._number)
            self._number += 1
            value = own.digest() + numbered.digest()
        return value if self._missing != "last" else (self._ranks[0], value)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _read_int(data: bytes) -> int | Decimal:
    digits = without_bom(data.strip()).strip()
    if not _INTEGER.fullmatch(digits):
        raise ValueError("not an integer, such as 7 or -1")
    try:
        return int(digits)
    except ValueError:  # more digits than int() accepts, because its time grows with their square
        return Decimal(digits.decode())


def _read_float(data: bytes) -> float:
    text = without_bom(data.strip())
    try:
        number = math.nan if b"_" in text else float(text)
    except ValueError:
        raise ValueError("not a number, such as 0.5 or -1e3") from None
    if math.isnan(number):
        raise ValueError("not a number that can be ordered")
    return number


_READERS: dict[str, Callable[[bytes], Any]] = {"text": bytes, "int": _read_int, "float": _read_float, "shuffle": bytes}


# ------------------------------------------------------------------------------------------------------ sorted runs


def sort_samples(
    entries: Iterable[tuple[Any, Sample]],
    *,
    reverse: bool = False,
    memory: float = 1 << 30,
    folder: str | os.PathLike[str] | None = None,
) -> Generator[Sample, None, None]:
    """Sorts samples by their values in bounded memory. Samples with equal values keep their order.

    All samples are read before the first is yielded. What does not fit in memory goes to at most three temporary files.
    They have no name, so that nothing is left of them however the process ends, and take as much space as the samples,
    or twice that for small samples in very many runs. A sample that is larger than the memory is sorted too.
    """
    with closing(_Runs(folder, memory, reverse)) as runs:
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
    """Estimates the memory that a sample and its value take."""
    parts = value if isinstance(value, tuple) else (value,)
    return _PER_SAMPLE + _PER_FIELD * len(sample) + sum(map(getsizeof, parts)) + sum(map(len, sample.values()))


class _TemporaryFile:
    """Pickled objects in an unnamed file, which no other process can change; all are written before any is read."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = folder
        self.end = 0  # the place of the next object
        with self._explained():
            self._file = tempfile.TemporaryFile(dir=folder, buffering=_BUFFER)  # noqa: SIM115 - closed by `close`

    def entries(self, run: _Run) -> Iterator[Entry]:
        """Reads the entries of a run."""
        position, stop = run
        while position < stop:
            block, position = self.get(position)
            yield from block

    def put(self, value: object) -> int:
        """Writes an object and returns its place."""
        place = self.end
        with self._explained():
            pickle.dump(value, self._file, pickle.HIGHEST_PROTOCOL)
            self.end = self._file.tell()
        return place

    def get(self, place: int) -> tuple[Any, int]:
        """Reads an object; returns it and the place after it."""
        with self._explained():
            self._file.seek(place)
            return pickle.load(self._file), self._file.tell()

    def close(self) -> None:
        # what did not fit on a full disk is still in the buffer, and useless
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = tempfile.gettempdir() if self._folder is None else os.fspath(self._folder)
            what = f"samples cannot be stored in a temporary file in {place} while they are sorted"
            cure = "Choose a folder with more room, or allow more memory"
            raise OSError(error.errno, f"{what}: {error.strerror or error}. {cure}") from error


class _Runs:
    """Sorted runs of samples.

    A run is a series of blocks (lists of entries), and a merge holds one block of each run in memory. For example, 10
    GiB of samples sorted in 1 GiB are ten runs of blocks of 1 MiB, and the merge takes about 10 MiB. A sample that is
    large for a block (256 KiB here) goes to another file, and its entry holds its place there: merges pass on only that
    number, and the sample is read when it is yielded.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, memory: float, reverse: bool) -> None:
        self.runs: list[_Run] = []
        self._folder, self._memory, self._reverse = folder, memory, reverse
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
        # one block of each run must fit: 1 GiB has room for 1000 (the limit) of 1 MiB, or 512 if the widest has 2 MiB
        return max(2, min(_MOST_RUNS, int(self._memory // self._widest)))

    def _merge_groups(self) -> None:
        """Merges neighbouring runs into fewer ones, in a new file: 2500 become 3 where 1000 can be merged at a time."""
        before, self._files[1] = self._files[1], _TemporaryFile(self._folder)
        most = self._most_runs()
        groups = [self.runs[start : start + most] for start in range(0, len(self.runs), most)]
        with closing(before):
            self.runs = [self._write(self._merge(group, before), self._files[1]) for group in groups]

    def _merge(self, runs: Iterable[_Run], file: _TemporaryFile) -> Iterator[Entry]:
        # the sort is stable: of equal values, heapq.merge takes those of an earlier run first, also in reverse
        return heapq.merge(*map(file.entries, runs), key=_value_of, reverse=self._reverse)

    def _write(self, entries: Iterable[Entry], file: _TemporaryFile) -> _Run:
        """Appends a run to a file."""
        start, size = file.end, 0
        block: list[Entry] = []
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


COMMAND = Command(__doc__, _add_arguments, _run)
