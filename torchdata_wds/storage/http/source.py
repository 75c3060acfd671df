"""The bytes of an object on a web server, whatever happens to the connections that they come through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdata_wds.errors import TRY_AGAIN, ShardFormatError, ShardOpenError
from torchdata_wds.storage.braces import unexpanded
from torchdata_wds.storage.byte_streams import Source, StoredVersion
from torchdata_wds.storage.http.client import Answer, HttpFailure, HttpRequest
from torchdata_wds.storage.http.versions import Version, content_range
from torchdata_wds.storage.retrying import Patience

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["HttpSource"]


_PIECE = 512 * 1024

#: So much of what was delivered is asked for again where only its bytes show that the object is the same.
_OVERLAP = 16 * 1024

_SMALLEST_OVERLAP = 64

_LONGEST_TAG = 40  # of one that is kept in states


class Delivered:
    """What was given to the reader, remembered in constant memory: its end, and a checksum of all of it if wanted.

    Args:
        start: Where in the object it begins.
        with_checksum: Whether to keep a checksum.
    """

    def __init__(self, start: int, *, with_checksum: bool) -> None:
        self.start = start
        self.position = start
        self.end = b""
        self._crc32 = _find_crc32() if with_checksum else None
        self._checksum = 0

    @property
    def has_checksum(self) -> bool:
        """Whether a checksum is kept."""
        return self._crc32 is not None

    def add(self, data: bytes | memoryview) -> None:
        """Remembers what comes next."""
        self.position += len(data)
        end = bytes(data[-_OVERLAP:])
        self.end = end if len(end) == _OVERLAP else (self.end + end)[-_OVERLAP:]
        if self._crc32 is not None:
            self._checksum = self._crc32(data, self._checksum)

    def differs_from(self, other: Delivered) -> bool:
        """Tells whether the other, which ends at the same place, cannot be of the same object."""
        common = min(len(self.end), len(other.end))
        if self.end[len(self.end) - common :] != other.end[len(other.end) - common :]:
            return True
        return self.has_checksum and other.has_checksum and self._checksum != other._checksum


class HttpSource(Source):
    """The body of an object: a connection that breaks, stalls or is refused for a while is replaced by another.

    A new connection goes on at the byte where the last one broke, and the object must be the same: by its entity tag
    or date, which the server compares (If-Range) and this does, too; by the length; and, where neither tag nor date
    proves anything, by the last bytes that were delivered, which are asked for again. A server that gives no parts is
    read from the start, and what was delivered is compared and passed over.

    Args:
        request: How to ask for the object.
        start: The first byte to give.
        stop: The byte behind the last one to give, if not all of it is wanted.
        version: What is known of the object.
    """

    def __init__(
        self, request: HttpRequest, *, start: int = 0, stop: int | None = None, version: Version | None = None
    ) -> None:
        self._request = request
        self._stop = stop
        self._patience = Patience(request.options.retries, request.shard)
        self._delivered = Delivered(start, with_checksum=False)
        self._known = version
        self._answer: Answer | None = None
        self._begun = False
        self._ended = False
        self._overlapping = False
        self.gives_parts = False

    @property
    def version(self) -> Version:
        """What is known of the object, once there is an answer."""
        return self._known or Version()

    def stored_version(self) -> StoredVersion | None:
        """The length and the tag of the object, if a server has said them of the object as it is."""
        known = self.version
        if known.total is None or known.encoding not in ("", "identity"):
            return None
        return StoredVersion(known.total, "" if known.etag.startswith("W/") else known.etag[:_LONGEST_TAG])

    def connect(self) -> None:
        """Waits for an answer, unless there is one.

        Raises:
            ShardOpenError: if none comes, or none with the object.
            ShardFormatError: if the object ends before the first byte that is wanted.
        """
        while self._answer is None and not self._ended:
            try:
                self._ask()
            except HttpFailure as failure:
                self._bear(failure)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Takes bytes into the buffer, without a copy in between where that can be."""
        answer = self._answer
        if answer is None or self._stop is not None:
            return super().readinto(buffer)
        view = memoryview(buffer)
        try:
            count = answer.readinto(view)
            if count is not None:
                self._check_length(count)
        except HttpFailure as failure:
            self._bear(failure)
            count = None
        if count is None:
            return super().readinto(buffer)
        self._delivered.add(view[:count])
        self._patience.renew()
        return count

    def take(self, size: int) -> bytes:
        """Gives up to `size` bytes; none only at the verified end."""
        if self._stop is not None:
            size = min(size, self._stop - self._delivered.position)
        while size:
            self.connect()
            if self._answer is None:
                break
            try:
                data = self._answer.read(min(size, _PIECE))
                self._check_length(len(data))
            except HttpFailure as failure:
                self._bear(failure)
                continue
            if data:
                self._delivered.add(data)
                self._patience.renew()
            return data
        return b""

    def interrupt(self) -> None:
        """Ends a read or a pause that another thread waits in; an answer that is still to come is waited for."""
        self._patience.interrupt()
        answer = self._answer
        if answer is not None:
            answer.interrupt()

    def _check_length(self, count: int) -> None:
        if self._patience.is_interrupted:
            # What looks like the end of a body without a length may be the connection's.
            raise HttpFailure("the connection was shut")
        position, total = self._delivered.position + count, self.version.total
        if total is not None and position > total:
            raise HttpFailure(f"the server sent more bytes than the {total:,} that it announced", lasting=True)
        if not count:
            if total is not None and position < total:
                raise HttpFailure("the server sent only a part of what was asked for")
            self._ended = True

    # -------------------------------------------------------------------------------------------------- going on

    def _ask(self) -> None:
        """Sends a request for what comes next, and checks that the answer is of the same object."""
        position = self._delivered.position
        if self._known is not None and self._known.total == position > self._delivered.start:
            self._ended = True
            return
        begin = position - self._overlap()
        condition = self.version.condition if begin == position > self._delivered.start else None
        answer = self._request.send(self._range_headers(begin, condition))
        try:
            first = self._first_byte(answer, begin)
            if first is None:
                self._ended = True
            elif self._meet(answer, condition):
                self._catch_up(answer, first)
                self._answer = answer
        finally:
            if self._answer is None:
                answer.dismiss()

    def _overlap(self) -> int:
        # A smaller one each time: a server that breaks off after a few bytes must get beyond it.
        wanted = max(_SMALLEST_OVERLAP, _OVERLAP >> min(self._patience.failures, 32))
        return min(wanted, len(self._delivered.end)) if self._overlapping else 0

    def _range_headers(self, begin: int, condition: str | None) -> dict[str, str]:
        if not begin and self._stop is None:
            return {}
        headers = {"Range": f"bytes={begin}-{'' if self._stop is None else self._stop - 1}"}
        return headers if condition is None else {**headers, "If-Range": condition}

    def _first_byte(self, answer: Answer, begin: int) -> int | None:
        """Where in the object the answer begins; None if the object ends where it should."""
        if answer.status == 200:
            return 0
        first, _, total = content_range(answer.headers)
        if answer.status == 206:
            if first == begin and (begin or self._stop is not None):
                return first
            found = answer.headers.get("Content-Range", "none")[:80]
            raise HttpFailure(f"{answer.describe()} and Content-Range {found!r} for bytes from {begin:,}", lasting=True)
        if answer.status == 416 and total is not None:
            if total == self._delivered.position and self.version.total in (None, total):
                return None
            if total <= self._delivered.position:
                raise self._ends_at(total)
        raise HttpFailure(answer.describe(), lasting=True)

    def _meet(self, answer: Answer, condition: str | None) -> bool:
        """Compares the answer with what is known; False if the answer leaves it open, so that bytes must tell."""
        found = Version.of(answer.status, answer.headers)
        known = found if self._known is None else self._known
        difference = known.difference(found)
        if difference is not None:
            raise self._changed(difference)
        if condition is not None and answer.status == 206 and not known.is_confirmed_by(found):
            self._overlapping = True
            return False
        self._known = known.joined(found)
        if not self._begun:
            self._begin(answer)
        return True

    def _begin(self, answer: Answer) -> None:
        """Decides by the first answer how later ones will be verified."""
        self._begun = True
        self._overlapping = self.version.condition is None
        self.gives_parts = answer.status == 206
        promises_parts = self.gives_parts or answer.headers.get("Accept-Ranges", "").strip().lower() == "bytes"
        if self._overlapping or not promises_parts:
            self._delivered = Delivered(self._delivered.start, with_checksum=True)

    def _catch_up(self, answer: Answer, at: int) -> None:
        """Reads past what was delivered, and compares it."""
        start, position = self._delivered.start, self._delivered.position
        again = Delivered(max(at, start), with_checksum=self._delivered.has_checksum and at <= start)
        while at < position:
            data = answer.read(min(_PIECE, position - at))
            if not data:
                raise self._ends_at(at)
            again.add(data[max(0, start - at) :])
            at += len(data)
        if again.differs_from(self._delivered):
            raise self._changed("other bytes stand where some were delivered")

    # -------------------------------------------------------------------------------------------------- failures

    def _bear(self, failure: HttpFailure) -> None:
        """Lets go of a connection that failed, and waits.

        Raises:
            ShardOpenError: if there is no point in going on.
        """
        self._close()
        if failure.lasting:
            raise self._error(failure, "")
        if self._patience.endures(failure.reason, failure.wait):
            return
        if self._patience.is_interrupted:
            raise self._error(failure, "; reading was interrupted")
        attempts = self._patience.failures
        raise self._error(
            failure,
            f"; gave up at byte {self._delivered.position:,} after {attempts} attempt{'s' * (attempts > 1)} "
            f"without progress (retries={self._request.options.retries})",
        )

    def _error(self, failure: HttpFailure, more: str) -> ShardOpenError:
        shard = self._request.shard
        if not self._begun:
            pattern = unexpanded(shard)
            looks = f"; it may not be there{pattern}" if pattern and failure.lasting else ""
            error = ShardOpenError(f"cannot open shard {shard}: {failure.reason}{more}{looks}", shard=shard)
        else:
            of = "" if self.version.total is None else f" of {self.version.total:,}"
            position = self._delivered.position
            error = ShardOpenError(
                f"shard {shard} broke off after {position:,}{of} bytes: {failure.reason}{more}.",
                shard=shard,
                advice=TRY_AGAIN,
            )
        error.__cause__ = failure.cause
        return error

    def _changed(self, what: str) -> ShardOpenError:
        shard, position = self._request.shard, self._delivered.position
        return ShardOpenError(
            f"shard {shard} was changed while it was read, after {position:,} bytes: {what}. Write new versions under "
            "new names, or read it again from its start.",
            shard=shard,
        )

    def _ends_at(self, total: int) -> ShardOpenError | ShardFormatError:
        shard, start = self._request.shard, self._delivered.start
        if self._delivered.position > start:
            return self._changed(f"it ends at byte {total:,} now")
        return ShardFormatError(
            f"shard {shard} ends at byte {total:,}, before the offset {start:,} that was asked for; "
            "is its index older than the shard?",
            shard=shard,
            kind="index",
        )

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def _find_crc32() -> Callable[[bytes | memoryview, int], int]:
    """The fastest checksum there is: isal's takes a third of the time of zlib's."""
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    found: Callable[[bytes | memoryview, int], int] = crc32
    return found
