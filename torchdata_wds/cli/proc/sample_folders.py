"""Samples as folders of files, which a program reads and changes.

The field ``jpg`` is the file ``sample.jpg``, and ``sample.__key__`` holds the key. Files such as ``sample-000001.jpg``
are an additional sample for each number or name after the dash, and so is a subfolder with such files. Every other file
is reported, so that nothing the program made is lost silently.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchdata_wds.errors import SampleError
from torchdata_wds.format.samples.names import as_bytes, check_field, is_metadata, is_written
from torchdata_wds.pipes.samples.field_specs import name_sample

_PREFIX = "sample."
_KEY = "__key__"

# `tarp proc -m` writes six digits after the dash; any name without a dot is accepted.
_FILE = re.compile(r"sample(?:-([^.]+))?\.(.+)", re.DOTALL)

# Errors of file systems for names that they refuse; EEXIST is from those that ignore case.
_NO_NAME = {errno.ENAMETOOLONG, errno.EEXIST, errno.EILSEQ, errno.EINVAL}


def failure(sample: Mapping[str, Any], what: str, field: str | None = None, *, subject: str = "") -> SampleError:
    """Returns an error that names a sample and its shard."""
    name, place = name_sample(sample)
    return SampleError(f"{subject}{name} {what}", **place, field=field)


def write_folder(sample: Mapping[str, Any], folder: Path) -> None:
    """Writes a sample's key and fields (not ``__url__`` and the like) to files in an empty folder."""
    key = sample[_KEY]
    files = {_KEY: key.encode("utf-8", "surrogatepass")}
    for field, value in sample.items():
        if is_written(field, key):
            check_field(field, key, lowercase=False)
            files[field] = as_bytes(value, key, field)
    for field, data in files.items():
        name = _PREFIX + field
        try:
            with open(folder / name, "xb") as file:  # noqa: PTH123 - a short path
                file.write(data)
        except OSError as error:
            if error.errno not in _NO_NAME:
                what = f"cannot write a sample's file of {len(data):,} bytes: {error.strerror}"
                raise OSError(error.errno, what, str(folder / name)) from error
            what = f"cannot have its field {field!r} in a file: {error.strerror} ({len(os.fsencode(name)):,} bytes)"
            raise failure(sample, f"{what}. Rename the field, or leave it out", field) from error


def read_folder(folder: Path, sample: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads the samples that a program made in a sample's folder, and lists the paths of files that belong to none.

    The sample of ``sample.*`` comes first, then those of ``sample-NAME.*`` in the order of their numbers or names, then
    the same for each subfolder by name. ``__key__`` is the content of ``sample.__key__`` or ``sample-NAME.__key__``
    without a trailing line feed, or else the old key followed by ``/SUBFOLDER`` and ``/NAME``; ``__url__`` stays. Files
    with other names or in deeper folders belong to no sample. Neither does a key without fields, except that of the
    folder itself.
    """
    samples: list[dict[str, Any]] = []
    others: list[str] = []
    url = {"__url__": sample["__url__"]} if "__url__" in sample else {}
    places = [""]
    for place in places:  # grows on the way: the first place is the folder itself, which adds its subfolders
        subfolders: list[str] = []
        found: dict[str, dict[str, bytes]] = {}
        for entry in _entries(folder / place, sample):
            if (parts := _FILE.fullmatch(entry.name)) is not None:
                found.setdefault(parts[1] or "", {})[parts[2]] = _read_file(entry, parts[2], sample)
            elif entry.is_dir(follow_symlinks=False):
                (subfolders if place else places).append(f"{place}{entry.name}/")
            else:
                others.append(place + entry.name)
        for name in sorted(found, key=_order):
            fields = found[name]
            key = "/".join(filter(None, (sample[_KEY], place.rstrip("/"), name)))
            # KEY/SUBFOLDER/NAME, without the parts that are empty, unless the files have a key of their own
            if (told := fields.pop(_KEY, None)) is not None:
                key = _read_key(told, sample)
            if fields:
                samples.append({_KEY: key, **url, **fields})
            elif place or name:
                others.append(f"{place}sample{name and '-'}{name}.{_KEY}")
        for deeper in subfolders:
            others.extend(_files_below(folder, deeper))
    return samples, others


def _entries(folder: Path, sample: Mapping[str, Any]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError as error:
        raise failure(sample, f"no longer has its folder: {error.strerror}") from error
    except OSError as error:
        raise failure(sample, f"has a folder that cannot be read: {error.strerror}: {error.filename!r}") from error


def _order(name: str) -> tuple[bool, int, str]:
    """Sorts "" first, then numbers by value, then other names.

    Numbers are compared as texts without leading zeros, the shorter first: they may be too long for an int. So "2" is
    (False, 1, "2") and "010" is (False, 2, "10"); "x" is (True, 0, "x").
    """
    is_number = name.isascii() and name.isdigit()
    return (bool(name) and not is_number, len(name.lstrip("0")) if is_number else 0, name.lstrip("0") or name)


def _files_below(folder: Path, place: str) -> Iterator[str]:
    """Lists all files below a place, without following links; a folder that cannot be read counts as a file."""
    waiting = [place]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(folder / place) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{place}{entry.name}/")
                    else:
                        yield place + entry.name
        except OSError:
            yield place


def _read_file(entry: os.DirEntry[str], field: str, sample: Mapping[str, Any]) -> bytes:
    """Reads a file up to its current size: a process that escaped may still write to it, or replace it with a link."""
    has = f"has a file {entry.name!r}"
    if field != _KEY and is_metadata(field):
        raise failure(sample, f"{has}, whose field is metadata that shards do not hold", field)
    if not entry.is_file(follow_symlinks=False):
        kinds = {"a symbolic link": entry.is_symlink(), "a folder": entry.is_dir(follow_symlinks=False)}
        kind = next((kind for kind, fits in kinds.items() if fits), "a device, a pipe or a socket")
        raise failure(sample, f"{has} that is {kind}: only a regular file becomes a field. Copy or delete it", field)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(entry.path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise failure(sample, f"{has} that is no longer regular", field)
            return file.read(status.st_size)
    except OSError as error:
        raise failure(sample, f"{has} that cannot be read: {error.strerror}", field) from error
    except MemoryError as error:
        size = status.st_size
        raise failure(sample, f"{has} of {size:,} bytes, for which there is not enough memory", field) from error


def _read_key(data: bytes, sample: Mapping[str, Any]) -> str:
    old: str = sample[_KEY]
    if data == old.encode("utf-8", "surrogatepass"):
        return old
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise failure(sample, f"has a key that is not UTF-8 text: {data[:60]!r}") from error
