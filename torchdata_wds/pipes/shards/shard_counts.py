"""How many samples each shard has: from the indexes beside the shards, from one file for all, or from a dict."""

import json
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.dataset_files.entries import wids_counts
from torchdata_wds.format.index import IndexHeader, read_index_header
from torchdata_wds.format.index.url_table import UrlTable
from torchdata_wds.option_types import Index
from torchdata_wds.storage import StorageOptions, mask_url, open_shard
from torchdata_wds.storage.cache.locked_files import ShardFacts
from torchdata_wds.storage.meters import reads_ahead
from torchdata_wds.storage.places import meter_for
from torchdata_wds.storage.urls import is_local

_THREADS = 16
_KINDS = "It must be a wids shard list, or an object from URL or base name to the number of samples"


class _Sidecars:
    """The index beside each shard. Remote indexes are read once, local ones each time."""

    is_local = False

    def __init__(self) -> None:
        self._known: dict[str, IndexHeader] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Sidecars, ()

    def __repr__(self) -> str:
        return "True"

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:
        """Reads the first line of each index, remote ones in threads."""
        distinct = dict.fromkeys(urls)
        if missing := [url for url in distinct if url not in self._known and not is_local(url)]:
            pool = ThreadPoolExecutor(min(_THREADS, len(missing)))
            try:
                with meter_for(missing[0], storage_options).waiting():
                    headers = list(pool.map(reads_ahead()(_read_header), missing, [storage_options] * len(missing)))
            finally:
                pool.shutdown(cancel_futures=True)  # after the first failure, do not wait for thousands of others
            self._known.update(zip(missing, headers, strict=True))
        self._known.update((url, _read_header(url, storage_options)) for url in filter(is_local, distinct))
        return [self._known[url].samples for url in urls]

    def facts(self, url: str) -> ShardFacts | None:
        """Returns what the index of a shard states about its bytes; None if its samples have not been counted."""
        return header_facts(self._known[url]) if url in self._known else None


class _CountTable:
    """Counts by URL, or by base name if only one shard has it."""

    is_local = True

    def __init__(self, counts: Iterable[tuple[Any, Any]], source: str) -> None:
        self._counts: dict[str, int] = {}
        for key, count in counts:
            url = os.fspath(key) if isinstance(key, (str, os.PathLike)) else None
            if not isinstance(url, str):
                raise TypeError(f"{source} has {key!r} for a shard, where a URL (str or Path) is expected")
            if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 0:
                raise _wrong_count(source, url, f"{count!r} samples; that must be a whole number from 0")
            if url not in self._counts:
                self._counts[url] = int(count)
            elif (other := self._counts[url]) != count:
                raise _wrong_count(source, url, f"both {other:,} and {count:,} samples")
        self._numbers = list(self._counts.values())
        self._table = UrlTable(self._counts, source, "number of samples")

    def __deepcopy__(self, memo: object) -> "_CountTable":
        return self  # nothing changes it

    def __repr__(self) -> str:
        return f"<counts of {len(self._counts):,} shards>"

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:  # noqa: ARG002  (one signature)
        """Returns the number of samples of each shard."""
        return [self._numbers[place] for place in self._table.places(urls)]


def _wrong_count(source: str, url: str, what: str) -> ShardListError:
    return ShardListError(f"{source} gives shard {mask_url(url)} {what}", shard=mask_url(url))


class _CountFile:
    """One JSON file for all shards. A remote file is read once, a local one each time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._table: _CountTable | None = None
        self.is_local = is_local(url)

    def __reduce__(self) -> tuple[Any, ...]:
        return _CountFile, (self._url,)

    def __repr__(self) -> str:
        return repr(mask_url(self._url))

    def of(self, urls: Sequence[str], storage_options: StorageOptions) -> list[int]:
        """Reads the file and looks the shards up."""
        if self._table is None or self.is_local:
            self._table = self._read(storage_options)
        return self._table.of(urls, storage_options)

    def _read(self, storage_options: StorageOptions) -> _CountTable:
        source = f"the index {mask_url(self._url)}"
        try:
            with open_shard(self._url, storage_options=storage_options) as stream:
                content = json.loads(stream.read())
            if not isinstance(content, dict):
                raise ShardListError(f"{source} is a JSON {type(content).__name__}, not an object. {_KINDS}")
            is_wids = "shardlist" in content or "datasets" in content
            return _CountTable(wids_counts(content, self._url) if is_wids else content.items(), source)
        except ShardListError:
            raise
        except ShardOpenError as error:
            raise ShardListError(f"{source} cannot be read: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ShardListError(f"{source} is malformed: {type(error).__name__}: {error}. {_KINDS}") from error
        except (ValueError, RecursionError) as error:
            raise ShardListError(f"{source} is not JSON: {error}. {_KINDS}") from error


#: Where the numbers of samples come from. `of` returns them for shards, or raises ShardListError; `is_local` is whether
#: that contacts no server and reads at most one file.
ShardCounts = _Sidecars | _CountFile | _CountTable


def shard_counts(index: Index) -> ShardCounts | None:
    """Turns an ``index=`` argument into a source of sample counts; None stays None."""
    if index is None or index is True:
        return _Sidecars() if index else None
    if isinstance(index, (str, os.PathLike)):
        return _CountFile(os.fspath(index))
    if isinstance(index, Mapping):
        return _CountTable(index.items(), "the dict given as index=")
    raise TypeError(
        "index must be True (an index beside each shard), the path or URL of one JSON file, a dict from URL or base "
        f"name to the number of samples, or None, not {index!r}"
    )


def header_facts(header: IndexHeader) -> ShardFacts | None:
    """Returns what an index states about its shard's bytes; None if it states nothing."""
    return None if header.bytes is None and header.sha256 is None else ShardFacts(header.bytes, header.sha256)


def _read_header(url: str, storage_options: StorageOptions) -> IndexHeader:
    """Reads the first line of the index beside a shard."""
    shown = mask_url(url)
    try:
        return read_index_header(url, storage_options)
    except ShardFormatError as error:
        raise ShardListError(f"the index beside shard {shown} cannot be used: {error}", shard=shown) from error
    except (ShardOpenError, ValueError) as error:
        raise ShardListError(
            f"shard {shown} has no readable index beside it: {error}. Make one with index_shard, or with writers and "
            "index=True; or pass split_shards the numbers of samples as a JSON file or a dict",
            shard=shown,
        ) from error
