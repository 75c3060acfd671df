"""Whether what a web server sends is still the same object: entity tags, dates, lengths (RFC 9110, 8.8 and 13.1.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)", re.ASCII)
_SHOWN = 80


@dataclass(frozen=True)
class Version:
    """What one answer tells of the object; "" where it does not say."""

    etag: str = ""
    modified: str = ""  # when it was modified, in the server's words
    settled: bool = False  # whether that was before the answer was made: only then does the date tell versions apart
    total: int | None = None  # the length in bytes, if it is known
    encoding: str = ""  # the Content-Encoding

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str]) -> Version:
        """Reads it from an answer with the whole object (200) or a part (206)."""
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
        # A part need not repeat what was said with the whole.
        encoding = headers.get("Content-Encoding", "identity" if whole else "").strip().lower()
        return cls(etag, modified, settled, total, encoding)

    @property
    def condition(self) -> str | None:
        """What may stand in If-Range: a strong tag, or a date if there is no tag; None if neither proves anything."""
        if self.etag:
            return None if self.etag.startswith("W/") else self.etag
        return self.modified if self.settled else None

    def is_confirmed_by(self, later: Version) -> bool:
        """Returns whether a later answer says anything that only answers with the same object say."""
        return bool(self.etag and later.etag) or bool(self.modified and later.modified)

    def difference(self, later: Version) -> str | None:
        """Says what shows that a later answer is of another object; None if nothing does."""
        if self.etag and later.etag:
            if self.etag.removeprefix("W/") != later.etag.removeprefix("W/"):
                return _changed("ETag", self.etag, later.etag)
        elif self.modified and later.modified and self.modified != later.modified:
            return _changed("Last-Modified", self.modified, later.modified)
        if self.total is not None and later.total is not None and self.total != later.total:
            return f"its length was {self.total:,} bytes and is now {later.total:,}"
        if self.encoding and later.encoding and self.encoding != later.encoding:
            return _changed("Content-Encoding", self.encoding, later.encoding)
        return None


def content_range(headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Reads the first byte and the length of the whole from a Content-Range, each None if it is not told."""
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    first, total = found.groups() if found else (None, None)
    return int(first) if first else None, int(total) if total and total != "*" else None


def is_number(text: str) -> bool:
    """Returns whether a header holds a number that may be an object's length."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def _changed(what: str, before: str, after: str) -> str:
    return f"its {what} was {before[:_SHOWN]!r} and is now {after[:_SHOWN]!r}"
