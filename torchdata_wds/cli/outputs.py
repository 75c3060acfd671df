"""The output of commands: its arguments, the same in all of them, and writing archives, files and lines."""

import argparse
import itertools
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

from torchdata_wds.cli.command import BRACES, Rekeying, UsageError, add_writing, choice, option, usage_checked
from torchdata_wds.cli.inputs import SampleReader
from torchdata_wds.cli.terminal import counted, say
from torchdata_wds.errors import DuplicateFieldError, ReappearingKeyError, SampleError, ShardOpenError
from torchdata_wds.format.samples.field_items import parse_field_items
from torchdata_wds.pipes.samples.field_specs import missing_field, name_sample
from torchdata_wds.storage import mask_url, open_target, remove_target
from torchdata_wds.storage.targets.local import PARTIAL
from torchdata_wds.storage.urls import STDIN, is_local, scheme_of
from torchdata_wds.writers.tar_writer import TarWriter

Missing = Literal["error", "skip", "empty"]  # what to do with a sample that lacks a chosen field
_BATCH = 256 << 10  # bytes of samples that are written at once
_ALWAYS = ("__key__", "__url__")


class FieldChoices:
    """Chooses fields of samples.

    `spec` has items separated by spaces. ``jpg;png`` (or ``jpg,png``) is the first of these fields that the sample has,
    ``new=old;older`` (or ``new:old,older``) is the same under a new name, and ``*.json`` is every field that matches.
    ``__key__`` and ``__url__`` can be columns of tables; a new name turns them into text fields. `columns` has one name
    per item. If an item finds nothing, ``missing="skip"`` leaves the sample out and ``"empty"`` adds an empty field;
    both are counted. Without a spec, all fields are chosen.
    """

    def __init__(self, spec: str | None, *, missing: Missing = "error") -> None:
        self._items = [] if spec is None else parse_field_items(spec)
        self.columns = [item.column for item in self._items]
        self.missing = missing
        self.left_out = self.left_empty = 0

    def choose(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns ``__key__``, ``__url__`` and the chosen fields, or None if the sample is left out."""
        if not self._items:
            return dict(sample)
        if (found := self._find(sample)) is None:
            return None
        chosen = {name: sample[name] for name in _ALWAYS if name in sample}
        for name, value in itertools.chain.from_iterable(found):
            if name in chosen and name not in _ALWAYS:
                which, place = name_sample(sample)
                what = f"two items of the list of fields give {which} a field {name!r}; rename one of them, as new=old"
                raise DuplicateFieldError(what, **place, field=name)
            chosen[name] = value
        return chosen

    def row(self, sample: Mapping[str, Any]) -> list[Any] | None:
        """Returns a value for each of `columns`, b"" for an empty one; None if the sample is left out."""
        if (found := self._find(sample)) is None:
            return None
        for column, fields in zip(self.columns, found, strict=True):
            if len(fields) > 1:
                which, place = name_sample(sample)
                what = f"{which} has {len(fields)} fields that match {column!r}, but a table has one column for them"
                names = [name for name, _ in fields]
                raise DuplicateFieldError(f"{what}: {names}. Name one of them", **place, field=column)
        return [fields[0][1] if fields else b"" for fields in found]

    def tell(self) -> None:
        """Says how many samples were left out, and how many fields were left empty."""
        if self.left_out:
            say(f"left out {counted(self.left_out, 'sample')} without the fields (--missing skip)")
        if self.left_empty:
            say(f"left {counted(self.left_empty, 'missing field')} empty (--missing empty)")

    def _find(self, sample: Mapping[str, Any]) -> list[list[tuple[str, Any]]] | None:
        """Returns the fields of each item with their new names; None if the sample is left out."""
        found = []
        for item in self._items:
            fields = [(new, sample[name]) for new, name in item.find(sample)]
            if item.new is not None:  # a key that becomes a field becomes bytes, like other fields
                fields = [(new, value.encode() if isinstance(value, str) else value) for new, value in fields]
            if not fields:
                if self.missing == "error":
                    raise missing_field(sample, item.names)
                if self.missing == "skip":
                    self.left_out += 1
                    return None
                self.left_empty += 1
                fields = [] if item.is_glob else [(item.new or item.names[0], b"")]
            found.append(fields)
        return found


def add_field_arguments(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds ``--fields`` and ``--missing``."""
    group = parser.add_argument_group("fields")
    text = "fields, separated by spaces: 'jpg;png' (the first that exists), new=old, '*.json'"
    option(group, "-f --fields", "SPEC", text, required=required)
    text = "if a field is missing: stop, leave the sample out, or use an empty field (default: error)"
    choice(group, "--missing", get_args(Missing), text, "error")


def field_choices(arguments: argparse.Namespace) -> FieldChoices:
    """Returns the choice of ``--fields``."""
    if arguments.fields is None and arguments.missing != "error":
        raise UsageError("--missing needs --fields, which says what may be missing")
    with usage_checked():
        return FieldChoices(arguments.fields, missing=arguments.missing)


def one_output(text: str) -> str:
    """Parses the name of a command's only output, which must not contain braces."""
    if scheme_of(text) != "pipe" and (found := BRACES.search(text)) is not None:
        what = f"{found[0]} in the output {mask_url(text)!r} is not filled in: this command writes one file"
        others = "'wds proc' and 'wds map' write one per shard, and 'wds split' writes numbered ones"
        raise argparse.ArgumentTypeError(f"{what}. {others}")
    return text


def add_output_arguments(
    parser: argparse.ArgumentParser,
    what: str = "a path, a writable URL, or '-' (the default)",
    kind: Callable[[str], str] = one_output,
) -> None:
    """Adds the arguments for writing an archive; `what` is the help of ``--output``, and `kind` parses it."""
    group = parser.add_argument_group("output")
    option(group, "-o --output", "SHARD", what, kind, default=STDIN)
    add_writing(group)


def compression(arguments: argparse.Namespace) -> Any:
    """Returns the writer's option for ``--compress``: None follows the name's suffix, False does not compress."""
    return False if arguments.compress == "none" else arguments.compress


class SampleOutput(TarWriter):
    """Writes samples whose fields are bytes to one archive, which is not completed after an exception."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.output == STDIN and sys.stdout.isatty():
            what = "refusing to write an archive to a terminal"
            raise UsageError(f"{what}: use -o FILE, or pipe the output to another program")
        self.count = 0
        self._rekey: Rekeying | None = arguments.rekey
        with usage_checked():
            super().__init__(
                arguments.output,
                encoder=False,
                compress=compression(arguments),
                lowercase=not getattr(arguments, "keep_case", False),
                index=arguments.index,
                overwrite=arguments.force,
            )

    def write(self, sample: Mapping[str, Any]) -> int:
        """Adds a whole sample, or raises SampleError if it could not be read back."""
        if self._rekey is not None:
            sample = self._rekey(sample, self.count)
        try:
            size = super().write(sample)
        except SampleError as error:
            # new keys help if the key came before or is not valid, but not if a field is at fault
            if type(error) is not ReappearingKeyError and (type(error) is not SampleError or error.field is not None):
                raise
            stop = "" if str(error).endswith(".") else "."
            cure = "New keys (--rekey '{shard}/{key}' or --rekey '#') keep such samples."
            raise error.extended(f"{stop} {cure}") from error
        self.count += 1
        return size

    def write_all(
        self, samples: Iterable[Mapping[str, Any]], refuse: Callable[[SampleError], object] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Adds samples, many at once; yields their numbers and bytes; errors are raised, or `refuse` is called."""
        for batch in _batches(samples):
            packed = self._packer.pack_all(batch) if self._rekey is None else None
            if packed is not None and self._shard.extend(packed):
                self.count += len(batch)
                yield len(batch), packed.size
                continue
            for sample in batch:
                try:
                    yield 1, self.write(sample)
                except SampleError as error:
                    if refuse is None:
                        raise
                    refuse(error)


def _batches(samples: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yields the samples in lists of about 256 KiB; the first one alone, and those before an error before it."""
    iterator = iter(samples)
    size = most = 0
    batch: list[Mapping[str, Any]] = []
    failure = None
    while failure is None:
        try:
            for sample in iterator:
                batch.append(sample)
                size += sum(map(sys.getsizeof, sample.values()))
                if size > most:
                    break
        except BaseException as error:  # noqa: BLE001 - raised below
            failure = error
        if not batch:
            break
        yield batch
        batch, size, most = [], 0, _BATCH
    if failure is not None:
        raise failure


def copy_samples(samples: Iterable[Mapping[str, Any]], output: SampleOutput, reader: SampleReader) -> None:
    """Writes samples; the reader counts or raises the errors of those that cannot be written."""
    for _ in output.write_all(samples, reader.refuse):
        pass


def chosen_seed(seed: int | None) -> int:
    """Returns the given seed, or draws one and reports it, so that the order can be repeated."""
    if seed is None:
        seed = secrets.randbits(32)
        say(f"shuffling with --seed {seed}")
    return seed


def write_line(line: str | bytes) -> None:
    """Writes a line to standard output, in UTF-8 regardless of the locale; on a terminal it shows at once."""
    sys.stdout.buffer.write((line.encode() if isinstance(line, str) else line) + b"\n")
    if sys.stdout.isatty():
        sys.stdout.buffer.flush()


def check_target(url: str, *, overwrite: bool) -> None:
    """Raises now what opening a target would raise later; commands are not tried, which would see an empty file."""
    if scheme_of(url) != "pipe":
        open_target(url, overwrite=overwrite).abort()


def write_whole(pieces: Iterable[bytes], url: str, *, overwrite: bool) -> None:
    """Writes a file that appears only when it is complete; `pieces` are not read before the target is open."""
    target = open_target(url, overwrite=overwrite)
    is_writing = False  # the target's own error names the part that it keeps
    try:
        for piece in pieces:
            is_writing = True
            target.write(piece)
            is_writing = False
    except BaseException as error:
        target.abort()
        if is_local(url) and not (is_writing and isinstance(error, ShardOpenError)):
            with suppress(ShardOpenError):  # half a picture, page or index is useless
                remove_target(url + PARTIAL)
        raise
    target.commit()
