"""``help``: the manual, one topic at a time."""

from __future__ import annotations

import argparse
import difflib
import pydoc
import sys
from importlib import resources
from importlib.resources.abc import Traversable

from torchdata_wds.cli.command import Command, UsageError

__all__ = ["COMMAND", "topics"]

_SUFFIX = ".md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``help``."""
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the topic to show; without one, all are listed")


def run(arguments: argparse.Namespace) -> int:
    """Shows a topic, through a pager on a terminal, or lists all topics."""
    pages = topics()
    if arguments.topic is None:
        print(_listing(pages), end="")
        return 0
    if arguments.topic not in pages:
        raise UsageError(_unknown(arguments.topic, pages))
    text = pages[arguments.topic].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        pydoc.pager(text)  # PAGER, or one that is there
    else:
        print(text, end="")
    return 0


COMMAND = Command(
    "show the manual: the list of its topics, or one topic",
    add_arguments,
    run,
    """
    wds help
    wds help resume
    """,
)


def topics() -> dict[str, Traversable]:
    """Finds the topics of the manual, with the file of each."""
    files = resources.files("torchdata_wds").joinpath("docs").iterdir()
    found = {file.name.removesuffix(_SUFFIX): file for file in files if file.name.endswith(_SUFFIX)}
    return dict(sorted(found.items()))


def _listing(pages: dict[str, Traversable]) -> str:
    """Each topic with its title, which is the first line of its file."""
    width = max(map(len, pages))
    lines = [f"  {topic:<{width}}  {_title(page)}\n" for topic, page in pages.items()]
    return f"Topics of the manual; 'wds help TOPIC' shows one, and 'wds COMMAND --help' a command:\n\n{''.join(lines)}"


def _title(page: Traversable) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _unknown(topic: str, pages: dict[str, Traversable]) -> str:
    near = difflib.get_close_matches(topic.lower(), pages, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (
        f"there is no topic {topic!r:.60}{hint} The topics are {', '.join(pages)}. "
        "For a command, see 'wds COMMAND --help'"
    )
