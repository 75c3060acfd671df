"""List, verify or clear what cache_shards and cache_samples keep in a folder.

wds cache list cache
wds cache verify cache --remove
wds cache clear cache --older-than 7d --dry-run

Other files are ignored: copies are recognized by their names or marks, files of samples by their first bytes, and
``.part`` and ``.lock`` files by the form of their names.
"""

import argparse
import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torchdata_wds.cli.command import Command, byte_size, flag, option
from torchdata_wds.cli.terminal import Progress, counted, paused, printable, say, stdout_is_apart
from torchdata_wds.errors import CacheError, WdsError, cli_message
from torchdata_wds.pipes.shards.shard_copies import check_copy
from torchdata_wds.storage.cache import locked_files
from torchdata_wds.storage.cache.names import LOCK, PART, is_own_name
from torchdata_wds.storage.cache.sample_file import HEADER_SIZE, is_ours, open_samples
from torchdata_wds.storage.locks import LockedFile

_SECONDS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhdw])")
_NEW_SECONDS = 1.0  # a new file may be without its lock for this long
State = Literal["whole", "being made", "left over"]


class CacheFile(NamedTuple):
    """One file of a cache; the kind ``"lock"`` is the lock of a copy."""

    path: str
    kind: Literal["shard", "samples", "lock"]
    state: State  # finished, being written by a live process, or left by a killed one
    size: int
    used: float  # when it was last used (or changed, if unfinished), in seconds since 1970


def duration(text: str) -> float:
    """Parses a duration such as ``7d`` into seconds."""
    if (found := _DURATION.fullmatch(text.strip().lower())) is None:
        raise argparse.ArgumentTypeError(f"expected a duration such as 30m, 12h, 7d or 2w, not {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parsers = []
    for name, summary in {
        "list": "show each copy of a shard and each file of samples",
        "verify": "read each copy completely and report damaged ones",
        "clear": "remove unused copies, and leftovers of killed processes",
    }.items():
        parsers.append(actions.add_parser(name, help=summary, description=summary))
        option(parsers[-1], "folder", "FOLDER", "the cache folder", os.path.expanduser)
        flag(parsers[-1], "-r --recursive", "search its subfolders too, for copies named by host and path")
    listing, verifying, clearing = parsers
    flag(listing, "--json", "one JSON object per line")
    flag(verifying, "--remove", "remove damaged files")
    option(clearing, "--older-than", "TIME", "only copies unused for TIME, such as 30m, 12h, 7d or 2w", duration)
    text = "remove the least recently used until the rest takes no more than SIZE"
    option(clearing, "--max-bytes", "SIZE", text, byte_size)
    flag(clearing, "--dry-run", "only show what would be removed")


def _run(arguments: argparse.Namespace) -> int:
    if not os.path.lexists(arguments.folder):
        say(f"the folder {printable(arguments.folder)} does not exist (yet): nothing is cached there")
        return 0
    work = {"list": _list, "verify": _verify, "clear": _clear}[arguments.action]
    return work(arguments, list_cache(arguments.folder, recursive=arguments.recursive))


def _list(arguments: argparse.Namespace, files: Sequence[CacheFile]) -> int:
    shown = [file for file in files if (file.kind, file.state) != ("lock", "being made")]
    now = time.time()
    for file in shown:
        name = os.path.relpath(file.path, arguments.folder)
        if arguments.json:
            content = {"name": name, "kind": file.kind, "state": file.state, "bytes": file.size, "used": file.used}
            print(json.dumps(content))
        else:
            seconds = max(0.0, now - file.used)
            unit = next((unit for unit in _SECONDS if seconds >= _SECONDS[unit]), "s")
            age = f"{int(seconds / _SECONDS[unit])}{unit}"
            print(f"{file.size:>15,} B  {file.kind:<7}  {file.state:<10}  {age:>5} ago  {printable(name)}")
    if not arguments.json:
        print(f"{sum(file.size for file in shown):>15,}  bytes in {counted(len(shown), 'file')}")
    return 0


def _verify(arguments: argparse.Namespace, files: Sequence[CacheFile]) -> int:
    whole = [file for file in files if file.state == "whole"]
    damaged, removed = 0, 0
    hidden = not (sys.stdout.isatty() or stdout_is_apart())
    with Progress("files", len(whole), size=sum(file.size for file in whole), hidden=hidden) as progress:
        for file in whole:
            if (reason := check_file(file)) is not None:
                damaged += 1
                with paused():
                    print(f"{printable(file.path)}: damaged: {printable(reason)}")
                removed += arguments.remove and _remove(file)
            progress.advance(size=file.size)
    told = f"{counted(len(whole) - damaged, 'file')} whole, {damaged:,} damaged"
    print(f"{told}, {removed:,} removed" if removed else told)
    return 1 if damaged else 0


def _clear(arguments: argparse.Namespace, files: Sequence[CacheFile]) -> int:
    chosen = choose_old(files, older_than=arguments.older_than, max_bytes=arguments.max_bytes, now=time.time())
    verb = "would be removed" if arguments.dry_run else "removed"
    removed = [file for file in chosen if arguments.dry_run or _remove(file)]
    for file in removed:
        print(f"{file.size:>15,} B  {verb}  {printable(os.path.relpath(file.path, arguments.folder))}")
    if made := [Path(file.path).name for file in files if file.state == "being made" and file.kind != "lock"]:
        say(f"kept {counted(len(made), 'file that is', 'files that are')} being made: {printable(', '.join(made[:5]))}")
    size = sum(file.size for file in removed)
    left = counted(sum(file.size for file in files) - size, "byte")
    print(f"{size:>15,}  bytes in {counted(len(removed), 'file')} {verb}, {left} left")
    return 1 if len(removed) < len(chosen) else 0


def _remove(file: CacheFile) -> bool:
    """Removes a file, or reports why it stays; returns whether it is gone."""
    try:
        if remove_file(file) != "in use":
            return True
        say(f"{printable(file.path)} stays: another process is writing or reading it")
    except CacheError as error:
        say(printable(str(error)))
    return False


COMMAND = Command(__doc__, _add_arguments, _run)


# ----------------------------------------------------------------------------------------------------------- the files


def list_cache(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[CacheFile]:
    """Lists the cache files in a folder by name; raises CacheError if it has only other files."""
    root = os.fspath(folder)
    files: list[CacheFile] = []
    others = 0
    try:
        for entry in _entries(root, recursive):
            try:
                file = _file_of(entry)
            except FileNotFoundError:
                continue
            except PermissionError:  # perhaps another user's
                file = None
            if file is not None:
                files.append(file)
            elif entry.name != locked_files.ROOM:
                others += 1
    except OSError as error:
        raise CacheError(f"the cache folder {root} cannot be read: {error.strerror or error}") from error
    if others and not files:
        raise CacheError(
            f"{root} is not a cache folder: none of the {others:,} files and folders in it is from cache_shards or "
            "cache_samples. Name the folder that those use; copies named by host and path lie in its subfolders, which "
            "are only searched on request (recursive)"
        )
    return sorted(files)


def _entries(folder: str, recursive: bool) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if recursive and entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path, recursive)
            else:
                yield entry


def _file_of(entry: os.DirEntry[str]) -> CacheFile | None:
    """Returns the cache file of a folder's entry; None if it is not one."""
    status = entry.stat(follow_symlinks=False)
    path, name, size = entry.path, entry.name, status.st_size
    if not stat.S_ISREG(status.st_mode) or name == locked_files.ROOM:
        return None
    if name.endswith(LOCK):  # the lock of a copy is empty, or contains the name of the unfinished copy
        base, content = name.removesuffix(LOCK), os.fsdecode(_read(path, 4096))
        is_of_copy = locked_files.UNIQUE.split(content) == [base, ""] if content else is_own_name(base)
        return CacheFile(path, "lock", _state(status, path), size, status.st_mtime) if is_of_copy else None
    if locked_files.UNIQUE.search(name):
        return CacheFile(path, "shard", _state(status, path), size, status.st_mtime)
    if not name.endswith(PART) and (is_own_name(name) or locked_files.mark_of(path)):
        return CacheFile(path, "shard", "whole", size, status.st_atime)
    if is_ours(_read(path, HEADER_SIZE)):
        state: State = _state(status, path) if name.endswith(PART) else "whole"
        return CacheFile(path, "samples", state, size, max(status.st_atime, status.st_mtime))
    return None


def _state(status: os.stat_result, path: str) -> State:
    """Returns the state of an unfinished file by its lock, which a new file may not have yet."""
    age = time.time() - status.st_mtime
    if abs(age) < _NEW_SECONDS:
        return "being made"
    with LockedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        is_free = file.lock(shared=True)
        # where locks do not work, only its age shows that no process writes it any more
        return "left over" if is_free and (file.has_locks or age >= locked_files.OLD_SECONDS) else "being made"


def _read(path: str, size: int) -> bytes:
    """Reads the start of a file, if possible without changing its access time, on which eviction relies."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # O_NOATIME is refused for another user's file
        file = os.open(path, flags)
    with LockedFile(file) as opened:
        return opened.read(size)


def check_file(file: CacheFile) -> str | None:
    """Reads a finished file to its end; returns what is wrong with it, or None."""
    path = file.path
    try:
        before = os.stat(path)  # noqa: PTH116
        if file.kind == "samples":
            if (reader := open_samples(Path(path))) is not None:
                with reader:
                    for _ in reader.rows():
                        pass
        else:
            with LockedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as copy:
                if locked_files.is_of_other_size(copy.fileno()):
                    raise CacheError(f"the copy {path} no longer has its original length: it was cut off")
            check_copy(path, path)
        # restore the access time, by which eviction finds the least recently used
        with contextlib.suppress(OSError):
            if os.path.samestat(before, os.stat(path)):  # noqa: PTH116
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    except (WdsError, OSError) as error:
        return cli_message(error) if os.path.lexists(path) else None
    return None


def choose_old(
    files: Iterable[CacheFile], *, older_than: float | None = None, max_bytes: float | None = None, now: float
) -> list[CacheFile]:
    """Chooses left-over files, then finished ones beyond the limits (or all without any), least recently used first."""
    files = list(files)
    chosen = [file for file in files if file.state == "left over"]
    whole = sorted((file for file in files if file.state == "whole"), key=lambda file: file.used)
    total = sum(file.size for file in whole)
    for file in whole:
        is_old = older_than is not None and now - file.used > older_than
        is_too_much = max_bytes is not None and total > max_bytes
        if is_old or is_too_much or (older_than is None and max_bytes is None):
            chosen.append(file)
            total -= file.size
    return chosen


def remove_file(file: CacheFile) -> locked_files.Removal:
    """Removes a file unless another process is writing or reading it; ``"gone"`` if it has vanished or was replaced."""
    path = file.path
    try:
        if file.kind == "samples" or file.state == "whole":
            return locked_files.remove_unlocked(path)
        if file.kind == "lock" and not os.path.lexists(path):
            return "gone"
        # hold the copy's lock, so that no other process starts to make the copy; releasing it removes the lock's file
        if (lock := locked_files.CopyLock.acquire(locked_files.UNIQUE.sub("", path.removesuffix(LOCK)))) is None:
            return "in use"
        try:
            return "removed" if file.kind == "lock" else locked_files.remove_unlocked(path)
        finally:
            lock.release()
    except FileNotFoundError:
        return "gone"
    except OSError as error:
        raise CacheError(f"{path} cannot be removed: {error.strerror or error}") from error
