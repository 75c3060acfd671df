"""Globs of local files, where ``**`` stands for folders at any depth and does not follow links to folders.

bash's ``globstar``, ripgrep and fd do the same: each file is found once, and links in a circle do no harm. A folder
that the pattern names, or that ``*`` matches, may be a link; so may files.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator

logger = logging.getLogger(__name__)
_ANY_DEPTH = "**"

# The patterns that were warned about: each is searched once an epoch, in each worker.
_warned: set[str] = set()


def find_matches(pattern: str) -> list[str]:
    """Finds what a glob matches: files and folders, sorted, each once; hidden ones only if the pattern has the dot.

    Links to folders and unreadable folders that ``**`` leaves out are warned about, once in a process.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> folder.joinpath("a", "b").mkdir(parents=True)
        >>> for name in ("x.tar", "a/y.tar", "a/b/z.tar"):
        ...     folder.joinpath(name).touch()
        >>> [os.path.relpath(path, folder) for path in find_matches(f"{folder}/**/*.tar")]
        ['a/b/z.tar', 'a/y.tar', 'x.tar']
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
    parts = pattern.split("/")
    if _ANY_DEPTH not in parts:
        yield from glob.glob(pattern)  # noqa: PTH207 - Path.glob shows hidden files and drops "./"
        return
    place = parts.index(_ANY_DEPTH)
    before = "/".join(parts[:place])
    while parts[place + 1 : place + 2] == [_ANY_DEPTH]:
        place += 1
    after = "/".join(parts[place + 1 :])  # which may have another one
    starts = [before + "/" if parts[0] != _ANY_DEPTH else ""]
    if glob.has_magic(before):
        starts = [f"{start}/" for start in sorted(glob.glob(before)) if os.path.isdir(start)]  # noqa: PTH112, PTH207
    for start in starts:
        for folder in _folders(start, left_out):
            if parts[place + 1 :] == [""]:
                yield folder
            else:
                yield from _matches(glob.escape(folder) + (after or "*"), left_out)


def _folders(start: str, left_out: list[str]) -> Iterator[str]:
    """A folder and all below it but links and hidden ones, each ending in a slash; "" is the current one."""
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        yield folder
        try:
            with os.scandir(folder or ".") as entries:
                folders = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            left_out.append(folder)
            continue
        for entry in folders:
            path = f"{folder}{entry.name}/"
            if entry.is_symlink():
                left_out.append(path)
            else:
                waiting.append(path)
