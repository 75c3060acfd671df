"""Finds the files that a local glob matches.

``**`` matches folders at any depth and does not follow links to folders, as in bash, ripgrep and fd: each file is found
once, and circular links are harmless. Links are followed for files, and for folders that the pattern names or ``*``
matches.
"""

import fnmatch
import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

# Patterns already warned about: each worker searches them again in every epoch.
_warned: set[str] = set()


def find_files(pattern: str) -> tuple[list[str], int]:
    """Returns the files that a local glob matches, sorted, and the number of the folders that it matches."""
    parent, slash, name = pattern.rpartition("/")
    if name != "**" and not glob.has_magic(parent) and not parent.endswith("/"):
        return _scan(parent + slash, name)
    matches = find_matches(pattern)
    files = files_among(matches)
    return files, len(matches) - len(files)


def _scan(folder: str, name: str) -> tuple[list[str], int]:
    """Finds files and folders in one listing of a folder, the most common case, with the rules of `glob.glob`."""
    is_match, shows_hidden = re.compile(fnmatch.translate(name)).match, name.startswith(".")
    try:
        with os.scandir(folder or ".") as entries:
            found = [entry for entry in entries if is_match(entry.name) and (shows_hidden or entry.name[0] != ".")]
    except OSError:
        return [], 0
    files = sorted(folder + entry.name for entry in found if not _is_dir(entry))
    return files, len(found) - len(files)


# In a folder with this many matches, one listing says which are folders; elsewhere each match is looked at.
_MANY_MATCHES = 8


def files_among(matches: Sequence[str]) -> list[str]:
    """Returns those of the matches of a local glob that are not folders, in order."""
    counts = Counter(match.rpartition("/")[:2] for match in matches)
    folders = {parent: _folder_names("".join(parent)) for parent, count in counts.items() if count >= _MANY_MATCHES}
    return [match for match in matches if not _is_folder(match, folders)]


def _folder_names(folder: str) -> set[str] | None:
    """Returns the names of the folders in a folder; None if it cannot be listed."""
    try:
        with os.scandir(folder or ".") as entries:
            return {entry.name for entry in entries if _is_dir(entry)}
    except OSError:
        return None


def _is_dir(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def _is_folder(match: str, folders: dict[tuple[str, str], set[str] | None]) -> bool:
    parent, slash, name = match.rpartition("/")
    names = folders.get((parent, slash))
    if names is None or name in ("", ".", ".."):
        return os.path.isdir(match)  # noqa: PTH112 - a name that is too long is not a folder
    return name in names


def find_matches(pattern: str) -> list[str]:
    """Returns the files and folders that a local glob matches, sorted and unique; hidden ones only if it has the dot.

    Logs a warning, once per pattern and process, if ``**`` skips linked or unreadable folders.
    """
    left_out: list[str] = []
    found = sorted(set(_matches(pattern, left_out)))
    if left_out and pattern not in _warned:
        _warned.add(pattern)
        logger.warning(
            "%s leaves out folders that are links or cannot be read, %d of them, such as %s: ** does not follow links. "
            "Give a linked folder a pattern of its own if it has other files",
            *(pattern, len(left_out), min(left_out)),
        )
    return found


def _matches(pattern: str, left_out: list[str]) -> Iterator[str]:
    # For "data/*/**/x*.tar", `before` is "data/*" and `after` is "x*.tar". Each folder that `before` matches is walked,
    # and `after`, which may contain the next "**", is matched in every folder below it, whose own name is escaped.
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)  # noqa: PTH207 - Path.glob shows hidden files and drops "./"
        return
    place = parts.index("**")
    before = "/".join(parts[:place])
    while parts[place + 1 : place + 2] == ["**"]:
        place += 1
    after = "/".join(parts[place + 1 :])
    starts = [before + "/" if parts[0] != "**" else ""]
    if glob.has_magic(before):
        starts = [f"{start}/" for start in sorted(glob.glob(before)) if os.path.isdir(start)]  # noqa: PTH112, PTH207
    for start in starts:
        for folder in _folders(start, left_out):
            if parts[place + 1 :] == [""]:
                yield folder
            else:
                yield from _matches(glob.escape(folder) + (after or "*"), left_out)


def _folders(start: str, left_out: list[str]) -> Iterator[str]:
    """Yields a folder and all below it except links and hidden ones, each with a final slash; "" is the current one."""
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        yield folder
        try:
            with os.scandir(folder or ".") as entries:
                folders = [entry for entry in entries if not entry.name.startswith(".") and _is_dir(entry)]
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            left_out.append(folder)
            continue
        for entry in folders:
            (left_out if entry.is_symlink() else waiting).append(f"{folder}{entry.name}/")
