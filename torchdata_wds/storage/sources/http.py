"""Shards from web servers, ``http:`` and ``https:``; reading survives broken connections.

Entity tags, dates and lengths show whether a new connection sends the same object: RFC 9110, 8.8 and 13.1.5.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import partial

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage.byte_streams import ShardSource, StoredVersion, ends_before, wrap_source
from torchdata_wds.storage.decompression import HEAD_SIZE, may_be_compressed
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.retrying import Failure, RetryingSource
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.sources.http_client import (
    Answer,
    HttpOptions,
    is_number,
    malformation,
    read_http_options,
    request,
)
from torchdata_wds.storage.urls import cannot_open, unexpanded

try:  # three times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

_OWN_DECODERS = ("gzip", "x-gzip", "zstd")

#: The most delivered bytes that are requested again, if only bytes can show that the object is the same.
_OVERLAP = 16 * 1024
_SMALLEST_OVERLAP = 64
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)", re.ASCII)


def open_http(place: Place, offset: int) -> io.BufferedReader:
    """Opens a shard on a web server; an offset becomes a range request if the server and the shard allow it.

    A user name and password in the URL are sent as basic authentication.
    """
    shard = place.shown
    chosen = read_http_options(place.scheme, place.options.get(place.scheme, {}))
    if wrong := malformation(place.url):
        raise cannot_open(shard, f"its address is malformed: {wrong}")
    version = _version_if_plain(place, chosen) if offset else None
    source = HttpSource(place, chosen, start=0 if version is None else offset, known=version)
    try:
        source.connect()
        if version is not None:
            return wrap_source(source, shard, plain=True)
        # Some servers compress without being asked to.
        encoding = source.version.encoding
        if encoding not in ("", "identity", *_OWN_DECODERS):
            shown = mask_text(encoding)[:80]
            raise cannot_open(shard, f"the server sent Content-Encoding {shown!r}, expected identity")
        body = ShardSource(source, shard) if encoding in _OWN_DECODERS else source
        return wrap_source(body, shard, skip=offset)
    except BaseException:
        source.close()
        raise


def _version_if_plain(place: Place, options: HttpOptions) -> "Version | None":
    """Returns the shard's version if the server sends parts of it and it is not compressed; else None.

    An offset in decompressed bytes can be requested as a range only then.
    """
    with HttpSource(place, options, stop=HEAD_SIZE) as source:
        source.connect()
        if not source.gives_parts or source.version.encoding not in ("", "identity"):
            return None
        head = b"".join(iter(partial(source.read, HEAD_SIZE), b""))
        return None if may_be_compressed(head) else replace(source.version, encoding="identity")


@dataclass(frozen=True)
class Version:
    """The version of an object, according to one answer; "" where the answer does not say."""

    etag: str = ""
    modified: str = ""  # Last-Modified, in the server's words
    settled: bool = False  # whether that is at least a second before the answer: else two versions may share the date
    total: int | None = None  # the length in bytes, if known
    encoding: str = ""  # Content-Encoding

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str]) -> "Version":
        """Reads the version from an answer with the whole object (200) or a part (206)."""
        whole = status == 200
        etag, modified = (headers.get(name, "").strip() for name in ("ETag", "Last-Modified"))
        try:
            age = parsedate_to_datetime(headers.get("Date", "")) - parsedate_to_datetime(modified)
            settled = age.total_seconds() >= 1
        except (TypeError, ValueError):
            settled = False
        length = headers.get("Content-Length", "")
        total = content_range(headers)[1]
        if whole:
            total = int(length) if is_number(length) and "Transfer-Encoding" not in headers else None
        # A part need not repeat the headers of the whole.
        encoding = headers.get("Content-Encoding", "identity" if whole else "").strip().lower()
        return cls(etag, modified, settled, total, encoding)

    @property
    def condition(self) -> str | None:
        """The value for If-Range: a strong tag, or a date if there is no tag; None if neither proves anything."""
        if self.etag:
            return None if self.etag.startswith("W/") else self.etag
        return self.modified if self.settled else None

    def is_confirmed_by(self, later: "Version") -> bool:
        """Returns whether a later answer has a tag or date too, which `difference` has then found to be equal."""
        return bool(self.etag and later.etag) or bool(self.modified and later.modified)

    def difference(self, later: "Version") -> str | None:
        """Describes what shows that a later answer is for another object; None if nothing does."""
        told = ("Last-Modified", self.modified, later.modified)
        if self.etag and later.etag:
            told = ("ETag", self.etag, later.etag)
        for what, before, after in (told, ("Content-Encoding", self.encoding, later.encoding)):
            if before and after and before.removeprefix("W/") != after.removeprefix("W/"):  # weak tags compare alike
                return f"its {what} was {before[:80]!r} and is now {after[:80]!r}"
        if self.total is not None and later.total is not None and self.total != later.total:
            return f"its length was {self.total:,} bytes and is now {later.total:,}"
        return None


def content_range(headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Reads the first byte and the total length from a Content-Range; each is None if it is not stated."""
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    first, total = found.groups() if found else (None, None)
    return int(first) if first else None, int(total) if total and total != "*" else None


class Delivered:
    """A record of the delivered bytes in constant memory: the last ones, and optionally a checksum of all."""

    def __init__(self, *, with_checksum: bool) -> None:
        self.end = b""
        self.has_checksum = with_checksum
        self._checksum = 0

    def add(self, data: bytes | memoryview) -> None:
        """Adds the next delivered bytes."""
        end = bytes(data[-_OVERLAP:])
        self.end = end if len(end) == _OVERLAP else (self.end + end)[-_OVERLAP:]
        if self.has_checksum:
            self._checksum = crc32(data, self._checksum)

    def differs_from(self, other: "Delivered") -> bool:
        """Returns whether another record, up to the same byte, must be of another object."""
        # One record may hold 64 bytes and the other 16,384: then the last 64 are compared.
        shorter, longer = sorted((self.end, other.end), key=len)
        is_known = self.has_checksum and other.has_checksum
        return not longer.endswith(shorter) or (is_known and self._checksum != other._checksum)


class HttpSource(RetryingSource):
    """The body of an object: a connection that breaks, stalls or is temporarily refused is replaced by a new one.

    A new connection continues at the byte where the last one broke, and the object must be the same. Its entity tag or
    date shows this, which both the server (If-Range) and this class compare; so does its length; and if neither tag nor
    date proves anything, the last delivered bytes, which are requested again. If the server does not send parts, the
    object is read from its start; the bytes already delivered are compared and skipped.

    Reads the bytes from `start` up to `stop`, or to the end. `known` is the version from an earlier answer.
    """

    def __init__(
        self, place: Place, options: HttpOptions, start: int = 0, stop: int | None = None, known: Version | None = None
    ) -> None:
        super().__init__(place.shown, start, options.retries)
        self._url = place.url
        self._options = options
        self._stop = stop
        self._delivered = Delivered(with_checksum=False)
        self._overlapping = False
        self.version = known or Version()
        self._total = self.version.total
        self.gives_parts = False  # whether the server answered with a part

    def stored_version(self) -> StoredVersion | None:
        """Returns the length and tag of the object, if the server has sent them for the object as it is stored."""
        known = self.version
        if known.total is None or known.encoding not in ("", "identity"):
            return None
        return StoredVersion(known.total, "" if known.etag.startswith("W/") else known.etag[:40])

    def interrupt(self) -> None:
        """Ends a read or a pause in another thread, but not the wait for an answer."""
        super().interrupt()
        answer = self._connection
        if answer is not None:
            answer.interrupt()

    def _receive(self, view: memoryview) -> int:
        if self._stop is not None:
            view = view[: self._stop - self._position]
            if not view:
                return 0
        count: int = self._connection.readinto(view)
        if self._patience.interrupted.is_set():
            # After an interrupt, what looks like the end of a body without a length may be the connection's.
            raise Failure("the connection was shut")
        position, total = self._position + count, self._total
        if total is not None and position > total:
            raise Failure(f"the server sent more bytes than the {total:,} that it announced", lasting=True)
        if not count:
            if total is not None and position < total:
                raise Failure("the server sent only a part of the requested bytes")
            self._ended = True
        self._delivered.add(view[:count])
        return count

    def _connect(self) -> None:
        """Requests the next bytes, and checks that the answer is for the same object."""
        if self._total == self._position > self._start:
            self._ended = True
            return
        # Without a useful tag or date, some delivered bytes are requested again, and `_catch_up` compares them. After a
        # failure at byte 1,000,000 the range begins 8,192 bytes earlier, at 991,808; after the next without progress,
        # at 995,904, and so on down to 64: a server that breaks off after few bytes must get beyond the overlap.
        overlap = max(_SMALLEST_OVERLAP, _OVERLAP >> min(self._patience.failures, 32)) if self._overlapping else 0
        begin = self._position - min(overlap, len(self._delivered.end))
        condition = self.version.condition if begin == self._position > self._start else None
        headers = {}
        if begin or self._stop is not None:
            headers["Range"] = f"bytes={begin}-{'' if self._stop is None else self._stop - 1}"
            headers.update({} if condition is None else {"If-Range": condition})
        answer = request(self._url, self._options, headers)
        try:
            first = self._first_byte(answer, begin)
            if first is None:
                self._ended = True
            elif self._is_met_by(answer, condition):
                self._catch_up(answer, first)
                self._connection = answer
        finally:
            if self._connection is None:
                answer.dismiss()

    def _first_byte(self, answer: Answer, begin: int) -> int | None:
        """Returns the byte of the object at which the answer begins; None if the object ends where reading stopped."""
        if answer.status == 200:
            return 0
        first, total = content_range(answer.headers)
        if answer.status == 206:
            if first == begin and (begin or self._stop is not None):
                return first
            found = answer.headers.get("Content-Range", "none")[:80]
            raise Failure(f"{answer.describe()} and Content-Range {found!r} for bytes from {begin:,}", lasting=True)
        if answer.status == 416 and total is not None:
            if total == self._position and self._total in (None, total):
                self.version, self._total = replace(self.version, total=total), total
                return None
            if total <= self._position:
                raise self._ends_at(total)
        raise Failure(answer.describe(), lasting=True)

    def _is_met_by(self, answer: Answer, condition: str | None) -> bool:
        """Compares the answer with the known version; returns False if that does not show whether they are the same."""
        found = Version.of(answer.status, answer.headers)
        known = found if self.version == Version() else self.version
        difference = known.difference(found)
        if difference is not None:
            raise self._changed(difference)
        if condition is not None and answer.status == 206 and not known.is_confirmed_by(found):
            self._overlapping = True  # after the next request, the bytes decide
            return False
        self.version = known if known.total is not None else replace(known, total=found.total)
        self._total = self.version.total
        if not self._has_begun:
            # The first answer decides how to verify later ones.
            self._has_begun = True
            self._overlapping = self.version.condition is None
            self.gives_parts = answer.status == 206
            promises_parts = self.gives_parts or answer.headers.get("Accept-Ranges", "").strip().lower() == "bytes"
            self._delivered = Delivered(with_checksum=self._overlapping or not promises_parts)
        return True

    def _catch_up(self, answer: Answer, at: int) -> None:
        """Reads an answer from byte `at` up to the current position, and compares it with the delivered bytes."""
        start, position = self._start, self._position
        # Say bytes 100 to 1,000 were delivered. Of an answer with the whole object, the first 100 bytes are skipped and
        # the next 900 compared, also by checksum. Of an overlap from byte 936, only these 64 bytes are compared: two
        # checksums are comparable only if both begin at the first delivered byte.
        again = Delivered(with_checksum=self._delivered.has_checksum and at <= start)
        while at < position:
            data = answer.read(position - at)
            if not data:
                raise self._ends_at(at)
            again.add(data[max(0, start - at) :])
            at += len(data)
        if again.differs_from(self._delivered):
            raise self._changed("its bytes differ from those already delivered")

    def _refusal(self, failure: Failure, more: str) -> ShardOpenError:
        pattern = unexpanded(self._shard)
        advice = f"; it may not be there{pattern}" if pattern and failure.lasting else ""
        return cannot_open(self._shard, f"{failure.reason}{more}{advice}")

    def _ends_at(self, total: int) -> ShardOpenError | ShardFormatError:
        if self._position > self._start:
            return self._changed(f"it ends at byte {total:,} now")
        return ends_before(self._shard, total, self._start)
