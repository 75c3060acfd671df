"""Bodies of known length, read straight into the reader's own bytes: urllib3 would copy them once more."""

from __future__ import annotations

import http.client
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import urllib3

__all__ = ["StraightBody"]


class StraightBody:
    """The rest of a body under urllib3's response, which is kept up to date.

    Args:
        response: The response, of which nothing was read by other means since.
        body: That of the standard library in it.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, body: http.client.HTTPResponse) -> None:
        self._response = response
        self._body = body

    @staticmethod
    def of(response: urllib3.BaseHTTPResponse) -> StraightBody | None:
        """The body of a response; None where it comes in chunks, has no length, or lies elsewhere than expected."""
        body = getattr(response, "_fp", None)
        if not isinstance(body, http.client.HTTPResponse) or body.chunked or not isinstance(body.fp, io.BufferedReader):
            return None
        if not body.length or getattr(response, "length_remaining", None) != body.length:
            return None
        return StraightBody(response, body)

    def readinto(self, view: memoryview) -> int:
        """Reads what has come, once; 0 where the body ended too early, which urllib3 then tells of.

        Raises:
            OSError: if the connection broke or stalled.
        """
        length = self._body.length
        if self._body.isclosed() or not length:
            return 0
        count = self._body.fp.readinto1(view[:length])
        self._body.length = length - count
        self._response.length_remaining = length - count
        if count == length:
            self._body.close()
            self._response.release_conn()
        return count
