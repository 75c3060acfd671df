"""Shards that are written: the names of one after the other, and packed samples to bytes at their destination."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from torchdata_wds import storage
from torchdata_wds.errors import ReappearingKeyError, ShardOpenError
from torchdata_wds.format.headers import BLOCK
from torchdata_wds.format.index import IndexHeader, ShardIndex, pack_row, shard_name
from torchdata_wds.format.index.sidecars import index_url, index_urls, open_index_target
from torchdata_wds.format.tar.packing import PackedSample, PackedSamples
from torchdata_wds.storage import StorageOptions, Target, Unique, mask_url
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of, url_text

logger = logging.getLogger(__name__)
Destination = str | os.PathLike[str] | BinaryIO
_PLACE = re.compile(r"%(?P<old>0?\d*)d|\{(?P<name>shard|rank|worker)(?::(?P<spec>0?\d*d?))?\}|(?P<percent>%%)")
_OTHER_PLACE = re.compile(r"\{[^{}]*\}")
_PLACES = "%06d or {shard:06d} for the number, and {rank} or {worker} where several processes write"
_RECORD = 20 * BLOCK  # tar writes whole records of 20 blocks
_FLUSH_AT = 256 << 10


@dataclass(frozen=True)
class ShardInfo:
    """A finished shard.

    Attributes:
        path: Its path or URL.
        count: How many samples it has.
        bytes: Its size in bytes, as it is stored.
        sha256: Its digest, in hexadecimal digits.
    """

    path: str
    count: int
    bytes: int
    sha256: str


def archive_size(content: int) -> int:
    """The size of a finished archive whose members take `content` bytes: with its end marker, in whole records."""
    return content + 2 * BLOCK + -(content + 2 * BLOCK) % _RECORD


class OpenFile(Target):
    """A file that the caller has opened: neither closed nor renamed. After an `abort` it has no end marker."""

    _is_bound = False  # the caller may have opened it for a forked child

    def __init__(self, file: BinaryIO, url: str) -> None:
        super().__init__(url)
        self._file = file

    def _write(self, view: memoryview) -> int:
        written: int = self._call("write", view)
        if not isinstance(written, int) or not 0 < written <= len(view):
            raise self._failure(f"took {written!r} of {len(view):,} bytes")
        self._commit()  # a process that is forked must not write it once more
        return written

    def _commit(self) -> None:
        if callable(getattr(self._file, "flush", None)):
            self._call("flush")

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._file, method)(*arguments)
        except BrokenPipeError:
            raise
        except (OSError, TypeError, ValueError) as error:
            raise self._failure(f"failed: {error}") from error

    def _failure(self, what: str) -> ShardOpenError:
        message = f"the file of shard {self._shard!r} {what}. A shard needs a binary file (mode='wb') with room"
        return ShardOpenError(message, shard=self._shard)


class ShardFile(Unique):
    """A shard that is being written, by one thread, to a path, a URL or an open binary file (called `name`).

    Whatever happens before `close` has returned, nothing with the shard's name is there that is not whole. The SHA-256
    digest is computed for an index, or if `digest` is true; `compress` is that of `compression_for`.
    """

    _is_open = False

    def __init__(
        self,
        destination: Destination,
        *,
        name: str = "",
        compress: str | bool | None = None,
        overwrite: bool = False,
        index: bool = False,
        digest: bool = True,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._options = StorageOptions(storage_options)
        self._overwrite = overwrite
        self._owner = os.getpid()
        is_url = isinstance(destination, (str, os.PathLike))
        self.url = url_text(destination) if is_url else name  # type: ignore[arg-type]
        kind = storage.compression_for(self.url, compress)
        self._compressor = storage.open_compressor(kind) if kind else None
        self._rows: list[str] | None = [] if index else None
        self._index: Target | None = None
        self._old_indexes = _old_indexes(self.url, overwrite) if is_url else []
        if is_url:
            self._target = storage.open_target(self.url, overwrite=overwrite, storage_options=self._options)
            if index:
                self._index = open_index_target(index_url(self.url), storage_options=self._options)
        elif index:
            raise ValueError("index=True needs a path or a URL: there is no place beside an open file")
        elif not callable(getattr(destination, "write", None)):
            raise TypeError(f"a shard is written to a path, a URL or a binary file, not to {destination!r}")
        else:
            self._target = OpenFile(cast("BinaryIO", destination), name)
        self._digest = hashlib.sha256() if digest or index else None
        self._stored = 0
        self._keys: set[str] = set()
        self._pending: list[bytes] = []  # not written yet, of `_pending_size` bytes
        self._pending_size = 0
        self.size = 0  # bytes of the archive so far, before compression
        self._is_whole = True
        self._is_open = True

    @property
    def count(self) -> int:
        """How many samples it has so far."""
        return len(self._keys)

    def append(self, packed: PackedSample) -> None:
        """Adds a sample."""
        self._check_whole()
        key = packed.key
        if key in self._keys:
            shard = mask_url(self.url)
            what = f"key {key!r} comes twice in shard {shard}: a reader would refuse the second sample"
            raise ReappearingKeyError(f"{what}. Give it another key", shard=shard, key=key)
        # an interrupt may come between any two of these lines
        self._is_whole = False
        if self._rows is not None:
            start = self.size
            places = [(name, start + offset, size) for name, offset, size in packed.members()]
            self._rows.append(pack_row(key, start, start + packed.size, places))
        self._keys.add(key)
        self.size += packed.size
        self._pending += packed.parts
        self._pending_size += packed.size
        # the first sample at once: a destination that cannot be written shows before much work is done
        if self._pending_size >= _FLUSH_AT or len(self._keys) == 1:
            self._flush()
        self._is_whole = True

    def extend(self, packed: PackedSamples) -> bool:
        """Adds several samples; returns False, and adds none, if an index is wanted or a key comes twice."""
        self._check_whole()
        keys = set(packed.keys)
        if self._rows is not None or len(keys) < len(packed.keys) or not keys.isdisjoint(self._keys):
            return False
        self._is_whole = False
        self._keys |= keys
        self.size += packed.size
        self._pending += packed.parts
        self._flush()
        self._is_whole = True
        return True

    def close(self) -> ShardInfo:
        """Finishes the shard and lets it appear under its name, then its index.

        An index that is there is another shard's. It goes first where that shard is replaced, else only when this one
        has the name, for it may be that of a writer that was faster.
        """
        try:
            self._check_whole()
            self._is_whole = False
            end = archive_size(self.size)
            self._pending.append(bytes(end - self.size))
            self.size = end
            self._flush()
            if self._compressor is not None:
                self._store(self._compressor.flush())
            info = ShardInfo(self.url, self.count, self._stored, self._digest.hexdigest() if self._digest else "")
            if self._overwrite:
                self._remove_old_indexes()
            self._target.commit()
            if self._index is not None and self._rows is not None:
                name, compressed = shard_name(self.url), self._compressor is not None
                tag = None if self._target.version is None else self._target.version.tag or None
                about = (end, compressed, info.bytes, info.sha256, tag)
                header = IndexHeader(name, "first_dot", len(self._rows), *about, special=())
                self._index.write(ShardIndex(header, self._rows).dump())
                self._index.commit()
                del self._old_indexes[:1]  # that is where the new one is
            if not self._overwrite:
                self._remove_old_indexes()
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        return info

    def abort(self) -> None:
        """Abandons the shard: it never appears under its name. A local one stays as ``.partial``, with its samples."""
        if self._is_open and self._is_whole and self._owner == os.getpid():
            with contextlib.suppress(Exception):
                self._flush()
        self._is_open = self._is_whole = False
        self._pending = []
        self._target.abort()
        if self._index is not None:
            self._index.abort()

    def __del__(self) -> None:
        if self._is_open and self._owner == os.getpid():
            self.abort()
            message = f"the writer of shard {mask_url(self.url)} was never closed: the shard is not there"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def _check_whole(self) -> None:
        if not self._is_whole:
            shard = mask_url(self.url)
            why = "because writing it failed or was interrupted before, and will not appear under its name"
            raise ShardOpenError(f"shard {shard} is not whole, {why}. Write it again", shard=shard)

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._store(data if self._compressor is None else self._compressor.compress(data))
        self._pending, self._pending_size = [], 0

    def _store(self, data: bytes) -> None:
        if data:
            self._target.write(data)
            if self._digest is not None:
                self._digest.update(data)
            self._stored += len(data)

    def _remove_old_indexes(self) -> None:
        try:
            for url in self._old_indexes:
                storage.remove_target(url, storage_options=self._options)
        except ShardOpenError as error:
            logger.warning("the index of another shard may stay beside this one: %s", error)


def _old_indexes(url: str, overwrite: bool) -> list[str]:
    """Where indexes may lie that are not the new shard's: of the shard before, or of a writer that was killed."""
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        return list(index_urls(os.path.abspath(local_path(url))))  # noqa: PTH100 - a str, and links stay
    return list(index_urls(url)) if overwrite and scheme not in (STDIN, "pipe") else []


class ShardNames:
    """A pattern of names with a place for the shard's number, and perhaps for the `rank` and the `worker`.

    `writers` processes write shards of this pattern and take turns with the numbers; this one's is `turn`.

    Example:
        >>> names = ShardNames("{rank}/train-%06d.tar", rank=1)
        >>> names.name(7)
        '1/train-000007.tar'
    """

    def __init__(
        self, pattern: str | os.PathLike[str], *, rank: int = 0, worker: int = 0, writers: int = 1, turn: int = 0
    ) -> None:
        pattern = os.fspath(pattern) if isinstance(pattern, os.PathLike) else pattern
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern of shards is a str with {_PLACES}, not {pattern!r}")
        self.pattern = pattern
        self._values = {"rank": rank, "worker": worker}
        self._writers = writers
        self._turn = turn
        places = sum(map(_is_number, _PLACE.finditer(pattern)))
        shown = f"pattern {mask_url(pattern)!r}"
        if places != 1:
            raise ValueError(f"{shown} has {places} places for the shard's number instead of one: write {_PLACES}")
        other = _OTHER_PLACE.search(_PLACE.sub("", pattern))
        if other is not None and scheme_of(pattern) != "pipe":
            raise ValueError(f"{shown} has an unknown place {other[0]}: there are {_PLACES}")

    def name(self, number: int) -> str:
        """The name of the shard with a number."""
        return _PLACE.sub(lambda match: self._fill(match, number), self.pattern)

    def numbers(
        self, start: int | Literal["next"], storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Iterator[int]:
        """Yields this writer's numbers, without end."""
        if start != "next":
            return itertools.count(start + self._turn, self._writers)
        number = self.next_number(storage_options)
        # each writer may see another highest number, but keeps to its own turn
        return itertools.count(number + (self._turn - number) % self._writers, self._writers)

    def check_listable(self) -> None:
        """Checks that there is a folder to look for existing shards in."""
        if scheme_of(self.pattern) == "pipe" or any(map(_is_number, _PLACE.finditer(self.pattern.rpartition("/")[0]))):
            shown = mask_url(self.pattern)
            raise ValueError(f"'next' looks for shards in one folder or bucket, which {shown!r} does not have")

    def next_number(self, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> int:
        """Returns the number after the highest that a shard of this pattern has."""
        self.check_listable()
        folder, slash, last = self.pattern.rpartition("/")
        folder = _PLACE.sub(lambda match: self._fill(match, 0), folder)
        parts: list[str] = []
        position = 0
        for match in _PLACE.finditer(last):
            place = r"(\d+)" if _is_number(match) else re.escape(self._fill(match, 0))
            parts += [re.escape(last[position : match.start()]), place]
            position = match.end()
        matcher = re.compile("".join(parts) + re.escape(last[position:]))
        existing = storage.list_targets(folder + slash or ".", storage_options=storage_options)
        numbers = [int(found[1]) for name in existing if (found := matcher.fullmatch(name))]
        return max(numbers, default=-1) + 1

    def _fill(self, match: re.Match[str], number: int) -> str:
        if match["percent"]:
            return "%" if any(other["old"] is not None for other in _PLACE.finditer(self.pattern)) else "%%"
        spec = match["old"] or match["spec"] or ""
        return format(self._values.get(match["name"], number), spec.rstrip("d") + "d")


def _is_number(match: re.Match[str]) -> bool:
    return match["old"] is not None or match["name"] == "shard"
