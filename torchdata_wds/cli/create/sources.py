"""Where the content of a new member comes from: a file, a text, a command or a URL."""

from __future__ import annotations

import base64
import io
import os
import stat
from typing import Literal, NamedTuple

from torchdata_wds.environment import is_secure
from torchdata_wds.errors import SampleError, ShardFormatError, ShardOpenError, UnsafeDataError, cli_message
from torchdata_wds.format.dataset_files.trust import Origin, SpecPlace, join_url, short
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, stored_bytes
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

# An array of stamps has no room for more, and file systems go on after the year 2262.
_BITS = (1 << 63) - 1
_STRANGER = SpecPlace(Origin("list", trusted=False))
_LONGEST_PATH = 4096


#: A file's size when it was checked, and the low 63 bits of its modification time in nanoseconds since 1970.
Stamp = tuple[int, int]

#: The stamp of what is not a file.
NO_FILE = (0, 0)


class MemberSource(NamedTuple):
    """Where one content comes from: a path, a text, base64 digits, or a URL, which has ``pipe:`` before a command."""

    kind: Literal["file", "text", "base64", "pipe", "url"]
    value: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether only reading it tells if it is there."""
        return self.kind in ("pipe", "url")

    def __str__(self) -> str:
        if self.is_elsewhere:
            return mask_url(self.value)
        return f"file {self.value!r}" if self.kind == "file" else f"the {self.kind}"


def parse_source(text: str, folder: str = "", *, trusted: bool = True) -> MemberSource:
    """Parses ``text:`` or ``base64:`` with what follows, ``pipe:command``, ``file:path``, a path, or a URL.

    Relative paths are relative to a folder or URL. Only if `trusted`, and never under ``WDS_SECURE=1``, may a URL
    render templates.

    Example:
        >>> parse_source("a cat.jpg", "images").value
        'images/a cat.jpg'
        >>> parse_source("text: two words")
        MemberSource(kind='text', value=' two words')
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "text":
        return MemberSource("text", rest)
    if colon and kind == "base64":
        return MemberSource("base64", rest)
    if scheme_of(text) == "pipe":
        return MemberSource("pipe", text)
    return parse_path(text, folder, trusted=trusted)


def parse_path(text: str, folder: str = "", *, trusted: bool = False) -> MemberSource:
    """Parses a source that is a path or a URL as `parse_source` does: a table of data runs no command."""
    scheme = scheme_of(text)
    if text == STDIN:
        raise SampleError("standard input ('-') cannot be the source of a member; write './-' for a file of that name")
    if scheme == "pipe":
        raise SampleError("a command (pipe:) is not a file; recipes may have commands")
    try:
        path = local_path(text)
    except ShardOpenError as error:
        raise SampleError(str(error)) from error
    if not path:
        raise SampleError("it names no file")
    if scheme == "":
        path = join_url(folder, path)
    elif scheme == "file" and scheme_of(folder) == "":
        path = os.path.join(folder, path)  # noqa: PTH118 - a str, as millions of them are made
    if scheme == "file" or not scheme_of(path):
        return MemberSource("file", path)
    if not trusted or is_secure():
        try:
            _STRANGER.check_url(path)
        except UnsafeDataError as error:
            raise SampleError(
                f"{mask_url(path)} renders templates, which could send secrets of this machine anywhere. A recipe may "
                "name it with --allow-pipe, unless WDS_SECURE=1"
            ) from error
    return MemberSource("url", path)


def check_source(source: MemberSource) -> Stamp | None:
    """Checks a source as far as that goes without reading or running anything.

    Returns the stamp of a file, None if there is no such file, or `NO_FILE` for any other source.
    """
    if source.kind == "base64":
        _decode_base64(source.value)
    elif source.kind == "pipe":
        if is_secure():
            shard = mask_url(source.value)
            raise UnsafeDataError(f"{shard} would run a command, which WDS_SECURE=1 forbids", shard=shard)
        if not source.value.removeprefix("pipe:").strip():
            raise SampleError("pipe: names no command; write 'pipe:cat a.jpg', say")
    if source.kind != "file":
        return NO_FILE
    path = source.value
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path for each of millions of files takes longer than this
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        shown = repr(path) if len(path) <= _LONGEST_PATH else short(path)
        raise SampleError(f"file {shown} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise SampleError(f"{path!r} is a folder, and a member is a file")
    if not stat.S_ISREG(status.st_mode):
        raise SampleError(f"{path!r} is not a regular file; in a recipe, 'pipe:cat PATH' reads it all the same")
    if not os.access(path, os.R_OK):
        raise SampleError(f"file {path!r} cannot be read: Permission denied")
    return status.st_size, status.st_mtime_ns & _BITS


def read_source(source: MemberSource, stamp: Stamp) -> bytes:
    """Reads a source as it is stored, compressed or not; a SampleError if a file no longer has its stamp."""
    if source.kind == "file":
        return _read_file(source.value, stamp)
    if source.kind == "text":
        return source.value.encode("utf-8", "surrogateescape")
    if source.kind == "base64":
        return _decode_base64(source.value)
    try:
        with io.BufferedReader(stored_bytes(open_shard(source.value)), BUFFER_SIZE) as stream:
            return b"".join(iter(lambda: stream.read(BUFFER_SIZE), b""))
    except (ShardOpenError, ShardFormatError) as error:
        raise SampleError(cli_message(error), shard=error.shard) from error


def _read_file(path: str, stamp: Stamp) -> bytes:
    size, _ = stamp
    # not by open(), which takes longer, and would wait for ever where a FIFO has taken the file's place
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            data = os.read(file, size + 1)
            if 0 < len(data) < size:  # the system reads 2 GiB at most
                data += b"".join(iter(lambda: os.read(file, BUFFER_SIZE), b""))
            status = os.fstat(file)  # now, so that a change in the middle shows too
        finally:
            os.close(file)
    except OSError as error:
        raise SampleError(f"file {path!r} was there, and cannot be read: {error.strerror or error}") from error
    if (status.st_size, status.st_mtime_ns & _BITS) != stamp:
        raise SampleError(
            f"file {path!r} was changed after it was checked ({size:,} bytes then, {status.st_size:,} now). "
            "Start again when it no longer changes"
        )
    if len(data) != size:
        raise SampleError(
            f"file {path!r} has more or fewer bytes than its size, {size:,}; if it is made as it is read, "
            "'pipe:cat PATH' in a recipe takes all of it"
        )
    return data


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.strip(), validate=True)
    except ValueError as error:
        raise SampleError(f"what follows base64: is not Base64: {error}") from error
