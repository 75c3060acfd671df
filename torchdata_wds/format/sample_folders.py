"""Samples as folders of files: what a program works on, and what it has made of them.

The field ``jpg`` is the file ``sample.jpg``, and ``sample.__key__`` holds the key. Each subfolder with such files is a
sample of its own. Everything else in the folder is the program's own affair.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdata_wds.errors import SampleError
from torchdata_wds.format.names import is_metadata
from torchdata_wds.format.writable import as_bytes, check_field, is_written
from torchdata_wds.storage import mask_url

__all__ = ["read_folder", "write_folder"]

_PREFIX = "sample."
_KEY = "__key__"
# What file systems say of names that they do not take; the second where case makes no difference.
_NO_NAME = {errno.ENAMETOOLONG, errno.EEXIST, errno.EILSEQ, errno.EINVAL}


def write_folder(sample: Mapping[str, Any], folder: Path) -> None:
    """Writes a sample's fields and its key into files.

    Args:
        sample: ``__key__`` and bytes by field; other names like ``__url__`` are not written.
        folder: An empty folder.

    Raises:
        SampleError: if a field has a name that no file can have, or is not bytes.
        OSError: if a file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_folder({"__key__": "a", "txt": b"one"}, folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['sample.__key__', 'sample.txt']
    """
    key = sample[_KEY]
    _write(folder, _KEY, _key_bytes(key), sample)
    for field, value in sample.items():
        if is_written(field, key):
            check_field(field, key, lowercase=False)
            _write(folder, field, as_bytes(value, key, field), sample)


def _key_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _write(folder: Path, field: str, data: bytes, sample: Mapping[str, Any]) -> None:
    name = _PREFIX + field
    try:
        with open(folder / name, "xb") as file:  # noqa: PTH123 - a short path
            file.write(data)
    except OSError as error:
        if error.errno in _NO_NAME:
            raise _failure(
                sample,
                f"cannot have its field {field!r} in a file: {error.strerror} ({len(os.fsencode(name)):,} bytes). "
                "Rename the field, or leave it out",
                field,
            ) from error
        raise OSError(
            error.errno, f"cannot write a sample's file of {len(data):,} bytes: {error.strerror}", str(folder / name)
        ) from error


def read_folder(folder: Path, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads what has become of a sample in its folder.

    Args:
        folder: What `write_folder` has filled.
        sample: The sample that was written there.

    Returns:
        Samples: the one that the folder itself holds, then those of its subfolders by name; none where there is no
        field. ``__key__`` is what ``sample.__key__`` says, without a line feed at its end; where that is not there it
        is the old key, in a subfolder ``<old key>/<subfolder>``. ``__url__`` is the old one.

    Raises:
        SampleError: if a ``sample.*`` is no regular file or cannot be read, its name is that of metadata, or a key is
            no text.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> sample = {"__key__": "a", "txt": b"one"}
        >>> write_folder(sample, folder)
        >>> _ = (folder / "sample.txt").rename(folder / "sample.text")
        >>> read_folder(folder, sample)
        [{'__key__': 'a', 'text': b'one'}]
    """
    try:
        with os.scandir(folder) as entries:
            places = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise _failure(sample, f"has no folder any more: {error.strerror}") from error
    found = [_read_sample(folder, sample[_KEY], sample)]
    # A folder with a field's name is that field's mistake, which has just been told.
    found += [_read_sample(folder / place, f"{sample[_KEY]}/{place}", sample) for place in places]
    return [made for made in found if not all(map(is_metadata, made))]


def _read_sample(folder: Path, key: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    fields = _read_fields(folder, sample)
    told = fields.pop(_KEY, None)
    made: dict[str, Any] = {_KEY: key if told is None else _read_key(told, sample)}
    if "__url__" in sample:
        made["__url__"] = sample["__url__"]
    for field in fields:
        if is_metadata(field):
            raise _failure(
                sample, f"has got the file {_PREFIX + field!r}, whose field is metadata that no shard holds", field
            )
    return made | fields


def _read_fields(folder: Path, sample: Mapping[str, Any]) -> dict[str, bytes]:
    fields = {}
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                field = entry.name.removeprefix(_PREFIX)
                if field and field != entry.name:
                    _check_regular(entry, field, sample)
                    fields[field] = _read_file(entry, field, sample)
    except OSError as error:
        raise _failure(sample, f"has left what cannot be read: {error.strerror}: {error.filename!r}") from error
    return fields


def _check_regular(entry: os.DirEntry[str], field: str, sample: Mapping[str, Any]) -> None:
    if entry.is_file(follow_symlinks=False):
        return
    kinds = {"a symbolic link": entry.is_symlink(), "a folder": entry.is_dir(follow_symlinks=False)}
    kind = next((kind for kind, fits in kinds.items() if fits), "no file but a device or a pipe")
    raise _failure(
        sample, f"has got {entry.name!r} that is {kind}: only a regular file becomes a field. Copy or delete it", field
    )


def _read_file(entry: os.DirEntry[str], field: str, sample: Mapping[str, Any]) -> bytes:
    """Reads a file up to the size that it has now: a process that has got away may write on, or put a link there."""
    with os.fdopen(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _failure(sample, f"has got {entry.name!r} that is no regular file any more", field)
        try:
            return file.read(status.st_size)
        except MemoryError as error:
            raise _failure(
                sample,
                f"has got {entry.name!r} of {status.st_size:,} bytes, for which there is not enough memory",
                field,
            ) from error


def _read_key(data: bytes, sample: Mapping[str, Any]) -> str:
    old: str = sample[_KEY]
    if data == _key_bytes(old):
        return old
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise _failure(sample, f"has got a key in {_PREFIX + _KEY!r} that is no UTF-8 text: {data[:60]!r}") from error


def _failure(sample: Mapping[str, Any], what: str, field: str | None = None) -> SampleError:
    key, url = sample[_KEY], sample.get("__url__")
    shard = None if url is None else mask_url(url)
    place = "" if shard is None else f" of shard {shard}"
    return SampleError(f"sample {key!r}{place} {what}", shard=shard, key=key, field=field)
