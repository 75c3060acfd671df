"""Byte ranges of shards on web servers: one request each, on connections that are kept open."""

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.meters import Meter
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.ranges.base import NEEDS_PARTS, changed, ends_inside, no_parts
from torchdata_wds.storage.running_reads import interruptible
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.sources.http import HttpSource
from torchdata_wds.storage.sources.http_client import Answer, malformation, read_http_options
from torchdata_wds.storage.urls import cannot_open


class _PartSource(HttpSource):
    """The body of a part; does not read a whole object up to where the part begins."""

    def _catch_up(self, answer: Answer, at: int) -> None:
        if at < self._start:
            raise no_parts(self._shard)
        super()._catch_up(answer, at)


class HttpRanges:
    """A shard on a web server; holds no connection, since the process's pool has them."""

    is_copy = False

    def __init__(self, place: Place) -> None:
        if wrong := malformation(place.url):
            raise cannot_open(place.shown, f"its address is malformed: {wrong}")
        self._place = place
        self.meter = Meter(place.shown)
        self._options = read_http_options(place.scheme, place.options.get(place.scheme, {}))

    def read(self, start: int, stop: int, version: StoredVersion | None) -> bytes:
        """Reads a range with one request, which also tells the version; more only if a connection breaks."""
        if start == stop:  # a request cannot ask for nothing
            return b""
        data = bytearray(stop - start)
        position = 0
        source = _PartSource(self._place, self._options, start, stop)
        with source, interruptible(source.interrupt), memoryview(data) as view:
            source.connect()
            self._check(source, start, stop, version)
            while count := source.fill(view[position:]):
                position += count
        if position < len(data):
            raise ends_inside(self._place.shown, start + position, start, stop)
        return bytes(data)

    def version(self) -> StoredVersion | None:
        """Requests one byte: signed URLs allow GET but not HEAD."""
        with HttpSource(self._place, self._options, stop=1) as source:
            source.connect()
            if source.gives_parts:
                source.read(1)  # to the end of the body, which keeps the connection
            return _version_of(source, is_recorded=True)

    def _check(self, source: HttpSource, start: int, stop: int, version: StoredVersion | None) -> None:
        shard, total = self._place.shown, source.version.total
        if source.version.encoding not in ("", "identity"):
            shown = mask_text(source.version.encoding)[:80]
            what = f"cannot open shard {shard}: the server compresses it, with Content-Encoding {shown!r}."
            raise ShardOpenError(what, shard=shard, advice=NEEDS_PARTS)
        now = _version_of(source)
        if version is not None and now is not None and (difference := version.difference(now)):
            raise changed(shard, difference)
        if total is not None and total < stop:
            raise ends_inside(shard, total, start, stop)
        if not source.gives_parts and (start, stop) != (0, total):
            raise no_parts(shard)


def _version_of(source: HttpSource, *, is_recorded: bool = False) -> StoredVersion | None:
    """Returns the version that an answer tells, by its date if there is no strong ETag.

    A date that is to be recorded must be older than the answer: else the shard may change again within that second.
    """
    found, told = source.stored_version(), source.version
    if found is None or found.tag or not told.modified or (is_recorded and not told.settled):
        return found
    return found._replace(tag=f"date-{told.modified}")
