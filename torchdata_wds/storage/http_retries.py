"""What fails between this and a web server, and how long the server wants to be left alone then."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = ["HttpFailure", "retry_after"]

#: Where a server that wants to be left alone does not say how long.
_SECONDS = 0.5
_LONGEST_SECONDS = 300.0


class HttpFailure(Exception):  # noqa: N818 - told of inside this backend; users see a ShardOpenError
    """A request or a body that failed.

    Args:
        reason: What happened, masked.
        lasting: Whether it would happen again.
        wait: Seconds to wait at least before the next attempt.
        cause: The exception to show as the cause, masked.
    """

    def __init__(
        self, reason: str, *, lasting: bool = False, wait: float = 0.0, cause: Exception | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting
        self.wait = wait
        self.cause = cause


def retry_after(headers: Mapping[str, str]) -> float:
    """Reads how many seconds a server wants to be left alone: `Retry-After` as seconds or a date, within reason.

    Example:
        >>> retry_after({"Retry-After": "7"}), retry_after({"Retry-After": "86400"}), retry_after({})
        (7.0, 300.0, 0.5)
    """
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        seconds = float(value)
    else:
        try:
            date = parsedate_to_datetime(value)
        except (TypeError, ValueError):
            return _SECONDS
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_SECONDS)
