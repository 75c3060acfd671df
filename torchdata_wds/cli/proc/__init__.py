"""Run a command on every sample, in a folder of its own.

wds proc -c 'tr a-z A-Z < sample.txt > sample.upper; rm sample.json' train-000000.tar -o upper.tar
wds proc -p 4 -c 'for i in 1 2; do mkdir $i; cp sample.jpg sample.cls $i; done; rm sample.*' train-000000.tar -o two.tar
wds proc -c 'cp sample.txt sample-0.txt; mv sample.txt sample-1.txt; rm sample.*' 'train-*.tar' -o 'halves-{name}.tar'
wds proc -c 'test $(cat sample.cls) -lt 5 || rm sample.*' train-000000.tar | wds ls -
"""

import argparse
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from typing import Any

from torchdata_wds.cli.command import Command, UsageError, add_parallel, choice, flag, option
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments, list_all_inputs
from torchdata_wds.cli.map.shard_tasks import Results, ShardTask, is_target_pattern, run_task, work_on_shards
from torchdata_wds.cli.outputs import SampleOutput, add_output_arguments, copy_samples
from torchdata_wds.cli.proc.sample_commands import CommandResult, SampleCommand
from torchdata_wds.cli.terminal import counted, message_of, paused, say, tell_losses

_OUTPUTS = (
    "a path, a writable URL, or '-' (the default); or one output per shard: a folder, or a name with {name} (the "
    "input's, without .tar and the like) or {shard:06d} (its number); then existing outputs are skipped, and a shard "
    "that fails does not stop the others"
)

_WHAT_HAPPENS = """
The command runs in bash, in a new folder that has a file sample.FIELD for each field, and the key in sample.__key__.
The files sample.* that exist afterwards are the new sample. Files sample-NAME.* are an additional sample for each NAME,
such as 000001, and so are files sample.* in a SUBFOLDER; their keys are KEY/NAME and KEY/SUBFOLDER unless they have a
__key__ file. If no files are left, the sample is left out. Other files are an error (with --errors skip or ignore they
are reported, and the exit status is 1): delete those you do not want. The command's standard output goes to standard
error when it ends.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, errors=False)
    add_output_arguments(parser, _OUTPUTS, str)
    group = parser.add_argument_group("command", textwrap.fill(_WHAT_HAPPENS.strip(), 78))
    which = group.add_mutually_exclusive_group(required=True)
    option(which, "-c --command", "COMMAND", "the command to run", dest="shell_command", default="")
    option(which, "-s --script", "FILE", "a script to run instead")
    add_parallel(group, "run N commands at a time (default: 1)")
    flag(group, "--unordered", "write samples as soon as they are ready, not in their order")
    text = (
        "if a command fails: stop and write nothing, leave the sample out and exit with 1, or use what it left; "
        "the last two also skip damaged shards and samples (default: abort)"
    )
    choice(group, "--errors", ("abort", "skip", "ignore"), text, "abort")
    option(group, "--timeout", "S", "kill a command after S seconds, which counts as a failure", _seconds)
    option(group, "--log-field", "FIELD", "store the last MiB of the command's output in this field")
    option(group, "--tmpdir", "FOLDER", "where to make the folders (default: as TMPDIR says)")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, not {text!r}")


def _run(arguments: argparse.Namespace) -> int:
    by_shard = is_target_pattern(arguments.output)
    if by_shard and arguments.slice is not None:
        raise UsageError("--slice counts the samples of all shards: with an output for each, use --shard-slice")
    made = _MadeSamples(arguments)
    if not by_shard:
        made.write(SampleReader(arguments), arguments)
        return made.tell()

    def write(url: str, output: str) -> None:
        # run_task has checked the real target; `output` is a new file in a temporary folder, or a URL
        options = argparse.Namespace(**{**vars(arguments), "output": output})
        made.write(SampleReader(options, urls=[url], hidden=True), options)

    def work(tasks: list[ShardTask]) -> Results:
        for task in tasks:
            yield task, run_task(lambda: write, task, explain=message_of)

    return max(work_on_shards(list_all_inputs(arguments), arguments, work), made.tell())


COMMAND = Command(__doc__, _add_arguments, _run)


class _MadeSamples:
    """Writes the samples that commands make, and counts what to report at the end."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._command = SampleCommand(arguments)
        self._is_strict = arguments.errors == "abort"
        self._ignored = self._emptied = self._unused = self._lost = 0
        self._left_out: Counter[str] = Counter()

    def write(self, reader: SampleReader, arguments: argparse.Namespace) -> None:
        """Runs the command on a reader's samples, and writes the results to one archive."""
        try:
            with (
                SampleOutput(arguments) as output,
                closing(iter(reader)) as samples,
                closing(self._command.run(samples)) as results,
            ):
                copy_samples(self._taken(results, reader), output, reader)
        finally:
            self._lost += reader.lost
            self._left_out += reader.left_out()

    def _taken(self, results: Iterable[CommandResult], reader: SampleReader) -> Iterator[dict[str, Any]]:
        """Yields the samples of results, and passes on the commands' output."""
        for result in results:
            pass_on(result.output)
            if result.samples is None:
                assert result.error is not None
                reader.refuse(result.error)
                continue
            if result.unused is not None:  # files that belong to no sample are reported with any --errors
                if self._is_strict:
                    raise result.unused
                self._unused += 1
                say(f"lost: {message_of(result.unused)}")
            if result.error is not None:
                self._ignored += 1
                say(f"ignored: {message_of(result.error)}")
            self._emptied += not result.samples
            yield from result.samples

    def tell(self) -> int:
        """Says what was left out, ignored and lost, and returns the exit status."""
        if self._ignored:
            say(f"ignored: {counted(self._ignored, 'command')} failed (see above)")
        if self._emptied:
            say(f"left out {counted(self._emptied, 'sample')} for which the command left no files")
        if self._unused:
            say(f"lost: files that {counted(self._unused, 'command')} left (see above)")
        return tell_losses(self._left_out, self._lost) or min(1, self._unused)


def pass_on(output: bytes) -> None:
    """Writes a command's output to standard error; if its reader has gone away, the work goes on."""
    if output:
        with suppress(BrokenPipeError), paused():
            sys.stderr.write(output.decode(errors="backslashreplace"))
            sys.stderr.flush()
