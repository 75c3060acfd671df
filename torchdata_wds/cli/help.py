"""``help``: the manual, one topic at a time."""

from __future__ import annotations

import argparse
import difflib
import pydoc
import sys
from importlib import resources

from torchdata_wds.cli.command import Command, UsageError

_SUFFIX = ".md"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the topic to show; without one, all are listed")


def _run(arguments: argparse.Namespace) -> int:
    files = resources.files("torchdata_wds").joinpath("docs").iterdir()
    pages = {file.name.removesuffix(_SUFFIX): file for file in files if file.name.endswith(_SUFFIX)}
    topic = arguments.topic
    if topic is None:
        print("Topics of the manual; 'wds help TOPIC' shows one, and 'wds COMMAND --help' a command:\n")
        width = max(map(len, pages))
        for name, page in sorted(pages.items()):
            title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            print(f"  {name:<{width}}  {title}")
        return 0
    if topic not in pages:
        near = difflib.get_close_matches(topic.lower(), pages, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(
            f"unknown topic {topic!r:.60}{hint} The topics are {', '.join(sorted(pages))}. "
            "For a command, see 'wds COMMAND --help'"
        )
    text = pages[topic].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        pydoc.pager(text)  # PAGER, or one that is installed
    else:
        print(text, end="")
    return 0


COMMAND = Command(
    "show the manual: the list of its topics, or one topic",
    _add_arguments,
    _run,
    """
    wds help
    wds help resume
    """,
)
