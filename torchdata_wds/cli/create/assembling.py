"""Assembles samples from parts that are stored elsewhere; all are checked before the first is read.

A list of parts is traversed twice, first to check all of them and then to read. Memory holds the list, the keys, and
two numbers per part.
"""

import base64
import io
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from torchdata_wds.cli.terminal import counted, message_of, say
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import SampleError, ShardFormatError, ShardOpenError, SpecError, UnsafeDataError, cli_message
from torchdata_wds.format.dataset_files.reading import short
from torchdata_wds.format.samples.names import check_field, check_key, is_metadata
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, stored_bytes

Missing = Literal["error", "skip-file", "skip-sample", "empty"]

#: What a part is made of: a path, a text, base64 digits, or a URL, which has ``pipe:`` before a command.
Kind = Literal["file", "text", "base64", "pipe", "url"]
_SHOWN = 20  # problems and missing files
# An array of stamps has room for 63 bits, and file systems have later times than the year 2262.
_BITS = (1 << 63) - 1
_LONGEST_PATH = 4096
_FOR_ALL = 0o444  # who may read a file

#: The key of a sample, its fields, and the paths of their files.
FilesOfSample = tuple[str, list[str], list[str]]

#: A file's size when it was checked, and the low 63 bits of its modification time in nanoseconds since 1970.
Stamp = tuple[int, int]

# The stamps of a part that is not a file, and of a missing file.
_NO_FILE, _ABSENT = (0, 0), (-1, 0)


class Part(NamedTuple):
    """The source of one field of one sample, and the line that names it, from 1; 0 without a list."""

    key: str
    field: str
    kind: Kind
    value: str
    line: int = 0

    @property
    def place(self) -> str:
        """Where the part was named, for messages."""
        return f"line {self.line:,}" if self.line else f"file {self.value!r}"


def _check_source(part: Part) -> Stamp:
    """Checks a source as far as possible without reading or running it."""
    if part.kind == "base64":
        _decode_base64(part.value)
    elif part.kind == "pipe":
        if is_secure():
            shard = mask_url(part.value)
            raise UnsafeDataError(f"{shard} would run a command, which WDS_SECURE=1 forbids", shard=shard)
        if not part.value.removeprefix("pipe:").strip():
            raise SampleError("pipe: names no command; expected one, as in 'pipe:cat a.jpg'")
    if part.kind != "file":
        return _NO_FILE
    path = part.value
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path for each of millions of files takes longer than this
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT
    except (OSError, ValueError) as error:
        shown = repr(path) if len(path) <= _LONGEST_PATH else short(path)
        raise SampleError(f"file {shown} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise SampleError(f"{path!r} is a folder; expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise SampleError(f"{path!r} is not a regular file; in a recipe, 'pipe:cat PATH' reads it anyway")
    if not os.access(path, os.R_OK):
        raise SampleError(f"file {path!r} cannot be read: Permission denied")
    return status.st_size, status.st_mtime_ns & _BITS


def _read_source(part: Part, stamp: Stamp) -> bytes:
    """Reads a source as stored, without decompressing it; raises SampleError if a file no longer has its stamp."""
    if stamp == _ABSENT:
        raise SampleError(f"there is no file {part.value!r}" if part.value else "the cell names no file")
    if part.kind == "file":
        return _read_file(part.value, stamp)
    if part.kind == "text":
        return part.value.encode("utf-8", "surrogateescape")
    if part.kind == "base64":
        return _decode_base64(part.value)
    try:
        with io.BufferedReader(stored_bytes(open_shard(part.value)), BUFFER_SIZE) as stream:
            return b"".join(iter(lambda: stream.read(BUFFER_SIZE), b""))
    except (ShardOpenError, ShardFormatError) as error:
        raise SampleError(cli_message(error), shard=error.shard) from error


def _read_file(path: str, stamp: Stamp) -> bytes:
    size, _ = stamp
    # os.open is faster than open(), and with O_NONBLOCK it does not wait forever if a FIFO has replaced the file
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            data = os.read(file, size + 1)  # one more byte shows that the file has grown
            if 0 < len(data) < size:  # one call reads at most 2 GiB
                data += b"".join(iter(lambda: os.read(file, BUFFER_SIZE), b""))
            status = os.fstat(file)  # after reading, so that a change during it shows too
        finally:
            os.close(file)
    except OSError as error:
        raise SampleError(f"file {path!r} was there, but cannot be read: {error.strerror or error}") from error
    if (status.st_size, status.st_mtime_ns & _BITS) != stamp:
        what = f"file {path!r} was changed after it was checked ({size:,} bytes then, {status.st_size:,} now)"
        raise SampleError(f"{what}. Start again when it no longer changes")
    if len(data) != size:
        what = f"file {path!r} has more or fewer bytes than its size, {size:,}"
        raise SampleError(f"{what}; if its content is made while it is read, use 'pipe:cat PATH' in a recipe")
    return data


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.strip(), validate=True)
    except ValueError as error:
        raise SampleError(f"what follows base64: is not Base64: {error}") from error


class Problems:
    """The problems of a list of parts: all are counted, and the first ones are kept as text."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self._shown: list[str] = []

    def add(self, place: str, problem: object) -> None:
        """Adds a problem: a place, and words or an exception."""
        self._count += 1
        if self._count <= _SHOWN:
            self._shown.append(f"  {place}: {cli_message(problem) if isinstance(problem, Exception) else problem}")

    def __bool__(self) -> bool:
        return self._count > 0

    def check(self) -> None:
        """Raises SpecError if there are any."""
        if self._count:
            head = f"{self._name} has {counted(self._count, 'problem')}, and nothing was written:"
            more = [f"  and {self._count - _SHOWN:,} more"] if self._count > _SHOWN else []
            raise SpecError("\n".join((head, *self._shown, *more)))


class PartList(ABC):
    """A list of parts, those of one sample next to each other; `skipped` counts what is not a part, by reason."""

    cure = ""  # what to do if the parts of a sample are apart; "" if that cannot happen

    def __init__(self, name: str, url: str) -> None:
        self.name = name  # for messages, such as "recipe x.txt"
        self.url = url
        self.skipped: Counter[str] = Counter()

    @abstractmethod
    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, the same each time, and adds what is not a part to the problems."""

    def samples(self, problems: Problems) -> Iterator[FilesOfSample] | None:  # noqa: ARG002 - of those that have files
        """Yields the files of each sample, in place of `parts`, if all parts are files of a folder; else None."""
        return None


class SampleAssembler:
    """Makes samples of their parts, after checking all of them."""

    def __init__(self, parts: PartList, missing: Missing = "error") -> None:
        self.count = self.missing_files = self.left_out = 0
        self._parts = parts
        self._missing = missing
        self._fields: set[str] = set()  # those already checked: many samples share a few
        self._stamps = array("q")  # size and time of each part in turn: 16 bytes each, for millions of parts
        self._is_checked = False
        self._is_plain = False  # whether all parts are files that need no closer look

    def check(self) -> None:
        """Checks every part once: its key, its field, and that its file can be read; raises SpecError otherwise."""
        if self._is_checked:
            return
        problems = Problems(self._parts.name)
        self._is_checked = self._is_plain = self._check_files(problems)
        if self._is_checked:
            return
        lines: dict[str, int] = {}
        for key, run in groupby(self._parts.parts(problems), key=attrgetter("key")):
            self.count += 1
            self._check_sample(key, run, lines, problems)
        problems.check()
        if not self.count:
            raise SpecError(f"{self._parts.name} has no samples: there is nothing to write")
        self._is_checked = True

    def _check_files(self, problems: Problems) -> bool:
        """Checks the files of a folder; returns False, and keeps nothing, if one needs a closer look."""
        samples = self._parts.samples(problems)
        fields: set[str] = set()
        count = 0
        stamps = array("q")
        try:
            for key, names, paths in samples or ():
                key.encode()  # a key that was split from a file's name can have no other fault
                count += 1
                fields.update(names)
                for path in paths:
                    status = os.stat(path)  # noqa: PTH116 - as above
                    mode = status.st_mode
                    if not stat.S_ISREG(mode) or (mode & _FOR_ALL != _FOR_ALL and not os.access(path, os.R_OK)):
                        return False
                    stamps.append(status.st_size)
                    stamps.append(status.st_mtime_ns & _BITS)
            for field in fields:
                check_part_field(field, "")
        except (OSError, ValueError):
            return False
        if not count or problems or any(field != field.lower() for field in fields):
            return False
        self.count, self._stamps = count, stamps
        return True

    def _check_sample(self, key: str, run: Iterator[Part], lines: dict[str, int], problems: Problems) -> None:
        # `lines` has the first line of each key: for lines of a, b and a, groupby yields a second group of a, with
        # another line. A part with a problem still gets a stamp, so that parts and stamps stay in step.
        fields: dict[str, Part] = {}
        for part in run:
            field = part.field.lower()
            if not fields:
                try:
                    check_key(key)
                except SampleError as error:
                    problems.add(part.place, error)
                if self._parts.cure and (first_line := lines.setdefault(key, part.line)) != part.line:
                    began = f"sample {key!r} began at line {first_line:,}, and others come between"
                    problems.add(part.place, f"{began}. {self._parts.cure}")
            if (first := fields.setdefault(field, part)) is not part:
                problems.add(part.place, f"field {field!r} of sample {key!r} was already given by {first.place}")
            try:
                if field not in self._fields:
                    check_part_field(field, key)
                    self._fields.add(field)
                stamp = _check_source(part)
                if stamp == _ABSENT and self._missing == "error":
                    _read_source(part, stamp)  # raises the error that says what is missing
            except SampleError as error:
                problems.add(part.place, error)
                stamp = _ABSENT
            self._stamps.extend(stamp)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the samples; raises SampleError if a part cannot be read, or changed after it was checked."""
        self.check()
        numbers = iter(self._stamps)
        stamps = zip(numbers, numbers, strict=True)
        if self._is_plain:
            yield from self._read_files(stamps)
            return
        parts = zip(self._parts.parts(Problems(self._parts.name)), stamps, strict=True)
        for key, run in groupby(parts, key=lambda pair: pair[0].key):
            if (sample := self._make(key, list(run))) is not None:
                yield sample
            else:
                self.left_out += 1

    def _read_files(self, stamps: Iterator[Stamp]) -> Iterator[dict[str, Any]]:
        for key, fields, paths in self._parts.samples(Problems(self._parts.name)) or ():
            sample: dict[str, Any] = {"__key__": key, "__url__": self._parts.url}
            for field, path, stamp in zip(fields, paths, stamps, strict=False):
                try:
                    sample[field] = _read_file(path, stamp)
                except SampleError:
                    sample[field] = self._read(Part(key, field, "file", path), stamp)
            yield sample

    def _make(self, key: str, run: list[tuple[Part, Stamp]]) -> dict[str, Any] | None:
        sample: dict[str, Any] = {"__key__": key, "__url__": self._parts.url}
        if self._missing == "skip-sample":
            # parts known to be missing come first: then the others of a sample that is left out are not read
            run.sort(key=lambda pair: pair[1] != _ABSENT)
        for part, stamp in run:
            data = self._read(part, stamp)
            if data is None and self._missing == "skip-sample":
                return None
            if data is not None or self._missing == "empty":
                sample[part.field.lower()] = data or b""
        return sample if len(sample) > 2 else None

    def _read(self, part: Part, stamp: Stamp) -> bytes | None:
        """Reads a part; returns None if it is missing and may be."""
        try:
            return _read_source(part, stamp)
        except SampleError as error:
            place = f"{self._parts.name}, {part.place}"
            what = f"{place}: field {part.field!r} of sample {part.key!r}: {cli_message(error)}"
            placed = SampleError(what, shard=error.shard, key=part.key, field=part.field)
            # only an absent file, and a URL or command that fails, is missing; a file that changed is always an error
            if self._missing == "error" or (stamp != _ABSENT and part.kind not in ("pipe", "url")):
                raise placed from error
            self.missing_files += 1
            if self.missing_files <= _SHOWN:
                say(message_of(placed))
            return None


def check_part_field(field: str, key: str) -> None:
    """Raises SampleError if a field (in lower case) could not be read back, or is metadata such as ``__url__``."""
    if is_metadata(field):
        what = "which describes the sample and is not written"
        raise SampleError(f"field {field!r} has a name of the form __x__, {what}")
    check_field(field, key)
