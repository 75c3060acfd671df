"""``create``: makes an archive of a folder, a recipe or a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from torchdata_wds.cli.arguments.outputs import SampleOutput, add_output_arguments, check_one_output
from torchdata_wds.cli.command import Command, UsageError, counted, message_of, say
from torchdata_wds.cli.create.assembling import Missing, PartList, SampleAssembler
from torchdata_wds.cli.create.folders import SampleFolder
from torchdata_wds.cli.create.part_lists import SourceKind, kind_of, open_part_list
from torchdata_wds.cli.create.plans import KEY_FORMAT
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import Progress
from torchdata_wds.errors import SampleError, WdsError
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

__all__ = ["COMMAND"]


_STDOUT = "/dev/stdout"

_NAMED = 20  # how many missing files are named

_TAB_NAMES = ("\\t", "tab")

_SOURCES = """\
a folder  its files, sorted by key. Links to files are followed; links to
          folders, and hidden folders, are passed over
a recipe  a line for each member: name, blanks, source. The source is a path,
          file:PATH, text:WORDS, base64:DIGITS, a URL, or with --allow-pipe
          pipe:COMMAND
a plan    (.tsv, .csv) a row for each sample. The first line names the fields;
          below '@jpg' are paths or URLs of files, below '__key__' keys
Fields are written in lower case. All names, and that all files are there, are
checked before the first byte is written; URLs and commands show when they
are read."""

#: Arguments that only one kind of source has, with what they are when they are not given.
_ONLY = {
    "sort": ("recipe", False),
    "allow_pipe": ("recipe", False),
    "delimiter": ("plan", None),
    "key_format": ("plan", KEY_FORMAT),
    "no_escapes": ("plan", False),
    "base64": ("plan", False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "source",
        nargs="?",
        default=STDIN,
        metavar="SOURCE",
        help="a folder, a recipe or a plan; by default a recipe from standard input",
    )
    parser.add_argument("--from", dest="kind", choices=get_args(SourceKind), help="what SOURCE is")
    parser.add_argument(
        "-C", "--directory", metavar="DIR", help="what relative paths are relative to; by default the list's folder"
    )
    parser.add_argument(
        "--missing",
        choices=get_args(Missing),
        default="error",
        help="without a file: write nothing, leave it out, leave its sample out, or take it as empty (default: error)",
    )
    parser.add_argument("--allow-pipe", action="store_true", help="let a recipe run commands (pipe:COMMAND)")
    parser.add_argument("--sort", action="store_true", help="sort a recipe by key; otherwise it keeps its order")
    parser.add_argument_group("sources", _SOURCES)
    plan = parser.add_argument_group("plans")
    plan.add_argument("--delimiter", metavar="CHAR", help="between cells; by default a comma for .csv, or else a tab")
    plan.add_argument(
        "--key-format",
        default=KEY_FORMAT,
        metavar="FORMAT",
        help=f"keys without column __key__ (default: {KEY_FORMAT})",
    )
    plan.add_argument("--no-escapes", action="store_true", help="with tabs: a backslash is one, as in '\\theta'")
    plan.add_argument("--base64", action="store_true", help="a cell that begins with 'base64:' is bytes in Base64")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the archive."""
    check_one_output(arguments.output)
    kind = arguments.kind or kind_of(arguments.source)
    _check_arguments(arguments, kind)
    with SampleOutput(arguments) as output:
        parts = _open(arguments, kind)
        missing = _MissingFiles()
        samples = SampleAssembler(parts, arguments.missing, missing.tell)
        try:
            samples.check()
        finally:
            _tell_skipped(parts)
        with Progress("samples", samples.count, only_on_terminal=True) as progress:
            for sample in samples:
                output.write(sample)
                progress.advance()
        missing.tell_counts(arguments.missing, samples)
        if not output.count:
            raise SampleError(f"{parts.name}: no sample is left, and nothing was written")
    return 0


COMMAND = Command(
    "make an archive of a folder of files, or of what a recipe or a table lists",
    add_arguments,
    run,
    """
    wds create images -o images.tar
    wds create recipe.txt -o recipe.tar
    wds create plan.tsv --missing skip-sample -o plan.tar
    wds create recipe.txt --sort --rekey '#' -o - | wds ls
    """,
)


def _check_arguments(arguments: argparse.Namespace, kind: SourceKind) -> None:
    """Checks that the arguments fit the kind of source.

    Raises:
        UsageError: if they do not.
    """
    for name, (owner, default) in _ONLY.items():
        if owner != kind and getattr(arguments, name) != default:
            raise UsageError(
                f"--{name.replace('_', '-')} is for a {owner}, and {printable(arguments.source)} is a {kind}"
            )
    if kind != "folder":
        return
    if arguments.directory is not None:
        raise UsageError("-C is for a recipe or a plan; the paths in a folder are relative to it")
    # where a shell has sent standard output to, if the system says so
    place = _STDOUT if arguments.output == STDIN else arguments.output
    if scheme_of(place) in ("", "file") and scheme_of(arguments.source) in ("", "file"):
        output, folder = (Path(local_path(name)).resolve() for name in (place, arguments.source))
        if output.is_relative_to(folder):
            raise UsageError(
                f"the archive {printable(str(output))} would lie in the folder that is read, and be a file of the "
                "next one: write it elsewhere"
            )


def _open(arguments: argparse.Namespace, kind: SourceKind) -> PartList:
    options = {}
    if kind == "plan":
        options = {
            "key_format": arguments.key_format,
            "escapes": not arguments.no_escapes,
            "base64": arguments.base64,
        }
        if arguments.delimiter is not None:
            options["delimiter"] = "\t" if arguments.delimiter in _TAB_NAMES else arguments.delimiter
    try:
        return open_part_list(
            arguments.source,
            kind,
            folder=arguments.directory,
            sort=arguments.sort,
            allow_pipe=arguments.allow_pipe,
            **options,
        )
    except WdsError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


class _MissingFiles:
    """Tells what is missing: the first by name, and all in numbers."""

    def __init__(self) -> None:
        self._told = 0

    def tell(self, error: SampleError) -> None:
        """Tells of one."""
        self._told += 1
        if self._told <= _NAMED:
            say(message_of(error))

    def tell_counts(self, missing: Missing, samples: SampleAssembler) -> None:
        """Tells the numbers."""
        files, left_out = samples.missing_files, samples.left_out
        if missing == "empty" and files:
            say(f"took {counted(files, 'missing file')} as empty (--missing empty)")
        elif files:
            say(f"left out: {counted(files, 'missing file')}, {counted(left_out, 'sample')} (--missing {missing})")


def _tell_skipped(parts: PartList) -> None:
    if isinstance(parts, SampleFolder):
        for reason, count in sorted(parts.skipped.items()):
            say(f"passed over {count:,} in {parts.name} that belong to no sample: {reason}")
