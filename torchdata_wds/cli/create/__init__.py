"""Make an archive from a folder of files, a recipe or a table.

wds create images -o images.tar
wds create recipe.txt -o recipe.tar
wds create plan.tsv --missing skip-sample -o plan.tar
wds create recipe.txt --sort --rekey '#' -o - | wds ls
"""

import argparse
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from torchdata_wds.cli.command import Command, UsageError, choice, flag, option
from torchdata_wds.cli.create.assembling import Missing, PartList, SampleAssembler
from torchdata_wds.cli.create.part_lists import KEY_FORMAT, Plan, Recipe, SampleFolder
from torchdata_wds.cli.outputs import SampleOutput, add_output_arguments
from torchdata_wds.cli.terminal import Progress, counted, printable, say
from torchdata_wds.errors import SampleError, SpecError
from torchdata_wds.format.dataset_files.reading import folder_of
from torchdata_wds.storage import compression_for, mask_url, open_shard
from torchdata_wds.storage.urls import STDIN, is_local, local_path

SourceKind = Literal["folder", "recipe", "plan"]
_DELIMITERS = {".tsv": "\t", ".csv": ","}
_STDOUT = "/dev/stdout"

_SOURCES = """\
a folder  its files, sorted by key. Links to files are followed; links to
          folders, and hidden folders, are skipped
a recipe  one line per member: name, blanks, source. The source is a path,
          file:PATH, text:WORDS, base64:DIGITS, a URL, or with --allow-pipe
          pipe:COMMAND
a plan    (.tsv, .csv) one row per sample. The first line names the fields;
          below '@jpg' are paths or URLs of files, below '__key__' keys
Field names are converted to lower case. All names, and that all files exist,
are checked before the first byte is written; URLs and commands fail only when
they are read."""

#: Arguments that only one kind of source has, with their default.
_ONLY = {
    "sort": ("recipe", False),
    "allow_pipe": ("recipe", False),
    "delimiter": ("plan", None),
    "key_format": ("plan", KEY_FORMAT),
    "no_escapes": ("plan", False),
    "base64": ("plan", False),
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a folder, a recipe or a plan (default: a recipe from standard input)"
    option(parser, "source", "SOURCE", text, nargs="?", default=STDIN)
    text = "what SOURCE is (default: by its name)"
    parser.add_argument("--from", dest="kind", choices=get_args(SourceKind), help=text)
    option(parser, "-C --directory", "DIR", "where relative paths start (default: the list's folder)")
    text = "if a file is missing: write nothing, skip it, skip its sample, or use an empty one (default: error)"
    choice(parser, "--missing", get_args(Missing), text, "error")
    flag(parser, "--allow-pipe", "allow commands (pipe:COMMAND) in a recipe")
    flag(parser, "--sort", "sort a recipe by key (default: keep its order)")
    parser.add_argument_group("sources", _SOURCES)
    plan = parser.add_argument_group("plans")
    option(plan, "--delimiter", "CHAR", "between cells (default: a comma for .csv, otherwise a tab)")
    text = f"keys if there is no column __key__ (default: {KEY_FORMAT})"
    option(plan, "--key-format", "FORMAT", text, default=KEY_FORMAT)
    flag(plan, "--no-escapes", "with tabs: take backslashes literally, as in '\\theta'")
    flag(plan, "--base64", "decode cells that begin with 'base64:'")
    add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    kind = arguments.kind or kind_of(arguments.source)
    _check_arguments(arguments, kind)
    options = {name: getattr(arguments, name) for name, (owner, _) in _ONLY.items() if owner == kind}
    with SampleOutput(arguments) as output:
        parts = open_part_list(arguments.source, kind, folder=arguments.directory, **options)
        samples = SampleAssembler(parts, arguments.missing)
        try:
            samples.check()
        finally:
            for reason, count in sorted(parts.skipped.items()):
                say(f"passed over {count:,} in {parts.name} that belong to no sample: {reason}")
        with Progress("samples", samples.count) as progress:
            for count, size in output.write_all(samples):
                progress.advance(count, size=size)
        if samples.missing_files:
            files, left_out = counted(samples.missing_files, "missing file"), counted(samples.left_out, "sample")
            done = f"took {files} as empty" if arguments.missing == "empty" else f"left out: {files}, {left_out}"
            say(f"{done} (--missing {arguments.missing})")
        if not output.count:
            raise SampleError(f"{parts.name}: no sample is left, and nothing was written")
    return 0


COMMAND = Command(__doc__, _add_arguments, _run)


def _check_arguments(arguments: argparse.Namespace, kind: SourceKind) -> None:
    """Raises UsageError unless the arguments fit the kind of source."""
    for name, (owner, default) in _ONLY.items():
        if owner != kind and getattr(arguments, name) != default:
            shown = printable(arguments.source)
            raise UsageError(f"--{name.replace('_', '-')} is for a {owner}, but {shown} is a {kind}")
    if kind != "folder":
        return
    if arguments.directory is not None:
        raise UsageError("-C is for a recipe or a plan; the paths in a folder are relative to it")
    # /dev/stdout leads to the file to which a shell redirected the output, where the system has it
    place = _STDOUT if arguments.output == STDIN else arguments.output
    if is_local(place) and is_local(arguments.source):
        output, folder = (Path(local_path(name)).resolve() for name in (place, arguments.source))
        if output.is_relative_to(folder):
            what = f"the archive {printable(str(output))} would be inside the folder that is read"
            raise UsageError(f"{what}, and become a member of the next one: write it elsewhere")


def kind_of(source: str) -> SourceKind:
    """Returns what a source is: a folder, a plan by its suffix, or else a recipe."""
    if is_local(source) and Path(local_path(source)).is_dir():
        return "folder"
    return "plan" if _suffix(source) in _DELIMITERS else "recipe"


def open_part_list(
    source: str, kind: SourceKind | None = None, *, folder: str | None = None, **options: Any
) -> PartList:
    """Opens a folder, recipe or plan; its relative paths start at `folder`, by default that of the list."""
    if not source:  # from a shell variable that is not set; Path("") would be the working directory
        raise SpecError("the name of the source is empty")
    kind = kind or kind_of(source)
    shown = printable(mask_url(source))
    path = Path(local_path(source)) if is_local(source) else None
    if kind == "folder":
        if path is None or not path.is_dir():
            raise SpecError(f"{shown} is not a folder")
        return SampleFolder(local_path(source))
    if path is not None and path.is_dir():
        raise SpecError(f"{shown} is a folder, not a {kind}")
    if path is not None and not path.exists():
        raise SpecError(f"there is no {kind} {shown}, and no folder of that name")
    # A list on standard input, or in a FIFO such as /dev/fd/63 that a shell makes for <(command), has no folder of its
    # own: its paths start at the working directory.
    base = "" if folder is None else local_path(folder)
    if folder is None and (path is None or path.is_file()):
        base = folder_of(source)
    if kind == "plan" and options.get("delimiter") is None:
        options["delimiter"] = _DELIMITERS.get(_suffix(source), "\t")
    with open_shard(source) as stream:
        return (Plan if kind == "plan" else Recipe)(stream.read(), source, base, **options)


def _suffix(source: str) -> str:
    """Returns the suffix in lower case, ignoring that of a compression."""
    path = PurePosixPath(source if is_local(source) else source.partition("?")[0])
    if compression_for(path.name, None):
        path = path.with_suffix("")
    return path.suffix.lower()
