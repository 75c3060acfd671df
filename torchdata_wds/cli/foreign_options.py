"""What to write instead of an option that a command does not have: one of tarp or tarproc, or a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

_LIST = "name the list as a shard, '@list.txt'"
_EOF = "nothing: an archive ends by itself"

_COPY = {
    "--shardslice": "--shard-slice",
    "-R": "--rekey",
    "--maxerr": "--errors skip",
    "--verbose": "nothing",
    "-v": "nothing",
}

#: What to write for an option, by command.
_WORDS: dict[str, dict[str, str]] = {
    "cat": {
        **_COPY,
        "-s": "--shuffle N (tarp), or --skip N (tarscat)",
        "-m": "--mix",
        "-l": _LIST,
        "--load": _LIST,
        "-T": _LIST,
        "-b": "nothing: braces are expanded",
        "-E": _EOF,
        "--noeof": _EOF,
        "--eof": _EOF,
        "--workers": "-p",
        "--dummy": "wds ls",
    },
    "create": {"--delim": "--delimiter", "-f": "--delimiter", "-k": "--key-format", "--key": "--key-format"},
    "first": {"-S": "--where FIELD=VALUE", "--select": "--where FIELD=VALUE"},
    "proc": {
        **_COPY,
        "-m": "-c, and end the command with: rm -f sample.*",
        "-e": "--errors",
        "--error-handling": "--errors",
        "-S": "nothing: subfolders are samples",
        "--subdirs": "nothing: subfolders are samples",
        "--count": "--slice :N",
        "--add-log": "--log-field",
        "-w": "--tmpdir",
        "--working_dir": "--tmpdir",
        "--interpreter": "its name in the command",
        "--shell": "its name in the command",
        "-f": "wds cat -f before it",
        "-O": "a redirection in the command",
        "--command-output": "a redirection in the command",
    },
    "show": {"-N": "nothing", "-d": "nothing", "--delay": "nothing"},
    "sort": {
        **_COPY,
        "-s": "-k",
        "--sortkey": "-k",
        "-S": "--type",
        "--sorttype": "--type",
        "-t": "--tmpdir FOLDER",
        "--tempfile": "--tmpdir FOLDER",
        "--update": "nothing: samples with equal values are kept",
        "-f": "wds cat -f before it",
    },
    "split": {
        **_COPY,
        "--maxshards": "--max-shards",
        "--num-samples": "-n",
        "-c": "-n",
        "--max-size": "-s",
        "-z": "--compress gz",
        "-p": "--post",
        "-C": "--post COMMAND --delete",
        "--command": "--post COMMAND --delete",
        "--nodelete": "nothing: shards stay without --delete",
    },
    "tsv": {"--nokey": "--no-key", "--noheader": "--no-header"},
    "json": {"--nokey": "--no-key", "-k": "-f"},
}


def hints(command: str, words: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yields what to write instead of those options among `words` that a command does not have, where that is known.

    Example:
        >>> list(hints("split", ["--maxshards=2", "-n", "5", "x.tar"], ["-n", "--count", "--max-shards"]))
        ["in 'wds split', for --maxshards write --max-shards"]
        >>> list(hints("ls", ["--jsno"], ["--json", "--slice"]))
        ['did you mean --json?']
    """
    told = _WORDS.get(command, {})
    for word in words:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if not option.startswith("-") or option in known:
            continue
        if option in told:
            yield f"in 'wds {command}', for {option} write {told[option]}"
        elif option.startswith("--") and (near := difflib.get_close_matches(option, known, 1, 0.8)):
            yield f"did you mean {near[0]}?"
