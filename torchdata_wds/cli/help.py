"""Show the manual: the list of its topics, or one topic.

wds help
wds help resume
"""

import argparse
import difflib
import sys
from collections.abc import Collection, Iterable, Iterator
from importlib import resources

from torchdata_wds.cli.command import Command, UsageError

_SUFFIX = ".md"
_COPY = {"--shardslice": "--shard-slice", "-R": "--rekey", "--maxerr": "--errors skip", "--verbose -v": "nothing"}

# What to write instead of options (separated by spaces) of tarp and tarproc that a command does not have.
_FOREIGN: dict[str, dict[str, str]] = {
    "cat": {
        **_COPY,
        "-s": "--shuffle N (tarp), or --skip N (tarscat)",
        "-m": "--mix",
        "-l --load -T": "name the list as a shard, '@list.txt'",
        "-b": "nothing: braces are expanded",
        "-E --noeof --eof": "nothing: an archive ends by itself",
        "--workers": "-p",
        "--dummy": "wds ls",
    },
    "create": {"--delim -f": "--delimiter", "-k --key": "--key-format"},
    "first": {"-S --select": "--where FIELD=VALUE"},
    "proc": {
        **_COPY,
        "-m": "-c, and end the command with: rm -f sample.*",
        "-e --error-handling": "--errors",
        "-S --subdirs": "nothing: subfolders are samples",
        "--count": "--slice :N",
        "--add-log": "--log-field",
        "-w --working_dir": "--tmpdir",
        "--interpreter --shell": "its name in the command",
        "-f": "wds cat -f before it",
        "-O --command-output": "a redirection in the command",
    },
    "show": {"-N -d --delay": "nothing"},
    "sort": {
        **_COPY,
        "-s --sortkey": "-k",
        "-S --sorttype": "--type",
        "-t --tempfile": "--tmpdir FOLDER",
        "--update": "nothing: samples with equal values are kept",
        "-f": "wds cat -f before it",
    },
    "split": {
        **_COPY,
        "--maxshards": "--max-shards",
        "--num-samples -c": "-n",
        "--max-size": "-s",
        "-z": "--compress gz",
        "-p": "--post",
        "-C --command": "--post COMMAND --delete",
        "--nodelete": "nothing: shards stay without --delete",
    },
    "tsv": {"--nokey": "--no-key", "--noheader": "--no-header"},
    "json": {"--nokey": "--no-key", "-k": "-f"},
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the topic to show (default: list all topics)")


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
        topics = f"The topics are {', '.join(sorted(pages))}. For a command, see 'wds COMMAND --help'"
        raise UsageError(f"unknown topic {topic!r:.60}{hint} {topics}")
    text = pages[topic].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        import pydoc

        pydoc.pager(text)  # PAGER, or one that is installed
    else:
        print(text, end="")
    return 0


COMMAND = Command(__doc__, _add_arguments, _run)


def hints(command: str, words: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yields what to write instead of options that the command does not have, where that is known."""
    told = {option: text for options, text in _FOREIGN.get(command, {}).items() for option in options.split()}
    for word in words:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if not option.startswith("-") or option in known:
            continue
        if option in told:
            yield f"in 'wds {command}', for {option} write {told[option]}"
        elif option.startswith("--") and (near := difflib.get_close_matches(option, known, 1, 0.8)):
            yield f"did you mean {near[0]}?"
