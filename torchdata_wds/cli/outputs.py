"""Arguments that say where samples go, the same in all commands, and the writing of archives, files and lines."""

import argparse
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torchdata_wds.cli.command import Rekeying, UsageError, add_writing, option, usage_checked
from torchdata_wds.cli.inputs import SampleReader
from torchdata_wds.cli.map.target_names import BRACES
from torchdata_wds.cli.terminal import say
from torchdata_wds.errors import ReappearingKeyError, SampleError, ShardOpenError
from torchdata_wds.storage import mask_url, open_target, remove_target
from torchdata_wds.storage.targets.local import PARTIAL
from torchdata_wds.storage.urls import STDIN, is_local, scheme_of
from torchdata_wds.writers.tar_writer import TarWriter


def add_output_arguments(
    parser: argparse.ArgumentParser, what: str = "a path, a URL that can be written, or '-' (the default)"
) -> None:
    """Adds the arguments of writing an archive; `what` is the help of ``--output``."""
    group = parser.add_argument_group("output")
    option(group, "-o --output", "SHARD", what, default=STDIN)
    add_writing(group)


def compression(arguments: argparse.Namespace) -> Any:
    """Returns what ``--compress`` means to a writer: None follows the name's suffix, False does not compress."""
    return False if arguments.compress == "none" else arguments.compress


def check_one_output(output: str) -> None:
    """Raises UsageError if the name of a command's one output has something in braces, as for one a shard."""
    if scheme_of(output) != "pipe" and (found := BRACES.search(output)) is not None:
        raise UsageError(
            f"{found[0]} in the output {mask_url(output)!r} is not filled in: this command writes one file. "
            "'wds proc' and 'wds map' write one for each shard, 'wds split' numbered ones"
        )


class SampleOutput(TarWriter):
    """One archive of samples whose fields are bytes; after an exception none is complete."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.output == STDIN and sys.stdout.isatty():
            raise UsageError(
                "refusing to write an archive to a terminal: use -o FILE, or pipe the output to another program"
            )
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
        """Adds a sample, whole or not at all; SampleError says that it could not be read back."""
        if self._rekey is not None:
            sample = self._rekey(sample, self.count)
        try:
            size = super().write(sample)
        except SampleError as error:
            # of a key that came before, or is not a name: new keys are the remedy
            if type(error) is not ReappearingKeyError and (type(error) is not SampleError or error.field is not None):
                raise
            stop = "" if str(error).endswith(".") else "."
            raise error.extended(
                f"{stop} New keys (--rekey '{{shard}}/{{key}}' or --rekey '#') keep such samples."
            ) from error
        self.count += 1
        return size


def copy_samples(samples: Iterable[Mapping[str, Any]], output: SampleOutput, reader: SampleReader) -> None:
    """Writes samples; the reader counts or raises the errors of those that cannot be written."""
    for sample in samples:
        try:
            output.write(sample)
        except SampleError as error:
            reader.refuse(error)


def chosen_seed(seed: int | None) -> int:
    """Returns the given seed, or draws one and says which, so that the order can be had again."""
    if seed is None:
        seed = secrets.randbits(32)
        say(f"shuffling with --seed {seed}")
    return seed


def write_line(line: str | bytes) -> None:
    """Writes a line to standard output: UTF-8 whatever the locale is, and at once on a terminal."""
    sys.stdout.buffer.write((line.encode() if isinstance(line, str) else line) + b"\n")
    if sys.stdout.isatty():
        sys.stdout.buffer.flush()


def write_whole(pieces: Iterable[bytes], url: str, *, overwrite: bool) -> None:
    """Writes a file that appears only when it is complete; `pieces` are taken once it can certainly be written."""
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
