"""Folders of files as samples: what is there, under its own names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from torchdata_wds.cli.create.assembling import Part, Problems
from torchdata_wds.cli.create.member_sources import MemberSource
from torchdata_wds.cli.terminal import printable
from torchdata_wds.errors import SampleError
from torchdata_wds.format.samples.names import skip_reason, split_name

# Between key and field: no file name has it, and it sorts before all others, so that names sort by key, then field.
_CUT = "\0"


class SampleFolder:
    """The files in a folder and the folders below it as parts of samples, sorted by key.

    Keys are relative to the folder. Links to files are followed; links to folders, which may lead in a circle or out of
    the folder, and folders whose name begins with a dot are not. `skipped` counts by reason what `parts` passed over.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("a.txt", "a-b.txt", "a.JPG", "README"):
        ...     _ = (folder / name).write_bytes(b"")
        >>> files = SampleFolder(str(folder))
        >>> [(part.key, part.field) for part in files.parts(Problems(files.name))], files.skipped
        ([('a', 'JPG'), ('a', 'txt'), ('a-b', 'txt')], Counter({'no extension': 1}))
    """

    cure = ""  # sorted, the files of a sample are together

    def __init__(self, path: str) -> None:
        self.name = f"folder {printable(path)}"
        self.url = path.rstrip("/") or path
        self.skipped: Counter[str] = Counter()
        self._names: list[str] | None = None

    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, and adds folders that cannot be read to the problems."""
        if self._names is None:
            self._names = sorted(self._find(problems))
        start = os.path.join(self.url, "")  # noqa: PTH118 - a str, as millions of them are made
        for name in self._names:
            key, _, field = name.partition(_CUT)
            yield Part(key, field, MemberSource("file", f"{start}{key}.{field}"))

    def _find(self, problems: Problems) -> list[str]:
        found: list[str] = []
        waiting = [""]
        while waiting:
            below = waiting.pop()
            path = os.path.join(self.url, below)  # noqa: PTH118 - a str, as millions of them are made
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        self._look_at(entry, below + entry.name, waiting, found)
            except OSError as error:
                problems.add(f"folder {path!r}", SampleError(f"it cannot be read: {error.strerror or error}"))
        return found

    def _look_at(self, entry: os.DirEntry[str], name: str, waiting: list[str], found: list[str]) -> None:
        is_file = entry.is_file(follow_symlinks=False)
        try:
            is_folder = not is_file and entry.is_dir()
        except OSError:  # a link that leads in a circle, or where nobody may look
            is_folder = False
        if is_folder:
            if entry.is_symlink():
                self.skipped["link to a folder"] += 1
            elif entry.name.startswith("."):
                self.skipped["hidden folder"] += 1
            else:
                waiting.append(name + "/")
        elif (names := split_name(name)) is None:
            self.skipped[skip_reason(name)] += 1
        elif is_file or entry.is_symlink():
            # where a link leads is checked with all files; one that leads nowhere is a missing file
            found.append(_CUT.join(names))
        else:
            self.skipped["no regular file"] += 1
