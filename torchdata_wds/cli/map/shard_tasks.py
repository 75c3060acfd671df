"""Processes shards one by one; each has one output, which appears under its name when it is complete.

A local output is made in a temporary folder next to its place and then renamed. So an existing output is complete, and
interrupted work resumes where it stopped.
"""

import argparse
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.cli.command import BRACES
from torchdata_wds.cli.inputs import part_of
from torchdata_wds.cli.terminal import Progress, counted, printable, say, shorten
from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index import shard_name
from torchdata_wds.format.index.sidecars import index_url, index_urls, make_index_folder
from torchdata_wds.storage import list_targets, mask_url
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.targets.base import sync_file, sync_folder
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

ShardFunction = Callable[[str, str], Any]
_SHOWN_LINES = 8
_SHOWN_WIDTH = 1000
_TRAILER = "\nThis exception is thrown by "  # torch adds the pipe with all its arguments
_PLACE = re.compile(r"\{name\}|\{shard(?::(0?\d{0,2})d?)?\}")

#: The placeholders of an output's name, for messages.
PLACES = "{name} for the input's name without its suffix, and {shard} or {shard:06d} for its number"
_NOTHING = "the function has returned without writing the file that its second argument names"


class ShardTask(NamedTuple):
    """The work for one shard: the target is an absolute path, or a URL that the function writes itself."""

    source: str
    target: str
    staging: str | None  # the folder for unfinished output; None for a URL
    overwrite: bool


#: Each finished task, with "" or the reason why it failed.
Results = Generator[tuple[ShardTask, str], None, None]


def work_on_shards(
    urls: Sequence[str], arguments: argparse.Namespace, work: Callable[[list[ShardTask]], Results]
) -> int:
    """Makes the missing outputs, shows progress, reports the shards that failed, and returns 1 if one did."""
    # named before a part is taken: numbers count all shards, and two parts must not write the same file
    pairs = part_of(list(zip(urls, name_targets(urls, arguments.output), strict=True)), arguments.part)
    skipped = set() if arguments.force else existing_targets(target for _, target in pairs)
    pairs = [pair for pair in pairs if pair[1] not in skipped]
    if skipped:
        say(f"skipped: {counted(len(skipped), 'output exists', 'outputs exist')} already (--force replaces them)")
    failed = 0
    with (
        staged_tasks(pairs, overwrite=arguments.force) as tasks,
        closing(work(tasks)) as results,
        Progress("shards", urls=[task.source for task in tasks], summarizes=True) as progress,
    ):
        for task, problem in results:
            progress.advance(shard=task.source)
            if problem:
                failed += 1
                say(f"shard {printable(mask_url(task.source))} failed: {problem}")
    say(f"{len(pairs) - failed:,} done, {failed:,} failed, {len(skipped):,} skipped")
    return 1 if failed else 0


def is_plain_path(url: str) -> bool:
    """Returns whether a URL names a local file that no rewriting rule moves elsewhere."""
    place = resolve(url)
    return place.is_local and not place.is_moved


def existing_targets(targets: Iterable[str]) -> set[str]:
    """Returns those paths and URLs that exist, listing each folder once."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for target in targets:
        folder, slash, name = (local_path(target) if is_plain_path(target) else target).rpartition("/")
        folders.setdefault(folder + slash, []).append((name, target))
    existing: set[str] = set()
    for folder, found in folders.items():
        names = set(list_targets(folder or "."))
        existing.update(target for name, target in found if name in names)
    return existing


@contextmanager
def staged_tasks(pairs: Iterable[tuple[str, str]], *, overwrite: bool = False) -> Iterator[list[ShardTask]]:
    """Makes tasks of inputs and outputs, with temporary folders next to the outputs until the context ends."""
    tasks = []
    folders: dict[Path, str] = {}
    with ExitStack() as stack:
        for source, target in pairs:
            if not is_plain_path(target):
                tasks.append(ShardTask(source, target, None, overwrite))
                continue
            path = Path(local_path(target)).absolute()
            if path.parent not in folders:
                path.parent.mkdir(parents=True, exist_ok=True)
                made = tempfile.TemporaryDirectory(prefix=".wds-map-", dir=path.parent, ignore_cleanup_errors=True)
                folders[path.parent] = stack.enter_context(made)
            tasks.append(ShardTask(source, str(path), folders[path.parent], overwrite))
        yield tasks


def run_task(
    load: Callable[[], ShardFunction], task: ShardTask, explain: Callable[[BaseException], str] | None = None
) -> str:
    """Does the work for one shard; returns "" or why it failed, by default the last lines of the traceback.

    `load` returns the function, which is called with the input and the name of a file to write. That file has the
    output's base name; files next to it whose names begin with that name and a dot, such as an index, move with it.
    """
    try:
        if task.staging is None:
            load()(task.source, task.target)
            return "" if existing_targets([task.target]) else f"{_NOTHING}: {mask_url(task.target)} is not there"
        if obstacle := _obstacle(task):
            return obstacle
        with tempfile.TemporaryDirectory(dir=task.staging, ignore_cleanup_errors=True) as folder:
            made = Path(folder, Path(task.target).name)
            load()(task.source, str(made))
            return _publish(made, task)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - anything may be raised, asyncio's CancelledError too
        return (explain or error_text)(error)


def _obstacle(task: ShardTask) -> str:
    """Returns why an output cannot be put under its name, or ""."""
    target = Path(task.target)
    if target.is_dir():
        return f"{task.target!r} is a folder"
    if task.overwrite or not os.path.lexists(target):
        return ""
    if not target.exists():
        return f"{task.target!r} is a symbolic link that leads nowhere"
    return f"{task.target!r} was created by another program in the meantime; it is left as it is"


def _publish(made: Path, task: ShardTask) -> str:
    """Moves what was made to its place, the output last: once it exists, all does. Returns "" or why that failed."""
    written = sorted(made.parent.iterdir())
    if made.is_symlink() or not made.is_file():
        names = ", ".join(repr(path.name) for path in written[:3])
        return f"{_NOTHING}: it wrote " + (f"{names} instead" if names else "nothing there")
    if obstacle := _obstacle(task):
        return obstacle
    target = Path(task.target)
    for old in index_urls(task.target):  # that of an older output would not fit
        Path(old).unlink(missing_ok=True)
    moves = {path: target.with_name(path.name) for path in written if path.name.startswith(made.name + ".")}
    moves[Path(index_url(made))] = index = Path(index_url(task.target))
    for path, place in (*((path, place) for path, place in moves.items() if path.is_file()), (made, target)):
        if place == index:
            make_index_folder(index)
        with path.open("rb") as file:
            sync_file(file.fileno())
        path.replace(place)
    sync_folder(target.parent)
    return ""


def error_text(error: BaseException) -> str:
    """Returns the last lines of an exception's traceback, masked and made safe for a terminal."""
    text = "".join(traceback.format_exception(error)).partition(_TRAILER)[0].rstrip()
    lines = [line for line in text.splitlines() if line.strip("^~ ")]
    # Cut before masking, which is slow for long lines, and again after it: the first cut leaves four times the width,
    # as it must not remove what marks a secret.
    shown = [printable(mask_text(line[: 4 * _SHOWN_WIDTH])) for line in lines[-_SHOWN_LINES:]]
    return "\n".join(shorten(line, _SHOWN_WIDTH) for line in shown)


# ---------------------------------------------------------------------------------------------------- names of outputs


def is_target_pattern(output: str) -> bool:
    """Returns whether an output means one file per shard: a folder, or a name with something in braces."""
    if output in (STDIN, "") or scheme_of(output) == "pipe":
        return False
    return _is_folder(output) or BRACES.search(output) is not None


def name_targets(urls: Sequence[str], pattern: str, *, in_place: bool = False) -> list[str]:
    """Returns the output's name for each shard; raises ShardListError if two are equal, or one would replace an input.

    The pattern is a folder, which exists or ends in ``/``, for outputs with the base names of the inputs. Or it is a
    name with ``{name}`` (the base name without ``.tar``, ``.tar.gz`` and the like) or ``{shard}`` (the input's number,
    with zeros as in ``{shard:06d}``). With `in_place`, an output may replace its own input.

    Example:
        >>> name_targets(["a/x.tar", "s3://bucket/y.tar.gz"], "out/{name}-{shard:02d}.tar")
        ['out/x-00.tar', 'out/y-01.tar']
    """
    if pattern == STDIN or scheme_of(pattern) == "pipe" or not pattern:
        shown = mask_url(pattern)
        raise ShardListError(f"outputs are files or URLs of a store, not {shown!r}: name a folder or {PLACES}")
    other = BRACES.search(_PLACE.sub("", pattern))
    if other is not None and not _is_folder(pattern.rstrip("/")):  # one that exists may have braces in its name
        raise ShardListError(f"output {mask_url(pattern)!r} has an unknown place {other[0]}: there are {PLACES}")
    is_folder = _is_folder(pattern)
    inputs = {_identity(url): url for url in urls}
    makers: dict[str, str] = {}
    targets = []
    for number, url in enumerate(urls):
        target = _PLACE.sub(lambda place: _fill(place, number, url), pattern)  # noqa: B023 - called at once
        if is_folder:
            target = f"{target.rstrip('/')}/{_base_name(url)}"
        targets.append(target)
        place = _identity(target)
        if place in inputs and not (in_place and inputs[place] == url):
            what = f"output {mask_url(target)} of input {mask_url(url)} would replace the input"
            raise ShardListError(f"{what} {mask_url(inputs[place])}; name another folder")
        if place in makers:
            what = f"inputs {mask_url(makers[place])} and {mask_url(url)} would both become {mask_url(target)}"
            raise ShardListError(f"{what}; an output's name takes {PLACES}")
        makers[place] = url
    return targets


def _is_folder(pattern: str) -> bool:
    return pattern.endswith("/") or (is_local(pattern) and os.path.isdir(local_path(pattern)))  # noqa: PTH112 - a str


def _base_name(url: str) -> str:
    name = "" if scheme_of(url) in (STDIN, "pipe") else shard_name(url)
    if name in ("", ".", ".."):
        what = f"input {mask_url(url)} has no base name to name its output by"
        raise ShardListError(f"{what}; write {{shard:06d}} into the output's name")
    return name


def _fill(place: re.Match[str], number: int, url: str) -> str:
    if place[0] != "{name}":
        return format(number, (place[1] or "") + "d")
    name = _base_name(url)
    suffix = max((end for end in SHARD_SUFFIXES if name.lower().endswith(end)), key=len, default="")
    return name[: len(name) - len(suffix)] or name


def _identity(url: str) -> str:
    """Returns the same text for all names of one file."""
    return os.path.realpath(local_path(url)) if is_local(url) else url
