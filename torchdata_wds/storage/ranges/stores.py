"""Byte ranges of shards in other stores, by fsspec."""

from functools import partial
from typing import Any

from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.ranges.shards import changed, ends_inside
from torchdata_wds.storage.retrying import attempt
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.sources.fsspec import OPEN_RETRIES, RETRIES, connect, refusal


class StoreRanges:
    """A shard in a store, with the client of this process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._filesystem, self._path = connect(place.url, place.options)
        self._version: StoredVersion | None = None

    def read(self, start: int, stop: int, version: StoredVersion | None) -> bytes:
        """Reads a range."""
        if start == stop:
            return b""
        if version is not None and self._version is None:
            self._version = self.version()
        if version is not None and self._version is not None and (difference := version.difference(self._version)):
            raise changed(self._place.shown, difference)
        data: bytes = self._attempt(partial(self._filesystem.cat_file, self._path, start=start, end=stop), RETRIES)
        if len(data) < stop - start:
            raise ends_inside(self._place.shown, start + len(data), start, stop)
        return data

    def version(self) -> StoredVersion | None:
        """Asks the store, not a listing that the client has kept."""
        self._filesystem.invalidate_cache()
        details = self._attempt(partial(self._filesystem.info, self._path), OPEN_RETRIES)
        size = details.get("size")
        if not isinstance(size, int):
            return None
        tag = "" if "::" in self._place.url else str(details.get("ETag") or details.get("etag") or "")
        return StoredVersion(size, tag.strip('"')[:40])

    def _attempt(self, work: Any, retries: int) -> Any:
        try:
            return attempt(work, retries, self._place.shown)
        except Exception as error:  # noqa: BLE001 - client libraries raise anything
            raise refusal(error, self._place.shown, self._filesystem, self._path) from masked_cause(error)
