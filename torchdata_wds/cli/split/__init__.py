"""Write samples into numbered shards.

wds split 'train-{000000..000003}.tar' -n 15 -o small
wds cat 'train-*.tar' | wds split -s 20kB -o 'part-%04d.tar' --max-shards 2 --post 'sha256sum {path}'
wds split 'train-{000000..000003}.tar' --order 1 -n 20 -o shuffled
"""

import argparse
import math
import os
import posixpath
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from torchdata_wds import storage
from torchdata_wds.cli import command
from torchdata_wds.cli.command import Command, Rekeying, UsageError, flag, option, positive_number, usage_checked
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.outputs import compression, write_line
from torchdata_wds.cli.sample_order import OrderedReader, add_order_arguments, check_order_arguments
from torchdata_wds.cli.terminal import counted, discard_output, say, stdout_is_apart
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import ReappearingKeyError, SampleError, UnsafeDataError, WdsError
from torchdata_wds.format.index.sidecars import index_url
from torchdata_wds.format.shards import ShardInfo, ShardNames
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.sources.command import CommandGuard, status_text
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of
from torchdata_wds.writers.shard_writer import ShardWriter

_PLACES = ("path", "name", "folder", "shard", "count")
_HAS_NUMBER = re.compile(r"%0?\d*d|\{shard")
_PLACE = "{shard:06d}"
_PLAIN = ".tar"
_DIGITS = "123456789" * 3  # a number that occurs nowhere else in a name
_STDERR = 2

# An escaped character, a quoted string, an unclosed quote, a variable, a placeholder.
_TOKEN = re.compile(
    r"\\.|(?P<quoted>'[^']*'|\"(?:\\.|[^\"\\])*\")|(?P<open>['\"])|\$\{\w*|\{(?P<name>[a-z_]+)\}", re.DOTALL
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    option(parser, "-n --count", "N", "samples per shard (default: 100000)", positive_number, default=100_000)
    text = "at most this many bytes per shard, before compression and with headers (default: 1e9)"
    option(parser, "-s --size", "BYTES", text, command.byte_size, default=1e9)
    text = "writes NAME-000000.tar and so on; NAME can also be a pattern with %%06d or {shard:06d}"
    option(parser, "-o --output", "NAME", text, required=True)
    option(parser, "--start", "N", "number of the first shard, or 'next' after existing ones", _first_number, default=0)
    option(parser, "--max-shards", "N", "stop when N shards are full", positive_number)
    text = "run COMMAND in sh for each finished shard, with {path}, {name}, {folder}, {shard} (the number), {count}"
    option(parser, "--post", "COMMAND", text)
    add_order_arguments(parser)
    flag(parser, "--delete", "remove each shard after --post has succeeded")
    command.add_writing(parser)


def _first_number(text: str) -> int | str:
    return text if text == "next" else command.whole_number(text)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.delete and arguments.post is None:
        raise UsageError("--delete removes each shard after --post has succeeded, so it needs --post")
    check_order_arguments(arguments)
    if arguments.order is not None and arguments.max_shards is not None:
        raise UsageError("--order writes all samples, or those of --slice and --part: leave out --max-shards")
    make_reader = SampleReader if arguments.order is None else OrderedReader
    reader = make_reader(arguments, hidden=not stdout_is_apart())  # paths are printed
    finished = Finished(arguments)
    start, stop = finished.next_number, finished.next_number + (arguments.max_shards or math.inf)
    # Only with --force could an output replace an input, perhaps before it is read: refuse if the inputs include a
    # shard that this run may write, from `start` up to `stop` (infinity without --max-shards).
    for url in reader.urls if arguments.force else ():
        if (number := number_of(finished.names, url)) is not None and start <= number < stop:
            raise UsageError(f"{storage.mask_url(url)} is read, and must not be replaced: choose another output name")
    with usage_checked():
        writer = ShardWriter(
            finished.names,
            max_count=arguments.count,
            max_bytes=arguments.size,
            start_shard=finished.next_number,
            max_shards=arguments.max_shards,
            post=finished,
            overwrite=arguments.force,
            encoder=False,
            compress=compression(arguments),
            lowercase=not arguments.keep_case,
            index=arguments.index,
        )
    try:
        with writer, closing(iter(reader)) as samples:
            used = _write(samples, arguments.rekey, writer, reader)
            is_full = writer.is_full  # asked before the writer closes its last shard, full or not
    finally:
        samples_and_bytes = f"{counted(finished.samples, 'sample')} and {counted(finished.bytes, 'byte')}"
        say(f"finished {counted(finished.shards, 'shard')} with {samples_and_bytes}")
    if is_full:
        say(
            f"stopped after {counted(finished.shards, 'shard')} because of --max-shards, without looking for more "
            f"samples. To continue: --start {finished.next_number} --slice {_rest(arguments.slice, used)}"
        )
        if arguments.rekey is not None and "{key" not in arguments.rekey.pattern:
            say("--rekey will number them from 0 again: change the start of its pattern, or keys will come twice")
    with suppress(ValueError, WdsError):  # the folder cannot be listed
        if (last := finished.names.next_number() - 1) >= finished.next_number:
            name = storage.mask_url(finished.names.name(last))
            say(f"shards with higher numbers existed before and are unchanged, up to {name}")
    return reader.finish()


class Finished:
    """Prints each finished shard, runs the ``--post`` command for it, and adds up what was written."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.shards = self.samples = self.bytes = 0
        with usage_checked():
            self.names = ShardNames(numbered_pattern(arguments.output, arguments.compress))
            self._hook = None if arguments.post is None else HookCommand(arguments.post, _PLACES)
            if arguments.start == "next":
                self.names.check_listable()
        self.next_number = self.names.next_number() if arguments.start == "next" else arguments.start
        self._deletes = arguments.delete
        self._has_index = arguments.index

    def __call__(self, shard: ShardInfo) -> None:
        """Handles one shard; raises ChildProcessError if the command fails, ShardOpenError if it cannot be removed."""
        number, self.next_number = self.next_number, self.next_number + 1
        self.shards += 1
        self.samples += shard.count
        self.bytes += shard.bytes
        try:
            write_line(os.fsencode(shard.path))
            sys.stdout.flush()
        except BrokenPipeError:  # samples are still written if the reader of the paths goes away
            discard_output()
        if self._hook is not None:
            folder, name = posixpath.split(shard.path)
            values = (shard.path, name, folder or ".", number, shard.count)
            self._hook.run(dict(zip(_PLACES, values, strict=True)))
        if self._deletes:
            if self._has_index:
                storage.remove_target(index_url(shard.path))
            storage.remove_target(shard.path)


def _write(
    samples: Iterable[Mapping[str, Any]], rekey: Rekeying | None, writer: ShardWriter, reader: SampleReader
) -> int:
    """Writes samples until there are no more or the writer is full; returns how many were used."""
    used = 0
    for sample in samples:
        try:
            if not writer.write(sample if rekey is None else rekey(sample, used)):
                break
        except ReappearingKeyError as error:
            reader.refuse(ReappearingKeyError(f"{error}, as --rekey does", shard=error.shard, key=error.key))
        except SampleError as error:
            reader.refuse(error)
        used += 1
        if writer.is_full:
            break
    return used


def _rest(part: slice | None, used: int) -> str:
    """Returns the ``--slice`` of the samples that were not used: after 3 samples of ``0:12:2``, ``6:12:2``."""
    part = part or slice(None)
    step = part.step or 1
    text = f"{(part.start or 0) + used * step}:{'' if part.stop is None else part.stop}"
    return text if step == 1 else f"{text}:{step}"


def numbered_pattern(name: str, compress: str | None = None) -> str:
    """Turns a name into a pattern for `ShardNames`; a pattern stays as it is.

    A number of six digits is added at the end, or before a shard's suffix; in a folder (``out/``) it is the whole name.
    A name without such a suffix gets one that fits the compression.

    Example:
        >>> numbered_pattern("out/train"), numbered_pattern("train.tar.zst"), numbered_pattern("out/", "gz")
        ('out/train-{shard:06d}.tar', 'train-{shard:06d}.tar.zst', 'out/{shard:06d}.tar.gz')
    """
    if name in (STDIN, ""):
        raise ValueError(f"numbered shards need a name like 'train' or a pattern like 'train-%06d.tar', not {name!r}")
    if _HAS_NUMBER.search(name) or scheme_of(name) == "pipe":
        return name
    suffix = max((known for known in SHARD_SUFFIXES if name.endswith(known)), key=len, default="")
    stem = name.removesuffix(suffix)
    if compress not in (None, "none") and suffix in ("", _PLAIN):
        suffix = f"{_PLAIN}.{compress}"
    dash = "" if not stem or stem.endswith("/") else "-"
    return f"{stem}{dash}{_PLACE}{suffix or _PLAIN}"


def number_of(names: ShardNames, url: str) -> int | None:
    """Returns the number of the shard that would replace a file, or None; paths may differ in spelling."""
    # A number with digits that occur nowhere else shows what is before and after it: out/x-123...789.tar has out/x- and
    # .tar, so out/x-000012.tar may be shard 12. Naming that shard checks it: out/x-12.tar is not shard 12 here.
    before, _, after = _place(names.name(int(_DIGITS))).partition(_DIGITS)
    for place in {_place(url), _place(str(Path(local_path(url)).resolve()) if is_local(url) else url)}:
        digits = place[len(before) : len(place) - len(after)]
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= len(_DIGITS)
        if is_number and _place(names.name(int(digits))) == place:
            return int(digits)
    return None


def _place(url: str) -> str:
    """Returns where a file would be created: a symbolic link there would be replaced, not followed."""
    if not is_local(url):
        return url
    path = Path(local_path(url))
    return str(path.parent.resolve() / path.name)


class HookCommand:
    """A command for ``/bin/sh`` with placeholders; each value becomes one word, regardless of its content.

    Placeholders are written as ``{path}``, outside of quotes. The command's standard input is empty, and its standard
    output goes to standard error.
    """

    def __init__(self, template: str, names: Collection[str]) -> None:
        if is_secure():
            raise UnsafeDataError(f"{mask_text(template)!r} is a command, which WDS_SECURE=1 forbids")
        self._template = template
        for found in _TOKEN.finditer(template):
            if found["open"]:
                raise ValueError(f"{template!r} has a quote that is not closed: {template[found.start() :]!r}")
            inside = next((name for name in names if f"{{{name}}}" in (found["quoted"] or "")), None)
            if inside is not None:
                what = f"{{{inside}}} is inside quotes in {template!r}"
                raise ValueError(f"{what}: remove the quotes, values are quoted automatically")
            if found["name"] is not None and found["name"] not in names:
                there = ", ".join(f"{{{known}}}" for known in names)
                raise ValueError(f"{template!r} has an unknown place {found[0]}: there are {there}")

    def fill(self, values: Mapping[str, object]) -> str:
        """Replaces the placeholders with values."""
        return _TOKEN.sub(
            lambda found: found[0] if found["name"] is None else shlex.quote(str(values[found["name"]])), self._template
        )

    def run(self, values: Mapping[str, object]) -> None:
        """Runs the command and waits for it; an exception, as after Ctrl-C, kills it and everything it started."""
        filled = self.fill(values)
        words = ["/bin/sh", "-c", filled]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=_STDERR, start_new_session=True)
        try:
            with closing(CommandGuard(process.pid)):
                status = process.wait()
        except BaseException:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if status:
            raise ChildProcessError(f"the command {mask_text(filled)!r} failed with {status_text(status)}")


COMMAND = Command(__doc__, _add_arguments, _run)
