"""How many samples each shard has: from the indexes beside the shards, from one file for all, or from a dict."""

from __future__ import annotations

import json
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.index import IndexHeader, _parse_header, index_url, shard_name
from torchdata_wds.option_types import Index
from torchdata_wds.storage import StorageOptions, mask_url, open_shard
from torchdata_wds.storage.cache.shard_facts import ShardFacts
from torchdata_wds.storage.urls import scheme_of

__all__ = ["ShardCounts", "header_facts", "known_counts", "shard_counts"]


T = TypeVar("T")

_THREADS = 16

_PIECE = 4096

_LONGEST_HEADER = 1 << 20

_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]")


class ShardCounts(Protocol):
    """Where the number of samples of each shard comes from."""

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:
        """Gives the number of samples of each shard.

        Raises:
            ShardListError: for a shard whose number is not known.
        """

    def facts(self, url: str) -> ShardFacts | None:
        """Gives size and digest of a shard whose samples were counted last, where they are known."""


def shard_counts(index: Index) -> ShardCounts | None:
    """Turns an ``index=`` argument into what gives the number of samples of each shard; None remains None.

    Raises:
        TypeError: if it is none of what `split_shards` takes.
        ShardListError: if a count is no whole number from 0.

    Example:
        >>> shard_counts({"x.tar": 5}).of(["data/x.tar"], StorageOptions())
        [5]
    """
    if index is None:
        return None
    if index is True:
        return _Sidecars()
    if isinstance(index, (str, os.PathLike)):
        return _CountFile(os.fspath(index))
    if isinstance(index, Mapping):
        source = "the dict given as index="
        return _CountTable(_checked(index.items(), source), source)
    raise TypeError(
        "index must be True (an index beside each shard), the path or URL of one JSON file, a dict from URL or base "
        f"name to the number of samples, or None, not {index!r}"
    )


def known_counts(counts: ShardCounts | None, urls: Sequence[str], storage_options: StorageOptions) -> list[int] | None:
    """The numbers of samples that a dict or a local file gives shards; None where they are elsewhere, or not all there.

    Example:
        >>> known_counts(shard_counts({"x.tar": 5}), ["x.tar"], StorageOptions())
        [5]
    """
    if not isinstance(counts, (_CountTable, _CountFile)) or not counts.is_local:
        return None
    try:
        return counts.of(urls, storage_options)
    except (ShardListError, OSError):
        return None


class _Sidecars:
    """The index beside each shard. Those on servers are read once, local ones each time."""

    def __init__(self) -> None:
        self._known: dict[str, IndexHeader] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Sidecars, ()

    def __repr__(self) -> str:
        return "True"

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:
        """Reads the first line of each index."""

        def read(url: str) -> IndexHeader:
            return _read_header(url, storage_options)

        distinct = dict.fromkeys(urls)
        remote = [url for url in distinct if scheme_of(url) not in ("", "file")]
        missing = [url for url in remote if url not in self._known]
        self._known.update(zip(missing, _map_in_threads(read, missing), strict=True))
        self._known.update((url, read(url)) for url in distinct if scheme_of(url) in ("", "file"))
        return [self._known[url].samples for url in urls]

    def facts(self, url: str) -> ShardFacts | None:
        """What the index beside a shard states of it."""
        header = self._known.get(url)
        return None if header is None else header_facts(header)


class _CountFile:
    """One JSON file for all shards. One on a server is read once, a local one each time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._table: _CountTable | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _CountFile, (self._url,)

    def __repr__(self) -> str:
        return repr(mask_url(self._url))

    @property
    def is_local(self) -> bool:
        """Whether reading it asks no server."""
        return scheme_of(self._url) in ("", "file")

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:
        """Reads the file and looks the shards up."""
        table = self._table or _read_table(self._url, storage_options)
        if scheme_of(self._url) not in ("", "file"):
            self._table = table
        return table.of(urls, storage_options)

    def facts(self, url: str) -> ShardFacts | None:
        """Nothing: such files count samples."""


class _CountTable:
    """Counts by URL, or by base name where that names one shard only."""

    is_local = True

    def __init__(self, counts: dict[str, int], source: str) -> None:
        self._counts = counts
        self._source = source
        self._by_name: dict[str, list[str]] = {}
        for url in counts:
            self._by_name.setdefault(shard_name(url), []).append(url)

    def __repr__(self) -> str:
        return f"<counts of {len(self._counts):,} shards>"

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:  # noqa: ARG002  (one signature)
        """Looks the shards up."""
        taken: dict[str, str] = {}  # the entry for a base name -> the shard that it was taken for
        return [self._counts[url] if url in self._counts else self._by_base_name(url, taken) for url in urls]

    def facts(self, url: str) -> ShardFacts | None:
        """Nothing: such tables count samples."""

    def _by_base_name(self, url: str, taken: dict[str, str]) -> int:
        entries = self._by_name.get(shard_name(url), [])
        shown = mask_url(url)
        if not entries:
            raise ShardListError(
                f"{self._source} has no number of samples for shard {shown}, neither by its URL nor by its base name. "
                "Add it, or leave the shard out of the list",
                shard=shown,
            )
        other = taken.setdefault(entries[0], url)
        if len(entries) > 1 or other != url:
            among = f"{mask_url(entries[0])} and {mask_url(entries[1])}" if len(entries) > 1 else mask_url(other)
            raise ShardListError(
                f"{self._source} has a number of samples for the base name of shard {shown}, which {among} has too: "
                "give the whole URLs as they are listed",
                shard=shown,
            )
        return self._counts[entries[0]]


def _checked(counts: Iterable[tuple[Any, Any]], source: str) -> dict[str, int]:
    """Checks counts by URL.

    Raises:
        TypeError: if a key is no URL.
        ShardListError: if a count is no whole number from 0, or a shard has two.
    """
    found: dict[str, int] = {}
    for key, count in counts:
        url = os.fspath(key) if isinstance(key, (str, os.PathLike)) else None
        if not isinstance(url, str):
            raise TypeError(f"{source} has {key!r} for a shard, where a URL (str or Path) belongs")
        if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 0:
            raise ShardListError(
                f"{source} gives shard {mask_url(url)} {count!r} samples; that must be a whole number from 0",
                shard=mask_url(url),
            )
        if found.setdefault(url, int(count)) != count:
            raise ShardListError(
                f"{source} gives shard {mask_url(url)} both {found[url]:,} and {count:,} samples", shard=mask_url(url)
            )
    return found


def header_facts(header: IndexHeader) -> ShardFacts | None:
    """What an index states of its shard's bytes; None if nothing."""
    return None if header.bytes is None and header.sha256 is None else ShardFacts(header.bytes, header.sha256)


def _map_in_threads(function: Callable[[str], T], urls: list[str]) -> list[T]:
    if len(urls) < 2:
        return list(map(function, urls))
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(_THREADS, len(urls)))
    try:
        return list(pool.map(function, urls))
    finally:
        pool.shutdown(cancel_futures=True)  # at the first failure nobody waits for thousands of others


def _read_header(url: str, storage_options: StorageOptions) -> IndexHeader:
    """Reads the first line of the index beside a shard."""
    shown = mask_url(url)
    try:
        place = index_url(url)
        line = _first_line(place, storage_options)
        return _parse_header(line, mask_url(place))
    except ShardFormatError as error:
        raise ShardListError(f"the index beside shard {shown} cannot be used: {error}", shard=shown) from error
    except (ShardOpenError, ValueError) as error:
        raise ShardListError(
            f"shard {shown} has no index that could be read beside it: {error}. index_shard makes one, as do writers "
            "with index=True; or give split_shards the numbers of samples as a JSON file or a dict",
            shard=shown,
        ) from error


def _first_line(url: str, storage_options: StorageOptions) -> bytes:
    line = b""
    with open_shard(url, storage_options=storage_options) as stream:
        while b"\n" not in line and len(line) < _LONGEST_HEADER:
            piece = stream.read(_PIECE)
            line += piece
            if len(piece) < _PIECE:
                break
    return line.partition(b"\n")[0]


def _read_table(url: str, storage_options: StorageOptions) -> _CountTable:
    shown = mask_url(url)
    try:
        with open_shard(url, storage_options=storage_options) as stream:
            content = json.loads(stream.read())
    except ShardOpenError as error:
        raise ShardListError(f"the index {shown} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ShardListError(f"the index {shown} is no JSON: {error}. {_KINDS}") from error
    if not isinstance(content, dict):
        raise ShardListError(f"the index {shown} is a JSON {type(content).__name__}, not an object. {_KINDS}")
    source = f"the index {shown}"
    try:
        pairs = _wids_pairs(content, url) if "shardlist" in content or "datasets" in content else content.items()
        return _CountTable(_checked(pairs, source), source)
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardListError(f"{source} is malformed: {type(error).__name__}: {error}. {_KINDS}") from error


_KINDS = "It must be a wids shard list, or an object from URL or base name to the number of samples"


def _wids_pairs(content: dict[str, Any], url: str) -> list[tuple[str, Any]]:
    """Gives URLs and counts of a wids shard list; those of relative URLs are joined to its base or place."""
    pairs = []
    for part in (content, *content.get("datasets", ())):
        base = part.get("base") or content.get("base") or _folder_of(url)
        pairs += [(_joined(base, shard["url"]), shard["nsamples"]) for shard in part.get("shardlist", ())]
    return pairs


def _folder_of(url: str) -> str:
    path, _, _ = url.partition("?") if scheme_of(url) not in ("", "file") else (url, "", "")
    folder, slash, _ = path.rpartition("/")
    return folder + slash


def _joined(base: str, url: str) -> str:
    if not base or scheme_of(url) or _ABSOLUTE.match(url):
        return url
    return f"{base.rstrip('/')}/{url.removeprefix('./')}"
