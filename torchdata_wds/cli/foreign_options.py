"""What to write instead of an option that a command does not have: one of tarp or tarproc, or a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

_COPY = {"--shardslice": "--shard-slice", "-R": "--rekey", "--maxerr": "--errors skip", "--verbose -v": "nothing"}

#: What to write for options, separated by blanks, by command.
_WORDS: dict[str, dict[str, str]] = {
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


def hints(command: str, words: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yields what to write for each of a command's arguments that is an option it does not have, if known."""
    told = {option: text for options, text in _WORDS.get(command, {}).items() for option in options.split()}
    for word in words:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if not option.startswith("-") or option in known:
            continue
        if option in told:
            yield f"in 'wds {command}', for {option} write {told[option]}"
        elif option.startswith("--") and (near := difflib.get_close_matches(option, known, 1, 0.8)):
            yield f"did you mean {near[0]}?"
