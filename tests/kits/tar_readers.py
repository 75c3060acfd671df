"""Archives as other programs read them: GNU tar, in one run of a shell for many, and Python's tarfile."""

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import read_members

_LISTED = re.compile(rb"(.)\S* +\S*/\S* +(\d+)(?:,\d+)? -?\d+-\d\d-\d\d \d\d:\d\d (.*)", re.DOTALL)
_ESCAPES = {
    b"n": b"\n",
    b"t": b"\t",
    b"\\": b"\\",
    b"r": b"\r",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
    b"a": b"\a",
    b" ": b" ",
}
_SCRIPT = """
for file in *.tar; do
    if tar --quoting-style=escape -tvPf "$file" > "$file.list" 2> "$file.errors"; then
        # a pipe: in a file GNU tar seeks over the holes of sparse members, to places that are not those of the member
        { tar -xOPf "$file" 2>> "$file.errors"; echo $? > "$file.status"; } | cat > "$file.data"
    else
        echo 1 > "$file.status"
    fi
done
"""


class Reading(NamedTuple):
    """What a program makes of an archive.

    Attributes:
        members: Names and contents of the files; None for content that is not known.
        error: What it complains about, "" if it does not.
    """

    members: list[tuple[str, bytes | None]]
    error: str


def agree(one: Reading, other: Reading) -> bool:
    """Whether two programs refuse an archive, or read the same files with the same content."""
    if one.error or other.error:
        return bool(one.error) == bool(other.error)
    if [name for name, _ in one.members] != [name for name, _ in other.members]:
        return False
    pairs = zip(one.members, other.members, strict=True)
    return all(mine == theirs for (_, mine), (_, theirs) in pairs if mine is not None and theirs is not None)


def read_here(archive: bytes) -> Reading:
    """Reads an archive as loaders do."""
    members: list[tuple[str, bytes | None]] = []
    try:
        for found in read_members(io.BytesIO(archive), "x.tar", reopen=lambda offset: io.BytesIO(archive[offset:])):
            members.append((found.name, found.data))
    except ShardFormatError as error:
        return Reading(members, str(error))
    return Reading(members, "")


def read_with_tarfile(archive: bytes) -> Reading:
    """Reads an archive with Python's tarfile, as webdataset and others do."""
    members: list[tuple[str, bytes | None]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for found in tar:
                if found.isreg() or found.islnk():
                    file = tar.extractfile(found)
                    if file is None:
                        raise KeyError(found.linkname)
                    members.append((_as_here(found.name.encode("utf-8", "surrogateescape")), file.read()))
    except (tarfile.TarError, ValueError, KeyError, OverflowError, OSError) as error:
        return Reading(members, f"{type(error).__name__}: {error}")
    return Reading(members, "")


def gnu_tar_is_here() -> bool:
    """Whether the program ``tar`` is GNU's."""
    if shutil.which("tar") is None:
        return False
    return b"GNU tar" in subprocess.run(["tar", "--version"], capture_output=True, check=False).stdout


def read_with_gnu_tar(archives: list[bytes], folder: Path) -> list[Reading]:
    """Reads archives with GNU tar: names and sizes as it lists them, content as it writes it to standard output."""
    for number, archive in enumerate(archives):
        (folder / f"{number:06d}.tar").write_bytes(archive)
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC", "TAR_OPTIONS": ""}
    subprocess.run(["sh", "-c", _SCRIPT], cwd=folder, env=environment, check=True)
    return [_gnu_reading(folder / f"{number:06d}.tar") for number in range(len(archives))]


def _gnu_reading(path: Path) -> Reading:
    def output(kind: str) -> bytes:
        file = path.with_name(f"{path.name}.{kind}")
        return file.read_bytes() if file.exists() else b""

    error = output("errors").decode("utf-8", "replace") or "an exit status"
    if int(output("status")):
        return Reading([], error)
    data, at = output("data"), 0
    members: list[tuple[str, bytes | None]] = []
    for line in output("list").splitlines():
        match = _LISTED.fullmatch(line)
        assert match is not None, line
        kind, size, name = match[1], int(match[2]), match[3]
        if kind == b"h":
            members.append((_unescaped(name.rpartition(b" link to ")[0]), None))
        elif kind in (b"-", b"C", b"?"):
            name = name.partition(b" unknown file type ")[0]
            members.append((_unescaped(name), data[at : at + size]))
            at += size
    if at != len(data):  # what it lists is not what it extracts
        members.append(("", data[at:]))
    return Reading(members, "")


def _unescaped(name: bytes) -> str:
    def byte(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 8)]) if len(match[1]) == 3 else _ESCAPES[match[1]]

    return _as_here(re.sub(rb"\\([0-7]{3}|.)", byte, name, flags=re.DOTALL))


def _as_here(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
