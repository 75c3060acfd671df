"""The index of a data set: where the samples of many shards lie, by number, and which numbers a key has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np

from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.index.columns import Columns, ShardColumns, key_check, pack
from torchdata_wds.format.index.packed import KEY_RULES, KEYED, Array, PackedIndex, digest_of
from torchdata_wds.format.index.shard_entries import ShardEntries, ShardEntry
from torchdata_wds.format.index.sidecars import open_index_target
from torchdata_wds.format.index.stores import BytesStore, FileStore, Store
from torchdata_wds.format.index.url_table import UrlTable, public_url
from torchdata_wds.storage import mask_url, open_shard
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.urls import local_path, url_text

__all__ = ["DatasetIndex", "ShardEntry", "key_check"]

_PIECE = 16 << 20


class DatasetIndex:
    """The index of many shards, whose samples are numbered from 0 through the shards as they are listed.

    Made by `of`, from the indexes of shards, and by `load`, from a packed file, which stays on disk: rows are read when
    they are asked for, so that a process holds the table of shards and nothing else. It can be pickled, by the path of
    its file if it has one, and used in threads and in forked processes.

    Args:
        packed: The packed index.
        chosen: The shards to take, by their numbers in it, each as often as wanted; None takes all.
        urls: The URLs of these shards; None takes those in the index.
        moved: Which of these shards are copies of those that were indexed, so that their dates and ETags are others.

    Attributes:
        keys: The rule by which names were split into key and field, ``"first_dot"`` or ``"last_dot"``.
        digest: 16 hexadecimal digits over the shards' base names, and over where their samples lie and what keys these
            have; the same in any folder.
        shards: The shards, a sequence of `ShardEntry`.
        bounds: How many samples lie before each shard, and at the end before none: int64 of shape [shards + 1].

    Example:
        >>> from torchdata_wds.format.index import IndexHeader, ShardIndex, pack_row
        >>> rows = [pack_row("a", 0, 1024, [("a.txt", 512, 3)]), pack_row("b", 1024, 2048, [("b.txt", 1536, 3)])]
        >>> index = DatasetIndex.of([("x.tar", ShardIndex(IndexHeader("x.tar", "first_dot", 2, 10240), rows))])
        >>> len(index), index.find("b"), index.rows(0, 0, 2)[0].tolist()
        (2, [1], [0, 1024, 2048])
    """

    def __init__(
        self,
        packed: PackedIndex,
        *,
        chosen: Array | None = None,
        urls: Sequence[str] | None = None,
        moved: Array | None = None,
    ) -> None:
        self.keys = packed.keys
        self._packed = packed
        self._chosen = chosen
        self._urls = urls
        self._moved = moved
        self._table: UrlTable | None = None
        self.bounds: Array = packed.bounds
        self.digest = packed.digest.hex()
        if chosen is not None:
            counts = np.diff(packed.bounds)[chosen]
            self.bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            self.digest = digest_of(packed.digests[chosen]).hex()
        self.shards: Sequence[ShardEntry] = ShardEntries(packed, chosen, urls, moved)

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, ShardIndex | ShardColumns]]) -> DatasetIndex:
        """Makes the index of shards from their own, in memory.

        Args:
            pairs: The URL of each shard and its index, in the order in which samples shall be numbered; or what
                `load_foreign` has read.

        Raises:
            ShardListError: if the indexes split names by different rules.
            ShardFormatError: if an index is damaged.
        """
        shards: list[ShardColumns] = []
        rules: dict[str, str] = {}
        for url, index in pairs:
            columns = index._replace(url=url) if isinstance(index, ShardColumns) else ShardColumns.of(url, index)
            shards.append(columns)
            rules.setdefault(columns.keys, url)
        if len(rules) > 1:
            (one, first), (other, second), *_ = rules.items()
            raise ShardListError(
                f"the index of shard {mask_url(first)} splits names at {one}, and that of shard {mask_url(second)} at "
                f"{other}. Make them again with the same keys="
            )
        return cls.of_columns(Columns.of(next(iter(rules), KEY_RULES[0]), shards))

    @classmethod
    def of_columns(cls, columns: Columns) -> DatasetIndex:
        """Makes an index of columns, in memory."""
        packed = PackedIndex(BytesStore(pack(columns), "in memory"))
        are_stored = all(map(eq, columns.urls, map(packed.url, range(len(columns.urls)))))
        return cls(packed, urls=None if are_stored else tuple(columns.urls))

    @classmethod
    def load(
        cls, url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> DatasetIndex:
        """Opens a packed index: a local file in place, any other one by reading it whole.

        Raises:
            ShardOpenError: if it cannot be opened.
            ShardFormatError: if it is not a packed index, not whole, or damaged.
        """
        place = resolve(url, storage_options)
        if place.is_local and (path := Path(local_path(place.url)).absolute()).is_file():
            return cls(PackedIndex(FileStore(str(path), mask_url(url))))
        with open_shard(url, storage_options=storage_options) as stream:
            return cls(PackedIndex(BytesStore(stream.read(), mask_url(url))))

    def save(
        self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Writes the index as a packed file, in place of one that is there, which others may be reading.

        Raises:
            ShardOpenError: if that cannot be written.
        """
        store: Store = self._packed.store
        if self._chosen is not None or self._urls is not None:
            store = BytesStore(pack(self._columns()), "in memory")
        target = open_index_target(url, storage_options=storage_options)
        try:
            for start in range(0, store.size, _PIECE):
                target.write(store.read(start, min(_PIECE, store.size - start)))
            target.commit()
        finally:
            target.abort()

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __repr__(self) -> str:
        return f"DatasetIndex({len(self):,} samples in {len(self.shards):,} shards, digest {self.digest})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DatasetIndex):
            return NotImplemented
        same = self.digest == other.digest and self.keys == other.keys
        return same and list(self.shards) == list(other.shards)

    __hash__ = None  # type: ignore[assignment]

    def parts(self) -> tuple[PackedIndex, dict[str, Any]]:
        """Returns the packed index, and the other arguments that make this object of it."""
        return self._packed, {"chosen": self._chosen, "urls": self._urls and tuple(self._urls), "moved": self._moved}

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._packed.store
        _, given = self.parts()
        if isinstance(store, FileStore):
            return _open_again, (store.path, store.shown, self._packed.check, given)
        return _of_bytes, (bytes(store.read(0, store.size)), store.shown, given)

    def rows(self, shard: int, first: int, stop: int) -> tuple[Array, Array | None]:
        """Reads where some samples of a shard lie, and what their keys are.

        Args:
            shard: The shard's place in `shards`.
            first: The first sample of the shard to read, from 0.
            stop: The sample to end before.

        Returns:
            Where each sample begins and the last one ends, in bytes of the decompressed archive: uint64 of shape
            [stop - first + 1]; and the low 32 bits of each key's `key_check`: uint32, None if the index has no keys.

        Raises:
            IndexError: if the shard has no such samples.
            ShardFormatError: if the index is damaged.
        """
        count = self.bounds.item(shard + 1) - self.bounds.item(shard)
        if not 0 <= first <= stop <= count:
            raise IndexError(f"shard {self.shards[shard].url} has {count:,} samples, not {first:,} to {stop:,}")
        base = shard if self._chosen is None else self._chosen.item(shard)
        return self._packed.offsets(base, first, stop), self._packed.checks(base, first, stop)

    def row_lists(self, shard: int, first: int, stop: int) -> tuple[list[int], list[int] | None]:
        """Reads what `rows` returns as lists, which is faster for a few samples; these must be in the shard."""
        base = shard if self._chosen is None else self._chosen.item(shard)
        return self._packed.row_lists(base, first, stop)

    def find(self, key: str) -> list[int]:
        """Finds the numbers of the samples that have a key, in ascending order; none where it is not there.

        Keys are compared by their 64-bit hashes. Another key may have the same: once in 10**12 searches in ten million
        samples.

        Raises:
            ShardFormatError: if it is not found, and the index of a shard has no keys.
        """
        found = self._packed.numbers_of(key_check(key))
        if self._chosen is not None and found:
            bases = np.searchsorted(self._packed.bounds, found, side="right") - 1
            inside = np.array(found) - self._packed.bounds[bases]
            found = sorted(
                int(self.bounds[shard] + number)
                for base, number in zip(bases, inside, strict=True)
                for shard in np.flatnonzero(self._chosen == base)
            )
        if not found and not self.has_keys:
            what = f"the index of these shards has no keys, so that {key!r} cannot be found. Make one with index_shard"
            raise ShardFormatError(what, key=key, kind="index")
        return found

    def verify(self) -> None:
        """Reads all rows and compares them with the digests of their shards.

        Opening an index checks its table of shards, and `rows` what it reads for sense; this finds any damage.

        Raises:
            ShardFormatError: if the index is damaged.
        """
        self._packed.verify()

    @property
    def has_keys(self) -> bool:
        """Whether the keys of all samples are known; the indexes of some other programs have none."""
        flags = self._packed.flags if self._chosen is None else self._packed.flags[self._chosen]
        return bool((flags & KEYED).all())

    def select(self, urls: Iterable[str | os.PathLike[str]]) -> DatasetIndex:
        """Returns the index of some shards in another order; their rows are not copied.

        Args:
            urls: The shards as they are listed, each as often as wanted: by the URL that the index has, else by base
                name, if only one shard of the index and one of the list has it. Such a shard is a copy: its date or
                ETag may be another, only its size must be that of the index.

        Raises:
            ShardListError: if the index does not have a shard.
        """
        listed = [url_text(url) for url in urls]
        if self._table is None:
            source = f"the index of {len(self.shards):,} shards"
            self._table = UrlTable(self._all_urls(), source, "entry")
        places = np.array(self._table.places(listed), np.int64)
        own = list(self._all_urls())
        pairs = [(own[place], url) for place, url in zip(places.tolist(), listed, strict=True)]
        moved = np.array([one != url and public_url(one) != public_url(url) for one, url in pairs], bool)
        if self._moved is not None:
            moved |= self._moved[places]
        chosen = places if self._chosen is None else self._chosen[places]
        return DatasetIndex(self._packed, chosen=chosen, urls=tuple(listed), moved=moved if moved.any() else None)

    def _all_urls(self) -> Iterator[str]:
        return iter(self._urls) if self._urls is not None else map(self._packed.url, range(len(self.bounds) - 1))

    def _columns(self) -> Columns:
        packed = self._packed
        urls = list(self._all_urls())
        chosen = np.arange(len(urls)) if self._chosen is None else self._chosen
        hashes = packed.all_hashes()
        parts = [(int(packed.bounds[base]), int(packed.bounds[base + 1]), int(base)) for base in chosen]
        offsets = (packed.offsets(base, 0, stop - first) for first, stop, base in parts)
        return Columns(
            packed.keys,
            urls,
            np.diff(self.bounds),
            packed.tar_bytes[chosen],
            packed.stored[chosen],
            [shard.version.tag if shard.version else "" for shard in self.shards],
            packed.flags[chosen],
            np.concatenate([np.empty(0, np.uint64), *offsets]),
            np.concatenate([np.empty(0, np.uint64), *(hashes[first:stop] for first, stop, _ in parts)]),
        )


def _open_again(path: str, shown: str, check: bytes, given: dict[str, Any]) -> DatasetIndex:
    """Opens the file of an index that was pickled."""
    try:
        packed = PackedIndex(FileStore(path, shown))
    except ShardOpenError as error:
        raise error.extended(". It was pickled by its path: keep it where all processes and machines see it") from error
    if packed.check != check:
        what = f"index {shown} is not the one that was pickled: another has been written in its place. Load it again"
        raise ShardFormatError(what, shard=shown, kind="index")
    return DatasetIndex(packed, **given)


def _of_bytes(data: bytes, shown: str, given: dict[str, Any]) -> DatasetIndex:
    """Opens the bytes of an index that was pickled."""
    return DatasetIndex(PackedIndex(BytesStore(data, shown)), **given)
