"""Shards by URL, whoever signed it, or by base name if only one has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index import shard_name
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.cache.names import unsigned
from torchdata_wds.storage.secrets.masking import without_credentials
from torchdata_wds.storage.urls import is_local


def public_url(url: str) -> str:
    """Returns a shard's URL without signatures and credentials: those change, and do not belong into files.

    Example:
        >>> public_url("https://user:secret@host/x.tar?versionId=3&X-Amz-Signature=0a1b")
        'https://host/x.tar?versionId=3'
    """
    return url if is_local(url) else without_credentials(unsigned(url))


class UrlTable:
    """Finds listed shards in a source that has entries by URL.

    Args:
        urls: The URLs of the entries; of equal ones the first is found.
        source: What has the entries, in messages.
        entry: What an entry is, in messages.

    Example:
        >>> UrlTable(["a/x.tar", "a/y.tar"], "the index", "entry").places(["a/y.tar", "b/x.tar"])
        [1, 0]
    """

    def __init__(self, urls: Iterable[str], source: str, entry: str) -> None:
        self._source = source
        self._entry = entry
        self._by_url: dict[str, int] = {}
        self._by_public: dict[str, int] | None = None  # made when it is needed, as the next one
        self._by_name: dict[str, list[str]] | None = None
        for place, url in enumerate(urls):
            self._by_url.setdefault(url, place)

    def places(self, urls: Sequence[str]) -> list[int]:
        """Returns the place of the entry of each shard.

        Raises:
            ShardListError: if a shard has none, or one that another shard of its base name may have too.
        """
        taken: dict[str, str] = {}  # the entry for a base name -> the shard that used it
        return [self._by_url[url] if url in self._by_url else self._place(url, taken) for url in urls]

    def _place(self, url: str, taken: dict[str, str]) -> int:
        if self._by_public is None:
            self._by_public = {}
            for known, place in self._by_url.items():
                self._by_public.setdefault(public_url(known), place)
        found = self._by_public.get(public_url(url))
        return self._by_base_name(url, taken) if found is None else found

    def _by_base_name(self, url: str, taken: dict[str, str]) -> int:
        if self._by_name is None:
            self._by_name = {}
            for known in self._by_url:
                self._by_name.setdefault(shard_name(known), []).append(known)
        entries = self._by_name.get(shard_name(url), [])
        other = taken.setdefault(entries[0], url) if entries else url
        if len(entries) == 1 and other == url:
            return self._by_url[entries[0]]
        shown = mask_url(url)
        if not entries:
            raise ShardListError(
                f"{self._source} has no {self._entry} for shard {shown}, neither by its URL nor by its base name. "
                "Add it, or leave the shard out of the list",
                shard=shown,
            )
        among = " and ".join(map(mask_url, entries[:2] if len(entries) > 1 else [other]))
        article = "an" if self._entry[0] in "aeiou" else "a"
        raise ShardListError(
            f"{self._source} has {article} {self._entry} for the base name of shard {shown}, which {among} has "
            "too: give the whole URLs as they are listed",
            shard=shown,
        )
