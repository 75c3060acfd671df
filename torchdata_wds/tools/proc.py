"""``proc``: runs a command on every sample, in a folder of its own."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from torchdata_wds.errors import SampleError
from torchdata_wds.tools.command import Command, UsageError, positive_number
from torchdata_wds.tools.inputs import SampleReader, add_input_arguments
from torchdata_wds.tools.messages import message_of, say
from torchdata_wds.tools.outputs import SampleOutput, add_output_arguments, copy_samples
from torchdata_wds.workers.sample_commands import CommandResult, SampleCommand

__all__ = ["COMMAND"]

_EXAMPLE = """
wds proc -c 'tr a-z A-Z < sample.txt > sample.upper; rm sample.json' train-000000.tar -o upper.tar
wds proc -p 4 -c 'for i in 1 2; do mkdir $i; cp sample.jpg sample.cls $i; done; rm sample.*' train-000000.tar -o two.tar
wds proc -c 'test $(cat sample.cls) -lt 5 || rm sample.*' train-000000.tar | wds ls -
"""

_WHAT_HAPPENS = """
It is run by bash in a new folder, with a file sample.FIELD for each field, and the key in sample.__key__. Whatever is
there as sample.* afterwards is the new sample, and sample.* in a subfolder is one more, with the key KEY/SUBFOLDER if
it has no sample.__key__; a sample of which nothing is left is left out. What the command writes to its standard output
goes to standard error when it ends.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_input_arguments(parser, errors=False)
    add_output_arguments(parser)
    group = parser.add_argument_group("command", textwrap.fill(_WHAT_HAPPENS.strip(), 78))
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("-c", "--command", dest="shell_command", default="", metavar="COMMAND", help="what is run")
    which.add_argument("-s", "--script", metavar="FILE", help="a file with what is run")
    group.add_argument(
        "-p", "--parallel", type=positive_number, default=1, metavar="N", help="how many at a time (default: 1)"
    )
    group.add_argument("--unordered", action="store_true", help="write samples as they are ready, not in their order")
    group.add_argument(
        "--errors",
        choices=("abort", "skip", "ignore"),
        default="abort",
        help="where a command fails: stop and write nothing, leave the sample out and exit with 1, or take what is "
        "there; damaged shards and samples are skipped too by the last two (default: abort)",
    )
    group.add_argument("--timeout", type=seconds, metavar="S", help="a command that takes longer is killed, and failed")
    group.add_argument("--log-field", metavar="FIELD", help="keep what the command writes in this field (its last MiB)")
    group.add_argument("--tmpdir", metavar="FOLDER", help="where the folders are made (default: as TMPDIR says)")


def seconds(text: str) -> float:
    """Reads a number of seconds.

    Raises:
        argparse.ArgumentTypeError: if it is none, or not more than 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, not {text!r}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Runs the command on every sample, and returns 1 if one was lost."""
    command = _command(arguments)
    reader = SampleReader(arguments)
    made = MadeSamples(reader)
    with (
        SampleOutput(arguments) as output,
        contextlib.closing(iter(reader)) as samples,  # type: ignore[type-var]
        contextlib.closing(command.run(samples)) as results,
    ):
        copy_samples(made.take(results), output, reader)
    made.tell()
    return reader.finish()


COMMAND = Command("run a command on every sample, in a folder of its own", add_arguments, run, _EXAMPLE)


def _command(arguments: argparse.Namespace) -> SampleCommand:
    try:
        return SampleCommand(
            arguments.shell_command,
            script=arguments.script,
            parallel=arguments.parallel,
            ordered=not arguments.unordered,
            timeout=arguments.timeout,
            folder=arguments.tmpdir,
            log_field=arguments.log_field,
            ignore_failures=arguments.errors == "ignore",
        )
    except (SampleError, ValueError) as error:
        raise UsageError(message_of(error)) from error


class MadeSamples:
    """What commands have made, with an account of what there is to tell.

    Args:
        reader: Refuses samples that are lost.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._ignored = 0
        self._left_out = 0

    def take(self, results: Iterable[CommandResult]) -> Iterator[dict[str, Any]]:
        """Gives the samples, and passes on what the commands have said.

        Raises:
            SampleError: if one is lost, unless such samples are to be skipped.
        """
        for result in results:
            pass_on(result.output)
            if result.samples is None:
                assert result.error is not None
                self._reader.refuse(result.error)
                continue
            if result.error is not None:
                self._ignored += 1
                say(f"ignored: {message_of(result.error)}")
            self._left_out += not result.samples
            yield from result.samples

    def tell(self) -> None:
        """Says what was left out and ignored."""
        if self._ignored:
            say(f"ignored: {self._ignored:,} commands failed (see above)")
        if self._left_out:
            say(f"left out {self._left_out:,} samples of which the command left nothing")


def pass_on(output: bytes) -> None:
    """Writes a command's output to standard error; that nobody reads it there does not stop the work."""
    if output:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(output.decode(errors="backslashreplace"))
            sys.stderr.flush()
