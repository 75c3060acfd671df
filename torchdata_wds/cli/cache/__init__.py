"""``cache``: lists, verifies or clears the copies and samples in a cache folder."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchdata_wds.cli.cache.folders import CacheFile, check_file, choose_old, list_cache, remove_file
from torchdata_wds.cli.command import Command, byte_size
from torchdata_wds.cli.terminal import Progress, counted, paused, printable, say, stdout_is_apart
from torchdata_wds.errors import CacheError
from torchdata_wds.pipes.shards.cache_shards import check_copy

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhdw])")


def duration(text: str) -> float:
    """Converts a span of time such as ``7d`` to seconds; an ArgumentTypeError if it is not one."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a span of time such as 30m, 12h, 7d or 2w, not {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions of ``cache`` and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = _action(actions, "list", "show each copy of a shard and file of samples", _list)
    listing.add_argument("--json", action="store_true", help="a JSON object a line")
    verifying = _action(actions, "verify", "read each copy to its end, and report those that are damaged", _verify)
    verifying.add_argument("--remove", action="store_true", help="remove what is damaged")
    clearing = _action(actions, "clear", "remove unused copies, and what killed processes left", _clear)
    clearing.add_argument(
        "--older-than", type=duration, metavar="TIME", help="only copies not used for 30m, 12h, 7d or 2w"
    )
    clearing.add_argument(
        "--max-bytes", type=byte_size, metavar="SIZE", help="remove the oldest until the others take no more than SIZE"
    )
    clearing.add_argument("--dry-run", action="store_true", help="say what would be removed")


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen action; returns the exit status."""
    if not os.path.lexists(arguments.folder):
        say(f"the folder {printable(arguments.folder)} does not exist (yet): nothing is cached there")
        return 0
    files = list_cache(arguments.folder, recursive=arguments.recursive)
    work: Callable[[argparse.Namespace, Sequence[CacheFile]], int] = arguments.work
    return work(arguments, files)


COMMAND = Command(
    "list, verify or clear what cache_shards and cache_samples keep in a folder",
    add_arguments,
    run,
    """
    wds cache list cache
    wds cache verify cache --remove
    wds cache clear cache --older-than 7d --dry-run
    """,
)


def _action(
    actions: Any, name: str, summary: str, work: Callable[[argparse.Namespace, Sequence[CacheFile]], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.add_argument("folder", metavar="FOLDER", type=os.path.expanduser, help="the folder of a cache")
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="look into its folders too, as for copies named by host and path"
    )
    parser.set_defaults(work=work)
    return parser


def _list(arguments: argparse.Namespace, files: Sequence[CacheFile]) -> int:
    shown = [file for file in files if (file.kind, file.state) != ("lock", "being made")]
    now = time.time()
    for file in shown:
        name = os.path.relpath(file.path, arguments.folder)
        if arguments.json:
            content = {"name": name, "kind": file.kind, "state": file.state, "bytes": file.size, "used": file.used}
            print(json.dumps(content))
        else:
            age = _span(now - file.used)
            print(f"{file.size:>15,} B  {file.kind:<7}  {file.state:<10}  {age:>5} ago  {printable(name)}")
    if not arguments.json:
        print(f"{sum(file.size for file in shown):>15,}  bytes in {counted(len(shown), 'file')}")
    return 0


def _verify(arguments: argparse.Namespace, files: Sequence[CacheFile]) -> int:
    whole = [file for file in files if file.state == "whole"]
    damaged, removed = 0, 0
    hidden = not (sys.stdout.isatty() or stdout_is_apart())
    with Progress("files", len(whole), only_on_terminal=True, hidden=hidden) as progress:
        for file in whole:
            reason = check_file(file, check_copy)
            if reason is not None:
                damaged += 1
                with paused():
                    print(f"{printable(file.path)}: damaged: {printable(reason)}")
                removed += arguments.remove and _remove(file)
            progress.advance()
    told = f"{counted(len(whole) - damaged, 'file')} whole, {damaged:,} damaged"
    print(f"{told}, {removed:,} removed" if removed else told)
    return 1 if damaged else 0


def _clear(arguments: argparse.Namespace, files: Sequence[CacheFile]) -> int:
    chosen = choose_old(files, older_than=arguments.older_than, max_bytes=arguments.max_bytes, now=time.time())
    verb = "would be removed" if arguments.dry_run else "removed"
    removed = [file for file in chosen if arguments.dry_run or _remove(file)]
    for file in removed:
        print(f"{file.size:>15,} B  {verb}  {printable(os.path.relpath(file.path, arguments.folder))}")
    made = [Path(file.path).name for file in files if file.state == "being made" and file.kind != "lock"]
    if made:
        say(f"{counted(len(made), 'file is', 'files are')} being made and kept: {printable(', '.join(made[:5]))}")
    size = sum(file.size for file in removed)
    left = counted(sum(file.size for file in files) - size, "byte")
    print(f"{size:>15,}  bytes in {counted(len(removed), 'file')} {verb}, {left} left")
    return 1 if len(removed) < len(chosen) else 0


def _remove(file: CacheFile) -> bool:
    """Removes a file, or says why it stays; returns whether it is gone."""
    try:
        outcome = remove_file(file)
    except CacheError as error:
        say(printable(str(error)))
        return False
    if outcome == "in use":
        say(f"{printable(file.path)} stays: another process makes or reads it")
    return outcome != "in use"


def _span(seconds: float) -> str:
    """Formats a span of time in its largest unit.

    Example:
        >>> _span(200000.0), _span(59)
        ('2d', '59s')
    """
    unit = next((unit for unit in "wdhm" if seconds >= _SECONDS[unit]), "s")
    return f"{max(0, int(seconds / _SECONDS[unit]))}{unit}"
