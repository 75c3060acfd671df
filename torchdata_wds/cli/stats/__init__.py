"""Count what a data set has: fields, sizes, image sizes, labels, duplicates and oddities.

wds stats 'train-{000000..000003}.tar'
wds stats --out stats.html 'train-{000000..000003}.tar'
wds stats --json - --top 5 train-*.tar
"""

import argparse
import json
import os

from torchdata_wds.cli.command import Command, UsageError, add_force, add_parallel, option, positive_number
from torchdata_wds.cli.inputs import add_input_arguments
from torchdata_wds.cli.outputs import check_target, one_output, write_line, write_whole
from torchdata_wds.cli.stats.counting import count_dataset
from torchdata_wds.cli.stats.dataset_figures import as_plain, summarize_dataset
from torchdata_wds.cli.stats.page import write_page
from torchdata_wds.cli.stats.report_lines import report
from torchdata_wds.cli.terminal import tell_losses
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

_TOP = 20
_PAGES = (".html", ".htm")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    text = f"name the N labels and image sizes of most samples (default: {_TOP})"
    option(parser, "--top", "N", text, positive_number, default=_TOP)
    cores = os.cpu_count() or 1
    add_parallel(parser, "read N shards at once, in processes (default: one per core)", cores)
    group = parser.add_argument_group("output", "the default is text on standard output")
    option(group, "-o --out", "FILE", "write a web page with charts, x.html", _page_name)
    option(group, "--json", "FILE", "write everything as JSON; '-' is standard output", one_output)
    add_force(group)


def _page_name(text: str) -> str:
    if not mask_url(text).partition("?")[0].lower().endswith(_PAGES):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .html, not {mask_url(text)!r}")
    return one_output(text)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.shards and arguments.json not in (None, STDIN) and mask_url(arguments.json).endswith(".tar"):
        raise UsageError("--json takes the file to write: for standard output, write --json -")
    for target in (arguments.out, arguments.json):
        if target not in (None, STDIN):
            check_target(target, overwrite=arguments.force)
    tally = count_dataset(arguments, arguments.parallel)
    figures = summarize_dataset(tally, arguments.top)
    if arguments.json == STDIN:
        write_line(json.dumps(as_plain(figures), indent=2))
    elif arguments.json is not None:
        pieces = [json.dumps(as_plain(figures), indent=2).encode() + b"\n"]
        write_whole(pieces, arguments.json, overwrite=arguments.force)
    if arguments.out is not None:
        title = ", ".join(map(mask_url, arguments.shards)) or "standard input"
        write_whole((piece.encode() for piece in write_page(figures, title)), arguments.out, overwrite=arguments.force)
    if arguments.json is None and arguments.out is None:
        for line in report(figures):
            write_line(line)
    return tell_losses(tally.left_out, tally.lost)


COMMAND = Command(__doc__, _add_arguments, _run)
